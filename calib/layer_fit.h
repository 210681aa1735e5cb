/* layer_fit.h - one layer, keys and values, while it is fitted. */
#ifndef LOWKEY_LAYER_FIT_H
#define LOWKEY_LAYER_FIT_H

#include "calib/attention.h"
#include "calib/channel_cost.h"
#include "calib/side_fit.h"

struct lowkey_layer_fit {
    const lowkey_captures *captures;
    const struct lowkey_fit_options *options;
    enum lowkey_sensitivity sensitivity;
    const char *out; /* scratch files go beside it */
    int layer; /* number of it among those captured */
    struct lowkey_side_fit side[2]; /* keys, values: lowkey_layer_fit_side */
    struct lowkey_grids grids[2];
    struct lowkey_store store[2]; /* weights from attention */
    double *moments; /* of keys, from attention: [H][D][D]; NULL: not wanted */
};

/* Set up one side; the members before it are set. widths: [C]; NULL: those of the options, in turn. */
void lowkey_layer_fit_side(struct lowkey_layer_fit *fit, int which, const uint8_t *widths,
                           struct lowkey_progress *progress, double *work_done);

/* Fit the layer: its description, whose arrays are the pool's; sides have their reports and notes. */
lowkey_status lowkey_layer_fit_run(struct lowkey_layer_fit *fit, lowkey_layer_desc *layer,
                                   struct lowkey_pool *pool, lowkey_error *err);

/* What each width from options->low_width to high_width costs in every channel: costs[which] is [C]. What
 * feedback makes up for is taken off, with rows in the order of equal widths. */
lowkey_status lowkey_layer_fit_costs(struct lowkey_layer_fit *fit, struct lowkey_width_costs *const costs[2],
                                     lowkey_error *err);

/* Does the matrix of keys' feedback come from queries? */
int lowkey_feeds_from_queries(const lowkey_captures *captures, const struct lowkey_fit_options *options);

#endif
