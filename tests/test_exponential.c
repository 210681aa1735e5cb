/* exp of rows against libm in f64: over the whole range, at its ends, in sums, and beyond. */
#include "experiments/lm/exponential.h"

#include <math.h>
#include <stdlib.h>

#include "tests/check.h"
#include "tests/random.h"

static void every_stretch_of_the_range_is_within_the_bound(void **state)
{
    (void)state;
    double worst = 0;
    float at = 0;
    for (int sign = 0; sign < 2; sign++) /* every 61st number from 2^-30 on; smaller ones are 1 */
        for (uint32_t bits = lowkey_f32_bits(9.3e-10f); bits <= lowkey_f32_bits(87); bits += 61) {
            const float x = sign ? -lowkey_f32_from_bits(bits) : lowkey_f32_from_bits(bits);
            const double error = fabs((double)lowkey_exp(x) / exp((double)x) - 1);
            if (!(error <= worst)) worst = error, at = x;
        }
    if (!(worst <= 1.1e-7)) fail_msg("off by %g at %.9g", worst, (double)at);
    assert_true(worst > 3e-8); /* it is f32: a test that sees nothing would say less */
}

static void beyond_the_range_the_nearer_end_counts(void **state)
{
    (void)state;
    assert_true(lowkey_exp(0) == 1 && lowkey_exp(-0.0f) == 1);
    assert_true(lowkey_exp(-1e30f) == lowkey_exp(-87) && lowkey_exp(-INFINITY) == lowkey_exp(-87));
    assert_true(lowkey_exp(1e30f) == lowkey_exp(87) && isfinite(lowkey_exp(INFINITY)));
    assert_true(lowkey_exp(-87) > 1.1754944e-38f); /* a normal number */
}

static void rows_of_any_length_are_summed_in_f64(void **state)
{
    (void)state;
    enum { N = 5000 };
    static float x[N], y[N];
    struct lowkey_random random = { 1 };
    for (int n = 1; n <= N; n = n < 40 ? n + 1 : n * 3) {
        double want = 0;
        for (int i = 0; i < n; i++) {
            x[i] = y[i] = (float)(8 * lowkey_random_normal(&random));
            want += exp((double)x[i] - 9);
        }
        assert_true(fabs(lowkey_exp_sum(x, n, 9) - want) <= 1.5e-6 * want); /* x - 9 rounds, too */
        assert_true(lowkey_exp_sum(x, n, 9) == lowkey_exp_row(y, n, 9));
        for (int i = 0; i < n; i++) assert_true(y[i] == lowkey_exp(x[i] - 9));
    }
}

static void the_first_of_the_largest_is_found(void **state)
{
    (void)state;
    enum { N = 70 };
    for (int n = 1; n <= N; n++)
        for (int i = 0; i < n; i++) {
            float x[N];
            int at = -1;
            for (int j = 0; j < n; j++) x[j] = -100 - (float)(j % 5);
            x[i] = -3;
            if (i + 2 < n) x[i + 2] = -3;
            assert_true(lowkey_largest(x, n, &at) == -3 && at == i);
            assert_true(lowkey_largest(x, n, NULL) == -3);
        }
    const float lost[3] = { NAN, NAN, NAN };
    int at;
    lowkey_largest(lost, 3, &at); /* of no use, but it ends within the row */
    assert_in_range(at, 0, 2);
}

static void swiglu_and_geglu_are_the_formulas(void **state)
{
    (void)state;
    enum { N = 1003 };
    static float silu[N], gelu[N], up[N], x[N];
    struct lowkey_random random = { 2 };
    for (int i = 0; i < N; i++) {
        x[i] = silu[i] = gelu[i] = i < 4 ? (float[]) { 200, -200, 0, -50 }[i]
                                         : (float)(5 * lowkey_random_normal(&random));
        up[i] = (float)lowkey_random_normal(&random);
    }
    lowkey_swiglu(silu, up, N);
    lowkey_geglu(gelu, up, N);
    for (int i = 0; i < N; i++) {
        const double t = (double)x[i], y = sqrt(2 / acos(-1)) * (t + 0.044715 * pow(t, 3));
        const double of_silu = t / (1 + exp(-t)) * (double)up[i],
                     of_gelu = t / 2 * (1 + tanh(y)) * (double)up[i];
        assert_true(fabs((double)silu[i] - of_silu) <= 3e-7 * fabs(of_silu) + 1e-30);
        assert_true(fabs((double)gelu[i] - of_gelu) <=
                    3e-6 * fabs(of_gelu) + 1e-6 * fabs(t < 0 ? (double)up[i] : 0));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_stretch_of_the_range_is_within_the_bound),
        cmocka_unit_test(beyond_the_range_the_nearer_end_counts),
        cmocka_unit_test(rows_of_any_length_are_summed_in_f64),
        cmocka_unit_test(the_first_of_the_largest_is_found),
        cmocka_unit_test(swiglu_and_geglu_are_the_formulas),
    };
    return lowkey_run_tests(tests);
}
