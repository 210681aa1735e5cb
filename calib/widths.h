/* widths.h - bits per channel under a budget, of all layers, heads, keys and values together. */
#ifndef LOWKEY_WIDTHS_H
#define LOWKEY_WIDTHS_H

#include "calib/layer_fit.h"

struct lowkey_widths {
    uint8_t *(*bits)[2]; /* [n_layers]: of keys and values [H][D] */
    double predicted[2]; /* what the errors of all keys, of all values are predicted to cost */
};

/* A pass over the layers for what widths cost, then one allocation. The two channels of a RoPE pair of keys share a
 * width, of values each channel has its own. Arrays are the pool's. */
lowkey_status lowkey_widths_find(const lowkey_captures *captures, const struct lowkey_fit_options *options,
                                 enum lowkey_sensitivity sensitivity, const char *out,
                                 struct lowkey_progress *progress, double *work_done, struct lowkey_pool *pool,
                                 struct lowkey_widths *widths, lowkey_error *err);

#endif
