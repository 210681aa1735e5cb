/* Log-likelihood, KL and top-1 against numbers by hand and sums in f64. */
#include "experiments/prediction.h"

#include <math.h>
#include <stdlib.h>

#include "tests/check.h"
#include "tests/random.h"

static void assert_close(double got, double want, double tolerance)
{
    if (!(fabs(got - want) <= tolerance)) fail_msg("%.17g, wanted %.17g", got, want);
}

static void log_likelihood_of_a_token_holds_for_any_logits(void **state)
{
    (void)state;
    const float even[4] = { 3, 3, 3, 3 }, far[3] = { -1e30f, 0, 1e4f }, low[2] = { -3e4f, -3e4f };
    const struct lowkey_logits of_even = lowkey_logits_of(even, 4), of_far = lowkey_logits_of(far, 3),
                               of_low = lowkey_logits_of(low, 2);
    assert_close(lowkey_token_nll(&of_even, 2), log(4), 1e-12);
    assert_close(lowkey_token_nll(&of_far, 2), 0, 1e-12);
    assert_close(lowkey_token_nll(&of_far, 1), 1e4, 1e-9);
    assert_close(lowkey_token_nll(&of_low, 0), log(2), 1e-12);
    assert_int_equal(of_even.top, 0);
    assert_int_equal(of_far.top, 2);
}

/* p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2): KL = 1/2 log 2 - 1/4 log 2. Shifts of all logits change nothing. */
static void kl_by_hand(void **state)
{
    (void)state;
    const float ln2 = (float)log(2);
    const float a[3] = { 2 * ln2, ln2, ln2 }, b[3] = { 5, 5, 5 + ln2 },
                shifted[3] = { 40 + 2 * ln2, 40 + ln2, 40 + ln2 };
    const struct lowkey_logits of_a = lowkey_logits_of(a, 3), of_b = lowkey_logits_of(b, 3),
                               of_shifted = lowkey_logits_of(shifted, 3);
    assert_close(lowkey_token_kl(&of_a, &of_b), 0.25 * log(2), 6e-7);
    assert_close(lowkey_token_kl(&of_a, &of_a), 0, 0);
    assert_close(lowkey_token_kl(&of_a, &of_shifted), 0, 4e-6); /* 40 + x is rounded in f32 */
}

static void brute_force(const float *a, const float *b, int n, double *nll, double *kl, double *spread)
{
    double max_a = -HUGE_VAL, max_b = -HUGE_VAL, sum_a = 0, sum_b = 0;
    for (int i = 0; i < n; i++) max_a = fmax(max_a, (double)a[i]), max_b = fmax(max_b, (double)b[i]);
    for (int i = 0; i < n; i++) sum_a += exp((double)a[i] - max_a), sum_b += exp((double)b[i] - max_b);
    *nll = log(sum_b) + max_b - (double)b[n / 3];
    *kl = *spread = 0;
    for (int i = 0; i < n; i++) {
        const double log_p = (double)a[i] - max_a - log(sum_a), log_q = (double)b[i] - max_b - log(sum_b);
        *kl += exp(log_p) * (log_p - log_q);
        *spread += exp(log_p) * fabs((double)a[i] - (double)b[i]);
    }
}

static void rows_of_any_length_and_closeness_are_within_the_bound(void **state)
{
    (void)state;
    enum { N = 49152 };
    float *a = malloc(N * sizeof *a), *b = malloc(N * sizeof *b);
    struct lowkey_random random = { 11 };
    for (int n = 1; n <= N; n = n == 1 ? 2 : n < 600 ? n + 37 : n < N && n * 3 > N ? N : n * 3)
        for (double apart = 1e-6; apart < 100; apart *= 10) {
            double nll, kl, spread;
            for (int i = 0; i < n; i++) {
                a[i] = (float)(4 * lowkey_random_normal(&random));
                b[i] = (float)((double)a[i] + apart * lowkey_random_normal(&random));
            }
            const struct lowkey_logits of_a = lowkey_logits_of(a, n), of_b = lowkey_logits_of(b, n);
            brute_force(a, b, n, &nll, &kl, &spread);
            assert_close(lowkey_token_nll(&of_b, n / 3), nll, 1.2e-7 + 1e-15 * fabs(nll));
            assert_close(lowkey_token_kl(&of_a, &of_b), kl, 2.4e-7 + 1.2e-7 * spread);
        }
    free(a);
    free(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(log_likelihood_of_a_token_holds_for_any_logits),
        cmocka_unit_test(kl_by_hand),
        cmocka_unit_test(rows_of_any_length_and_closeness_are_within_the_bound),
    };
    return lowkey_run_tests(tests);
}
