/* prediction.c - see prediction.h. Rows of a vocabulary of 49,152 logits, hundreds of thousands of them. */
#include "experiments/prediction.h"

#include <math.h>

#include "experiments/lm/exponential.h"
#include "kernels/element.h"

struct lowkey_logits lowkey_logits_of(const float *x, int n)
{
    struct lowkey_logits logits = { .x = x, .n = n };
    logits.max = lowkey_largest(x, n, &logits.top);
    logits.log_sum = log(lowkey_exp_sum(x, n, logits.max));
    return logits;
}

double lowkey_token_nll(const struct lowkey_logits *logits, int target)
{
    return logits->log_sum + ((double)logits->max - (double)logits->x[target]);
}

/* sum_i exp(a_i - shift) (a_i - b_i) over n <= STRETCH, by lanes */
enum { LANES = 16, STRETCH = 512 };

LOWKEY_CLONES("avx2", "avx512f")
static void add_stretch(const float *a, const float *b, int n, float shift, double *sum)
{
    float weighted[STRETCH];
    int t = 0;
    for (int i = 0; i < n; i++) weighted[i] = lowkey_exp(a[i] - shift) * (a[i] - b[i]);
    for (; t + LANES <= n; t += LANES)
        for (int i = 0; i < LANES; i++) sum[i] += (double)weighted[t + i];
    for (int i = 0; t < n; t++, i++) sum[i] += (double)weighted[t];
}

double lowkey_token_kl(const struct lowkey_logits *reference, const struct lowkey_logits *logits)
{
    double lanes[LANES] = { 0 }, sum = 0;
    for (int first = 0, n; first < reference->n; first += n) {
        n = reference->n - first < STRETCH ? reference->n - first : STRETCH;
        add_stretch(reference->x + first, logits->x + first, n, reference->max, lanes);
    }
    for (int i = 0; i < LANES; i++) sum += lanes[i];
    const double log_sums = (logits->log_sum - reference->log_sum) +
                            ((double)logits->max - (double)reference->max);
    return sum / exp(reference->log_sum) + log_sums;
}
