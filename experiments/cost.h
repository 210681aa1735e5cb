/* cost.h - what errors of stored keys and values cost, predicted from gradients: each figure once, with its formula.
 *
 * e = stored - exact of an element, g the gradient of its sample's summed loss with respect to it, n_tokens the tokens of
 * all samples. A unit is what acts together: the channels of one head's keys or values, or one channel alone. Its sums
 * are F_s = sum of g e over the tokens of sample s and the unit's channels. Nats per token:
 *
 *   first order    sum_s F_s / n_tokens: what the loss changes by while errors are small
 *   its standard error   sqrt(S var(F_s)) / n_tokens over the S samples, as if they were independent draws (var with S - 1);
 *                  NaN with one
 *   diagonal       sum of (g e)^2 / (2 n_tokens) over all elements: half of e' H e, H the Fisher information, had
 *                  errors of different elements nothing in common. Right for fine formats, too small for coarse ones
 *   coherent       sum_s F_s^2 / (2 n_tokens): the same with a sample's errors taken together. One sample is one draw, so
 *                  it is as noisy as S squares are; an estimate between the two is their mean
 *
 * Of units together (heads, layers, keys and values): diagonal and coherent add up over the units; first orders and F_s
 * add up, and the standard error is of those sums. So a head's coherent cost is not the sum of its channels'. */
#ifndef LOWKEY_COST_H
#define LOWKEY_COST_H

#include <stddef.h>

struct lowkey_cost { /* nats per token */
    double first_order, standard_error, diagonal, coherent;
};

/* Keys or values of one sample: rows [n_tokens][n_channels] of all heads. For each channel c the sum of g e is written to
 * sums[c * stride], and that of (g e)^2 added to squares[c]. f64, in the order of tokens. */
void lowkey_cost_add(int n_tokens, int n_channels, const float *exact, const float *stored, const float *grad,
                     size_t stride, double *sums, double *squares);

struct lowkey_cost_total { /* of units together */
    int n_samples;
    double squares, coherent;
    double *first; /* [n_samples] F_s; the caller's */
};

/* A unit of n_channels: sums [n_channels][n_samples], squares [n_channels]. scratch: [n_samples] */
void lowkey_cost_add_unit(struct lowkey_cost_total *total, int n_channels, const double *sums, const double *squares,
                          double *scratch);
struct lowkey_cost lowkey_cost_of(const struct lowkey_cost_total *total, double n_tokens);

#endif
