/* test_cache.c - caches: limits, pages reserved, given back and used again, memory. */
#include <limits.h>
#include <stdlib.h>

#include "runtime/cache.h"
#include "tests/caches.h"
#include "tests/cases.h"
#include "tests/check.h"

static lowkey_quantizer *small_quantizer(const lowkey_allocator *allocator)
{
    struct lowkey_quantizer_choice choice = lowkey_case(1, 12, 16);
    choice.n_layers = 3;
    choice.n_sink_tokens = 2;
    return lowkey_make_quantizer(&choice, allocator);
}

struct fixture {
    lowkey_quantizer *quantizer;
    lowkey_context *context;
    lowkey_cache *cache;
};

static struct fixture open_cache(int n_pages, int max_sequences, int max_tokens)
{
    struct fixture f = { small_quantizer(NULL), lowkey_test_context(NULL, NULL), NULL };
    f.cache = lowkey_test_cache(f.context, f.quantizer, n_pages, max_sequences, max_tokens);
    return f;
}

static void close_cache(struct fixture *f)
{
    lowkey_cache_free(f->cache);
    lowkey_context_free(f->context);
    lowkey_quantizer_free(f->quantizer);
}

static void append(struct fixture *f, int sequence, int layer, int n)
{
    const lowkey_layer_desc *desc = &lowkey_quantizer_describe(f->quantizer)->layers[layer];
    struct lowkey_random random = { (uint64_t)(sequence * 10 + layer) };
    struct lowkey_tokens_made tokens = lowkey_make_tokens(&random, desc, n);
    lowkey_error err;
    assert_ok(lowkey_cache_append(f->cache, desc->index, 1, &sequence, &n,
                                  (lowkey_rows) { .data = tokens.keys },
                                  (lowkey_rows) { .data = tokens.values }, &err),
              err);
    lowkey_tokens_made_free(&tokens);
}

static void test_empty(void **state)
{
    (void)state;
    struct fixture f = open_cache(4, 3, 0);
    assert_int_equal(lowkey_cache_length(f.cache, 0, 1), 0);
    assert_int_equal(lowkey_cache_length(f.cache, 2, 5), 0);
    assert_int_equal(lowkey_cache_length(f.cache, 0, 2), -1); /* layers are 1, 3, 5 */
    assert_int_equal(lowkey_cache_length(f.cache, 3, 1), -1);
    assert_int_equal(lowkey_cache_length(f.cache, -1, 1), -1);
    close_cache(&f);
    lowkey_cache_free(NULL);
}

static void test_bad_configs(void **state)
{
    (void)state;
    struct fixture f = open_cache(1, 1, 0);
    static const struct {
        lowkey_cache_config config;
        lowkey_status status;
        const char *words;
    } bad[] = {
        { { 0, 1, 1, 0, 0 }, LOWKEY_EINVAL, "struct_size" },
        { { sizeof(lowkey_cache_config), 0, 1, 0, 0 }, LOWKEY_EINVAL, "n_pages" },
        { { sizeof(lowkey_cache_config), -5, 1, 0, 0 }, LOWKEY_EINVAL, "n_pages" },
        { { sizeof(lowkey_cache_config), 1, 0, 0, 0 }, LOWKEY_EINVAL, "max_sequences" },
        { { sizeof(lowkey_cache_config), 1, 1, -1, 0 }, LOWKEY_EINVAL, "max_tokens" },
        { { sizeof(lowkey_cache_config), 1, 1, 0, 7 }, LOWKEY_EINVAL, "reserved" },
    };
    lowkey_error err;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        lowkey_cache *cache = f.cache;
        assert_refused(lowkey_cache_create(f.context, f.quantizer, &bad[i].config, &cache, &err),
                       bad[i].status, err, bad[i].words);
        assert_null(cache);
    }
    const lowkey_cache_config good = { sizeof good, 1, 1, 0, 0 };
    lowkey_cache *cache;
    assert_refused(lowkey_cache_create(NULL, f.quantizer, &good, &cache, &err), LOWKEY_EINVAL, err,
                   "context is NULL");
    assert_refused(lowkey_cache_create(f.context, NULL, &good, &cache, &err), LOWKEY_EINVAL, err,
                   "quantizer is NULL");
    assert_refused(lowkey_cache_create(f.context, f.quantizer, NULL, &cache, &err), LOWKEY_EINVAL, err,
                   "config is NULL");
    assert_refused(lowkey_cache_create(f.context, f.quantizer, &good, NULL, &err), LOWKEY_EINVAL, err,
                   "out is NULL");
    close_cache(&f);
}

/* 2^31 - 1 pages and sequences: bytes are counted in 64 bits, and the allocator is asked for all of them. */
static void test_huge_sizes(void **state)
{
    (void)state;
    struct lowkey_counter counter = { .fail_at = -1, .most_bytes = 1 << 20 };
    const lowkey_allocator allocator = lowkey_counting_allocator(&counter);
    lowkey_context *context = lowkey_test_context(&allocator, NULL);
    lowkey_quantizer *quantizer = small_quantizer(NULL);
    static const lowkey_cache_config huge[] = { { sizeof huge[0], INT_MAX, 1, 0, 0 },
                                                { sizeof huge[0], INT_MAX, INT_MAX, 0, 0 },
                                                { sizeof huge[0], 1 << 20, INT_MAX, INT_MAX, 0 } };
    for (int i = 0; i < 3; i++) {
        lowkey_cache *cache;
        lowkey_error err;
        assert_refused(lowkey_cache_create(context, quantizer, &huge[i], &cache, &err), LOWKEY_ENOMEM, err,
                       "no memory for");
        const double bytes = strtod(strpbrk(err.message, "0123456789"), NULL);
        const double blocks = i == 2 ? 1 << 20 : 1 << 25;
        assert_true(bytes >= (i ? 0x1p31 * 4 * blocks : 0x1p31 * 8) && bytes < 0x1p63);
        assert_null(cache);
    }
    lowkey_context_free(context);
    lowkey_quantizer_free(quantizer);
    assert_int_equal(counter.n_live, 0);
}

static void test_limits(void **state)
{
    (void)state;
    struct fixture f = open_cache(3, 2, 130);
    lowkey_error err;
    assert_refused(lowkey_cache_reserve(f.cache, 2, 1, &err), LOWKEY_EINVAL, err,
                   "sequence 2: expected 0 to 1");
    assert_refused(lowkey_cache_reserve(f.cache, -1, 1, &err), LOWKEY_EINVAL, err, "sequence -1");
    assert_refused(lowkey_cache_reserve(f.cache, 0, -1, &err), LOWKEY_EINVAL, err, "-1");
    assert_refused(lowkey_cache_reserve(f.cache, 0, 131, &err), LOWKEY_EFULL, err, "limit of 130");
    assert_refused(lowkey_cache_reserve(f.cache, 0, INT_MAX, &err), LOWKEY_EFULL, err, "limit of 130");
    assert_int_equal(f.cache->n_free, 3);
    assert_ok(lowkey_cache_reserve(f.cache, 0, 128, &err), err); /* 2 pages */
    assert_refused(lowkey_cache_reserve(f.cache, 1, 65, &err), LOWKEY_EFULL, err,
                   "need 2 more pages, 1 of 3 are free");
    assert_int_equal(f.cache->n_free, 1);
    assert_ok(lowkey_cache_reserve(f.cache, 1, 64, &err), err);
    assert_int_equal(f.cache->n_free, 0);
    assert_ok(lowkey_cache_reserve(f.cache, 1, 64, &err),
              err); /* the same room: nothing was appended since */
    assert_refused(lowkey_cache_reserve(f.cache, 0, 129, &err), LOWKEY_EFULL, err, "pages");
    assert_ok(lowkey_cache_reserve(f.cache, 0, 0, &err), err);
    close_cache(&f);
}

/* max_tokens is a limit of its own: n_pages * 64 where it is 0 or larger than that. */
static void test_max_tokens(void **state)
{
    (void)state;
    lowkey_error err;
    struct fixture f = open_cache(2, 1, 0);
    assert_refused(lowkey_cache_reserve(f.cache, 0, 129, &err), LOWKEY_EFULL, err, "limit of 128");
    close_cache(&f);
    f = open_cache(2, 1, 1000000);
    assert_refused(lowkey_cache_reserve(f.cache, 0, 129, &err), LOWKEY_EFULL, err, "limit of 128");
    assert_ok(lowkey_cache_reserve(f.cache, 0, 128, &err), err);
    close_cache(&f);
    f = open_cache(2, 1, 1);
    assert_ok(lowkey_cache_reserve(f.cache, 0, 1, &err), err);
    append(&f, 0, 0, 1);
    assert_refused(lowkey_cache_reserve(f.cache, 0, 1, &err), LOWKEY_EFULL, err, "1 tokens and 1 more");
    close_cache(&f);
}

static void test_pages_go_round(void **state)
{
    (void)state;
    struct fixture f = open_cache(5, 3, 0);
    lowkey_error err;
    assert_ok(lowkey_cache_reserve(f.cache, 0, 130, &err), err);
    for (int layer = 0; layer < 3; layer++) append(&f, 0, layer, layer == 1 ? 130 : 70);
    assert_int_equal(lowkey_cache_length(f.cache, 0, 3), 130);
    assert_int_equal(lowkey_cache_length(f.cache, 0, 5), 70);
    assert_ok(lowkey_cache_reserve(f.cache, 0, 100, &err), err); /* to 230: 4 pages */
    assert_int_equal(f.cache->n_free, 1);
    assert_ok(lowkey_cache_trim(f.cache, 0, 1000, &err), err); /* past the end: only what is reserved goes */
    assert_int_equal(lowkey_cache_length(f.cache, 0, 3), 130);
    assert_int_equal(f.cache->n_free, 2);
    assert_ok(lowkey_cache_trim(f.cache, 0, 100, &err), err);
    assert_int_equal(lowkey_cache_length(f.cache, 0, 3), 100);
    assert_int_equal(lowkey_cache_length(f.cache, 0, 5), 70);
    assert_int_equal(f.cache->n_free, 3);
    assert_ok(lowkey_cache_trim(f.cache, 0, 64, &err), err);
    assert_int_equal(f.cache->n_free, 4);
    assert_ok(lowkey_cache_trim(f.cache, 0, 0, &err), err);
    assert_int_equal(f.cache->n_free, 5);
    for (int i = 0; i < 5; i++) assert_int_equal(f.cache->references[i], 0);
    assert_refused(lowkey_cache_trim(f.cache, 0, -1, &err), LOWKEY_EINVAL, err, "-1");
    assert_refused(lowkey_cache_trim(f.cache, 7, 0, &err), LOWKEY_EINVAL, err, "sequence 7");
    int n[3] = { 0, 0, 0 }; /* every page once, whoever takes them */
    assert_ok(lowkey_cache_reserve(f.cache, 1, 200, &err), err);
    assert_ok(lowkey_cache_reserve(f.cache, 2, 1, &err), err);
    for (int i = 0; i < 4; i++) n[f.cache->references[lowkey_cache_block(f.cache, 1, i)]]++;
    assert_int_equal(n[1], 4);
    assert_int_equal(f.cache->references[lowkey_cache_block(f.cache, 2, 0)], 1);
    close_cache(&f);
}

/* No cache, as a binding hands one on that was never made. */
static void test_no_cache(void **state)
{
    (void)state;
    lowkey_error err;
    const lowkey_rows rows = { 0 };
    const void *bytes;
    size_t n_bytes;
    lowkey_cache_usage usage = { .struct_size = sizeof usage };
    const lowkey_attend_args args = { .struct_size = sizeof args };
    assert_int_equal(lowkey_cache_length(NULL, 0, 0), -1);
    assert_int_equal(lowkey_attend_workspace_bytes(NULL, &args), 0);
    assert_refused(lowkey_cache_reserve(NULL, 0, 1, &err), LOWKEY_EINVAL, err, "cache is NULL");
    assert_refused(lowkey_cache_append(NULL, 0, 0, NULL, NULL, rows, rows, &err), LOWKEY_EINVAL, err,
                   "cache is NULL");
    assert_refused(lowkey_cache_trim(NULL, 0, 0, &err), LOWKEY_EINVAL, err, "cache is NULL");
    assert_refused(lowkey_attend(NULL, &args, &err), LOWKEY_EINVAL, err, "cache is NULL");
    assert_refused(lowkey_cache_read(NULL, 0, 0, 0, 0, NULL, NULL, &err), LOWKEY_EINVAL, err,
                   "cache is NULL");
    assert_refused(lowkey_cache_page(NULL, 0, 0, 0, 0, 0, &bytes, &n_bytes, &err), LOWKEY_EINVAL, err,
                   "cache is NULL");
    assert_refused(lowkey_cache_measure(NULL, &usage, &err), LOWKEY_EINVAL, err, "cache is NULL");
}

/* The allocator fails at call 0, 1, ... until everything is made: never a leak, always ENOMEM. */
static void test_no_memory_at_any_call(void **state)
{
    (void)state;
    lowkey_error err;
    lowkey_quantizer *quantizer = small_quantizer(NULL);
    const lowkey_cache_config config = { .struct_size = sizeof config, .n_pages = 2, .max_sequences = 1 };
    int n_failed = 0;
    for (long fail_at = 0;; fail_at++) {
        struct lowkey_counter counter = { .fail_at = fail_at, .fill = 0xff };
        lowkey_context_config context_config = { .struct_size = sizeof context_config };
        context_config.allocator = lowkey_counting_allocator(&counter);
        lowkey_context *context = NULL;
        lowkey_cache *cache = NULL;
        lowkey_status status = lowkey_context_create(&context_config, &context, &err);
        if (status == LOWKEY_OK) status = lowkey_cache_create(context, quantizer, &config, &cache, &err);
        const int done = status == LOWKEY_OK;
        if (!done) {
            assert_int_equal(status, LOWKEY_ENOMEM);
            assert_null(cache);
            n_failed++;
        } else { /* and nothing more is asked for afterwards */
            const long calls = counter.n_calls;
            struct fixture f = { quantizer, context, cache };
            assert_ok(lowkey_cache_reserve(cache, 0, 70, &err), err);
            append(&f, 0, 0, 70);
            assert_ok(lowkey_cache_trim(cache, 0, 3, &err), err);
            assert_int_equal(counter.n_calls, calls);
        }
        lowkey_cache_free(cache);
        lowkey_context_free(context);
        assert_int_equal(counter.n_live, 0);
        assert_int_equal(counter.live_bytes, 0);
        if (done) break;
    }
    assert_int_equal(n_failed, 3);
    lowkey_quantizer_free(quantizer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        { "cache: empty sequences have length 0, others -1", test_empty, NULL, NULL, NULL },
        { "cache: sizes that make no sense are refused", test_bad_configs, NULL, NULL, NULL },
        { "cache: sizes are counted in 64 bits", test_huge_sizes, NULL, NULL, NULL },
        { "cache: reserve refuses without changing anything", test_limits, NULL, NULL, NULL },
        { "cache: max_tokens is a limit of its own", test_max_tokens, NULL, NULL, NULL },
        { "cache: trim gives back the pages that no layer needs, and they are used again",
          test_pages_go_round, NULL, NULL, NULL },
        { "cache: calls without one are refused", test_no_cache, NULL, NULL, NULL },
        { "cache: an allocator that fails at any call gives ENOMEM and leaks nothing",
          test_no_memory_at_any_call, NULL, NULL, NULL },
    };
    return lowkey_run_tests(tests);
}
