/* test_command.c - options, numbers, ranges and lists on a command line. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

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

/* What a command line of one word says to stderr, and what lowkey_next_option answers. */
static int answer(const char *word, char said[200])
{
    static const struct option options[] = { { "file", required_argument, NULL, 256 },
                                             { "json", no_argument, NULL, 257 },
                                             { "help", no_argument, NULL, 'h' },
                                             { 0 } };
    char *argv[] = { (char *)"t", (char *)word, NULL };
    fflush(stderr);
    FILE *kept = tmpfile();
    assert_non_null(kept);
    const int terminal = dup(STDERR_FILENO);
    dup2(fileno(kept), STDERR_FILENO);
    optind = 0;
    const int found = lowkey_next_option("t", 2, argv, options, NULL);
    fflush(stderr);
    dup2(terminal, STDERR_FILENO);
    close(terminal);
    rewind(kept);
    said[fread(said, 1, 199, kept)] = 0;
    fclose(kept);
    return found;
}

static void a_wrong_option_is_named_in_one_line(void **state)
{
    (void)state;
    char said[200];
    static const struct {
        const char *word;
        int found;
        const char *said;
    } cases[] = {
        { "--json", 257, "" },
        { "--file=x", 256, "" },
        { "--help", 'h', "" },
        { "-h", 'h', "" },
        { "word", -1, "" },
        { "--none", '?', "lowkey t: unknown option '--none'; see lowkey help t\n" },
        { "-j", '?', "lowkey t: unknown option '-j'; see lowkey help t\n" },
        { "--file", '?', "lowkey t: --file takes a value; see lowkey help t\n" },
        { "--json=1", '?', "lowkey t: --json=1: it takes no value; see lowkey help t\n" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(answer(cases[i].word, said), cases[i].found);
        assert_string_equal(said, cases[i].said);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_wrong_option_is_named_in_one_line),
        cmocka_unit_test(a_range_is_first_and_end),
        cmocka_unit_test(a_list_rises),
        cmocka_unit_test(numbers_are_whole_and_within_limits),
    };
    return lowkey_run_tests(tests);
}
