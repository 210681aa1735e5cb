/* Attention over the packed store against lowkey_attend over the very same cache, and against the oracle in f64 over what
 * that cache gives back: every format and shape, sinks, chunks that cut pages, threads. */
#include "experiments/packed_store.h"

#include <stdlib.h>

#include "experiments/lm/plain_attention.h"
#include "tests/caches.h"
#include "tests/cases.h"
#include "tests/check.h"
#include "tests/oracle.h"

enum { N = 105 };

struct machine {
    lowkey_quantizer *quantizer;
    lowkey_layer_desc layers[2]; /* the quantizer's one layer is number 1 of the model */
    lowkey_model model;
    lowkey_packed_store *packed;
    lowkey_plain_attention *attention;
    struct lowkey_tokens_made tokens;
};

static void machine_init(struct machine *m, const struct lowkey_quantizer_choice *choice, int n_threads)
{
    struct lowkey_random random = { 5 };
    lowkey_error err;
    m->quantizer = lowkey_make_quantizer(choice, NULL);
    m->layers[0] = m->layers[1] = lowkey_quantizer_describe(m->quantizer)->layers[0];
    m->layers[0].index = 0;
    m->model = (lowkey_model) { .n_layers = 2, .geometry = m->layers };
    assert_ok(lowkey_packed_store_create(m->quantizer, N, n_threads, &m->packed, &err), err);
    const struct lowkey_store store = lowkey_packed_store_interface(m->packed);
    assert_ok(lowkey_plain_attention_create(&m->model, 2, N, n_threads, &store, &m->attention, &err), err);
    m->tokens = lowkey_make_tokens(&random, &m->layers[1], N);
}

static void machine_free(struct machine *m)
{
    lowkey_tokens_made_free(&m->tokens);
    lowkey_plain_attention_free(m->attention);
    lowkey_packed_store_free(m->packed);
    lowkey_quantizer_free(m->quantizer);
}

/* Attention to tokens first..first+n-1 of layer 1. */
static void attend_chunk(struct machine *m, int first, int n, float *out)
{
    const lowkey_layer_desc *layer = &m->layers[1];
    const struct lowkey_attention attend = lowkey_plain_attention_interface(m->attention);
    const struct lowkey_attention_step step = {
        .layer = layer,
        .n_tokens = n,
        .query = m->tokens.queries + first * layer->n_q_heads * layer->key_head_dim,
        .key = m->tokens.keys + first * layer->n_kv_heads * layer->key_head_dim,
        .value = m->tokens.values + first * layer->n_kv_heads * layer->value_head_dim,
        .out = out,
    };
    lowkey_error err;
    assert_ok(attend.step(attend.user, &step, &err), err);
}

static void check(const struct lowkey_quantizer_choice *choice, int chunk, int n_threads)
{
    struct machine m;
    machine_init(&m, choice, n_threads);
    const lowkey_layer_desc *layer = &m.layers[1];
    const int heads = layer->n_q_heads, n_key = layer->n_kv_heads * layer->key_head_dim,
              n_value = layer->n_kv_heads * layer->value_head_dim, n_out = heads * layer->value_head_dim,
              rows = N * heads, sequence = 0;
    float *out = calloc((size_t)(N * n_out), sizeof *out),
          *packed = calloc((size_t)(N * n_out), sizeof *packed),
          *keys = calloc((size_t)(N * n_key), sizeof *keys),
          *values = calloc((size_t)(N * n_value), sizeof *values);
    double *want = calloc((size_t)(N * n_out), sizeof *want), *lse = calloc((size_t)rows, sizeof *lse),
           *bound = calloc((size_t)rows, sizeof *bound), *twice = calloc((size_t)rows, sizeof *twice);
    lowkey_error err;
    const struct lowkey_attention attend = lowkey_plain_attention_interface(m.attention);
    attend_chunk(&m, 0, 30, out); /* another sequence, forgotten */
    assert_ok(attend.reset(attend.user, &err), err);
    for (int t = 0, n; t < N; t += n) {
        n = N - t < chunk ? N - t : chunk;
        attend_chunk(&m, t, n, out + t * n_out);
    }
    const lowkey_cache *cache = lowkey_packed_store_cache(m.packed);
    assert_int_equal(lowkey_cache_length(cache, 0, 1), N);
    assert_ok(lowkey_cache_read(cache, 0, 1, 0, N, keys, values, &err), err);
    lowkey_oracle_attend(layer, N, 0, keys, values, N, m.tokens.queries, want, lse, bound);
    double worst = lowkey_oracle_worst(rows, layer->value_head_dim, out, want, bound);
    if (!(worst <= 1)) fail_msg("off by %g of the bound (chunks of %d)", worst, chunk);
    lowkey_test_attend(cache, layer, 1, &sequence, (int[]) { N }, &m.tokens, packed, NULL);
    for (int i = 0; i < rows; i++) twice[i] = 2 * bound[i];
    for (int i = 0; i < N * n_out; i++) want[i] = (double)packed[i];
    worst = lowkey_oracle_worst(rows, layer->value_head_dim, out, want, twice);
    if (!(worst <= 1)) fail_msg("lowkey_attend: off by %g of the bounds (chunks of %d)", worst, chunk);
    free(out), free(packed), free(keys), free(values);
    free(want), free(lse), free(bound), free(twice);
    machine_free(&m);
}

static void attention_over_the_packed_store_is_lowkey_attend(void **state)
{
    (void)state;
    static const int chunks[] = { 1, 7, 64, 65, N };
    for (int shape = 0; shape < LOWKEY_N_SHAPES; shape++)
        for (int format = shape % 2; format < LOWKEY_N_FORMATS; format += 2) {
            struct lowkey_quantizer_choice choice = lowkey_case(shape, format,
                                                                (format + 7) % LOWKEY_N_FORMATS);
            choice.n_sink_tokens = (int[]) { 0, 1, 5, 64 }[(shape + format) % 4];
            check(&choice, chunks[(shape + 2 * format) % 5], 1 + (shape + format) % 3);
        }
}

/* Chunks and threads change no byte: the pages of two caches are the same. */
static void chunks_and_threads_change_no_byte(void **state)
{
    (void)state;
    for (int format = 0; format < LOWKEY_N_FORMATS; format++) {
        struct lowkey_quantizer_choice choice = lowkey_case(1, format, format);
        choice.n_sink_tokens = 3;
        struct machine a, b;
        machine_init(&a, &choice, 1);
        machine_init(&b, &choice, 3);
        const lowkey_layer_desc *layer = &a.layers[1];
        const size_t n_key = (size_t)(N * layer->n_kv_heads * layer->key_head_dim);
        float *out = calloc((size_t)(N * layer->n_q_heads * layer->value_head_dim), sizeof *out),
              *of_a = calloc(2 * n_key, sizeof *of_a), *of_b = calloc(2 * n_key, sizeof *of_b);
        lowkey_error err;
        attend_chunk(&a, 0, N, out);
        for (int t = 0; t < N; t += 35) attend_chunk(&b, t, 35, out);
        assert_ok(
            lowkey_cache_read(lowkey_packed_store_cache(a.packed), 0, 1, 0, N, of_a, of_a + n_key, &err),
            err);
        assert_ok(
            lowkey_cache_read(lowkey_packed_store_cache(b.packed), 0, 1, 0, N, of_b, of_b + n_key, &err),
            err);
        assert_memory_equal(of_a, of_b, 2 * n_key * sizeof *of_a);
        free(out), free(of_a), free(of_b);
        machine_free(&a);
        machine_free(&b);
    }
}

static void what_a_quantizer_lacks_and_too_many_tokens_are_refused(void **state)
{
    (void)state;
    const struct lowkey_quantizer_choice choice = lowkey_case(1, 1, 1);
    struct machine m;
    machine_init(&m, &choice, 1);
    const struct lowkey_store store = lowkey_packed_store_interface(m.packed);
    struct lowkey_store_step step = {
        .layer = &m.layers[0], .n_tokens = 1, .key = m.tokens.keys, .value = m.tokens.values
    };
    lowkey_error err;
    assert_refused(store.put(store.user, &step, &err), LOWKEY_EINVAL, err, "layer 0");
    step.layer = &m.layers[1];
    step.first = 1;
    assert_refused(store.put(store.user, &step, &err), LOWKEY_EINVAL, err,
                   "holds 0 tokens, token 1 is to follow");
    step.first = 0;
    step.n_tokens = N + 1;
    assert_refused(store.put(store.user, &step, &err), LOWKEY_EINVAL, err, "do not fit");
    lowkey_packed_store *none;
    assert_refused(lowkey_packed_store_create(m.quantizer, 0, 1, &none, &err), LOWKEY_EINVAL, err,
                   "0 tokens");
    assert_null(none);
    lowkey_packed_store_free(NULL);
    machine_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_over_the_packed_store_is_lowkey_attend),
        cmocka_unit_test(chunks_and_threads_change_no_byte),
        cmocka_unit_test(what_a_quantizer_lacks_and_too_many_tokens_are_refused),
    };
    return lowkey_run_tests(tests);
}
