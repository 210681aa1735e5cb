/* test_estimate.c - lowkey_cache_estimate says without allocating what lowkey_cache_measure says of a real
 * cache. */
#include "tests/caches.h"
#include "tests/cases.h"
#include "tests/check.h"

/* A cache of that size, filled: its measure, without what depends on the data. */
static lowkey_cache_usage measured(const lowkey_quantizer *quantizer, int n_pages, int max_sequences,
                                   int max_tokens, int n_sequences, int tokens_each)
{
    lowkey_context *context = lowkey_test_context(NULL, NULL);
    lowkey_cache *cache = lowkey_test_cache(context, quantizer, n_pages, max_sequences, max_tokens);
    const lowkey_quantizer_desc *desc = lowkey_quantizer_describe(quantizer);
    struct lowkey_random random = { 5 };
    lowkey_error err;
    for (int s = max_sequences - n_sequences; s < max_sequences; s++)
        assert_ok(lowkey_cache_reserve(cache, s, tokens_each, &err), err);
    for (int i = 0; i < desc->n_layers; i++) {
        struct lowkey_tokens_made tokens = lowkey_make_tokens(&random, &desc->layers[i], tokens_each);
        for (int s = max_sequences - n_sequences; s < max_sequences; s++)
            assert_ok(lowkey_cache_append(cache, desc->layers[i].index, 1, &s, &tokens_each,
                                          (lowkey_rows) { .data = tokens.keys },
                                          (lowkey_rows) { .data = tokens.values }, &err),
                      err);
        lowkey_tokens_made_free(&tokens);
    }
    lowkey_cache_usage usage = { .struct_size = sizeof usage };
    assert_ok(lowkey_cache_measure(cache, &usage, &err), err);
    lowkey_cache_free(cache);
    lowkey_context_free(context);
    return usage;
}

/* outliers_bytes of a measure holds 4 bytes an entry: entries of tokens held, as nothing was trimmed. How many of them are
 * keys' is not said: all that the keys hold beyond the estimate. */
static void take_outliers_out(lowkey_cache_usage *usage, const lowkey_cache_usage *estimate)
{
    const uint64_t of_keys = usage->key_payload_bits - estimate->key_payload_bits;
    assert_true(of_keys <= 32 * usage->outliers && of_keys % 32 == 0);
    usage->key_payload_bits -= of_keys;
    usage->value_payload_bits -= 32 * usage->outliers - of_keys;
    usage->outliers_bytes -= 4 * usage->outliers;
    usage->outliers = usage->clamped = usage->saturated = 0;
    const uint64_t payload = usage->codes_bytes + usage->scales_bytes + usage->outliers_bytes +
                             usage->sinks_bytes;
    usage->bits_payload = usage->elements ? 8 * (double)payload / (double)usage->elements : 0;
}

static void test_every_format_shape_and_length(void **state)
{
    (void)state;
    static const int lengths[] = { 0, 1, 63, 64, 65, 150 };
    for (int shape = 0; shape < LOWKEY_N_SHAPES; shape++) {
        for (int format = 0; format < LOWKEY_N_FORMATS; format++) {
            struct lowkey_quantizer_choice choice = lowkey_case(shape, format,
                                                                (format + 5) % LOWKEY_N_FORMATS);
            choice.n_layers = 1 + format % 2;
            choice.n_sink_tokens = (int[]) { 0, 1, 5, 64 }[(shape + format) % 4];
            lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
            const int tokens_each = lengths[(shape + format) % 6], n_sequences = 1 + (shape + format / 2) % 2;
            const lowkey_cache_config config = { .struct_size = sizeof config,
                                                 .n_pages = 7,
                                                 .max_sequences = 3,
                                                 .max_tokens = format % 3 ? 0 : 150 };
            lowkey_cache_usage usage = { .struct_size = sizeof usage };
            lowkey_error err;
            assert_ok(lowkey_cache_estimate(quantizer, &config, n_sequences, tokens_each, &usage, &err), err);
            lowkey_cache_usage want = measured(quantizer, 7, 3, config.max_tokens, n_sequences, tokens_each);
            take_outliers_out(&want, &usage);
            assert_memory_equal(&usage, &want, sizeof usage);
            lowkey_quantizer_free(quantizer);
        }
    }
}

/* Two bits, one head of 64 + 64 channels, no sinks: a page is 64 * 64 * 2 / 8 = 1024 bytes for keys and for
 * values. */
static void test_by_hand_at_131072_tokens(void **state)
{
    (void)state;
    struct lowkey_quantizer_choice choice = { .n_q_heads = 1,
                                              .n_kv_heads = 1,
                                              .key_head_dim = 64,
                                              .value_head_dim = 64,
                                              .key = { .bits = 2 },
                                              .value = { .bits = 2 } };
    lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
    const lowkey_cache_config config = { .struct_size = sizeof config, .n_pages = 2048, .max_sequences = 1 };
    lowkey_cache_usage usage = { .struct_size = sizeof usage };
    lowkey_error err;
    assert_ok(lowkey_cache_estimate(quantizer, &config, 1, 131072, &usage, &err), err);
    assert_int_equal(usage.elements, 131072 * 128);
    assert_int_equal(usage.codes_bytes, 2048 * 2048);
    assert_int_equal(usage.held_pages_bytes, 2048 * 2048);
    assert_true(usage.bits_payload == 2);
    assert_true(usage.bits_held > 2 && usage.bits_held < 2.1);
    lowkey_quantizer_free(quantizer);
}

static void test_refusals(void **state)
{
    (void)state;
    struct lowkey_quantizer_choice choice = lowkey_case(0, 1, 1);
    lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
    lowkey_cache_config config = {
        .struct_size = sizeof config, .n_pages = 4, .max_sequences = 2, .max_tokens = 200
    };
    lowkey_cache_usage usage = { .struct_size = sizeof usage };
    lowkey_error err;
    assert_ok(lowkey_cache_estimate(quantizer, &config, 2, 128, &usage, &err), err);
    assert_refused(lowkey_cache_estimate(quantizer, &config, 2, 129, &usage, &err), LOWKEY_EFULL, err,
                   "4 pages");
    assert_refused(lowkey_cache_estimate(quantizer, &config, 1, 201, &usage, &err), LOWKEY_EFULL, err,
                   "200 tokens");
    assert_refused(lowkey_cache_estimate(quantizer, &config, 3, 1, &usage, &err), LOWKEY_EINVAL, err,
                   "3 of 1");
    assert_refused(lowkey_cache_estimate(quantizer, &config, 1, -1, &usage, &err), LOWKEY_EINVAL, err,
                   "1 of -1");
    assert_refused(lowkey_cache_estimate(NULL, &config, 1, 1, &usage, &err), LOWKEY_EINVAL, err, "quantizer");
    assert_refused(lowkey_cache_estimate(quantizer, NULL, 1, 1, &usage, &err), LOWKEY_EINVAL, err, "config");
    assert_refused(lowkey_cache_estimate(quantizer, &config, 1, 1, NULL, &err), LOWKEY_EINVAL, err, "usage");
    config.n_pages = 0;
    assert_refused(lowkey_cache_estimate(quantizer, &config, 1, 1, &usage, &err), LOWKEY_EINVAL, err,
                   "n_pages");
    lowkey_quantizer_free(quantizer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        { "estimate: equals the measure of a real cache, every format and shape",
          test_every_format_shape_and_length, NULL, NULL, NULL },
        { "estimate: pages by hand at 131,072 tokens", test_by_hand_at_131072_tokens, NULL, NULL, NULL },
        { "estimate: refuses what has no room, and NULLs", test_refusals, NULL, NULL, NULL },
    };
    return lowkey_run_tests(tests);
}
