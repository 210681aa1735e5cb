/* table.h - a channel's table, and how it is rounded to what a quantizer may hold. */
#ifndef LOWKEY_TABLE_H
#define LOWKEY_TABLE_H

#include <stdint.h>

#include "calib/kmeans.h"

struct lowkey_table { /* as fitted, before rounding */
    int n; /* entries in use, 1 to 64 */
    double entry[LOWKEY_MAX_CENTROIDS]; /* rising */
    float boundary[LOWKEY_MAX_CENTROIDS - 1]; /* code = how many are below x */
};

/* zero + scale * codebook, scale > 0; boundaries of the codebook's midpoints. */
void lowkey_table_make(int n, const double *codebook, const double *midpoint, double zero, double scale,
                       struct lowkey_table *table);
/* The midpoints of a codebook's neighbours: [n - 1]. */
void lowkey_midpoints(int n, const double *codebook, double *midpoint);

struct lowkey_stored_table { /* of E entries, as quantizer.h5 has it */
    int n_entries;
    float entry[LOWKEY_MAX_CENTROIDS]; /* strictly rising over those in use; the last of them repeated */
    float boundary[LOWKEY_MAX_CENTROIDS - 1]; /* FLT_MAX behind those in use */
    float center;
    int exponent;
};

/* Round every entry to the f32 nearest to center + an f16 * 2^exponent. The center is 0 but for channels
 * whose offset is more than 8 times their half-range (f16 would cost their entries more than 1/30 of a
 * step at 4 bits), and those whose few values are exact only so: constants, and two values one ulp apart.
 * Entries that fall together are one. reach: the largest distance of the channel's values from the middle
 * of its entries: the exponent of a constant. */
void lowkey_table_store(const struct lowkey_table *table, double reach, struct lowkey_stored_table *out);

#endif
