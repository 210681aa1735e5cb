/* Attention over a store, and over a recent window beside it, against the formula in f64 token by token. */
#include "experiments/lm/plain_attention.h"

#include <math.h>
#include <stdlib.h>

#include "formats/half.h"
#include "tests/check.h"
#include "tests/oracle.h"
#include "tests/random.h"

enum { N = 150 };

struct fake { /* a store that gives back less than it got, and says what it was asked */
    int windows[2]; /* tokens that a query sees as they were; < 0: before the first, > position + 1: none */
    int n_tokens, n_resets;
    int attention_window; /* the layer's: a query sees the last so many; 0: all */
};

static float stored(float x)
{
    return x * 0.875f + 0.0625f;
}

static lowkey_status put(void *user, const struct lowkey_store_step *step, lowkey_error *err)
{
    (void)err;
    struct fake *fake = user;
    const lowkey_layer_desc *layer = step->layer;
    assert_int_equal(step->first, fake->n_tokens);
    fake->n_tokens += step->n_tokens;
    for (int i = 0; i < step->n_tokens * layer->n_kv_heads * layer->key_head_dim; i++)
        step->stored_key[i] = stored(step->key[i]);
    for (int i = 0; i < step->n_tokens * layer->n_kv_heads * layer->value_head_dim; i++)
        step->stored_value[i] = stored(step->value[i]);
    return LOWKEY_OK;
}

static lowkey_status reset(void *user, lowkey_error *err)
{
    (void)err;
    struct fake *fake = user;
    fake->n_tokens = 0;
    fake->n_resets++;
    return LOWKEY_OK;
}

static int exact_from(void *user, enum lowkey_store_side side, int position)
{
    const struct fake *fake = user;
    return position + 1 - fake->windows[side];
}

static float in_window(float x)
{
    return lowkey_f16_to_f32(lowkey_f32_to_f16(x));
}

/* What the query at a position sees: the oracle wants rows of all tokens. */
static void see(const struct fake *fake, int has_window, enum lowkey_store_side side, int position, int width,
                const float *x, float *out)
{
    for (int t = 0; t <= position; t++) {
        const int exact = has_window && t > position - fake->windows[side];
        for (int c = 0; c < width; c++)
            out[t * width + c] = exact ? in_window(x[t * width + c]) : stored(x[t * width + c]);
    }
}

static float *draw(struct lowkey_random *random, int n)
{
    float *x = calloc((size_t)n, sizeof *x);
    lowkey_random_fill(random, LOWKEY_NORMAL, x, (size_t)n);
    return x;
}

static void check(const lowkey_layer_desc *layer, struct fake fake, int has_window, int chunk, int n_threads)
{
    struct lowkey_random random = { 3 };
    const lowkey_model model = { .n_layers = 1, .geometry = (lowkey_layer_desc *)layer };
    const struct lowkey_store store = { put, reset, has_window ? exact_from : NULL, &fake };
    const int heads = layer->n_q_heads, n_key = layer->n_kv_heads * layer->key_head_dim,
              n_value = layer->n_kv_heads * layer->value_head_dim, n_out = heads * layer->value_head_dim;
    struct {
        float *queries, *keys, *values;
    } tokens = { draw(&random, N * heads * layer->key_head_dim), draw(&random, N * n_key),
                 draw(&random, N * n_value) };
    float *out = calloc((size_t)(N * n_out), sizeof *out), *keys = calloc((size_t)(N * n_key), sizeof *keys),
          *values = calloc((size_t)(N * n_value), sizeof *values);
    double *want = calloc((size_t)n_out, sizeof *want), *lse = calloc((size_t)heads, sizeof *lse),
           *bound = calloc((size_t)heads, sizeof *bound);
    lowkey_plain_attention *attention;
    lowkey_error err;
    assert_ok(lowkey_plain_attention_create(&model, 1, N, n_threads, &store, &attention, &err), err);
    const struct lowkey_attention attend = lowkey_plain_attention_interface(attention);
    for (int round = 0; round < 2; round++) { /* the second after a reset */
        assert_ok(attend.reset(attend.user, &err), err);
        for (int t = 0; t < N; t += chunk) {
            const struct lowkey_attention_step step = {
                .layer = layer,
                .n_tokens = N - t < chunk ? N - t : chunk,
                .window = fake.attention_window,
                .query = tokens.queries + t * heads * layer->key_head_dim,
                .key = tokens.keys + t * n_key,
                .value = tokens.values + t * n_value,
                .out = out + t * n_out,
            };
            assert_ok(attend.step(attend.user, &step, &err), err);
        }
    }
    assert_int_equal(fake.n_resets, 2);
    for (int t = 0; t < N; t++) {
        see(&fake, has_window, LOWKEY_STORE_KEY, t, n_key, tokens.keys, keys);
        see(&fake, has_window, LOWKEY_STORE_VALUE, t, n_value, tokens.values, values);
        const int first = fake.attention_window && t >= fake.attention_window ? t - fake.attention_window + 1 : 0;
        lowkey_oracle_attend(layer, t + 1 - first, first, keys + first * n_key, values + first * n_value, 1,
                             tokens.queries + t * heads * layer->key_head_dim, want, lse, bound);
        const double worst = lowkey_oracle_worst(heads, layer->value_head_dim, out + t * n_out, want, bound);
        if (!(worst <= 1))
            fail_msg("token %d: off by %g of the bound (windows %d %d)", t, worst, fake.windows[0],
                     fake.windows[1]);
    }
    lowkey_plain_attention_free(attention);
    free(tokens.queries);
    free(tokens.keys);
    free(tokens.values);
    free(out);
    free(keys);
    free(values);
    free(want);
    free(lse);
    free(bound);
}

static const double frequencies[64] = { 1, 0.5, 0.3, 0.1, 0.03, 0.01, 0.001, 0.0001 };
static const lowkey_layer_desc layers[] = {
    { .struct_size = sizeof(lowkey_layer_desc),
      .n_q_heads = 6,
      .n_kv_heads = 2,
      .key_head_dim = 16,
      .value_head_dim = 8,
      .logit_scale = 0.25,
      .rope_dims = 16,
      .rope_pairing = LOWKEY_PAIR_HALF,
      .rope_attention_factor = 1,
      .rope_inv_freq = frequencies },
    { .struct_size = sizeof(lowkey_layer_desc),
      .n_q_heads = 3,
      .n_kv_heads = 3,
      .key_head_dim = 64,
      .value_head_dim = 72,
      .logit_scale = 0.1,
      .rope_dims = 8,
      .rope_pairing = LOWKEY_PAIR_INTERLEAVED,
      .rope_attention_factor = 1.2,
      .rope_inv_freq = frequencies },
    { .struct_size = sizeof(lowkey_layer_desc),
      .n_q_heads = 4,
      .n_kv_heads = 1,
      .key_head_dim = 8,
      .value_head_dim = 96,
      .logit_scale = 0.35,
      .rope_dims = 0,
      .rope_attention_factor = 1,
      .rope_inv_freq = frequencies },
};
enum { N_LAYERS = sizeof layers / sizeof *layers };

static void queries_see_what_the_store_gave_back(void **state)
{
    (void)state;
    static const int chunks[] = { 1, 63, 64, 65, N };
    for (int l = 0; l < N_LAYERS; l++)
        for (int i = 0; i < 5; i++)
            check(&layers[l], (struct fake) { .windows = { 0, 0 } }, 0, chunks[i], 1 + i);
}

static void a_window_is_seen_in_16_bits_and_what_is_older_as_stored(void **state)
{
    (void)state;
    static const int windows[][2] = { { 0, 0 }, { 1, 0 }, { 0, 7 }, { 128, 30 }, { 5, N + 9 }, { -2, 64 } };
    for (int l = 0; l < N_LAYERS; l++)
        for (int i = 0; i < 6; i++) {
            const struct fake fake = { .windows = { windows[i][0], windows[i][1] } };
            check(&layers[l], fake, 1, N, 2);
            check(&layers[l], fake, 1, 1 + 40 * (i % 3), 1);
        }
}

static void a_layer_with_a_window_of_its_own_sees_no_older_tokens(void **state)
{
    (void)state;
    static const int attention_windows[] = { 1, 2, 63, 64, 65, 100, N, N + 1 };
    static const int windows[][2] = { { 0, 0 }, { 7, 90 }, { 128, 3 } };
    for (int l = 0; l < N_LAYERS; l++)
        for (int i = 0; i < 8; i++)
            for (int w = 0; w < 3; w++) {
                const struct fake fake = { .windows = { windows[w][0], windows[w][1] },
                                           .attention_window = attention_windows[i] };
                check(&layers[l], fake, w > 0, 1 + 40 * (i % 3), 1 + w);
                check(&layers[l], fake, w > 0, N, 2);
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(queries_see_what_the_store_gave_back),
        cmocka_unit_test(a_window_is_seen_in_16_bits_and_what_is_older_as_stored),
        cmocka_unit_test(a_layer_with_a_window_of_its_own_sees_no_older_tokens),
    };
    return lowkey_run_tests(tests);
}
