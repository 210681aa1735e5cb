/* channel_cost.h - what a table's errors on one channel cost: by gradients in nats per token, else in the units of
 * the weights. What an allocation of widths compares. */
#ifndef LOWKEY_CHANNEL_COST_H
#define LOWKEY_CHANNEL_COST_H

#include "calib/captures.h"
#include "calib/table.h"

enum { LOWKEY_WIDEST_TABLE = 5 };

struct lowkey_width_costs { /* of one channel, by width; 0 for those not asked for */
    double at[LOWKEY_WIDEST_TABLE + 1];
};

/* e = the table's value - x over the channel's kept tokens, in the order of captures; g the gradient.
 *
 *   by_gradient  (diagonal + coherent) / 2: diagonal = sum of (g e)^2 / (2 n), coherent = sum over samples of
 *                (sum of g e)^2 / (2 n), n the tokens of all samples (METHOD, "What predicts the loss": one sample is
 *                one draw, so the coherent cost is shrunk towards the diagonal one)
 *   otherwise    sum of w e^2 / (2 n), w = weight: NULL: one number for all tokens, each */
double lowkey_channel_cost(const lowkey_captures *captures, const struct lowkey_stored_table *table, const float *x,
                           const float *weight, double each, int by_gradient);

#endif
