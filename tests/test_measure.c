/* test_measure.c - the metrics on numbers done by hand. */
#include <math.h>

#include "experiments/measure.h"
#include "tests/check.h"

static void assert_near(double got, double want)
{
    if (!(fabs(got - want) <= 1e-14 * (1 + fabs(want)))) fail_msg("got %.17g, wanted %.17g", got, want);
}

/* s = (0, ln 3): p = (1/4, 3/4); S is s turned round. KL = 1/4 ln(1/3) + 3/4 ln 3 = ln 3 / 2. d = (ln 3, -ln
 * 3) with squares 2 ln^2 3; s lies ln 3 / 2 to both sides of its mean, squares ln^2 3 / 2; so the logit error
 * is 2. o = (3, 4), O = (3, 5): 1 / 5. */
static void one_row_by_hand(void **state)
{
    (void)state;
    const double ln3 = log(3), s[] = { 0, ln3 }, stored[] = { ln3, 0 }, o[] = { 3, 4 };
    const float stored_o[] = { 3, 5 };
    struct lowkey_damage damage = { 0 };
    lowkey_damage_add(&damage, 2, s, stored, 2, o, stored_o);
    assert_near(lowkey_softmax_kl(&damage), ln3 / 2);
    assert_near(lowkey_relative_logit_error(&damage), 2);
    assert_near(lowkey_relative_output_error(&damage), 0.2);
    assert_near(lowkey_flip_rate(&damage), 1);
    assert_true(isnan(lowkey_softmax_kl_stderr(&damage)));
}

static void a_shift_of_all_scores_is_no_damage(void **state)
{
    (void)state;
    const double s[] = { 1, -2, 0.5, 700 }, stored[] = { 1001, 998, 1000.5, 1700 }, o[] = { 1 };
    const float stored_o[] = { 1 };
    struct lowkey_damage damage = { 0 };
    lowkey_damage_add(&damage, 4, s, stored, 1, o, stored_o);
    assert_near(lowkey_softmax_kl(&damage), 0);
    assert_near(lowkey_relative_logit_error(&damage), 0);
    assert_near(lowkey_relative_output_error(&damage), 0);
    assert_int_equal(damage.n_flips, 0);
}

/* KL is not symmetric: p = (1/2, 1/2), P = (1/4, 3/4): 1/2 ln 2 + 1/2 ln(2/3) = 1/2 ln(4/3); the other way it
 * would be 1/4 ln(1/2) + 3/4 ln(3/2) = 0.1308. */
static void kl_is_from_exact_to_stored(void **state)
{
    (void)state;
    const double s[] = { 5, 5 }, stored[] = { 0, log(3) };
    struct lowkey_damage damage = { 0 };
    lowkey_damage_add(&damage, 2, s, stored, 0, NULL, NULL);
    assert_near(lowkey_softmax_kl(&damage), 0.5 * log(4.0 / 3));
}

static void scores_far_apart_give_finite_kl(void **state)
{
    (void)state;
    const double s[] = { 0, 5000 }, stored[] = { 5000, 0 };
    struct lowkey_damage damage = { 0 };
    lowkey_damage_add(&damage, 2, s, stored, 0, NULL, NULL);
    assert_near(lowkey_softmax_kl(&damage), 5000);
}

static void ties_are_no_flips(void **state)
{
    (void)state;
    const struct {
        double s[3], stored[3];
        unsigned flips;
    } cases[] = {
        { { 1, 2, 3 }, { 1, 3, 3 }, 0 }, /* the exact top shares the stored top */
        { { 3, 2, 3 }, { 0, 1, 2 }, 0 }, /* one of two exact tops stays */
        { { 3, 2, 3 }, { 0, 1, -2 }, 1 }, /* neither does */
        { { 1, 2, 3 }, { 1, 3, 2.5 }, 1 },
        { { 2, 2, 2 }, { 7, 7, 7 }, 0 },
        { { 1, 2, 3 }, { 1, 3 + 0x1p-45, 3 }, 0 }, /* a rounding apart */
        { { 1, 2, 3 }, { 1, 3 + 0x1p-30, 3 }, 1 },
        { { 3, 2, 3 + 0x1p-45 }, { 5, 0, 4 }, 0 },
        { { -100, 0, 0x1p-39 }, { -100, 1, 0 }, 0 }, /* of the row's size, not of the top's */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct lowkey_damage damage = { 0 };
        lowkey_damage_add(&damage, 3, cases[i].s, cases[i].stored, 0, NULL, NULL);
        assert_int_equal(damage.n_flips, cases[i].flips);
    }
}

static void a_query_of_one_token_has_no_damage_to_its_softmax(void **state)
{
    (void)state;
    const double s[] = { 2 }, stored[] = { -9 }, o[] = { 0 };
    const float stored_o[] = { 0 };
    struct lowkey_damage damage = { 0 };
    lowkey_damage_add(&damage, 1, s, stored, 1, o, stored_o);
    assert_near(lowkey_softmax_kl(&damage), 0);
    assert_near(lowkey_relative_logit_error(&damage), 0);
    assert_near(lowkey_relative_output_error(&damage), 0);
    assert_int_equal(damage.n_flips, 0);
}

/* Rows are weighed by their sums, not averaged: numerators 8 and 0, denominators 2 and 6 -> sqrt(8 / 8), not
 * (2 + 0) / 2 by luck of equal weights. KL of the rows: a and 0 -> mean a / 2, standard error a / 2. */
static void rows_add_up_as_sums_and_merging_is_adding(void **state)
{
    (void)state;
    const double s1[] = { -1, 1 }, t1[] = { 1, -1 }, o1[] = { 3, 0 };
    const double s2[] = { -1, -1, 2 }, o2[] = { 0, 4 };
    const float w1[] = { 3, 5 }, w2[] = { 0, 4 };
    struct lowkey_damage both = { 0 }, one = { 0 }, two = { 0 };
    lowkey_damage_add(&one, 2, s1, t1, 2, o1, w1);
    lowkey_damage_add(&two, 3, s2, s2, 2, o2, w2);
    lowkey_damage_add(&both, 2, s1, t1, 2, o1, w1);
    lowkey_damage_add(&both, 3, s2, s2, 2, o2, w2);
    const double kl = lowkey_softmax_kl(&one);
    assert_near(kl, 2 * tanh(1)); /* p = sigmoid(2): KL = (2 p - 1) * 2 */
    lowkey_damage_merge(&one, &two);
    assert_memory_equal(&one, &both, sizeof both);
    assert_near(lowkey_relative_logit_error(&both), 1);
    assert_near(lowkey_relative_output_error(&both), 1); /* sqrt((25 + 0) / (9 + 16)) */
    assert_near(lowkey_softmax_kl(&both), kl / 2);
    assert_near(lowkey_softmax_kl_stderr(&both),
                kl / 2); /* deviations +-kl/2: variance kl^2/2, over 2 rows */
    assert_near(lowkey_flip_rate(&both), 0.5);
}

/* Two channels of three tokens, stride 3. Channel 0: 0 3 6 (spread 18), stored 0 3 7; channel 1: 600 600 600
 * (none), stored 600 602 600. (1 + 4) / 18: an offset does not hide the loss. */
static void relative_mse_is_of_each_channels_spread(void **state)
{
    (void)state;
    const float x[] = { 0, 600, -1, 3, 600, -1, 6, 600, -1 }, stored[] = { 0, 600, 5, 3, 602, 5, 7, 600, 5 };
    struct lowkey_distortion distortion = { 0 }, sum = { 0 };
    lowkey_distortion_add(&distortion, 3, 2, x, stored, 3);
    assert_near(lowkey_relative_mse(&distortion), 5.0 / 18);
    lowkey_distortion_merge(&sum, &distortion);
    lowkey_distortion_merge(&sum, &distortion);
    assert_near(sum.error, 10);
    assert_near(sum.spread, 36);
}

static void nothing_lost_of_nothing_is_zero_and_something_infinite(void **state)
{
    (void)state;
    assert_near(lowkey_relative_mse(&(struct lowkey_distortion) { 0, 0 }), 0);
    assert_true(isinf(lowkey_relative_mse(&(struct lowkey_distortion) { 1, 0 })));
    assert_near(lowkey_softmax_kl(&(struct lowkey_damage) { 0 }), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_row_by_hand),
        cmocka_unit_test(a_shift_of_all_scores_is_no_damage),
        cmocka_unit_test(kl_is_from_exact_to_stored),
        cmocka_unit_test(scores_far_apart_give_finite_kl),
        cmocka_unit_test(ties_are_no_flips),
        cmocka_unit_test(a_query_of_one_token_has_no_damage_to_its_softmax),
        cmocka_unit_test(rows_add_up_as_sums_and_merging_is_adding),
        cmocka_unit_test(relative_mse_is_of_each_channels_spread),
        cmocka_unit_test(nothing_lost_of_nothing_is_zero_and_something_infinite),
    };
    return lowkey_run_tests(tests);
}
