/* test_kernels.c - the table of kernels and how a row is found. */
#include "tests/check.h"
#include "kernels/kernels.h"

static void test_rows_are_complete(void **state)
{
    (void)state;
    int n = 0;
    for (const struct lowkey_kernels *row = lowkey_kernels; row->isa; row++, n++)
        assert_true(row->supported && row->pack && row->unpack && row->attend_page && row->merge);
    assert_true(n >= 1);
    assert_string_equal(lowkey_kernels[n - 1].isa, "scalar");
}

static void test_find(void **state)
{
    (void)state;
    for (const struct lowkey_kernels *row = lowkey_kernels; row->isa; row++)
        assert_ptr_equal(lowkey_kernels_find(row->isa), row->supported() ? row : NULL);
    const struct lowkey_kernels *best = lowkey_kernels_find(NULL);
    assert_non_null(best);
    for (const struct lowkey_kernels *row = lowkey_kernels; row != best; row++)
        assert_false(row->supported());
    assert_null(lowkey_kernels_find("abacus"));
    assert_null(lowkey_kernels_find(""));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        { "kernels: every row has every operation, and scalar is the last", test_rows_are_complete, NULL,
          NULL, NULL },
        { "kernels: a row is found by name, the best for none", test_find, NULL, NULL, NULL },
    };
    return lowkey_run_tests(tests);
}
