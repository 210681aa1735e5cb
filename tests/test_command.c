/* test_command.c - numbers, ranges and lists on a command line. */
#include <stdlib.h>

#include "calib/command.h"
#include "tests/check.h"

static void a_range_is_first_and_end(void **state)
{
    (void)state;
    int first, end;
    assert_int_equal(lowkey_parse_range("t", "--samples", "0:1", &first, &end), 0);
    assert_int_equal(first, 0);
    assert_int_equal(end, 1);
    assert_int_equal(lowkey_parse_range("t", "--samples", "17:2147483647", &first, &end), 0);
    assert_int_equal(first, 17);
    assert_int_equal(end, 2147483647);
    const char *bad[] = {
        "",     ":",     "3",     "3:",           ":3",
        "3:3",  "4:3",   "-1:3",  "1:+3",         "1: 3",
        "1:3x", "1:2:3", "0x1:3", "0:2147483648", "99999999999999999999:999999999999999999999"
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(lowkey_parse_range("t", "--samples", bad[i], &first, &end), 2);
}

static void a_list_rises(void **state)
{
    (void)state;
    int *list, n;
    assert_int_equal(lowkey_parse_list("t", "--layers", "0,7,65535", &list, &n), 0);
    assert_int_equal(n, 3);
    assert_int_equal(list[0], 0);
    assert_int_equal(list[1], 7);
    assert_int_equal(list[2], 65535);
    free(list);
    const char *bad[] = {
        "", ",", "1,", ",1", "1,,2", "2,1", "1,1", "-1", "1 2", "1,2x", "65536", "a", "99999999999999999999"
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(lowkey_parse_list("t", "--layers", bad[i], &list, &n), 2);
        assert_null(list);
    }
}

static void numbers_are_whole_and_within_limits(void **state)
{
    (void)state;
    int64_t i;
    double x;
    assert_int_equal(lowkey_parse_int("t", "--n", "12", 1, 12, &i), 0);
    assert_int_equal(i, 12);
    assert_int_equal(lowkey_parse_double("t", "--x", "0.5", 0, 1, &x), 0);
    assert_true(x == 0.5);
    const char *bad[] = { "", "x", "13", "0", "1.5.", "nan", "99999999999999999999" };
    for (size_t k = 0; k < sizeof bad / sizeof *bad; k++) {
        assert_int_equal(lowkey_parse_int("t", "--n", bad[k], 1, 12, &i), 2);
        assert_int_equal(lowkey_parse_double("t", "--x", bad[k], 1, 12, &x), 2);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_range_is_first_and_end),
        cmocka_unit_test(a_list_rises),
        cmocka_unit_test(numbers_are_whole_and_within_limits),
    };
    return lowkey_run_tests(tests);
}
