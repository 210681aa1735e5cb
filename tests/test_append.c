/* test_append.c - appending: any cut gives the same bytes, what was trimmed never was, rows of any type and stride, and all
 * or nothing. */
#include <math.h>
#include <stdlib.h>

#include "formats/half.h"
#include "tests/caches.h"
#include "tests/cases.h"
#include "tests/check.h"
#include "tests/pack_oracle.h"

struct fixture {
    lowkey_quantizer *quantizer;
    lowkey_context *context;
    lowkey_cache *cache;
    const lowkey_layer_desc *layer;
    struct lowkey_tokens_made tokens; /* 200 */
    int n_key, n_value;
    struct lowkey_counter *memory; /* zeros at first */
};

static struct fixture open_fixture(int format, int n_sinks, int max_tokens)
{
    struct lowkey_quantizer_choice choice = lowkey_case(3, format, (format + 7) % LOWKEY_N_FORMATS);
    choice.n_sink_tokens = n_sinks;
    struct fixture f = { .quantizer = lowkey_make_quantizer(&choice, NULL),
                         .memory = calloc(1, sizeof *f.memory) };
    f.memory->fail_at = -1;
    const lowkey_allocator allocator = lowkey_counting_allocator(f.memory);
    f.context = lowkey_test_context(&allocator, NULL);
    f.cache = lowkey_test_cache(f.context, f.quantizer, 16, 4, max_tokens);
    f.layer = &lowkey_quantizer_describe(f.quantizer)->layers[0];
    struct lowkey_random random = { (uint64_t)format };
    f.tokens = lowkey_make_tokens(&random, f.layer, 200);
    f.n_key = f.layer->n_kv_heads * f.layer->key_head_dim,
    f.n_value = f.layer->n_kv_heads * f.layer->value_head_dim;
    return f;
}

static void close_fixture(struct fixture *f)
{
    lowkey_tokens_made_free(&f->tokens);
    lowkey_cache_free(f->cache);
    lowkey_context_free(f->context);
    lowkey_quantizer_free(f->quantizer);
    assert_int_equal(f->memory->n_live, 0);
    free(f->memory);
}

static void append(struct fixture *f, int sequence, int first, int n)
{
    lowkey_test_append(f->cache, sequence, f->layer, &f->tokens, first, n);
}

/* Two sequences hold the same: values to the bit, and the bytes of whole pages where no sinks are in them. */
static void assert_same(const struct fixture *f, int a, int b, int whole_pages)
{
    const int n = lowkey_cache_length(f->cache, a, f->layer->index), row = f->n_key + f->n_value;
    lowkey_error err;
    assert_int_equal(n, lowkey_cache_length(f->cache, b, f->layer->index));
    float *x = malloc(sizeof *x * (size_t)(n * row + 1)), *y = malloc(sizeof *y * (size_t)(n * row + 1));
    assert_ok(lowkey_cache_read(f->cache, a, f->layer->index, 0, n, x, x + n * f->n_key, &err), err);
    assert_ok(lowkey_cache_read(f->cache, b, f->layer->index, 0, n, y, y + n * f->n_key, &err), err);
    assert_memory_equal(x, y, sizeof *x * (size_t)(n * row));
    free(x), free(y);
    for (int page = 0; whole_pages && page < n / 64; page++)
        for (int side = 0; side < 2; side++)
            for (int head = -1; head < f->layer->n_kv_heads; head++) {
                const void *p, *q;
                size_t bytes_p, bytes_q;
                assert_ok(
                    lowkey_cache_page(f->cache, a, f->layer->index, page, side, head, &p, &bytes_p, &err),
                    err);
                assert_ok(
                    lowkey_cache_page(f->cache, b, f->layer->index, page, side, head, &q, &bytes_q, &err),
                    err);
                assert_int_equal(bytes_p, bytes_q);
                if (bytes_p == 0) continue; /* no side page */
                assert_ptr_not_equal(p, q);
                assert_memory_equal(p, q, bytes_p);
            }
}

static void test_any_cut(void **state)
{
    (void)state;
    for (int format = 0; format < LOWKEY_N_FORMATS; format++) {
        const int n_sinks = (int[]) { 0, 1, 5, 64 }[format % 4];
        struct fixture f = open_fixture(format, n_sinks, 0);
        append(&f, 0, 0, 130);
        for (int t = 0; t < 130; t++) append(&f, 1, t, 1);
        append(&f, 2, 0, 7);
        append(&f, 2, 7, 57);
        append(&f, 2, 64, 0);
        append(&f, 2, 64, 66);
        append(&f, 3, 0, 3);
        append(&f, 3, 3, 127);
        for (int s = 1; s < 4; s++) assert_same(&f, 0, s, 0);
        close_fixture(&f);
    }
}

/* In memory that was all zeros whole pages are the same bytes, unspecified ones and side pages included. */
static void test_same_bytes(void **state)
{
    (void)state;
    for (int format = 0; format < LOWKEY_N_FORMATS; format++) {
        struct fixture f = open_fixture(format, 0, 0);
        append(&f, 0, 0, 128);
        append(&f, 1, 0, 7);
        append(&f, 1, 7, 121);
        assert_same(&f, 0, 1, 1);
        close_fixture(&f);
    }
}

static void test_what_was_trimmed_never_was(void **state)
{
    (void)state;
    lowkey_error err;
    for (int format = 0; format < LOWKEY_N_FORMATS; format++) {
        struct fixture f = open_fixture(format, format % 2 ? 5 : 0, 0);
        append(&f, 0, 20, 10); /* other tokens, then 4 of the right ones behind them */
        assert_ok(lowkey_cache_trim(f.cache, 0, 0, &err), err);
        append(&f, 0, 0, 10);
        assert_ok(lowkey_cache_trim(f.cache, 0, 4, &err), err);
        append(&f, 0, 4, 6);
        append(&f, 1, 0, 10);
        assert_same(&f, 0, 1, 0);
        append(&f, 0, 10, 120);
        assert_ok(lowkey_cache_trim(f.cache, 0, 63, &err), err);
        append(&f, 0, 63, 2);
        append(&f, 1, 10, 55);
        assert_same(&f, 0, 1, 0);
        close_fixture(&f);
    }
}

static void test_many_sequences_at_once(void **state)
{
    (void)state;
    lowkey_error err;
    for (int format = 10; format < LOWKEY_N_FORMATS; format++)
        for (int threads = 0; threads < 4; threads += 3) {
            struct fixture f = open_fixture(format, 3, 0);
            lowkey_context *context = lowkey_test_context(NULL, threads ? &threads : NULL);
            lowkey_cache *batch = lowkey_test_cache(context, f.quantizer, 16, 4, 0);
            static const int sequences[] = { 2, 0, 3, 1 }, n_tokens[] = { 70, 0, 5, 125 };
            for (int i = 0, row = 0; i < 4; row += n_tokens[i++]) {
                append(&f, sequences[i], row, n_tokens[i]);
                assert_ok(lowkey_cache_reserve(batch, sequences[i], n_tokens[i], &err), err);
            }
            const lowkey_rows keys = { .data = f.tokens.keys }, values = { .data = f.tokens.values };
            assert_ok(lowkey_cache_append(batch, f.layer->index, 4, sequences, n_tokens, keys, values, &err),
                      err);
            for (int i = 0; i < 4; i++) {
                const size_t n = (size_t)n_tokens[i];
                float *x = malloc(sizeof *x * (n * 500 + 1)), *y = malloc(sizeof *y * (n * 500 + 1));
                for (int side = 0; side < 2; side++) {
                    const int n_channels = side ? f.n_value : f.n_key;
                    assert_ok(lowkey_cache_read(f.cache, sequences[i], f.layer->index, 0, n_tokens[i],
                                                side ? NULL : x, side ? x : NULL, &err),
                              err);
                    assert_ok(lowkey_cache_read(batch, sequences[i], f.layer->index, 0, n_tokens[i],
                                                side ? NULL : y, side ? y : NULL, &err),
                              err);
                    assert_memory_equal(x, y, n * (size_t)n_channels * sizeof *x);
                }
                free(x), free(y);
            }
            lowkey_cache_free(batch);
            lowkey_context_free(context);
            close_fixture(&f);
        }
}

/* f16 and bf16 rows with strides hold what the same numbers as dense f32 rows do. */
static void test_types_and_strides(void **state)
{
    (void)state;
    enum { N = 70 };
    lowkey_error err;
    for (int format = 0; format < LOWKEY_N_FORMATS; format++)
        for (int dtype = LOWKEY_F32; dtype <= LOWKEY_BF16; dtype++) {
            struct fixture f = open_fixture(format, 2, 0);
            const lowkey_layer_desc *l = f.layer;
            lowkey_rows rows[2];
            for (int side = 0; side < 2; side++) {
                const int d = side ? l->value_head_dim : l->key_head_dim, head_stride = d + 4;
                const int token_stride = l->n_kv_heads * head_stride + 12;
                float *dense = side ? f.tokens.values : f.tokens.keys;
                void *data = calloc((size_t)(N * token_stride), 4);
                for (int i = 0; i < N * l->n_kv_heads * d; i++) {
                    const int at = i / (l->n_kv_heads * d) * token_stride +
                                   i / d % l->n_kv_heads * head_stride + i % d;
                    if (dtype == LOWKEY_F32) ((float *)data)[at] = dense[i];
                    if (dtype == LOWKEY_F16)
                        dense[i] = lowkey_f16_to_f32(
                            ((uint16_t *)data)[at] = lowkey_f32_to_f16_saturate(dense[i], NULL));
                    if (dtype == LOWKEY_BF16)
                        dense[i] = lowkey_bf16_to_f32(
                            ((uint16_t *)data)[at] = lowkey_f32_to_bf16_saturate(dense[i], NULL));
                }
                rows[side] = (lowkey_rows) { data, (lowkey_dtype)dtype, token_stride, head_stride };
            }
            append(&f, 0, 0, N);
            const int sequence = 1, n = N;
            assert_ok(lowkey_cache_reserve(f.cache, sequence, n, &err), err);
            assert_ok(lowkey_cache_append(f.cache, l->index, 1, &sequence, &n, rows[0], rows[1], &err), err);
            assert_same(&f, 0, 1, 0);
            free((void *)rows[0].data), free((void *)rows[1].data);
            close_fixture(&f);
        }
}

/* ---- refusals: nothing changes ---- */

static void check_unchanged(struct fixture *f, lowkey_status status, const char *words, int layer, int n,
                            const int *sequences, const int *n_tokens, lowkey_rows keys, lowkey_rows values)
{
    lowkey_error err;
    lowkey_cache_usage before = { .struct_size = sizeof before }, after = { .struct_size = sizeof after };
    assert_ok(lowkey_cache_measure(f->cache, &before, &err), err);
    assert_refused(lowkey_cache_append(f->cache, layer, n, sequences, n_tokens, keys, values, &err), status,
                   err, words);
    assert_ok(lowkey_cache_measure(f->cache, &after, &err), err);
    assert_memory_equal(&before, &after, sizeof before);
    append(f, 3, lowkey_cache_length(f->cache, 3, f->layer->index), 1); /* and it still works */
    assert_same(f, 0, 1, 0);
}

static void test_refusals(void **state)
{
    (void)state;
    struct fixture f = open_fixture(12, 3, 0);
    lowkey_error err;
    const lowkey_rows keys = { .data = f.tokens.keys }, values = { .data = f.tokens.values };
    const int layer = f.layer->index;
    append(&f, 0, 0, 20), append(&f, 1, 0, 20);
    assert_ok(lowkey_cache_reserve(f.cache, 0, 6, &err), err);
    assert_ok(lowkey_cache_reserve(f.cache, 1, 6, &err), err);
    check_unchanged(&f, LOWKEY_EINVAL, "layer 2: ", 2, 1, (int[]) { 0 }, (int[]) { 1 }, keys, values);
    check_unchanged(&f, LOWKEY_EINVAL, "sequence 4: ", layer, 1, (int[]) { 4 }, (int[]) { 1 }, keys, values);
    check_unchanged(&f, LOWKEY_EINVAL, "found -2", layer, 1, (int[]) { 0 }, (int[]) { -2 }, keys, values);
    check_unchanged(&f, LOWKEY_EINVAL, "holds 20 tokens and 7 more", layer, 2, (int[]) { 0, 1 },
                    (int[]) { 6, 7 }, keys, values);
    check_unchanged(&f, LOWKEY_EINVAL, "2147483647 more", layer, 1, (int[]) { 0 }, (int[]) { 2147483647 },
                    keys, values);
    check_unchanged(&f, LOWKEY_EINVAL, "sequence 1: named twice", layer, 3, (int[]) { 1, 0, 1 },
                    (int[]) { 1, 1, 1 }, keys, values);
    check_unchanged(&f, LOWKEY_EINVAL, "n >= 0", layer, -1, (int[]) { 0 }, (int[]) { 1 }, keys, values);
    check_unchanged(&f, LOWKEY_EINVAL, "n >= 0", layer, 1, NULL, (int[]) { 1 }, keys, values);
    check_unchanged(&f, LOWKEY_EINVAL, "keys: data", layer, 1, (int[]) { 0 }, (int[]) { 1 },
                    (lowkey_rows) { 0 }, values);
    check_unchanged(&f, LOWKEY_EINVAL, "values: dtype", layer, 1, (int[]) { 0 }, (int[]) { 1 }, keys,
                    (lowkey_rows) { f.tokens.values, (lowkey_dtype)9, 0, 0 });
    close_fixture(&f);
}

static void test_not_finite(void **state)
{
    (void)state;
    static const float bad[] = { NAN, INFINITY, -INFINITY };
    struct fixture f = open_fixture(13, 2, 0);
    lowkey_error err;
    const lowkey_rows keys = { .data = f.tokens.keys }, values = { .data = f.tokens.values };
    append(&f, 0, 0, 20), append(&f, 1, 0, 20);
    assert_ok(lowkey_cache_reserve(f.cache, 0, 6, &err), err);
    assert_ok(lowkey_cache_reserve(f.cache, 1, 6, &err), err);
    for (int side = 0; side < 2; side++)
        for (int i = 0; i < 3; i++) { /* row 8 is token 20 + 2 of sequence 1, after 6 of sequence 0 */
            const int d = side ? f.layer->value_head_dim : f.layer->key_head_dim;
            float *at = (side ? f.tokens.values : f.tokens.keys) + (8 * f.layer->n_kv_heads + 1) * d + 9;
            const float good = *at;
            *at = bad[i];
            check_unchanged(&f, LOWKEY_EINVAL,
                            side ? "values of layer 1: sequence 1 token 22 head 1 channel 9"
                                 : "keys of layer 1: sequence 1 token 22 head 1 channel 9",
                            f.layer->index, 2, (int[]) { 0, 1 }, (int[]) { 6, 6 }, keys, values);
            *at = good;
        }
    close_fixture(&f);
}

static void test_capacity_16_append_17(void **state)
{
    (void)state;
    struct fixture f = open_fixture(2, 0, 16);
    lowkey_error err;
    const lowkey_rows keys = { .data = f.tokens.keys }, values = { .data = f.tokens.values };
    const int layer = f.layer->index;
    assert_refused(lowkey_cache_reserve(f.cache, 0, 17, &err), LOWKEY_EFULL, err, "limit of 16");
    assert_ok(lowkey_cache_reserve(f.cache, 0, 16, &err), err);
    assert_refused(lowkey_cache_append(f.cache, layer, 1, (int[]) { 0 }, (int[]) { 17 }, keys, values, &err),
                   LOWKEY_EINVAL, err, "17 more do not fit the 16");
    assert_int_equal(lowkey_cache_length(f.cache, 0, layer), 0);
    for (int t = 0; t < 16; t++) append(&f, 1, t, 1);
    assert_refused(lowkey_cache_reserve(f.cache, 1, 1, &err), LOWKEY_EFULL, err, "16 tokens and 1 more");
    assert_refused(lowkey_cache_append(f.cache, layer, 1, (int[]) { 1 }, (int[]) { 1 }, keys, values, &err),
                   LOWKEY_EINVAL, err, "1 more do not fit");
    assert_ok(lowkey_cache_append(f.cache, layer, 1, (int[]) { 0 }, (int[]) { 16 }, keys, values, &err), err);
    assert_same(&f, 0, 1, 0);
    close_fixture(&f);
}

/* Sinks come back as the nearest 16-bit number, the others as the oracle packs them. */
static void test_sinks(void **state)
{
    (void)state;
    static const int counts[] = { 0, 1, 5, 64 };
    lowkey_error err;
    for (int i = 0; i < 8; i++) {
        struct lowkey_quantizer_choice choice = lowkey_case(1, 1, 1);
        choice.n_sink_tokens = counts[i % 4];
        choice.sink_rule = i < 4 ? LOWKEY_RULE_F16 : LOWKEY_RULE_BF16;
        lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
        lowkey_context *context = lowkey_test_context(NULL, NULL);
        lowkey_cache *cache = lowkey_test_cache(context, quantizer, 2, 1, 0);
        const lowkey_layer_desc *layer = &lowkey_quantizer_describe(quantizer)->layers[0];
        struct lowkey_random random = { 9 };
        struct lowkey_tokens_made tokens = lowkey_make_tokens(&random, layer, 70);
        struct lowkey_oracle_token *want = lowkey_oracle_token_new(192);
        tokens.keys[7] = 1e6f; /* saturates as f16, not as bf16 */
        float keys[70 * 192];
        for (int t = 0; t < 70; t++) lowkey_test_append(cache, 0, layer, &tokens, t, 1);
        assert_ok(lowkey_cache_read(cache, 0, layer->index, 0, 70, keys, NULL, &err), err);
        for (int t = 0; t < 70; t++) {
            lowkey_oracle_pack(&layer->key, 3, 64, tokens.keys + t * 192, 0, want);
            for (int c = 0; c < 192; c++) {
                const float x = tokens.keys[t * 192 + c], got = keys[t * 192 + c];
                if (t >= counts[i % 4])
                    assert_true(got == want->values[c]);
                else if (x == 1e6f)
                    assert_true(i < 4 ? got == 65504 : fabsf(got - x) <= x / 256);
                else
                    assert_true(fabsf(got - x) <= fabsf(x) / (i < 4 ? 2048 : 256) + 1e-7f);
            }
        }
        lowkey_cache_usage usage = { .struct_size = sizeof usage };
        assert_ok(lowkey_cache_measure(cache, &usage, &err), err);
        assert_int_equal(usage.saturated, i < 4 && counts[i % 4] > 0 ? 1 : 0);
        lowkey_oracle_token_free(want);
        lowkey_tokens_made_free(&tokens);
        lowkey_cache_free(cache);
        lowkey_context_free(context);
        lowkey_quantizer_free(quantizer);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        { "append: 130 at once, one by one, 7 + 57 + 0 + 66 hold the same, every format", test_any_cut, NULL,
          NULL, NULL },
        { "append: whole pages are the same bytes", test_same_bytes, NULL, NULL, NULL },
        { "append: what was trimmed never was", test_what_was_trimmed_never_was, NULL, NULL, NULL },
        { "append: many sequences at once, on 1 and 3 threads, hold what single appends do",
          test_many_sequences_at_once, NULL, NULL, NULL },
        { "append: f16 and bf16 rows with strides hold what dense f32 rows do", test_types_and_strides, NULL,
          NULL, NULL },
        { "append: a refusal changes nothing", test_refusals, NULL, NULL, NULL },
        { "append: NaN and infinities are refused by sequence, token, head and channel", test_not_finite,
          NULL, NULL, NULL },
        { "append: 17 tokens into room for 16 are refused, singly and in bulk", test_capacity_16_append_17,
          NULL, NULL, NULL },
        { "append: sinks are kept in 16 bits, the others packed", test_sinks, NULL, NULL, NULL },
    };
    return lowkey_run_tests(tests);
}
