/* The decoder against an oracle in f64 (tests/tiny_model.c), over the axes of Llama-like and Gemma-like models. */
#include "experiments/lm/decoder.h"

#include <math.h>
#include <stdlib.h>

#include "experiments/lm/plain_attention.h"
#include "tests/check.h"
#include "tests/tiny_model.h"

static const struct tiny_shape shapes[] = {
    /* layers hidden ffn vocab  q kv key value rope pairing  factor scale untied bias norm */
    { 2, 24, 40, 50, 3, 3, 8, 8, 8, LOWKEY_PAIR_HALF, 0, 0, 0, 0, 0 },
    { 1, 24, 40, 4100, 9, 3, 16, 16, 16, LOWKEY_PAIR_INTERLEAVED, 0, 0, 1, 0, 0 },
    { 2, 32, 16, 60, 8, 1, 16, 8, 16, LOWKEY_PAIR_HALF, 1.2, 0.5, 1, 1, 0 },
    { 1, 16, 24, 30, 2, 1, 24, 40, 8, LOWKEY_PAIR_INTERLEAVED, 0, 0, 0, 1, 1 },
    { 2, 16, 24, 30, 4, 2, 64, 64, 32, LOWKEY_PAIR_HALF, 0.9, 0, 1, 0, 1 },
    { 3, 16, 24, 30, 2, 2, 8, 16, 0, LOWKEY_PAIR_HALF, 0, 0, 0, 0, 0 },
    { 3, 24, 40, 50, 4, 1, 16, 16, 16, LOWKEY_PAIR_HALF, 0, 0, 0, 0, 1 },
    { 2, 16, 24, 30, 2, 2, 8, 8, 8, LOWKEY_PAIR_HALF, 0, 0, 1, 1, 0 },
    { 2, 16, 24, 30, 2, 1, 8, 8, 8, LOWKEY_PAIR_HALF, 0, 0, 0, 0, 0 },
    { 1, 16, 24, 30, 2, 1, 8, 8, 8, LOWKEY_PAIR_HALF, 0, 0, 0, 0, 0 },
};
static const struct tiny_extras extras[] = { /* of the shapes in the same place */
    [6] = { 1, 1, 37, 4.9 },
    [7] = { 0, 0, 1, 0 },
    [8] = { 1, 0, 128, 0 },
    [9] = { 0, 1, 0, 0.5 },
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes, N_TOKENS = 300 };

struct machine {
    lowkey_model *model;
    lowkey_plain_attention *attention;
    lowkey_decoder *decoder;
    int32_t tokens[N_TOKENS];
};

/* Only of shapes in the table. */
static const struct tiny_extras *extras_of(const struct tiny_shape *shape)
{
    static const struct tiny_extras none;
    return shape >= shapes && shape < shapes + N_SHAPES ? &extras[shape - shapes] : &none;
}

static struct machine machine_of(const struct tiny_shape *shape, int max_chunk, int n_threads)
{
    struct machine m = { .model = lowkey_tiny_model_with(shape, extras_of(shape), 7) };
    lowkey_error err;
    for (int t = 0; t < N_TOKENS; t++) m.tokens[t] = (t * 31 + t / 7) % shape->vocab;
    assert_ok(
        lowkey_plain_attention_create(m.model, shape->n_layers, N_TOKENS, n_threads, NULL, &m.attention, &err),
        err);
    const struct lowkey_decoder_config config = { .model = m.model,
                                                  .attention = lowkey_plain_attention_interface(m.attention),
                                                  .max_chunk = max_chunk,
                                                  .n_threads = n_threads };
    assert_ok(lowkey_decoder_create(&config, &m.decoder, &err), err);
    return m;
}

static void machine_free(struct machine *m)
{
    lowkey_decoder_free(m->decoder);
    lowkey_plain_attention_free(m->attention);
    lowkey_tiny_model_free(m->model);
}

/* All tokens through the decoder in chunks of n; hidden: [N_TOKENS][hidden], to be freed. */
static float *run(struct machine *m, int n)
{
    const size_t width = (size_t)m->model->hidden_size;
    float *hidden = calloc(N_TOKENS * width, sizeof *hidden);
    lowkey_error err;
    assert_ok(lowkey_decoder_reset(m->decoder, &err), err);
    for (int first = 0; first < N_TOKENS; first += n) {
        const int now = N_TOKENS - first < n ? N_TOKENS - first : n;
        assert_ok(
            lowkey_decoder_forward(m->decoder, m->tokens + first, now, hidden + (size_t)first * width, &err),
            err);
    }
    return hidden;
}

static void assert_near(const float *got, const double *want, size_t n, double tolerance, const char *what)
{
    double largest = 0, worst = 0;
    for (size_t i = 0; i < n; i++) {
        largest = fmax(largest, fabs(want[i]));
        worst = isnan((double)got[i]) ? HUGE_VAL : fmax(worst, fabs((double)got[i] - want[i]));
    }
    if (!(worst <= tolerance * largest)) fail_msg("%s: off by %g, largest %g", what, worst, largest);
}

static void hidden_states_and_logits_agree_with_the_oracle(void **state)
{
    (void)state;
    for (int s = 0; s < N_SHAPES; s++) {
        struct machine m = machine_of(&shapes[s], N_TOKENS, 2);
        const size_t width = (size_t)m.model->hidden_size, vocab = (size_t)m.model->vocab_size;
        double *want = calloc(N_TOKENS * width, sizeof *want),
               *logits = calloc(N_TOKENS * vocab, sizeof *logits);
        float *got = calloc(N_TOKENS * vocab, sizeof *got), *hidden = run(&m, N_TOKENS);
        lowkey_tiny_oracle(m.model, m.tokens, N_TOKENS, want, -1, NULL, NULL, NULL);
        for (size_t t = 0; t < N_TOKENS; t++)
            for (size_t v = 0; v < vocab; v++)
                for (size_t c = 0; c < width; c++)
                    logits[t * vocab + v] += want[t * width + c] * (double)m.model->output[v * width + c];
        lowkey_decoder_logits(m.decoder, hidden, N_TOKENS, got);
        assert_near(hidden, want, N_TOKENS * width, 2e-5, "hidden");
        assert_near(got, logits, N_TOKENS * vocab, 2e-5, "logits");
        free(want);
        free(logits);
        free(got);
        free(hidden);
        machine_free(&m);
    }
}

static void chunks_of_any_size_give_the_same_result(void **state)
{
    (void)state;
    static const int chunks[] = { 1, 63, 64, 65, 256, 257 };
    for (int s = 0; s < N_SHAPES; s++) {
        struct machine m = machine_of(&shapes[s], N_TOKENS, 1);
        const size_t n = N_TOKENS * (size_t)m.model->hidden_size;
        float *whole = run(&m, N_TOKENS);
        double *want = calloc(n, sizeof *want);
        for (size_t i = 0; i < n; i++) want[i] = (double)whole[i];
        for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
            float *got = run(&m, chunks[i]);
            assert_near(got, want, n, 4e-5, "hidden in chunks"); /* each is within 2e-5 of the oracle */
            free(got);
        }
        free(whole);
        free(want);
        machine_free(&m);
    }
}

static void the_number_of_threads_changes_no_bit(void **state)
{
    (void)state;
    for (int s = 0; s < N_SHAPES; s++) {
        struct machine one = machine_of(&shapes[s], N_TOKENS, 1), many = machine_of(&shapes[s], N_TOKENS, 7);
        float *a = run(&one, N_TOKENS), *b = run(&many, N_TOKENS);
        assert_memory_equal(a, b, N_TOKENS * (size_t)one.model->hidden_size * sizeof *a);
        free(a);
        free(b);
        machine_free(&one);
        machine_free(&many);
    }
}

struct seen { /* what an attention in between is handed at one layer */
    struct lowkey_attention inner;
    int layer, n_tokens;
    float *query, *key, *value;
};

static lowkey_status look_on(void *user, const struct lowkey_attention_step *step, lowkey_error *err)
{
    struct seen *seen = user;
    const lowkey_layer_desc *g = step->layer;
    if (g->index == seen->layer) {
        const size_t before = (size_t)seen->n_tokens, n = (size_t)step->n_tokens;
        const size_t q = (size_t)(g->n_q_heads * g->key_head_dim),
                     k = (size_t)(g->n_kv_heads * g->key_head_dim);
        const size_t v = (size_t)(g->n_kv_heads * g->value_head_dim);
        memcpy(seen->query + before * q, step->query, n * q * sizeof(float));
        memcpy(seen->key + before * k, step->key, n * k * sizeof(float));
        memcpy(seen->value + before * v, step->value, n * v * sizeof(float));
        seen->n_tokens += step->n_tokens;
    }
    return seen->inner.step(seen->inner.user, step, err);
}

static void attention_is_handed_queries_and_keys_after_bias_and_norm_and_before_rope(void **state)
{
    (void)state;
    for (int s = 0; s < N_SHAPES; s++) {
        struct machine m = machine_of(&shapes[s], 77, 2);
        const struct tiny_shape *g = &shapes[s];
        const size_t q = (size_t)(g->n_q_heads * g->key_dim), k = (size_t)(g->n_kv_heads * g->key_dim),
                     v = (size_t)(g->n_kv_heads * g->value_dim);
        struct seen seen = { .inner = lowkey_plain_attention_interface(m.attention),
                             .layer = g->n_layers - 1 };
        double *want[4], *hidden;
        want[0] = calloc(N_TOKENS * q, sizeof(double)), seen.query = calloc(N_TOKENS * q, sizeof(float));
        want[1] = calloc(N_TOKENS * k, sizeof(double)), seen.key = calloc(N_TOKENS * k, sizeof(float));
        want[2] = calloc(N_TOKENS * v, sizeof(double)), seen.value = calloc(N_TOKENS * v, sizeof(float));
        hidden = calloc(N_TOKENS * (size_t)g->hidden, sizeof(double));
        lowkey_error err;
        lowkey_decoder_free(m.decoder);
        const struct lowkey_decoder_config config = { .model = m.model,
                                                      .attention = { look_on, seen.inner.reset, &seen },
                                                      .max_chunk = 77 };
        assert_ok(lowkey_decoder_create(&config, &m.decoder, &err), err);
        for (int first = 0; first < N_TOKENS; first += 77)
            assert_ok(lowkey_decoder_forward(m.decoder, m.tokens + first,
                                             N_TOKENS - first < 77 ? N_TOKENS - first : 77, NULL, &err),
                      err);
        lowkey_tiny_oracle(m.model, m.tokens, N_TOKENS, hidden, seen.layer, want[0], want[1], want[2]);
        assert_int_equal(seen.n_tokens, N_TOKENS);
        assert_near(seen.query, want[0], N_TOKENS * q, 2e-5, "query");
        assert_near(seen.key, want[1], N_TOKENS * k, 2e-5, "key");
        assert_near(seen.value, want[2], N_TOKENS * v, 2e-5, "value");
        for (int i = 0; i < 3; i++) free(want[i]);
        free(hidden);
        free(seen.query);
        free(seen.key);
        free(seen.value);
        machine_free(&m);
    }
}

static void a_decoder_of_the_first_layers_runs_only_those(void **state)
{
    (void)state;
    struct tiny_shape shallow = shapes[5];
    shallow.n_layers = 2;
    struct machine all = machine_of(&shapes[5], N_TOKENS, 1), two = machine_of(&shallow, N_TOKENS, 1);
    lowkey_error err;
    lowkey_decoder_free(all.decoder);
    const struct lowkey_decoder_config config = {
        .model = all.model, .attention = lowkey_plain_attention_interface(all.attention), .n_layers = 2
    };
    assert_ok(lowkey_decoder_create(&config, &all.decoder, &err), err);
    float *a = run(&all, N_TOKENS), *b = run(&two, N_TOKENS); /* the same seed: the same first layers */
    assert_memory_equal(a, b, N_TOKENS * (size_t)all.model->hidden_size * sizeof *a);
    free(a);
    free(b);
    machine_free(&all);
    machine_free(&two);
}

static void bad_calls_are_refused_in_words(void **state)
{
    (void)state;
    struct machine m = machine_of(&shapes[0], 200, 1);
    lowkey_error err;
    lowkey_decoder *none;
    lowkey_plain_attention *no_attention;
    m.tokens[1] = 50;
    assert_refused(lowkey_decoder_forward(m.decoder, m.tokens, 2, NULL, &err), LOWKEY_EINVAL, err,
                   "token 1 is 50, expected 0 to 49");
    m.tokens[1] = -1;
    assert_refused(lowkey_decoder_forward(m.decoder, m.tokens, 2, NULL, &err), LOWKEY_EINVAL, err,
                   "token 1 is -1");
    m.tokens[1] = 1;
    assert_refused(lowkey_decoder_forward(m.decoder, m.tokens, 0, NULL, &err), LOWKEY_EINVAL, err,
                   "0 tokens, expected 1 to 200");
    assert_refused(lowkey_decoder_forward(m.decoder, m.tokens, 201, NULL, &err), LOWKEY_EINVAL, err,
                   "201 tokens, expected 1 to 200");
    assert_ok(lowkey_decoder_forward(m.decoder, m.tokens, 200, NULL, &err), err);
    assert_refused(lowkey_decoder_forward(m.decoder, m.tokens, 101, NULL, &err), LOWKEY_EFULL, err,
                   "holds 200 tokens of at most 300, 101 more");
    assert_ok(lowkey_decoder_forward(m.decoder, m.tokens, 100, NULL, &err), err);
    assert_refused(lowkey_decoder_create(&(struct lowkey_decoder_config) { .model = m.model, .n_layers = 3 },
                                         &none, &err),
                   LOWKEY_EINVAL, err, "3 layers of 2");
    assert_null(none);
    assert_refused(lowkey_plain_attention_create(m.model, 3, 8, 1, NULL, &no_attention, &err), LOWKEY_EINVAL, err,
                   "3 layers of 2");
    assert_null(no_attention);
    lowkey_decoder_free(NULL);
    lowkey_plain_attention_free(NULL);
    machine_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hidden_states_and_logits_agree_with_the_oracle),
        cmocka_unit_test(chunks_of_any_size_give_the_same_result),
        cmocka_unit_test(the_number_of_threads_changes_no_bit),
        cmocka_unit_test(attention_is_handed_queries_and_keys_after_bias_and_norm_and_before_rope),
        cmocka_unit_test(a_decoder_of_the_first_layers_runs_only_those),
        cmocka_unit_test(bad_calls_are_refused_in_words),
    };
    return lowkey_run_tests(tests);
}
