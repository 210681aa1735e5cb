/* kmeans_parts.h - what the solver's entries share: runs of data in rising order, the exact partition,
 * Lloyd. */
#ifndef LOWKEY_KMEANS_PARTS_H
#define LOWKEY_KMEANS_PARTS_H

#include "calib/kmeans.h"

/* Runs of data in rising order: a run is a value, or a bin of values taken together. */
struct lowkey_runs {
    size_t n;
    double *value; /* [n] strictly rising, relative to an origin near the bulk: squares must not cancel */
    struct lowkey_mass *sums; /* [n + 1] before each run, and of all */
    double square; /* sum of w value^2 */
};

lowkey_status lowkey_runs_alloc(struct lowkey_runs *runs, size_t capacity,
                                lowkey_error *err); /* empty, square 0 */
void lowkey_runs_free(struct lowkey_runs *runs);
/* Append a run of positive weight; one of the last run's value joins it. */
void lowkey_runs_add(struct lowkey_runs *runs, double value, double weight, double moment);

/* The exact optimum over n runs given by prefix sums: ends[k] is the first run after cluster k,
 * ends[n_clusters - 1] = n. n >= n_clusters >= 1. */
lowkey_status lowkey_partition(size_t n, const struct lowkey_mass *sums, int n_clusters, size_t *ends,
                               lowkey_error *err);

/* The same for several numbers of clusters, rising, none above n: ends[i] as above, of counts[i] clusters. */
lowkey_status lowkey_partitions(size_t n, const struct lowkey_mass *sums, int n_counts, const int *counts,
                                size_t (*ends)[LOWKEY_MAX_CENTROIDS], lowkey_error *err);

/* Lloyd's iteration from a partition to a fixed point: never raises the cost. */
void lowkey_lloyd(const struct lowkey_runs *runs, int n_clusters, size_t *ends);

/* The exact optimum among the partitions whose boundaries lie within some 50 runs of the present ones,
 * again and again while that lowers the cost: Lloyd's fixed points are many and close to each other, and
 * this leaves them. */
lowkey_status lowkey_polish(const struct lowkey_runs *runs, int n_clusters, size_t *ends, lowkey_error *err);

/* The partition that boundaries (relative to the origin) make; 0: it would leave a cluster empty. */
int lowkey_partition_at(const struct lowkey_runs *runs, int n_clusters, const double *boundary, size_t *ends);

/* Centroids, boundaries and cost of a partition. */
void lowkey_centroids_of(const struct lowkey_runs *runs, int n_clusters, const size_t *ends, double origin,
                         struct lowkey_centroids *out);

lowkey_status lowkey_check_centroids(int n_centroids, lowkey_error *err);

#endif
