/* measure.c - the metrics of measure.h, as sums that add up in a fixed order: rows in, ratios out. */
#include "experiments/measure.h"

#include <assert.h>
#include <math.h>

static double ratio(double numerator, double denominator)
{
    if (numerator == 0 && denominator == 0) return 0;
    return numerator / denominator;
}

static double mean_of_rows(double sum, uint64_t n_rows)
{
    return n_rows ? sum / (double)n_rows : 0;
}

static double largest(int n, const double *x)
{
    double most = x[0];
    for (int t = 1; t < n; t++) most = fmax(most, x[t]);
    return most;
}

/* From where on a score counts as the largest */
static double top(int n, const double *x, double most)
{
    double size = 0;
    for (int t = 0; t < n; t++) size = fmax(size, fabs(x[t]));
    return most - 0x1p-40 * size;
}

/* KL(softmax(s) || softmax(S)) = sum p (s - S) - log sum exp s + log sum exp S; scores are finite, so it is.
 * With both sums taken from their own largest score the sum over t is of small numbers. */
static double softmax_kl(int n, const double *s, double s_max, const double *stored, double stored_max)
{
    double sum = 0, stored_sum = 0, weighted = 0;
    for (int t = 0; t < n; t++) {
        const double e = exp(s[t] - s_max);
        sum += e;
        stored_sum += exp(stored[t] - stored_max);
        weighted += e * ((s[t] - s_max) - (stored[t] - stored_max));
    }
    return fmax(0, weighted / sum - log(sum) + log(stored_sum)); /* rounding alone can make it negative */
}

void lowkey_damage_add(struct lowkey_damage *damage, int n_tokens, const double *exact_scores,
                       const double *stored_scores, int value_dim, const double *exact_out,
                       const float *stored_out)
{
    assert(n_tokens >= 1);
    double s_mean = 0, d_mean = 0;
    for (int t = 0; t < n_tokens; t++) {
        s_mean += exact_scores[t];
        d_mean += stored_scores[t] - exact_scores[t];
    }
    s_mean /= n_tokens;
    d_mean /= n_tokens;
    const double s_max = largest(n_tokens, exact_scores), stored_max = largest(n_tokens, stored_scores);
    const double s_top = top(n_tokens, exact_scores, s_max),
                 stored_top = top(n_tokens, stored_scores, stored_max);
    int kept = 0; /* is a token at the top of both? */
    double spread = 0, error = 0;
    for (int t = 0; t < n_tokens; t++) {
        const double s = exact_scores[t] - s_mean, d = stored_scores[t] - exact_scores[t] - d_mean;
        spread += s * s;
        error += d * d;
        kept |= exact_scores[t] >= s_top && stored_scores[t] >= stored_top;
    }
    const double kl = softmax_kl(n_tokens, exact_scores, s_max, stored_scores, stored_max);
    damage->n_rows++;
    damage->n_flips += !kept;
    damage->logit_error += error;
    damage->logit_spread += spread;
    damage->kl += kl;
    damage->kl_squares += kl * kl;
    for (int c = 0; c < value_dim; c++) {
        const double e = (double)stored_out[c] - exact_out[c];
        damage->output_error += e * e;
        damage->output_size += exact_out[c] * exact_out[c];
    }
}

void lowkey_damage_merge(struct lowkey_damage *into, const struct lowkey_damage *from)
{
    into->n_rows += from->n_rows;
    into->n_flips += from->n_flips;
    into->logit_error += from->logit_error;
    into->logit_spread += from->logit_spread;
    into->kl += from->kl;
    into->kl_squares += from->kl_squares;
    into->output_error += from->output_error;
    into->output_size += from->output_size;
}

double lowkey_relative_logit_error(const struct lowkey_damage *damage)
{
    return sqrt(ratio(damage->logit_error, damage->logit_spread));
}

double lowkey_softmax_kl(const struct lowkey_damage *damage)
{
    return mean_of_rows(damage->kl, damage->n_rows);
}

double lowkey_softmax_kl_stderr(const struct lowkey_damage *damage)
{
    const double n = (double)damage->n_rows, mean = lowkey_softmax_kl(damage);
    if (n < 2) return NAN;
    return sqrt(fmax(0, damage->kl_squares - n * mean * mean) / (n - 1) / n);
}

double lowkey_relative_output_error(const struct lowkey_damage *damage)
{
    return sqrt(ratio(damage->output_error, damage->output_size));
}

double lowkey_flip_rate(const struct lowkey_damage *damage)
{
    return mean_of_rows((double)damage->n_flips, damage->n_rows);
}

void lowkey_distortion_add(struct lowkey_distortion *distortion, int n_tokens, int n_channels,
                           const float *exact, const float *stored, ptrdiff_t stride)
{
    enum { MAX_CHANNELS = 256 };
    double mean[MAX_CHANNELS] = { 0 };
    assert(n_channels <= MAX_CHANNELS);
    for (int t = 0; t < n_tokens; t++)
        for (int c = 0; c < n_channels; c++) mean[c] += (double)exact[t * stride + c];
    for (int c = 0; c < n_channels; c++) mean[c] /= n_tokens;
    for (int t = 0; t < n_tokens; t++) {
        for (int c = 0; c < n_channels; c++) {
            const double x = (double)exact[t * stride + c], e = (double)stored[t * stride + c] - x;
            distortion->error += e * e;
            distortion->spread += (x - mean[c]) * (x - mean[c]);
        }
    }
}

void lowkey_distortion_merge(struct lowkey_distortion *into, const struct lowkey_distortion *from)
{
    into->error += from->error;
    into->spread += from->spread;
}

double lowkey_relative_mse(const struct lowkey_distortion *distortion)
{
    return ratio(distortion->error, distortion->spread);
}
