/* drift.h - does a quantizer still fit the traffic? How often each code is used now, against how often it was when the
 * quantizer was fitted (report/histogram in quantizer.h5). New values come from captures, packed as the runtime packs, or
 * are read out of a live cache's pages. */
#ifndef LOWKEY_DRIFT_H
#define LOWKEY_DRIFT_H

#include "formats/quantizer_file.h"

struct lowkey_drift_side { /* keys or values of one layer: H heads, D channels, E table entries */
    const lowkey_layer_desc *layer;
    int which; /* 0 keys, 1 values */
    uint64_t n_tokens; /* counted, sinks left out */
    uint64_t *counts; /* [H][D][E]; NULL where no channel has a table */
    /* [H][D] values outside [lower, upper]; only from captures, and not where tokens have scales of their own. */
    uint64_t *outside;
    int has_outside; /* outside was counted, for all of n_tokens */
};

typedef struct lowkey_drift {
    const lowkey_quantizer *quantizer; /* borrowed, as the record is */
    const struct lowkey_fit_record *record;
    int n_sides; /* two a layer: keys, values */
    struct lowkey_drift_side *sides;
} lowkey_drift;

lowkey_status lowkey_drift_create(const lowkey_quantizer *quantizer, const struct lowkey_fit_record *record,
                                  lowkey_drift **out, lowkey_error *err);
void lowkey_drift_free(lowkey_drift *drift); /* takes NULL */

/* Add all tokens of captures but their sinks. Another model's, or layers that the quantizer lacks, are refused; layers
 * that the captures lack stay uncounted. name: what messages call the quantizer. */
lowkey_status lowkey_drift_add_captures(lowkey_drift *drift, const char *name, int n_paths,
                                        const char *const *paths, int n_threads, lowkey_error *err);
/* Add what a cache of this quantizer holds of a sequence, all layers, sinks left out. */
lowkey_status lowkey_drift_add_cache(lowkey_drift *drift, const lowkey_cache *cache, int sequence,
                                     lowkey_error *err);

/* Jensen-Shannon divergence of two histograms of n codes, in bits, 0 to 1: with p, q their shares and m = (p + q) / 2,
 * the sum of p log2(p / m) / 2 + q log2(q / m) / 2. 0 where either is empty. */
double lowkey_divergence(const uint64_t *a, const uint64_t *b, int n);

struct lowkey_drift_channel { /* one channel, or the sum over those of a side */
    int layer, which, head, channel, bits;
    double divergence;
    double ends, ends_fit; /* share of the first and the last code in use, now and when fitted */
    double outside; /* share outside [lower, upper]; NAN: not counted */
};
/* Channels with a table of sides that hold tokens, most divergent first, ties by layer, side, head, channel. n: how many;
 * the array is to be freed. NULL: no memory. */
struct lowkey_drift_channel *lowkey_drift_channels(const lowkey_drift *drift, size_t *n);
/* Means over a side's channels with a table; channel: how many those are, head: -1. */
struct lowkey_drift_channel lowkey_drift_mean(const lowkey_drift *drift, int side);

/* "fits", "shifted" or "does not fit": by the means and the worst channel, as experiments/README.md has it. */
const char *lowkey_drift_verdict(double mean_divergence, double worst_divergence);

#endif
