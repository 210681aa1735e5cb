/* kmeans.c - weighted k-means in one dimension. Optimal clusters are intervals, so that dynamic
 * programming over sorted runs of data finds the optimum; runs are the values themselves where those are
 * few, else bins, and Lloyd's iteration on the values then settles the boundaries within the bins.
 * kmeans_points.c makes the bins for values that are not sorted.
 *
 * Minimising sum w (x - centroid)^2 is maximising, over clusters, moment^2 / weight: two sums a run are
 * enough. */
#include "calib/kmeans_parts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/error.h"

/* Weights that vanish beside the sum before them gain nothing. */
static inline double gain(struct lowkey_mass before, struct lowkey_mass to)
{
    const double moment = to.moment - before.moment, weight = to.weight - before.weight;
    return weight > 0 ? moment * moment / weight : 0;
}

struct row { /* one row of the dynamic programme: the best of the first j runs in k clusters */
    const struct lowkey_mass *sums;
    const double *shorter; /* [n + 1] the best in k - 1 clusters */
    double *best; /* [n + 1] */
    uint32_t *start; /* [n + 1] where the last cluster starts; ties to the lower */
};

static void solve_one(const struct row *row, size_t j, size_t from, size_t to)
{
    double best = -INFINITY;
    size_t start = from;
    for (size_t i = from; i <= to; i++) {
        const double candidate = row->shorter[i] + gain(row->sums[i], row->sums[j]);
        if (candidate > best) {
            best = candidate;
            start = i;
        }
    }
    row->best[j] = best;
    row->start[j] = (uint32_t)start;
}

/* Divide and conquer: the best start does not fall as j rises, so solving the middle bounds both halves. */
static void solve_range(const struct row *row, size_t first, size_t last, size_t from, size_t to)
{
    while (first <= last) {
        const size_t middle = first + (last - first) / 2;
        solve_one(row, middle, from, to < middle ? to : middle - 1);
        const size_t start = row->start[middle];
        if (middle > first) solve_range(row, first, middle - 1, from, start);
        first = middle + 1;
        from = start;
    }
}

lowkey_status lowkey_partitions(size_t n, const struct lowkey_mass *sums, int n_counts, const int *counts,
                                size_t (*ends)[LOWKEY_MAX_CENTROIDS], lowkey_error *err)
{
    const size_t k = (size_t)counts[n_counts - 1];
    if (n >= UINT32_MAX)
        return lowkey_fail(err, LOWKEY_EINVAL, "k-means: %zu runs of data, at most 2^32 - 2", n);
    double *best = malloc(2 * (n + 1) * sizeof *best);
    uint32_t *start = malloc(k * (n + 1) * sizeof *start);
    if (!best || !start) {
        free(best);
        free(start);
        return lowkey_fail(err, LOWKEY_ENOMEM, "k-means: no memory for %zu runs and %zu centroids", n, k);
    }
    double *shorter = best + n + 1;
    for (size_t j = 1; j <= n; j++) best[j] = gain(sums[0], sums[j]);
    for (size_t c = 1; c < k; c++) {
        double *swap = best;
        best = shorter;
        shorter = swap;
        const struct row row = { sums, shorter, best, start + c * (n + 1) };
        /* c + 1 clusters; each needs a run, and so do the k - c - 1 behind, if only k clusters are wanted */
        const size_t last = n_counts > 1 ? n : n - (k - c - 1);
        solve_range(&row, c + 1 < k ? c + 1 : last, last, c,
                    last - 1); /* of the last row only j = n is wanted */
    }
    for (int i = 0; i < n_counts; i++) {
        const size_t n_clusters = (size_t)counts[i];
        ends[i][n_clusters - 1] = n;
        for (size_t c = n_clusters - 1; c > 0; c--) ends[i][c - 1] = start[c * (n + 1) + ends[i][c]];
    }
    free(best < shorter ? best : shorter);
    free(start);
    return LOWKEY_OK;
}

lowkey_status lowkey_partition(size_t n, const struct lowkey_mass *sums, int n_clusters, size_t *ends,
                               lowkey_error *err)
{
    size_t found[1][LOWKEY_MAX_CENTROIDS];
    LOWKEY_TRY(lowkey_partitions(n, sums, 1, &n_clusters, found, err));
    memcpy(ends, found[0], (size_t)n_clusters * sizeof *ends);
    return LOWKEY_OK;
}

/* Within the cluster's values, whatever the sums round to; so a cluster of one value is that value. */
static double mean_of(const struct lowkey_runs *runs, size_t from, size_t to)
{
    const struct lowkey_mass before = runs->sums[from], upto = runs->sums[to];
    const double mean = (upto.moment - before.moment) / (upto.weight - before.weight);
    return mean >= runs->value[from] ? fmin(mean, runs->value[to - 1]) : runs->value[from];
}

/* The number of runs whose value is at most b, sought from a guess outwards: boundaries move little. */
static size_t runs_up_to(const struct lowkey_runs *runs, double b, size_t guess)
{
    const double *value = runs->value;
    size_t low = guess, high = guess, step = 1; /* value[low - 1] <= b < value[high], once found */
    while (low > 0 && value[low - 1] > b) {
        high = low - 1;
        low = low > step ? low - step : 0;
        step *= 2;
    }
    while (high < runs->n && value[high] <= b) {
        low = high + 1;
        high = runs->n - high > step ? high + step : runs->n;
        step *= 2;
    }
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (value[middle] <= b)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static double total_gain(const struct lowkey_mass *sums, int n_clusters, const size_t *ends)
{
    double sum = 0;
    for (int c = 0; c < n_clusters; c++) sum += gain(sums[c ? ends[c - 1] : 0], sums[ends[c]]);
    return sum;
}

int lowkey_partition_at(const struct lowkey_runs *runs, int n_clusters, const double *boundary, size_t *ends)
{
    size_t start = 0;
    for (int c = 0; c < n_clusters; c++) {
        ends[c] = c + 1 < n_clusters ? runs_up_to(runs, boundary[c], start) : runs->n;
        if (ends[c] <= start) return 0;
        start = ends[c];
    }
    return 1;
}

static void midpoints(const struct lowkey_runs *runs, int n_clusters, const size_t *ends, double *boundary)
{
    double mean = mean_of(runs, 0, ends[0]);
    for (int c = 0; c + 1 < n_clusters; c++) {
        const double following = mean_of(runs, ends[c], ends[c + 1]);
        boundary[c] = 0.5 * mean + 0.5 * following;
        mean = following;
    }
}

void lowkey_lloyd(const struct lowkey_runs *runs, int n_clusters, size_t *ends)
{
    enum { MAX_ROUNDS = 1000 };
    double boundary[LOWKEY_MAX_CENTROIDS], reached = total_gain(runs->sums, n_clusters, ends);
    for (int round = 0; round < MAX_ROUNDS; round++) {
        size_t next[LOWKEY_MAX_CENTROIDS];
        memcpy(next, ends, (size_t)n_clusters * sizeof *ends);
        midpoints(runs, n_clusters, ends, boundary);
        if (!lowkey_partition_at(runs, n_clusters, boundary, next)) return;
        const double now = total_gain(runs->sums, n_clusters, next);
        if (!(now > reached)) return;
        reached = now;
        memcpy(ends, next, (size_t)n_clusters * sizeof *ends);
    }
}

/* The runs within reach of a boundary, each by itself, and what lies between taken together: cut[i] is the
 * first run of piece i, cut[n_pieces] = n. */
static size_t cut_near(const struct lowkey_runs *runs, int n_clusters, const size_t *ends, size_t reach,
                       size_t *cut)
{
    size_t n_pieces = 0, next = 0;
    cut[n_pieces++] = 0;
    for (int c = 0; c + 1 < n_clusters; c++) {
        const size_t low = ends[c] > reach ? ends[c] - reach : 0;
        const size_t high = runs->n - ends[c] > reach ? ends[c] + reach : runs->n;
        for (next = low > next ? low : next; next < high; next++)
            if (next > cut[n_pieces - 1]) cut[n_pieces++] = next;
        if (next > cut[n_pieces - 1] && next < runs->n) cut[n_pieces++] = next;
    }
    cut[n_pieces] = runs->n;
    return n_pieces;
}

lowkey_status lowkey_polish(const struct lowkey_runs *runs, int n_clusters, size_t *ends, lowkey_error *err)
{
    enum { REACH = 48, MAX_PIECES = LOWKEY_MAX_CENTROIDS * (2 * REACH + 1) + 2, MAX_ROUNDS = 16 };
    size_t cut[MAX_PIECES], better[LOWKEY_MAX_CENTROIDS];
    struct lowkey_mass sums[MAX_PIECES];
    double reached = total_gain(runs->sums, n_clusters, ends);
    for (int round = 0; round < MAX_ROUNDS && n_clusters > 1; round++) {
        const size_t n_pieces = cut_near(runs, n_clusters, ends, REACH, cut);
        for (size_t i = 0; i <= n_pieces; i++) sums[i] = runs->sums[cut[i]];
        LOWKEY_TRY(lowkey_partition(n_pieces, sums, n_clusters, better, err));
        for (int c = 0; c < n_clusters; c++) better[c] = cut[better[c]];
        lowkey_lloyd(runs, n_clusters, better);
        const double now = total_gain(runs->sums, n_clusters, better);
        if (!(now > reached)) break;
        reached = now;
        memcpy(ends, better, (size_t)n_clusters * sizeof *ends);
    }
    return LOWKEY_OK;
}

void lowkey_centroids_of(const struct lowkey_runs *runs, int n_clusters, const size_t *ends, double origin,
                         struct lowkey_centroids *out)
{
    *out = (struct lowkey_centroids) { .n = n_clusters };
    for (int c = 0; c < n_clusters; c++) out->value[c] = origin + mean_of(runs, c ? ends[c - 1] : 0, ends[c]);
    for (int c = 0; c + 1 < n_clusters; c++) out->boundary[c] = 0.5 * out->value[c] + 0.5 * out->value[c + 1];
    out->cost = fmax(runs->square - total_gain(runs->sums, n_clusters, ends), 0);
}

lowkey_status lowkey_runs_alloc(struct lowkey_runs *runs, size_t capacity, lowkey_error *err)
{
    *runs = (struct lowkey_runs) { .value = malloc((capacity + 1) * sizeof *runs->value),
                                   .sums = malloc((capacity + 1) * sizeof *runs->sums) };
    if (runs->value && runs->sums) {
        runs->sums[0] = (struct lowkey_mass) { 0, 0 };
        return LOWKEY_OK;
    }
    lowkey_runs_free(runs);
    return lowkey_fail(err, LOWKEY_ENOMEM, "k-means: no memory for %zu values", capacity);
}

void lowkey_runs_free(struct lowkey_runs *runs)
{
    free(runs->value);
    free(runs->sums);
    *runs = (struct lowkey_runs) { 0 };
}

void lowkey_runs_add(struct lowkey_runs *runs, double value, double weight, double moment)
{
    const struct lowkey_mass before = runs->sums[runs->n];
    if (runs->n == 0 || value > runs->value[runs->n - 1]) runs->value[runs->n++] = value;
    runs->sums[runs->n] = (struct lowkey_mass) { before.weight + weight, before.moment + moment };
}

/* Cut runs into bins for the dynamic programme: half of them by rank, so that the bulk is fine, half by
 * range, so that rare large values are told apart. Returns how many; cut[b] is the first run of bin b,
 * cut[n_bins] = n. */
static size_t cut_bins(const struct lowkey_runs *runs, size_t n_bins, size_t *cut)
{
    const size_t half = n_bins / 2, n = runs->n;
    const double low = runs->value[0], step = (runs->value[n - 1] - low) / (double)half;
    size_t bins = 0, next_rank = 0;
    double next_edge = low;
    for (size_t i = 0; i < n; i++) {
        if (i < next_rank && runs->value[i] < next_edge) continue;
        cut[bins++] = i;
        while (i >= next_rank) next_rank += n / half + 1;
        if (runs->value[i] >= next_edge) next_edge = low + step * (floor((runs->value[i] - low) / step) + 1);
    }
    cut[bins] = n;
    return bins;
}

static lowkey_status solve_binned(const struct lowkey_runs *runs, int n_clusters, size_t *ends,
                                  lowkey_error *err)
{
    enum { BINS = 2048 };
    if (runs->n <= BINS) return lowkey_partition(runs->n, runs->sums, n_clusters, ends, err);
    size_t cut[BINS + 3];
    struct lowkey_mass sums[BINS + 3];
    const size_t n_bins = cut_bins(runs, BINS, cut);
    for (size_t b = 0; b <= n_bins; b++) sums[b] = runs->sums[cut[b]];
    LOWKEY_TRY(lowkey_partition(n_bins, sums, n_clusters, ends, err));
    for (int c = 0; c < n_clusters; c++) ends[c] = cut[ends[c]];
    lowkey_lloyd(runs, n_clusters, ends);
    return lowkey_polish(runs, n_clusters, ends, err);
}

static lowkey_status solve(const struct lowkey_runs *runs, double origin, int n_centroids,
                           struct lowkey_centroids *out, lowkey_error *err)
{
    size_t ends[LOWKEY_MAX_CENTROIDS];
    const int n_clusters = runs->n < (size_t)n_centroids ? (int)runs->n : n_centroids;
    LOWKEY_TRY(solve_binned(runs, n_clusters, ends, err));
    lowkey_centroids_of(runs, n_clusters, ends, origin, out);
    if (runs->n == (size_t)n_clusters) out->cost = 0; /* each value its own centroid */
    return LOWKEY_OK;
}

lowkey_status lowkey_check_centroids(int n_centroids, lowkey_error *err)
{
    if (n_centroids >= 1 && n_centroids <= LOWKEY_MAX_CENTROIDS) return LOWKEY_OK;
    return lowkey_fail(err, LOWKEY_EINVAL, "k-means: 1 to %d centroids, not %d", LOWKEY_MAX_CENTROIDS,
                       n_centroids);
}

/* Sorted values as runs, relative to the middle one. */
static lowkey_status runs_of_sorted(size_t n, const float *x, const float *w, struct lowkey_runs *runs,
                                    double *origin, lowkey_error *err)
{
    LOWKEY_TRY(lowkey_runs_alloc(runs, n, err));
    *origin = n ? (double)x[n / 2] : 0;
    for (size_t i = 0; i < n; i++) {
        const double weight = w ? (double)w[i] : 1;
        if (!isfinite(x[i]) || !isfinite(weight) || weight < 0 || (i && x[i] < x[i - 1]))
            return lowkey_fail(err, LOWKEY_EINVAL,
                               "k-means: value %zu: %g of weight %g: finite, rising and >= 0 expected", i,
                               (double)x[i], weight);
        if (!(weight > 0)) continue;
        const double d = (double)x[i] - *origin;
        lowkey_runs_add(runs, d, weight, weight * d);
        runs->square += weight * d * d;
    }
    if (runs->n == 0) return lowkey_fail(err, LOWKEY_EINVAL, "k-means: no value of positive weight");
    return LOWKEY_OK;
}

lowkey_status lowkey_kmeans_sorted(size_t n, const float *x, const float *w, int n_centroids,
                                   struct lowkey_centroids *out, lowkey_error *err)
{
    LOWKEY_TRY(lowkey_check_centroids(n_centroids, err));
    struct lowkey_runs runs = { 0 };
    double origin;
    lowkey_status status = runs_of_sorted(n, x, w, &runs, &origin, err);
    if (status == LOWKEY_OK) status = solve(&runs, origin, n_centroids, out, err);
    lowkey_runs_free(&runs);
    return status;
}

static lowkey_status solve_sizes(const struct lowkey_runs *runs, double origin, int n_counts, const int *counts,
                                 struct lowkey_centroids *out, lowkey_error *err)
{
    enum { BINS = 512 };
    size_t cut[BINS + 3], ends[LOWKEY_MAX_CENTROIDS][LOWKEY_MAX_CENTROIDS];
    struct lowkey_mass sums[BINS + 3];
    int clusters[LOWKEY_MAX_CENTROIDS];
    size_t n_bins = runs->n;
    if (runs->n > BINS)
        n_bins = cut_bins(runs, BINS, cut);
    else
        for (size_t i = 0; i <= runs->n; i++) cut[i] = i;
    for (size_t b = 0; b <= n_bins; b++) sums[b] = runs->sums[cut[b]];
    for (int i = 0; i < n_counts; i++)
        clusters[i] = (size_t)counts[i] < n_bins ? counts[i] : (int)n_bins;
    LOWKEY_TRY(lowkey_partitions(n_bins, sums, n_counts, clusters, ends, err));
    for (int i = 0; i < n_counts; i++) {
        for (int c = 0; c < clusters[i]; c++) ends[i][c] = cut[ends[i][c]];
        lowkey_lloyd(runs, clusters[i], ends[i]);
        lowkey_centroids_of(runs, clusters[i], ends[i], origin, &out[i]);
        if (runs->n == (size_t)clusters[i]) out[i].cost = 0;
    }
    return LOWKEY_OK;
}

lowkey_status lowkey_kmeans_sizes(size_t n, const float *x, const float *w, int n_counts, const int *counts,
                                  struct lowkey_centroids *out, lowkey_error *err)
{
    LOWKEY_TRY(lowkey_check_centroids(n_counts, err));
    for (int i = 0; i < n_counts; i++) LOWKEY_TRY(lowkey_check_centroids(counts[i], err));
    struct lowkey_runs runs = { 0 };
    double origin;
    lowkey_status status = runs_of_sorted(n, x, w, &runs, &origin, err);
    if (status == LOWKEY_OK) status = solve_sizes(&runs, origin, n_counts, counts, out, err);
    lowkey_runs_free(&runs);
    return status;
}

lowkey_status lowkey_kmeans_bins(size_t n, const struct lowkey_mass *bins, double square, int n_centroids,
                                 struct lowkey_centroids *out, lowkey_error *err)
{
    LOWKEY_TRY(lowkey_check_centroids(n_centroids, err));
    struct lowkey_runs runs;
    LOWKEY_TRY(lowkey_runs_alloc(&runs, n, err));
    for (size_t i = 0; i < n; i++)
        if (bins[i].weight > 0)
            lowkey_runs_add(&runs, bins[i].moment / bins[i].weight, bins[i].weight, bins[i].moment);
    runs.square = square;
    lowkey_status status;
    size_t ends[LOWKEY_MAX_CENTROIDS];
    const int n_clusters = runs.n < (size_t)n_centroids ? (int)runs.n : n_centroids;
    if (runs.n == 0)
        status = lowkey_fail(err, LOWKEY_EINVAL, "k-means: no value of positive weight");
    else
        status = lowkey_partition(runs.n, runs.sums, n_clusters, ends,
                                  err); /* bins cannot be cut: no Lloyd */
    if (status == LOWKEY_OK) lowkey_centroids_of(&runs, n_clusters, ends, 0, out);
    lowkey_runs_free(&runs);
    return status;
}
