/* test_context.c - contexts: devices and levels by name, what is refused, memory. */
#include "tests/caches.h"
#include "tests/check.h"
#include "kernels/kernels.h"

static void test_defaults(void **state)
{
    (void)state;
    const lowkey_context_config config = { .struct_size = sizeof config };
    lowkey_context *context;
    lowkey_error err;
    assert_ok(lowkey_context_create(&config, &context, &err), err);
    assert_string_equal(lowkey_context_isa(context), lowkey_kernels_find(NULL)->isa);
    lowkey_context_free(context);
    lowkey_context_free(NULL);
}

static void test_every_level_by_name(void **state)
{
    (void)state;
    for (const struct lowkey_kernels *row = lowkey_kernels; row->isa; row++) {
        const lowkey_context_config config = { .struct_size = sizeof config,
                                               .device = "cpu",
                                               .isa = row->isa };
        lowkey_context *context;
        lowkey_error err;
        if (!row->supported()) continue;
        assert_ok(lowkey_context_create(&config, &context, &err), err);
        assert_string_equal(lowkey_context_isa(context), row->isa);
        lowkey_context_free(context);
    }
}

static void check_refused(lowkey_context_config config, lowkey_status status, const char *words)
{
    lowkey_context *context = (lowkey_context *)&config;
    lowkey_error err;
    if (config.struct_size == 0) config.struct_size = sizeof config;
    assert_refused(lowkey_context_create(&config, &context, &err), status, err, words);
    assert_int_equal(err.status, status);
    assert_null(context);
    assert_int_equal(lowkey_context_create(&config, &context, NULL), status);
}

static void test_refused_by_name(void **state)
{
    (void)state;
    struct lowkey_counter counter = { 0 };
    check_refused((lowkey_context_config) { .device = "cuda" }, LOWKEY_EUNSUPPORTED, "device 'cuda'");
    check_refused((lowkey_context_config) { .device = "tpu" }, LOWKEY_EINVAL, "'tpu'");
    check_refused((lowkey_context_config) { .device = "" }, LOWKEY_EINVAL, "''");
    check_refused((lowkey_context_config) { .isa = "abacus" }, LOWKEY_EUNSUPPORTED,
                  "scalar), found 'abacus'");
    check_refused((lowkey_context_config) { .device_index = 1 }, LOWKEY_EINVAL, "device_index");
    check_refused((lowkey_context_config) { .stream = &counter }, LOWKEY_EINVAL, "stream");
    check_refused((lowkey_context_config) { .allocator.free = lowkey_counting_allocator(&counter).free },
                  LOWKEY_EINVAL, "allocator");
    lowkey_error err;
    lowkey_context *context;
    assert_refused(lowkey_context_create(NULL, &context, &err), LOWKEY_EINVAL, err, "config is NULL");
    const lowkey_context_config config = { .struct_size = sizeof config }, no_size = { 0 };
    assert_refused(lowkey_context_create(&config, NULL, &err), LOWKEY_EINVAL, err, "out is NULL");
    assert_refused(lowkey_context_create(&no_size, &context, &err), LOWKEY_EINVAL, err, "struct_size");
}

static void test_memory(void **state)
{
    (void)state;
    struct lowkey_counter counter = { .fail_at = -1 };
    const lowkey_allocator allocator = lowkey_counting_allocator(&counter);
    lowkey_context_free(lowkey_test_context(&allocator, NULL));
    assert_int_equal(counter.n_live, 0);
    assert_int_equal(counter.live_bytes, 0);
    counter.fail_at = counter.n_calls;
    const lowkey_context_config config = { .struct_size = sizeof config, .allocator = allocator };
    lowkey_context *context;
    lowkey_error err;
    assert_refused(lowkey_context_create(&config, &context, &err), LOWKEY_ENOMEM, err, "context: no memory");
    assert_null(context);
    assert_int_equal(counter.n_live, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        { "context: all zero is the CPU at its best level", test_defaults, NULL, NULL, NULL },
        { "context: every level of the table by its name", test_every_level_by_name, NULL, NULL, NULL },
        { "context: devices, levels and arguments that are not there are refused by name",
          test_refused_by_name, NULL, NULL, NULL },
        { "context: memory comes from the caller's allocator and goes back", test_memory, NULL, NULL, NULL },
    };
    return lowkey_run_tests(tests);
}
