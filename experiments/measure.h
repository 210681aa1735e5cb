/* measure.h - what damage means: every metric once, with its formula.
 *
 * A row is one query of one query head. Over the tokens t that it sees, s_t are its exact scores
 * (logit_scale * RoPE(q) . RoPE(k_t), f64, from the captured keys) and S_t the same from the stored keys;
 * p = softmax(s), P = softmax(S); o = sum_t p_t v_t, and O is what lowkey_attend gave. Over many rows:
 *
 *   relative logit error   sqrt(sum_rows sum_t (d_t - mean d)^2 / sum_rows sum_t (s_t - mean s)^2), d = S - s;
 *                          softmax does not see a shift of all scores, so neither does this
 *   softmax KL             mean over rows of sum_t p_t (log p_t - log P_t), nats
 *   relative output error  sqrt(sum_rows |O - o|^2 / sum_rows |o|^2)
 *   top-1 flips            share of rows in which no token has both the top s and the top S. A score is at the
 *                          top if it is less than 2^-40 of the row's largest absolute score below the largest:
 *                          the order of a sum can part equal scores by so much. So a tie is no flip
 *   relative MSE           sum (X - x)^2 / sum (x - mean)^2 over keys or values, mean over the tokens of a
 *                          sample, per channel: the share of the variance that was lost
 *
 * Ratios: 0 / 0 is 0 (nothing to lose, nothing lost), e / 0 infinite. Sums are f64, in the order of calls. */
#ifndef LOWKEY_MEASURE_H
#define LOWKEY_MEASURE_H

#include <stddef.h>
#include <stdint.h>

struct lowkey_damage {         /* sums over rows; all zero: none yet */
    uint64_t n_rows, n_flips;
    double logit_error, logit_spread;   /* numerator and denominator */
    double kl, kl_squares;              /* sum of the rows' KL, and of its square */
    double output_error, output_size;
};

/* One row: scores [n_tokens], n_tokens >= 1, and outputs [value_dim]. */
void lowkey_damage_add(struct lowkey_damage *damage, int n_tokens, const double *exact_scores,
                       const double *stored_scores, int value_dim, const double *exact_out,
                       const float *stored_out);
void lowkey_damage_merge(struct lowkey_damage *into, const struct lowkey_damage *from);

double lowkey_relative_logit_error(const struct lowkey_damage *damage);
double lowkey_softmax_kl(const struct lowkey_damage *damage);
/* Standard error of the mean KL, as if rows were independent draws: rows of one sample are not quite. NaN
 * under 2 rows. */
double lowkey_softmax_kl_stderr(const struct lowkey_damage *damage);
double lowkey_relative_output_error(const struct lowkey_damage *damage);
double lowkey_flip_rate(const struct lowkey_damage *damage);

struct lowkey_distortion {     /* sums over elements of keys, or of values; all zero: none yet */
    double error, spread;
};

/* One sample, one head: rows of n_channels <= 256 values, stride elements from token to token. */
void lowkey_distortion_add(struct lowkey_distortion *distortion, int n_tokens, int n_channels,
                           const float *exact, const float *stored, ptrdiff_t stride);
void lowkey_distortion_merge(struct lowkey_distortion *into, const struct lowkey_distortion *from);
double lowkey_relative_mse(const struct lowkey_distortion *distortion);

#endif
