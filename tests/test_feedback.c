/* Error feedback: the factor's identity, a hand example, the order of rows, and that feedback lowers e' H
 * e. */
#include <math.h>
#include <stdlib.h>

#include <gsl/gsl_randist.h>
#include <gsl/gsl_rng.h>

#include "calib/feedback.h"
#include "formats/geometry.h"
#include "formats/half.h"
#include "tests/captured.h"
#include "tests/check.h"

/* H = sum of g g' of n random vectors of D coupled numbers. */
static void random_moments(gsl_rng *rng, int D, int n, double *H)
{
    double mix[64 * 64], g[64], z[64];
    for (int i = 0; i < D * D; i++) mix[i] = gsl_ran_ugaussian(rng) / sqrt(D);
    memset(H, 0, (size_t)(D * D) * sizeof *H);
    for (int t = 0; t < n; t++) {
        for (int i = 0; i < D; i++) z[i] = gsl_ran_ugaussian(rng) + (i % 3 == 0);
        for (int i = 0; i < D; i++) {
            g[i] = 0;
            for (int j = 0; j < D; j++) g[i] += mix[i * D + j] * z[j];
        }
        for (int i = 0; i < D * D; i++) H[i] += g[i / D] * g[i % D];
    }
}

static double quadratic(int D, const double *H, const double *e)
{
    double sum = 0;
    for (int i = 0; i < D * D; i++) sum += e[i / D] * H[i] * e[i % D];
    return sum;
}

/* e' (H + damp mean I) e = sum over j of d_j (e_j + sum over i > j of l_ij e_i)^2, rows in order: with d
 * found by solving for unit vectors, the identity must hold for any e. */
static void the_factor_splits_the_quadratic_form(void **state)
{
    (void)state;
    enum { D = 16 };
    gsl_rng *rng = gsl_rng_alloc(gsl_rng_mt19937);
    double H[D * D], damped[D * D], d[D], e[D], by_row[D];
    float factor[D * D];
    uint16_t order[D];
    lowkey_error err;
    for (int trial = 0; trial < 20; trial++) {
        int is_zero;
        random_moments(rng, D, 100, H);
        for (int i = 0; i < D; i++) order[i] = (uint16_t)((i * 5 + trial) % D);
        assert_ok(lowkey_feedback_factor(D, H, order, 0.05, factor, NULL, &is_zero, &err), err);
        assert_false(is_zero);
        double mean = 0;
        for (int c = 0; c < D; c++) mean += H[c * D + c] / D;
        for (int i = 0; i < D * D; i++) damped[i] = H[i] + (i % (D + 1) == 0 ? 0.05 * mean : 0);
        /* d_j: what is left of A_jj once the earlier terms are taken off */
        for (int j = 0; j < D; j++) {
            d[j] = damped[order[j] * D + order[j]];
            for (int k = 0; k < j; k++) d[j] -= d[k] * pow((double)factor[j * D + k], 2);
            assert_true(d[j] > 0);
        }
        double left[D];
        assert_ok(lowkey_feedback_left(D, H, order, 0.05, left, &err), err);
        for (int j = 0; j < D; j++) /* d has f16's factors in it */
            assert_true(fabs(left[order[j]] - d[j] / damped[order[j] * D + order[j]]) < 0.01);
        assert_true(left[order[0]] == 1 && left[order[D - 1]] < 0.9);
        for (int i = 0; i < D; i++) e[i] = gsl_ran_ugaussian(rng);
        for (int j = 0; j < D; j++) {
            by_row[j] = e[order[j]];
            for (int i = j + 1; i < D; i++) by_row[j] += (double)factor[i * D + j] * e[order[i]];
        }
        double sum = 0;
        for (int j = 0; j < D; j++) sum += d[j] * by_row[j] * by_row[j];
        const double want = quadratic(D, damped, e);
        assert_true(fabs(sum - want) < 0.01 * want); /* f16 has 11 bits */
        for (int i = 0; i < D * D; i++) {
            assert_true(lowkey_f16_to_f32(lowkey_f32_to_f16(factor[i])) == factor[i]);
            if (i / D <= i % D) assert_true(factor[i] == 0);
        }
    }
    gsl_rng_free(rng);
}

/* H + damp mean I = [[2.5, 2], [2, 4.5]] with damp 1/6 of mean 3: rows 0, 1: l = 2/2.5; rows 1, 0: l =
 * 2/4.5. */
static void a_factor_by_hand(void **state)
{
    (void)state;
    const double H[8 * 8] = {
        [0] = 2, [1] = 2, [8] = 2, [9] = 4, [18] = 3, [27] = 3, [36] = 3, [45] = 3, [54] = 3, [63] = 3
    };
    uint16_t order[8] = { 0, 1, 2, 3, 4, 5, 6, 7 };
    float factor[64];
    int is_zero;
    lowkey_error err;
    const double mean = (2 + 4 + 6 * 3) / 8.0, damp = 0.5 / mean;
    assert_ok(lowkey_feedback_factor(8, H, order, damp, factor, NULL, &is_zero, &err), err);
    assert_true(factor[8] == lowkey_f16_to_f32(lowkey_f32_to_f16(0.8f)));
    for (int i = 0; i < 64; i++) assert_true(i == 8 || factor[i] == 0);
    order[0] = 1, order[1] = 0;
    assert_ok(lowkey_feedback_factor(8, H, order, damp, factor, NULL, &is_zero, &err), err);
    assert_true(factor[8] == lowkey_f16_to_f32(lowkey_f32_to_f16((float)(2 / 4.5))));
}

static void a_zero_matrix_gives_a_zero_factor_and_says_so(void **state)
{
    (void)state;
    double H[64] = { 0 };
    uint16_t order[8] = { 0, 1, 2, 3, 4, 5, 6, 7 };
    float factor[64];
    int is_zero = 0;
    lowkey_error err;
    memset(factor, 1, sizeof factor);
    assert_ok(lowkey_feedback_factor(8, H, order, 0.05, factor, NULL, &is_zero, &err), err);
    assert_true(is_zero);
    for (int i = 0; i < 64; i++) assert_true(factor[i] == 0);
    H[1] = H[8] = 5, H[0] = H[9] = 1; /* not positive semidefinite: no sum of squares */
    assert_refused(lowkey_feedback_factor(8, H, order, 1e-6, factor, NULL, &is_zero, &err), LOWKEY_EINVAL, err,
                   "damp");
}

/* Quantize to integers times a step, with and without feedback, as packing does: the last row first. */
static void feedback_lowers_the_cost_on_random_matrices(void **state)
{
    (void)state;
    enum { D = 32, TOKENS = 50 };
    gsl_rng *rng = gsl_rng_alloc(gsl_rng_mt19937);
    static double H[D * D];
    static float factor[D * D];
    uint16_t order[D];
    lowkey_error err;
    for (int trial = 0; trial < 10; trial++) {
        int is_zero;
        random_moments(rng, D, 200, H);
        for (int i = 0; i < D; i++) order[i] = (uint16_t)((i * 7 + trial) % D);
        assert_ok(lowkey_feedback_factor(D, H, order, 0.05, factor, NULL, &is_zero, &err), err);
        double plain = 0, fed = 0;
        for (int token = 0; token < TOKENS; token++) {
            double x[D], e_plain[D], e_fed[D];
            for (int c = 0; c < D; c++) {
                x[c] = 3 * gsl_ran_ugaussian(rng);
                e_plain[c] = rint(x[c]) - x[c];
            }
            for (int j = D - 1; j >= 0; j--) {
                double t = x[order[j]];
                for (int i = D - 1; i > j; i--) t -= (double)factor[i * D + j] * e_fed[order[i]];
                e_fed[order[j]] = rint(t) - x[order[j]];
            }
            plain += quadratic(D, H, e_plain);
            fed += quadratic(D, H, e_fed);
        }
        if (!(fed < 0.8 * plain)) fail_msg("fed %g, plain %g", fed, plain);
    }
    gsl_rng_free(rng);
}

static void rows_keep_pairs_together_and_wide_ones_first(void **state)
{
    (void)state;
    static const int dims[] = { 8, 64, 72, 80, 96, 128, 256 };
    gsl_rng *rng = gsl_rng_alloc(gsl_rng_mt19937);
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++)
        for (int partial = 0; partial < 3; partial++)
            for (int pairing = 0; pairing < 2; pairing++) {
                const int D = dims[i], rope_dims = partial == 0 ? D : partial == 1 ? D / 8 * 4 : 0;
                static const uint8_t widths[] = { 1, 2, 3, 4, 5, 8, 16 };
                uint8_t bits[256];
                uint16_t order[256];
                int row_of[256], seen[256] = { 0 };
                for (int c = 0; c < D; c++) bits[c] = widths[gsl_rng_uniform_int(rng, 7)];
                lowkey_row_order(D, rope_dims, (lowkey_pairing)pairing, bits, order);
                for (int r = 0; r < D; r++) {
                    assert_true(order[r] < D && !seen[order[r]]);
                    seen[order[r]] = 1;
                    row_of[order[r]] = r;
                }
                for (int p = 0; p < rope_dims / 2; p++) {
                    int first, second;
                    lowkey_rope_pair(rope_dims, (lowkey_pairing)pairing, p, &first, &second);
                    assert_true(row_of[first] % 2 == 0 && row_of[second] == row_of[first] + 1);
                }
                for (int r = 0; r + 3 < rope_dims; r += 2) {
                    const int here = bits[order[r]] > bits[order[r + 1]] ? bits[order[r]]
                                                                         : bits[order[r + 1]];
                    const int next = bits[order[r + 2]] > bits[order[r + 3]] ? bits[order[r + 2]]
                                                                             : bits[order[r + 3]];
                    assert_true(here >= next);
                }
                for (int r = rope_dims; r + 1 < D; r++) assert_true(bits[order[r]] >= bits[order[r + 1]]);
            }
    gsl_rng_free(rng);
}

static void one_width_keeps_the_default_order(void **state)
{
    (void)state;
    uint8_t bits[64];
    uint16_t order[64], plain[64];
    memset(bits, 2, sizeof bits);
    lowkey_row_order(64, 32, LOWKEY_PAIR_HALF, bits, order);
    lowkey_default_order(64, 32, LOWKEY_PAIR_HALF, plain);
    assert_memory_equal(order, plain, sizeof plain);
}

/* Sums over the tokens that are no sinks, of two heads of 16 channels, from captures read in pieces. */
static void gradient_moments_are_sums_over_kept_tokens(void **state)
{
    (void)state;
    enum { H = 2, D = 16 };
    static const int lengths[CAPTURED_SAMPLES] = { 300, 3, 70 }, sinks[] = { 0, 1, 2 };
    const lowkey_layer_desc geometry = { .struct_size = sizeof geometry,
                                         .n_q_heads = 2,
                                         .n_kv_heads = H,
                                         .key_head_dim = D,
                                         .value_head_dim = D,
                                         .rope_dims = D,
                                         .logit_scale = 0.25,
                                         .rope_attention_factor = 1 };
    struct captured captured;
    captured_make(&captured, &geometry, lengths,
                  1u << LOWKEY_KEY | 1u << LOWKEY_VALUE | 1u << LOWKEY_KEY_GRAD, 4);
    const char *const path = captured.path;
    for (size_t s = 0; s < sizeof sinks / sizeof sinks[0]; s++) {
        double want[H * D * D] = { 0 }, got[H * D * D];
        for (int sample = 0, t = 0; sample < CAPTURED_SAMPLES; sample++)
            for (int i = 0; i < lengths[sample]; i++, t++)
                for (int k = 0; i >= sinks[s] && k < H * D * D; k++) {
                    const float *g = captured.rows[LOWKEY_KEY_GRAD] + (t * H + k / (D * D)) * D;
                    want[k] += (double)g[k / D % D] * (double)g[k % D];
                }
        lowkey_captures *captures;
        lowkey_error err;
        assert_ok(lowkey_captures_open(1, &path, 0, 0, sinks[s], &captures, &err), err);
        assert_ok(lowkey_gradient_moments(captures, 0, LOWKEY_KEY_GRAD, 2, got, &err), err);
        for (int k = 0; k < H * D * D; k++)
            if (!(fabs(got[k] - want[k]) <= 1e-9 * (1 + fabs(want[k]))))
                fail_msg("%d: %g, wanted %g", k, got[k], want[k]);
        lowkey_captures_close(captures);
    }
    captured_free(&captured);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_factor_splits_the_quadratic_form),
        cmocka_unit_test(a_factor_by_hand),
        cmocka_unit_test(a_zero_matrix_gives_a_zero_factor_and_says_so),
        cmocka_unit_test(feedback_lowers_the_cost_on_random_matrices),
        cmocka_unit_test(rows_keep_pairs_together_and_wide_ones_first),
        cmocka_unit_test(gradient_moments_are_sums_over_kept_tokens),
        cmocka_unit_test(one_width_keeps_the_default_order),
    };
    return lowkey_run_tests(tests);
}
