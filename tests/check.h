/* check.h - cmocka and what every test file of ours shares. A test file is one program: it lists its tests in main
 * with lowkey_run_tests and prints TAP. A test's name is a sentence. */
#ifndef LOWKEY_CHECK_H
#define LOWKEY_CHECK_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

/* A test that cannot run here: counted as skipped, with its reason on the same line of the log. */
#define lowkey_skip(...)                                  \
    do {                                                  \
        printf("# skipped because: " __VA_ARGS__);        \
        printf("\n");                                     \
        skip();                                           \
    } while (0)

#define lowkey_run_tests(tests) cmocka_run_group_tests_name(__FILE__, tests, NULL, NULL)

/* A call that must succeed, and one that must fail with a status and a message that holds the words. */
#define assert_ok(call, err)                                                                            \
    do {                                                                                                \
        if ((call) != LOWKEY_OK) fail_msg("%s: %s", #call, (err).message);                              \
    } while (0)
#define assert_refused(call, want, err, words)                                                          \
    do {                                                                                                \
        (err).message[0] = 0;                                                                           \
        const int got_ = (int)(call), want_ = (int)(want);                                              \
        if (got_ != want_) fail_msg("%s: status %d, wanted %d (%s)", #call, got_, want_, (err).message); \
        if (!strstr((err).message, words)) fail_msg("message '%s' lacks '%s'", (err).message, words);   \
    } while (0)

#endif
