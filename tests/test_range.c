/* Order statistics: ranks by hand, and values against a sort. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include <gsl/gsl_randist.h>
#include <gsl/gsl_rng.h>

#include "calib/range.h"
#include "tests/check.h"

static void the_number_outside_is_the_floor_of_half_the_fraction(void **state)
{
    (void)state;
    const struct {
        int64_t n;
        double fraction;
        int64_t want;
    } cases[] = {
        { 1, 0, 0 },
        { 1, 1, 0 },
        { 2, 1, 0 },
        { 3, 1, 1 },
        { 1000, 0, 0 },
        { 1000, 0.01, 5 },
        { 600, 0.01, 3 },
        { 599, 0.01, 2 },
        { 700, 0.07, 24 },
        { 3, 0.5, 0 },
        { 4, 0.5, 1 },
        { 1000, 1, 499 },
        { 1001, 1, 500 },
        { INT64_C(1) << 40, 0.01, 5497558138 },
        { INT64_C(1) << 40, 1e-12, 0 },
        { INT64_C(1) << 40, 2e-12, 1 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        assert_int_equal(lowkey_outliers_each_end(cases[i].n, cases[i].fraction), cases[i].want);
    for (int percent = 0; percent <= 100;
         percent++) /* decimal fractions of round numbers mean what they say */
        assert_int_equal(lowkey_outliers_each_end(20000, percent / 100.0),
                         percent < 100 ? percent * 100 : 9999);
}

static void the_rank_of_a_token_is_rounded_and_at_least_one(void **state)
{
    (void)state;
    const struct {
        int n;
        double fraction;
        int want;
    } cases[] = { { 192, 0, 0 },    { 192, 0.01, 1 }, { 192, 1e-9, 1 }, { 1024, 0.01, 5 }, { 300, 0.01, 2 },
                  { 299, 0.01, 1 }, { 8, 1, 4 },      { 9, 1, 4 },      { 8, 0.3, 1 } };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        assert_int_equal(lowkey_outlier_rank(cases[i].n, cases[i].fraction), cases[i].want);
}

static int compare_floats(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static void order_statistics_are_those_of_a_sort(void **state)
{
    (void)state;
    gsl_rng *rng = gsl_rng_alloc(gsl_rng_mt19937);
    float x[777], sorted[777];
    for (int trial = 0; trial < 60; trial++) {
        const int n = trial == 0 ? 1 : 1 + (int)gsl_rng_uniform_int(rng, 777);
        for (int i = 0; i < n; i++) {
            const double wide = gsl_ran_ugaussian(rng) * pow(10, 60 * gsl_rng_uniform(rng) - 30);
            x[i] = (float)(trial % 3 == 0   ? wide
                           : trial % 3 == 1 ? floor(3 * gsl_ran_ugaussian(rng))
                                            : gsl_ran_ugaussian(rng));
        }
        if (n > 5) x[0] = FLT_MAX, x[1] = -FLT_MAX, x[2] = -0.0f, x[3] = 1e-45f;
        memcpy(sorted, x, sizeof x);
        qsort(sorted, (size_t)n, sizeof *sorted, compare_floats);
        for (int rank = 0; rank < n; rank++) assert_true(lowkey_order_statistic(n, x, rank) == sorted[rank]);
    }
    gsl_rng_free(rng);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_number_outside_is_the_floor_of_half_the_fraction),
        cmocka_unit_test(the_rank_of_a_token_is_rounded_and_at_least_one),
        cmocka_unit_test(order_statistics_are_those_of_a_sort),
    };
    return lowkey_run_tests(tests);
}
