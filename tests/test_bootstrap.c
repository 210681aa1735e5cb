/* Intervals over windows: by hand where there is no chance, against the normal approximation where there is much of it. */
#include "experiments/bootstrap.h"

#include <math.h>

#include "tests/check.h"
#include "tests/random.h"

static void what_does_not_vary_has_no_width(void **state)
{
    (void)state;
    const double above[4] = { 6, 3, 9, 12 }, below[4] = { 2, 1, 3, 4 };
    const struct lowkey_interval interval = lowkey_bootstrap(4, above, below);
    assert_true(interval.low == 3 && interval.high == 3);
}

static void one_window_says_nothing(void **state)
{
    (void)state;
    const double one = 1;
    assert_true(isnan(lowkey_bootstrap(1, &one, &one).low) && isnan(lowkey_bootstrap(1, &one, &one).high));
    assert_true(isnan(lowkey_bootstrap(0, NULL, NULL).low));
}

/* Two windows, 0 and 1: a resample's mean is 0, 1/2, 1 with 1/4, 1/2, 1/4. */
static void two_windows_give_their_ends(void **state)
{
    (void)state;
    const double above[2] = { 0, 1 }, below[2] = { 1, 1 };
    const struct lowkey_interval interval = lowkey_bootstrap(2, above, below);
    assert_true(interval.low == 0 && interval.high == 1);
}

static void many_windows_agree_with_the_normal_approximation(void **state)
{
    (void)state;
    enum { N = 400 };
    struct lowkey_random random = { 5 };
    double above[N], below[N], sum = 0, weights = 0, variance = 0;
    for (int i = 0; i < N; i++) {
        below[i] = i % 2 ? 1 : 3; /* a ratio of sums, not a mean of ratios */
        above[i] = below[i] * (2 + 0.5 * lowkey_random_normal(&random));
        sum += above[i];
        weights += below[i];
    }
    for (int i = 0; i < N; i++) variance += pow((above[i] - sum / weights * below[i]) / weights, 2);
    const struct lowkey_interval interval = lowkey_bootstrap(N, above, below);
    const double low = sum / weights - 1.96 * sqrt(variance), high = sum / weights + 1.96 * sqrt(variance);
    assert_true(fabs(interval.low - low) < 0.2 * sqrt(variance));
    assert_true(fabs(interval.high - high) < 0.2 * sqrt(variance));
}

/* The same draws for every figure: the interval of a sum of figures that differ by a constant is moved by it. */
static void figures_over_the_same_windows_are_paired(void **state)
{
    (void)state;
    enum { N = 32 };
    struct lowkey_random random = { 6 };
    double a[N], b[N], ones[N];
    for (int i = 0; i < N; i++) a[i] = lowkey_random_normal(&random), b[i] = a[i] + 0.25, ones[i] = 1;
    const struct lowkey_interval of_a = lowkey_bootstrap(N, a, ones), of_b = lowkey_bootstrap(N, b, ones);
    assert_true(fabs(of_b.low - of_a.low - 0.25) < 1e-12 && fabs(of_b.high - of_a.high - 0.25) < 1e-12);
    const struct lowkey_interval again = lowkey_bootstrap(N, a, ones);
    assert_true(again.low == of_a.low && again.high == of_a.high && of_a.low < of_a.high);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_does_not_vary_has_no_width),
        cmocka_unit_test(one_window_says_nothing),
        cmocka_unit_test(two_windows_give_their_ends),
        cmocka_unit_test(many_windows_agree_with_the_normal_approximation),
        cmocka_unit_test(figures_over_the_same_windows_are_paired),
    };
    return lowkey_run_tests(tests);
}
