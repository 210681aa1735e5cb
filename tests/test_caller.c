/* test_caller.c - structs of callers compiled with another version, and their allocators. */
#include "formats/caller.h"
#include "tests/caches.h"
#include "tests/check.h"

struct ours {
    size_t struct_size;
    int a, b;
};

struct longer {
    struct ours ours;
    int c, d;
};

static void test_sizes(void **state)
{
    (void)state;
    struct longer given = { { sizeof given, 1, 2 }, 0, 0 };
    struct ours read;
    lowkey_error err;
    assert_ok(lowkey_struct_read(&read, sizeof read, &given, sizeof given, "given", &err), err);
    assert_int_equal(read.struct_size, sizeof read);
    assert_int_equal(read.a, 1);
    assert_int_equal(read.b, 2);
    given.c = 1 << 16; /* a field that this version does not know, at its third byte */
    assert_refused(lowkey_struct_read(&read, sizeof read, &given, sizeof given, "given", &err),
                   LOWKEY_EUNSUPPORTED, err, "given: byte 18 of 24 is set");
    assert_ok(lowkey_struct_read(&read, sizeof read, &given, offsetof(struct ours, b), "given", &err), err);
    assert_int_equal(read.a, 1);
    assert_int_equal(read.b, 0);
    assert_refused(lowkey_struct_read(&read, sizeof read, &given, 0, "given", &err), LOWKEY_EINVAL, err,
                   "struct_size");
    assert_refused(
        lowkey_struct_read(&read, sizeof read, &given, sizeof given.ours.struct_size - 1, "given", &err),
        LOWKEY_EINVAL, err, "struct_size: expected the struct's size, found 7");
    assert_refused(lowkey_struct_read(&read, sizeof read, &given, (size_t)1 << 40, "given", &err),
                   LOWKEY_EINVAL, err, "struct_size");
}

static void test_allocators(void **state)
{
    (void)state;
    struct lowkey_counter counter = { 0 };
    const lowkey_allocator counting = lowkey_counting_allocator(&counter);
    lowkey_allocator read, half = counting;
    const lowkey_allocator none = { 0 };
    lowkey_error err;
    assert_ok(lowkey_allocator_read(NULL, &read, &err), err);
    assert_ok(lowkey_allocator_read(&none, &read, &err), err);
    for (size_t alignment = 64; alignment <= 4096; alignment *= 2) {
        void *block = read.alloc(read.user, alignment, alignment);
        assert_int_equal((uintptr_t)block % alignment, 0);
        read.free(read.user, block, alignment);
    }
    assert_ok(lowkey_allocator_read(&counting, &read, &err), err);
    assert_ptr_equal(read.user, &counter);
    half.free = NULL;
    assert_refused(lowkey_allocator_read(&half, &read, &err), LOWKEY_EINVAL, err, "both");
    half = counting, half.alloc = NULL;
    assert_refused(lowkey_allocator_read(&half, &read, &err), LOWKEY_EINVAL, err, "both");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        { "caller: shorter structs get zeros, longer ones must be zero", test_sizes, NULL, NULL, NULL },
        { "caller: an allocator is both functions or neither", test_allocators, NULL, NULL, NULL },
    };
    return lowkey_run_tests(tests);
}
