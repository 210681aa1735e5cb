/* test_usage.c - the bytes a cache says it holds: by hand, and against what its allocator gave. */
#include "tests/caches.h"
#include "tests/cases.h"
#include "tests/check.h"

static lowkey_cache_usage measure(const lowkey_cache *cache)
{
    lowkey_cache_usage usage = { .struct_size = sizeof usage };
    lowkey_error err;
    assert_ok(lowkey_cache_measure(cache, &usage, &err), err);
    assert_int_equal(usage.struct_size, sizeof usage);
    return usage;
}

static void test_allocated_bytes(void **state)
{
    (void)state;
    for (int format = 0; format < LOWKEY_N_FORMATS; format++) {
        struct lowkey_counter of_quantizer = { .fail_at = -1 }, of_context = { .fail_at = -1 };
        const lowkey_allocator first = lowkey_counting_allocator(&of_quantizer),
                               second = lowkey_counting_allocator(&of_context);
        struct lowkey_quantizer_choice choice = lowkey_case(1 + format % 7, format,
                                                            (format + 1) % LOWKEY_N_FORMATS);
        choice.n_layers = 1 + format % 3;
        choice.n_sink_tokens = format % 6;
        lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, &first);
        lowkey_context *context = lowkey_test_context(&second, NULL);
        const size_t context_bytes = of_context.live_bytes;
        lowkey_cache *cache = lowkey_test_cache(context, quantizer, 5, 3, 200);
        const lowkey_cache_usage usage = measure(cache);
        assert_int_equal(usage.allocated_bytes,
                         of_quantizer.live_bytes + of_context.live_bytes - context_bytes);
        assert_int_equal(usage.elements, 0);
        assert_true(usage.bits_payload == 0 && usage.bits_held == 0);
        assert_int_equal(usage.held_pages_bytes, 0);
        assert_int_equal(usage.held_sinks_bytes, 0);
        lowkey_cache_free(cache);
        lowkey_context_free(context);
        lowkey_quantizer_free(quantizer);
        assert_int_equal(of_quantizer.n_live, 0);
        assert_int_equal(of_context.n_live, 0);
    }
}

/* Keys: 3 bits, an f16 scale and zero for 24 channels each, outliers by rank 1 + 1. Values: 2 bits, no more.
 * 2 KV heads of 24 and 16 channels, 3 sinks; two layers. */
static void test_by_hand(void **state)
{
    (void)state;
    const struct lowkey_quantizer_choice choice = {
        .n_layers = 2,
        .n_q_heads = 4,
        .n_kv_heads = 2,
        .key_head_dim = 24,
        .value_head_dim = 16,
        .n_sink_tokens = 3,
        .key = { .bits = 3,
                 .token_scale = LOWKEY_SCALE_F16,
                 .scale_block = 24,
                 .outlier_rule = LOWKEY_OUTLIER_RANK,
                 .outlier_rank = 1,
                 .outlier_cap = 2,
                 .outlier_page_capacity = 128 },
        .value = { .bits = 2 },
    };
    lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
    lowkey_context *context = lowkey_test_context(NULL, NULL);
    lowkey_cache *cache = lowkey_test_cache(context, quantizer, 6, 3, 0);
    const lowkey_quantizer_desc *desc = lowkey_quantizer_describe(quantizer);
    struct lowkey_random random = { 1 };
    struct lowkey_tokens_made tokens = lowkey_make_tokens(&random, &desc->layers[0], 100);
    const size_t empty = measure(cache).allocated_bytes;
    lowkey_test_append(cache, 0, &desc->layers[0], &tokens, 0, 100); /* 97 packed, 2 pages */
    lowkey_test_append(cache, 2, &desc->layers[0], &tokens, 0, 2); /* 0 packed, 1 page */
    lowkey_test_append(cache, 2, &desc->layers[1], &tokens, 0, 2);
    lowkey_cache_usage usage = measure(cache);
    assert_int_equal(usage.elements, 104 * (48 + 32));
    assert_int_equal(usage.codes_bytes, 97 * (48 * 3 + 32 * 2) / 8);
    assert_int_equal(usage.scales_bytes, 97 * 2 * 2 * 2);
    assert_int_equal(usage.outliers_bytes, 97 * 2 + 97 * 2 * 4);
    assert_int_equal(usage.sinks_bytes, (3 + 2 + 2) * 80 * 2);
    assert_int_equal(usage.key_elements, 104 * 48);
    assert_int_equal(usage.value_elements, 104 * 32);
    assert_int_equal(usage.key_payload_bits, 97 * (48 * 3 + 2 * 2 * 16 + 16 + 2 * 32) + 7 * 48 * 16);
    assert_int_equal(usage.value_payload_bits, 97 * 32 * 2 + 7 * 32 * 16);
    assert_int_equal(usage.outliers, 2 * 97);
    assert_int_equal(usage.clamped, 0);
    /* A page of keys: 24 rows of 16 bytes and 24 of 8 = 384 + 192; of values: 16 * 16 = 256; two heads. The keys' side page:
     * scale and zero 64 * 2 * 2 each, ends 128, 128 entries of 4. */
    assert_int_equal(usage.held_pages_bytes, 3 * 2 * (2 * (384 + 192 + 256) + 2 * 256 + 128 + 512));
    assert_int_equal(usage.held_sinks_bytes, 2 * 2 * 3 * 80 * 2);
    assert_int_equal(usage.allocated_bytes, empty);
    const uint64_t payload = usage.codes_bytes + usage.scales_bytes + usage.outliers_bytes +
                             usage.sinks_bytes;
    const uint64_t held = usage.held_pages_bytes + usage.held_sinks_bytes + usage.held_tables_bytes +
                          usage.held_other_bytes;
    assert_true(usage.bits_payload == 8.0 * (double)payload / (104 * 80));
    assert_true(usage.bits_held == 8.0 * (double)held / (104 * 80));
    assert_true(usage.held_tables_bytes > 0 && held < usage.allocated_bytes);

    lowkey_error err;
    assert_ok(lowkey_cache_trim(cache, 0, 64, &err), err);
    usage = measure(cache);
    assert_int_equal(usage.outliers_bytes, 61 * 2 + 61 * 2 * 4);
    assert_int_equal(usage.outliers, 2 * 97); /* since creation */
    assert_ok(lowkey_cache_trim(cache, 0, 0, &err), err);
    assert_ok(lowkey_cache_trim(cache, 2, 0, &err), err);
    usage = measure(cache);
    assert_int_equal(usage.elements, 0);
    assert_int_equal(usage.held_pages_bytes, 0);
    lowkey_tokens_made_free(&tokens);
    lowkey_cache_free(cache);
    lowkey_context_free(context);
    lowkey_quantizer_free(quantizer);
}

/* 2 bits are 2.00 bits, and 16 are 16.00. */
static void test_payload_of_static_tables(void **state)
{
    (void)state;
    static const struct {
        int format;
        double bits;
    } known[] = { { 0, 1 },  { 1, 2 },  { 2, 3 },  { 3, 4 },  { 4, 5 }, { 5, 8 },
                  { 8, 16 }, { 11, 2 }, { 18, 1 }, { 19, 2 }, { 22, 5 } };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        const struct lowkey_quantizer_choice choice = lowkey_case(1, known[i].format, known[i].format);
        lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
        lowkey_context *context = lowkey_test_context(NULL, NULL);
        lowkey_cache *cache = lowkey_test_cache(context, quantizer, 2, 1, 0);
        const lowkey_layer_desc *layer = &lowkey_quantizer_describe(quantizer)->layers[0];
        struct lowkey_random random = { 1 };
        struct lowkey_tokens_made tokens = lowkey_make_tokens(&random, layer, 65);
        lowkey_test_append(cache, 0, layer, &tokens, 0, 65);
        assert_true(measure(cache).bits_payload == known[i].bits);
        assert_true(measure(cache).bits_held > known[i].bits);
        lowkey_tokens_made_free(&tokens);
        lowkey_cache_free(cache);
        lowkey_context_free(context);
        lowkey_quantizer_free(quantizer);
    }
}

/* A caller compiled with an older or a newer header gets what it has room for. */
static void test_struct_sizes(void **state)
{
    (void)state;
    const struct lowkey_quantizer_choice choice = lowkey_case(0, 1, 1);
    lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
    lowkey_context *context = lowkey_test_context(NULL, NULL);
    lowkey_cache *cache = lowkey_test_cache(context, quantizer, 2, 1, 0);
    struct {
        lowkey_cache_usage usage;
        uint64_t more[2];
    } room;
    lowkey_error err;
    memset(&room, 0xff, sizeof room);
    room.usage.struct_size = sizeof room;
    assert_ok(lowkey_cache_measure(cache, &room.usage, &err), err);
    assert_int_equal(room.usage.struct_size, sizeof room);
    assert_int_equal(room.more[1], 0);
    const lowkey_cache_usage whole = measure(cache);
    memset(&room, 0xff, sizeof room);
    room.usage.struct_size = offsetof(lowkey_cache_usage, allocated_bytes);
    assert_ok(lowkey_cache_measure(cache, &room.usage, &err), err);
    assert_int_equal(room.usage.held_tables_bytes, whole.held_tables_bytes);
    assert_true(room.usage.allocated_bytes == UINT64_MAX);
    room.usage.struct_size = 0;
    assert_refused(lowkey_cache_measure(cache, &room.usage, &err), LOWKEY_EINVAL, err, "struct_size");
    assert_refused(lowkey_cache_measure(cache, NULL, &err), LOWKEY_EINVAL, err, "usage");
    lowkey_cache_free(cache);
    lowkey_context_free(context);
    lowkey_quantizer_free(quantizer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        { "usage: allocated bytes are what the allocator gave", test_allocated_bytes, NULL, NULL, NULL },
        { "usage: every part by hand", test_by_hand, NULL, NULL, NULL },
        { "usage: b bits of static tables are b.00 bits of payload", test_payload_of_static_tables, NULL,
          NULL, NULL },
        { "usage: callers of other versions", test_struct_sizes, NULL, NULL, NULL },
    };
    return lowkey_run_tests(tests);
}
