/* moments.h - what a pass of packing says about every channel: moments, errors, how often each code was
 * used. */
#ifndef LOWKEY_MOMENTS_H
#define LOWKEY_MOMENTS_H

#include "calib/pack_pass.h"

struct lowkey_channel_moments {
    /* Of elements that are no outliers, in the table's units (with a token scale: (x - zero_t) / scale_t),
     * less shift: u what was packed, v the table's entry. */
    double n, u, uu, v, vv, uv;
    /* Of all elements: x - shift_x; the error after outliers, squared; the same weighted, and the weights. */
    double x, xx, error, weighted_error, weight;
};

struct lowkey_moments {
    int n_channels, n_table; /* C; E */
    double *shift, *shift_x; /* [C] subtracted, so that squares do not cancel; set by the caller */
    const struct lowkey_weight_shape *shapes; /* [C]; NULL: all weights are 1 */
    struct lowkey_channel_moments *channel; /* [C] */
    uint64_t *histogram; /* [C][E] */
    struct lowkey_pack_counts counts;
};

/* pass: captures, layer, stream, side, weights, n_threads. Adds up into moments, whose arrays are the
 * caller's. */
lowkey_status lowkey_moments_run(const struct lowkey_pack_pass *pass, struct lowkey_moments *moments,
                                 lowkey_error *err);

/* The correction of a channel's table (METHOD, "Gain correction"): entries become mean_u + a (entry -
 * mean_v) with a = var(u) / cov(u, v); 1, and no shift, where cov <= 0. */
struct lowkey_correction {
    double factor, from, to; /* entry -> to + factor (entry - from) */
};
struct lowkey_correction lowkey_gain_correction(const struct lowkey_channel_moments *m, double shift);

/* Q-Norm: the spread of v made that of u, over n channels together whose codebooks are one: channel c's
 * table is zero[c] + scale[c] * codebook. The correction is the codebook's. scale[c] = 0: the channel is
 * passed over. */
struct lowkey_correction lowkey_qnorm_correction(int n, const struct lowkey_channel_moments *m,
                                                 const double *shift, const double *zero,
                                                 const double *scale);

#endif
