/* feedback.h - error feedback: the matrix that a head's errors meet in, its factor, and the order of rows. */
#ifndef LOWKEY_FEEDBACK_H
#define LOWKEY_FEEDBACK_H

#include "calib/captures.h"

/* H = the sum over kept tokens of g g', of every KV head, g the head's gradient row: out [n_heads][D][D],
 * f64, added in the order of the samples. */
lowkey_status lowkey_gradient_moments(const lowkey_captures *captures, int layer, enum lowkey_stream stream,
                                      int n_threads, double *out, lowkey_error *err);

/* The order of rows: RoPE pairs side by side, then the rest, as lowkey_default_order has them; of each the
 * wide first (a pair is as wide as its wider channel), so that the narrow, which are packed first, can be
 * made up for. order: [head_dim] */
void lowkey_row_order(int head_dim, int rope_dims, lowkey_pairing pairing, const uint8_t *bits,
                      uint16_t *order);

/* Factor H + damp mean(diag H) I = L L' with rows in the given order: factor[i][j] = f16(L_ij / L_jj) for
 * i > j, else 0. H: [D][D] by channel. H = 0: all of the factor is 0, and *is_zero 1. metric_weight: [D] by channel,
 * what the squared error of what a row quantizes counts then, L_jj^2; NULL: not wanted. */
lowkey_status lowkey_feedback_factor(int head_dim, const double *H, const uint16_t *order, double damp,
                                     float *factor, float *metric_weight, int *is_zero, lowkey_error *err);

/* weight relative to the largest of its head, in f32, within what a quantizer may hold: 2^-40 to 1; 1 where the largest is 0. */
float lowkey_metric_weight(double weight, double largest);

/* What of the cost of each channel's own error is left when errors are fed back in that order: L_jj^2 / A_jj of
 * the damped matrix A = L L'. left: [D] by channel; 1 where H = 0. */
lowkey_status lowkey_feedback_left(int head_dim, const double *H, const uint16_t *order, double damp,
                                   double *left, lowkey_error *err);

#endif
