/* test_read.c - what a cache gives back: ranges of values, bytes of pages, and what it refuses. */
#include <stdlib.h>

#include "tests/caches.h"
#include "tests/cases.h"
#include "tests/check.h"
#include "tests/pack_oracle.h"

static void test_any_range_is_a_part_of_the_whole(void **state)
{
    (void)state;
    static const int ranges[][2] = { { 0, 1 },   { 0, 3 },   { 2, 70 },  { 3, 61 }, { 60, 10 },
                                     { 64, 64 }, { 129, 1 }, { 130, 0 }, { 0, 0 } };
    lowkey_error err;
    for (int format = 0; format < LOWKEY_N_FORMATS; format++) {
        struct lowkey_quantizer_choice choice = lowkey_case(1, format, (format + 1) % LOWKEY_N_FORMATS);
        choice.n_sink_tokens = format % 2 ? 3 : 0;
        lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
        lowkey_context *context = lowkey_test_context(NULL, NULL);
        lowkey_cache *cache = lowkey_test_cache(context, quantizer, 3, 1, 0);
        const lowkey_layer_desc *layer = &lowkey_quantizer_describe(quantizer)->layers[0];
        struct lowkey_random random = { 5 };
        struct lowkey_tokens_made tokens = lowkey_make_tokens(&random, layer, 130);
        float *whole = malloc(2 * 130 * 192 * sizeof *whole), *part = malloc(2 * 130 * 192 * sizeof *part);
        lowkey_test_append(cache, 0, layer, &tokens, 0, 130);
        assert_ok(lowkey_cache_read(cache, 0, 1, 0, 130, whole, whole + 130 * 192, &err), err);
        for (size_t i = 0; i < sizeof ranges / sizeof ranges[0]; i++) {
            const int first = ranges[i][0], n = ranges[i][1];
            for (int k = 0; k < 2 * 130 * 192; k++) part[k] = 12345;
            assert_ok(lowkey_cache_read(cache, 0, 1, first, n, part, part + n * 192, &err), err);
            assert_memory_equal(part, whole + first * 192, (size_t)n * 192 * sizeof *part);
            assert_memory_equal(part + n * 192, whole + (130 + first) * 192, (size_t)n * 192 * sizeof *part);
            assert_true(n == 130 || part[2 * n * 192] == 12345);
        }
        free(whole), free(part);
        lowkey_tokens_made_free(&tokens);
        lowkey_cache_free(cache);
        lowkey_context_free(context);
        lowkey_quantizer_free(quantizer);
    }
}

/* The bytes of a page are what the document says they are: decoded by the oracle they give the codes packed. */
static void test_pages(void **state)
{
    (void)state;
    lowkey_error err;
    const struct lowkey_quantizer_choice choice = lowkey_case(3, 10, 15);
    lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
    lowkey_context *context = lowkey_test_context(NULL, NULL);
    lowkey_cache *cache = lowkey_test_cache(context, quantizer, 3, 2, 0);
    const lowkey_layer_desc *layer = &lowkey_quantizer_describe(quantizer)->layers[0];
    struct lowkey_random random = { 5 };
    struct lowkey_tokens_made tokens = lowkey_make_tokens(&random, layer, 70);
    struct lowkey_oracle_token *want = lowkey_oracle_token_new(160);
    lowkey_test_append(cache, 1, layer, &tokens, 0, 70);
    for (int t = 0; t < 70; t++) {
        lowkey_oracle_pack(&layer->key, 2, 80, tokens.keys + t * 160, 0, want);
        for (int c = 0; c < 160; c++) {
            const void *bytes;
            size_t n_bytes;
            assert_ok(lowkey_cache_page(cache, 1, 1, t / 64, 0, c / 80, &bytes, &n_bytes, &err), err);
            assert_int_equal(n_bytes, lowkey_oracle_page_bytes(&layer->key, 80, c / 80));
            assert_int_equal((uintptr_t)bytes % 64, 0);
            assert_int_equal(lowkey_oracle_code(&layer->key, 80, c / 80, bytes, c % 80, t % 64),
                             want->codes[c]);
        }
    }
    lowkey_oracle_token_free(want);
    lowkey_tokens_made_free(&tokens);
    lowkey_cache_free(cache);
    lowkey_context_free(context);
    lowkey_quantizer_free(quantizer);
}

static void test_refusals(void **state)
{
    (void)state;
    lowkey_error err;
    const struct lowkey_quantizer_choice choice = lowkey_case(1, 1,
                                                              15); /* values have a side page, keys none */
    lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
    lowkey_context *context = lowkey_test_context(NULL, NULL);
    lowkey_cache *cache = lowkey_test_cache(context, quantizer, 3, 2, 0);
    const lowkey_layer_desc *layer = &lowkey_quantizer_describe(quantizer)->layers[0];
    struct lowkey_random random = { 5 };
    struct lowkey_tokens_made tokens = lowkey_make_tokens(&random, layer, 10);
    float out[10 * 192];
    const void *bytes = out;
    size_t n_bytes = 9;
    lowkey_test_append(cache, 0, layer, &tokens, 0, 10);
    assert_ok(lowkey_cache_reserve(cache, 0, 100, &err), err); /* reserved is not held */
    static const int bad[][2] = { { -1, 1 }, { 0, 11 },         { 10, 1 },        { 11, 0 },
                                  { 3, -1 }, { 2147483647, 1 }, { 1, 2147483647 } };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_refused(lowkey_cache_read(cache, 0, 1, bad[i][0], bad[i][1], out, NULL, &err), LOWKEY_EINVAL,
                       err, "holds tokens 0 to 9");
    assert_refused(lowkey_cache_read(cache, 2, 1, 0, 1, out, NULL, &err), LOWKEY_EINVAL, err, "sequence 2");
    assert_refused(lowkey_cache_read(cache, 0, 0, 0, 1, out, NULL, &err), LOWKEY_EINVAL, err, "layer 0");
    assert_ok(lowkey_cache_read(cache, 0, 1, 0, 10, NULL, NULL, &err), err);

    assert_ok(lowkey_cache_page(cache, 0, 1, 0, 0, -1, &bytes, &n_bytes, &err), err);
    assert_null(bytes);
    assert_int_equal(n_bytes, 0);
    assert_ok(lowkey_cache_page(cache, 0, 1, 0, 1, -1, &bytes, &n_bytes, &err), err);
    assert_int_equal(n_bytes, lowkey_oracle_side_page_bytes(&layer->value, 192));
    static const struct {
        int sequence, layer, page, side, head;
        const char *words;
    } pages[] = { { 0, 1, 1, 0, 0, "page 1" },
                  { 0, 1, -1, 0, 0, "page -1" },
                  { 0, 1, 2147483647, 0, 0, "page 2147483647" },
                  { 1, 1, 0, 0, 0, "holds 0 tokens" },
                  { 2, 1, 0, 0, 0, "sequence 2" },
                  { 0, 7, 0, 0, 0, "layer 7" },
                  { 0, 1, 0, 2, 0, "side" },
                  { 0, 1, 0, -1, 0, "side" },
                  { 0, 1, 0, 0, 3, "head" },
                  { 0, 1, 0, 0, -2, "head" } };
    for (size_t i = 0; i < sizeof pages / sizeof pages[0]; i++) {
        assert_refused(lowkey_cache_page(cache, pages[i].sequence, pages[i].layer, pages[i].page,
                                         pages[i].side, pages[i].head, &bytes, &n_bytes, &err),
                       LOWKEY_EINVAL, err, pages[i].words);
        assert_null(bytes);
    }
    assert_refused(lowkey_cache_page(cache, 0, 1, 0, 0, 0, NULL, &n_bytes, &err), LOWKEY_EINVAL, err, "NULL");
    assert_refused(lowkey_cache_page(cache, 0, 1, 0, 0, 0, &bytes, NULL, &err), LOWKEY_EINVAL, err, "NULL");
    lowkey_tokens_made_free(&tokens);
    lowkey_cache_free(cache);
    lowkey_context_free(context);
    lowkey_quantizer_free(quantizer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        { "read: any range is a part of the whole, every format", test_any_range_is_a_part_of_the_whole, NULL,
          NULL, NULL },
        { "read: pages are the document's bytes", test_pages, NULL, NULL, NULL },
        { "read: what is not held is refused", test_refusals, NULL, NULL, NULL },
    };
    return lowkey_run_tests(tests);
}
