/* test_block.c - blocks: what is measured is what is filled, and sizes that no memory has are found out. */
#include "formats/block.h"
#include "tests/caches.h"
#include "tests/check.h"

struct arrays {
    char *bytes;
    double *numbers;
    int *none;
};

static void take(struct lowkey_block *block, struct arrays *arrays)
{
    arrays->bytes = lowkey_block_take(block, 65, 1);
    arrays->none = lowkey_block_take(block, 0, sizeof(int));
    arrays->numbers = lowkey_block_take(block, 3, sizeof(double));
}

static void test_measure_and_fill(void **state)
{
    (void)state;
    struct lowkey_counter counter = { .fail_at = -1 };
    const lowkey_allocator allocator = lowkey_counting_allocator(&counter);
    struct lowkey_block block = { 0 };
    struct arrays arrays;
    lowkey_error err;
    take(&block, &arrays);
    assert_null(arrays.bytes);
    assert_null(arrays.numbers);
    assert_int_equal(block.used, 128 + 64);
    assert_ok(lowkey_block_allocate(&block, &allocator, "test", &err), err);
    assert_int_equal(counter.live_bytes, 128 + 64);
    take(&block, &arrays);
    assert_int_equal(block.used, block.bytes);
    assert_int_equal((uintptr_t)arrays.bytes % 64, 0);
    assert_ptr_equal(arrays.numbers, arrays.bytes + 128);
    lowkey_block_free(&block, &allocator);
    lowkey_block_free(&block, &allocator);
    assert_int_equal(counter.live_bytes, 0);
    assert_int_equal(counter.n_live, 0);
}

static void test_too_large(void **state)
{
    (void)state;
    static const struct {
        size_t count, bytes;
    } sizes[] = {
        { SIZE_MAX, 2 }, { SIZE_MAX, 1 }, { (size_t)1 << 40, (size_t)1 << 40 }, { 1, SIZE_MAX - 63 }
    };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        struct lowkey_counter counter = { .fail_at = -1 };
        const lowkey_allocator allocator = lowkey_counting_allocator(&counter);
        struct lowkey_block block = { 0 };
        lowkey_error err;
        lowkey_block_take(&block, 100, 1);
        lowkey_block_take(&block, sizes[i].count, sizes[i].bytes);
        assert_refused(lowkey_block_allocate(&block, &allocator, "test", &err), LOWKEY_ENOMEM, err,
                       "test: needs more memory");
        assert_int_equal(counter.n_calls, 0);
    }
}

static void test_no_memory(void **state)
{
    (void)state;
    struct lowkey_counter counter = { .fail_at = 0 };
    const lowkey_allocator allocator = lowkey_counting_allocator(&counter);
    struct lowkey_block block = { 0 };
    lowkey_error err;
    lowkey_block_take(&block, 100, 1);
    assert_refused(lowkey_block_allocate(&block, &allocator, "test", &err), LOWKEY_ENOMEM, err,
                   "test: no memory for 128 bytes");
    lowkey_block_free(&block, &allocator);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        { "block: arrays are 64-byte aligned and take what was measured", test_measure_and_fill, NULL, NULL,
          NULL },
        { "block: sizes beyond size_t are refused without asking the allocator", test_too_large, NULL, NULL,
          NULL },
        { "block: an allocator without memory is ENOMEM", test_no_memory, NULL, NULL, NULL },
    };
    return lowkey_run_tests(tests);
}
