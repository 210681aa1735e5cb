/* kmeans.h - weighted k-means in one dimension, as good as exact: codebooks of up to 64 centroids. */
#ifndef LOWKEY_KMEANS_H
#define LOWKEY_KMEANS_H

#include "runtime/lowkey.h"

enum { LOWKEY_MAX_CENTROIDS = 64 };

struct lowkey_centroids {
    int n; /* in use: the wanted ones, or as many as there are distinct values */
    double value[LOWKEY_MAX_CENTROIDS]; /* strictly rising */
    double boundary[LOWKEY_MAX_CENTROIDS - 1]; /* midpoints; a value on one belongs to the lower */
    double cost; /* sum of w (x - nearest)^2, to about 1e-13 of the sum about the median */
};

struct lowkey_mass { /* data as sums */
    double weight, moment; /* of w, of w x */
};

/* The best centroids of n values x with weights w (NULL: 1 each), in any order: of x[i] of positive
 * weight. All finite, weights >= 0, at least one > 0 (LOWKEY_EINVAL). Memory: 2 bytes a value and 10 MiB.
 * The order of the values matters to rounding only; the same order gives the same bits. */
lowkey_status lowkey_kmeans_points(size_t n, const float *x, const float *w, int n_centroids,
                                   struct lowkey_centroids *out, lowkey_error *err);

/* The same of values in rising order. Memory: 24 bytes a value and 2 MiB. */
lowkey_status lowkey_kmeans_sorted(size_t n, const float *x, const float *w, int n_centroids,
                                   struct lowkey_centroids *out, lowkey_error *err);

/* Codebooks of several sizes at once, for comparing them: counts rising; out: [n_counts]. One dynamic programme
 * over some 512 bins, then Lloyd's iteration on the values: near the optimum (1 % above it; 32 of
 * very heavy tails up to 30 %). Memory: 24 bytes a value and 1 MiB. */
lowkey_status lowkey_kmeans_sizes(size_t n, const float *x, const float *w, int n_counts, const int *counts,
                                  struct lowkey_centroids *out, lowkey_error *err);

/* The optimum of bins alone: their sums (moments about 0), rising and not overlapping; bins without weight
 * are passed over. square: the sum of w x^2, of which the cost is made. */
lowkey_status lowkey_kmeans_bins(size_t n, const struct lowkey_mass *bins, double square, int n_centroids,
                                 struct lowkey_centroids *out, lowkey_error *err);

#endif
