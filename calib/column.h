/* column.h - the fit of one channel of a side, and of channels that share a codebook. */
#ifndef LOWKEY_COLUMN_H
#define LOWKEY_COLUMN_H

#include "calib/kmeans.h"
#include "calib/side_fit.h"

enum {
    LOWKEY_SHARED_BINS = 1 << 16, /* of a shared codebook, over [-1, 1] */
    LOWKEY_SORTED = 1 << 21 /* values up to which a channel is sorted; longer ones are solved from bins */
};

struct lowkey_shared { /* the normalised values of channels that share a codebook */
    struct lowkey_mass bins[LOWKEY_SHARED_BINS];
    double square;
};

struct lowkey_column {
    struct lowkey_side_fit *fit;
    size_t channel;
    int64_t n;
    float *x, *w; /* [n], changed; w: raw weights; NULL: all 1 */
    struct lowkey_shared *shared; /* NULL where the channel has a codebook of its own */
    lowkey_status status;
    lowkey_error err;
};

/* Does each channel have a codebook that depends on it alone? */
int lowkey_has_own_codebook(const struct lowkey_side_fit *fit);

/* Extremes of the channel, and the bits of all its values or'ed. Before the fit, which changes x. */
uint32_t lowkey_column_look_over(const struct lowkey_column *column);

/* Parts of the fit: raw weights become those of the fit; values with their weights are sorted, in place. */
void lowkey_column_tame(struct lowkey_column *column);
lowkey_status lowkey_column_sort(struct lowkey_column *column);
/* In place of a fit, where the side has room for them: what widths would cost (column_costs.c). */
lowkey_status lowkey_column_costs(struct lowkey_column *column);

/* Fit column number i of an array: a body for lowkey_parallel_for. */
void lowkey_column_fit(void *columns, int i);

/* Tables of the channels first..last-1 that share a codebook: one codebook for each width among them. */
lowkey_status lowkey_shared_solve(struct lowkey_side_fit *fit, size_t first, size_t last,
                                  const struct lowkey_shared *shared, lowkey_error *err);
/* Are all weights zero? */
int lowkey_shared_is_empty(const struct lowkey_shared *shared);
/* Has any of the channels a part in a shared codebook: a table, and more than one value? */
int lowkey_any_shares(const struct lowkey_side_fit *fit, size_t first, size_t last);

#endif
