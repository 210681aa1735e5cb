/* kmeans_points.c - weighted k-means of millions of values that are not sorted: one pass sums them into
 * bins, dynamic programming over the bins finds the optimum on bin edges, a second pass takes the values
 * near the boundaries out of their bins, and Lloyd's iteration settles the boundaries among them.
 *
 * Bins have two levels. A cell is a range of the float's bits of x - origin (32 to the octave), so that
 * cells are fine around the origin, which lies in the bulk, whatever the range; a cell is cut into equal
 * bins, as many as a sample of the values says that it needs: their number goes with (weight
 * width^2)^(1/3), which makes the spread within bins least. Should the sample have misled, the sums of the
 * bins lay out the next round. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "calib/kmeans_parts.h"
#include "calib/sort.h"
#include "runtime/error.h"

enum {
    CELL_SHIFT = 18, /* of a float's 23 mantissa bits 5 stay */
    N_CELLS = 1 << (32 - CELL_SHIFT),
    MAX_BINS = 1 << 16, /* bin numbers are kept as u16 */
    BLOCK = 512, /* values taken together */
    LANES = 8, /* sums of squares side by side */
    FEW = 1024, /* distinct values up to which each is a run of its own */
};

struct cell {
    float left, bins_per_unit;
    uint32_t first_bin, n_bins;
};

struct points {
    size_t n;
    const float *x, *w; /* w may be NULL */
    double origin, square; /* sum of w (x - origin)^2 */
    uint32_t n_bins;
    uint16_t *bin_of; /* [n] */
    struct cell cells[N_CELLS];
    double cell_weight[N_CELLS];
    struct lowkey_mass bins[MAX_BINS];
    uint8_t is_open[MAX_BINS]; /* its values are runs of their own */
};

struct block { /* what is made of some values before they are looked up */
    float near[BLOCK], ones[BLOCK];
    uint32_t cell[BLOCK];
    double moment[BLOCK], square[BLOCK], lanes[LANES];
};

static inline double weight_of(const struct points *points, size_t i)
{
    return points->w ? (double)points->w[i] : 1;
}

/* The lowest value of a cell; infinite beyond the floats. */
static double key_edge(uint32_t cell)
{
    const double edge = cell < N_CELLS ? (double)lowkey_key_float(cell << CELL_SHIFT) : HUGE_VAL;
    return isnan(edge) ? HUGE_VAL : edge; /* keys beyond the infinities hold no values */
}

/* Monotone in d: the difference is exact, near enough, within a cell. */
static inline uint32_t bin_in(const struct cell *cell, float d)
{
    const float offset = (d - cell->left) * cell->bins_per_unit;
    return cell->first_bin + (offset < (float)cell->n_bins ? (uint32_t)(int32_t)offset : cell->n_bins - 1);
}

static inline uint32_t bin_number(const struct points *points, double d)
{
    return bin_in(&points->cells[lowkey_float_key((float)d) >> CELL_SHIFT], (float)d);
}

/* (weight width^2)^(1/3) of a cell: its claim on bins; 0 where it cannot be cut. */
static double claim_of(const struct points *points, uint32_t c)
{
    const double width = key_edge(c + 1) - key_edge(c);
    return points->cell_weight[c] > 0 && isfinite(width) ? cbrt(points->cell_weight[c] * width * width) : 0;
}

/* Share n_shared bins among the cells, one more for each. */
static void lay_bins(struct points *points, uint32_t n_shared)
{
    double claims = 0;
    for (uint32_t c = 0; c < N_CELLS; c++) claims += claim_of(points, c);
    points->n_bins = 0;
    for (uint32_t c = 0; c < N_CELLS; c++) {
        struct cell *cell = &points->cells[c];
        const double claim = claim_of(points, c);
        const uint32_t n_bins = 1 + (claim > 0 ? (uint32_t)(n_shared * (claim / claims)) : 0);
        const double left = key_edge(c), width = key_edge(c + 1) - left;
        const float per_unit = (float)(n_bins / width); /* 0 where the width is infinite */
        *cell = (struct cell) { isfinite(per_unit) && per_unit > 0 ? (float)left : 0,
                                isfinite(per_unit) && per_unit > 0 ? per_unit : 0, points->n_bins, n_bins };
        points->n_bins += n_bins;
    }
}

/* The origin is the median of a sample, and the sample's weights lay the bins. */
static lowkey_status look_at_sample(struct points *points, lowkey_error *err)
{
    enum { SAMPLE = 1 << 14 };
    const size_t count = points->n < SAMPLE ? points->n : SAMPLE;
    struct lowkey_keyed *sample = malloc(2 * SAMPLE * sizeof *sample);
    if (!sample) return lowkey_fail(err, LOWKEY_ENOMEM, "k-means: no memory for a sample");
    for (size_t s = 0; s < count; s++)
        sample[s].key = lowkey_float_key(points->x[(size_t)((double)points->n / (double)count * (double)s)]);
    lowkey_sort_keyed(count, sample, sample + SAMPLE);
    points->origin = (double)lowkey_key_float(sample[count / 2].key);
    free(sample);
    for (size_t s = 0; s < count; s++) {
        const size_t i = (size_t)((double)points->n / (double)count * (double)s);
        const float d = (float)((double)points->x[i] - points->origin);
        points->cell_weight[lowkey_float_key(d) >> CELL_SHIFT] += weight_of(points, i);
    }
    lay_bins(points, MAX_BINS / 8);
    return LOWKEY_OK;
}

/* What of a block's values needs no look-up, side by side: x - origin as a float, its cell, weight (x -
 * origin), and the sum of weight (x - origin)^2 in LANES parts. Returns whether any value or weight may be
 * bad: not finite, or a weight's sign set. Wider registers change nothing: every sum is in the same order. */
#if defined(__x86_64__) && defined(__gnu_linux__)
__attribute__((target_clones("default", "avx2")))
#endif
static uint32_t
prepare_block(size_t n, const float *x, const float *w, double origin, struct block *block)
{
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t x_bits, w_bits;
        memcpy(&x_bits, &x[i], sizeof x_bits);
        memcpy(&w_bits, &w[i], sizeof w_bits);
        bad |= (uint32_t)(x_bits << 1 >= 0xff000000u) | (uint32_t)(w_bits >= 0x7f800000u);
    }
    for (size_t i = 0; i < n; i++) {
        const double d = (double)x[i] - origin;
        block->near[i] = (float)d;
        block->moment[i] = (double)w[i] * d;
        block->square[i] = block->moment[i] * d;
    }
    for (size_t i = 0; i < n; i++) block->cell[i] = lowkey_float_key(block->near[i]) >> CELL_SHIFT;
    for (size_t i = n; i < BLOCK; i++) block->square[i] = 0;
    for (size_t i = 0; i < BLOCK; i += LANES)
        for (size_t lane = 0; lane < LANES; lane++) block->lanes[lane] += block->square[i + lane];
    return bad;
}

/* Sum one block of values into the bins; as prepare_block returns. */
static uint32_t sum_block(struct points *points, size_t first, size_t n, struct block *block)
{
    const float *w = points->w ? points->w + first : block->ones;
    const uint32_t bad = prepare_block(n, points->x + first, w, points->origin, block);
    for (size_t i = 0; i < n; i++) {
        const uint32_t bin = bin_in(&points->cells[block->cell[i]], block->near[i]);
        points->bin_of[first + i] = (uint16_t)bin;
        points->bins[bin].weight += (double)w[i];
        points->bins[bin].moment += block->moment[i];
    }
    return bad;
}

static lowkey_status sum_bins(struct points *points, lowkey_error *err)
{
    struct block block = { .lanes = { 0 } };
    for (size_t i = 0; i < BLOCK; i++) block.ones[i] = 1;
    memset(points->bins, 0, sizeof points->bins);
    for (size_t first = 0; first < points->n; first += BLOCK) {
        const size_t n = points->n - first < BLOCK ? points->n - first : BLOCK;
        if (!sum_block(points, first, n, &block)) continue;
        for (size_t i = first; i < first + n; i++)
            if (!isfinite(points->x[i]) || !isfinite(weight_of(points, i)) || weight_of(points, i) < 0)
                return lowkey_fail(err, LOWKEY_EINVAL,
                                   "k-means: value %zu: %g of weight %g: finite and >= 0 expected", i,
                                   (double)points->x[i], weight_of(points, i));
    }
    points->square = 0;
    for (size_t lane = 0; lane < LANES; lane++) points->square += block.lanes[lane];
    return LOWKEY_OK;
}

/* The spread within bins, were each filled evenly; also makes the bins' sums those of their cells. */
static double spread_within(struct points *points)
{
    double spread = 0;
    for (uint32_t c = 0; c < N_CELLS; c++) {
        const struct cell *cell = &points->cells[c];
        double weight = 0;
        for (uint32_t b = 0; b < cell->n_bins; b++) weight += points->bins[cell->first_bin + b].weight;
        points->cell_weight[c] = weight;
        const double per_unit = (double)cell->bins_per_unit;
        if (weight > 0 && per_unit > 0) spread += weight / (12 * per_unit * per_unit);
    }
    return spread;
}

/* The runs that there are: bins, and the values of those that are open. opened: [n_opened] in rising
 * order. */
static lowkey_status make_runs(const struct points *points, size_t n_opened,
                               const struct lowkey_keyed *opened, struct lowkey_runs *runs, lowkey_error *err)
{
    LOWKEY_TRY(lowkey_runs_alloc(runs, points->n_bins + n_opened, err));
    size_t i = 0;
    for (uint32_t b = 0; b < points->n_bins; b++) {
        const struct lowkey_mass *bin = &points->bins[b];
        if (!(bin->weight > 0)) continue;
        if (!points->is_open[b]) lowkey_runs_add(runs, bin->moment / bin->weight, bin->weight, bin->moment);
        for (; points->is_open[b] && i < n_opened; i++) {
            const double d = (double)lowkey_key_float(opened[i].key) - points->origin;
            if (bin_number(points, d) != b) break;
            float weight;
            memcpy(&weight, &opened[i].load, sizeof weight);
            if (weight > 0) lowkey_runs_add(runs, d, (double)weight, (double)weight * d);
        }
    }
    runs->square = points->square;
    return LOWKEY_OK;
}

/* The values of the open bins, sorted, each with its weight; the caller frees *opened. */
static lowkey_status open_bins(const struct points *points, size_t *n_opened, struct lowkey_keyed **opened,
                               lowkey_error *err)
{
    size_t count = 0, capacity = 0;
    struct lowkey_keyed *items = NULL;
    for (size_t first = 0; first < points->n; first += BLOCK) {
        if (capacity - count < BLOCK) {
            capacity = 2 * capacity + 16 * BLOCK;
            struct lowkey_keyed *more = realloc(items, 2 * capacity *
                                                           sizeof *items); /* as much again for the sort */
            if (!more) {
                free(items);
                return lowkey_fail(err, LOWKEY_ENOMEM, "k-means: no memory for %zu values near boundaries",
                                   capacity);
            }
            items = more;
        }
        const size_t n = points->n - first < BLOCK ? points->n - first : BLOCK;
        for (size_t i = first; i < first + n; i++) { /* no branch: which are open is not to be predicted */
            items[count].load = (uint32_t)(i - first);
            items[count].key = (uint32_t)(first / BLOCK);
            count += points->is_open[points->bin_of[i]];
        }
    }
    for (size_t s = 0; s < count; s++) {
        const size_t i = (size_t)items[s].key * BLOCK + items[s].load;
        const float weight = (float)weight_of(points, i);
        items[s].key = lowkey_float_key(points->x[i]);
        memcpy(&items[s].load, &weight, sizeof weight);
    }
    if (count > 0) lowkey_sort_keyed(count, items, items + count);
    *n_opened = count;
    *opened = items;
    return LOWKEY_OK;
}

/* Open the bins that boundaries fall into, with one neighbour on either side; 0: they all were. */
static int open_at(struct points *points, int n_boundaries, const double *boundary)
{
    int any = 0;
    for (int c = 0; c < n_boundaries; c++) {
        const uint32_t bin = bin_number(points, boundary[c]);
        if (points->is_open[bin]) continue;
        any = points->is_open[bin] = 1;
        uint32_t low = bin, high = bin;
        while (low > 0 && !(points->bins[--low].weight > 0)) {
        }
        while (high + 1 < points->n_bins && !(points->bins[++high].weight > 0)) {
        }
        points->is_open[low] = points->is_open[high] = 1;
    }
    return any;
}

/* Settle the boundaries among the values: Lloyd, opening bins as boundaries reach them. */
static lowkey_status refine(struct points *points, struct lowkey_runs *runs, int n_clusters, size_t *ends,
                            lowkey_error *err)
{
    enum { MAX_ROUNDS = 8 };
    memset(points->is_open, 0, sizeof points->is_open);
    for (int round = 0; round < MAX_ROUNDS; round++) {
        struct lowkey_centroids now;
        lowkey_lloyd(runs, n_clusters, ends);
        if (round > 0) LOWKEY_TRY(lowkey_polish(runs, n_clusters, ends, err));
        lowkey_centroids_of(runs, n_clusters, ends, 0, &now);
        if (!open_at(points, n_clusters - 1, now.boundary)) break;
        size_t n_opened = 0, next_ends[LOWKEY_MAX_CENTROIDS];
        struct lowkey_keyed *opened = NULL;
        struct lowkey_runs next;
        LOWKEY_TRY(open_bins(points, &n_opened, &opened, err));
        const lowkey_status status = make_runs(points, n_opened, opened, &next, err);
        free(opened);
        LOWKEY_TRY(status);
        const int good = lowkey_partition_at(&next, n_clusters, now.boundary, next_ends);
        if (good) {
            const struct lowkey_runs swap = *runs;
            *runs = next;
            next = swap;
            memcpy(ends, next_ends, sizeof next_ends);
        }
        lowkey_runs_free(&next);
        if (!good) break;
    }
    return LOWKEY_OK;
}

/* Bins by the sample; again by what the bins then hold while they are too coarse beside the cost reached. */
static lowkey_status solve_binned(struct points *points, int n_centroids, struct lowkey_runs *runs,
                                  int *n_clusters, size_t *ends, lowkey_error *err)
{
    enum { MAX_ROUNDS = 4 };
    const double enough = 1e-3; /* of the cost may lie within bins: what is left to the last refinement */
    memset(points->is_open, 0, sizeof points->is_open);
    for (int round = 1;; round++) {
        struct lowkey_centroids now;
        LOWKEY_TRY(sum_bins(points, err));
        LOWKEY_TRY(make_runs(points, 0, NULL, runs, err));
        if (runs->n == 0) return lowkey_fail(err, LOWKEY_EINVAL, "k-means: no value of positive weight");
        *n_clusters = runs->n < (size_t)n_centroids ? (int)runs->n : n_centroids;
        LOWKEY_TRY(lowkey_partition(runs->n, runs->sums, *n_clusters, ends, err));
        lowkey_centroids_of(runs, *n_clusters, ends, 0, &now);
        if (spread_within(points) <= enough * now.cost || round == MAX_ROUNDS) return LOWKEY_OK;
        lowkey_runs_free(runs);
        lay_bins(points, MAX_BINS / 2);
    }
}

/* Where there are few distinct values, they sorted with their weights summed (f64, in the order given),
 * into runs. *few: whether there are. */
static lowkey_status try_few(struct points *points, struct lowkey_runs *runs, int *few, lowkey_error *err)
{
    enum { SLOTS = 4 * FEW };
    struct slot {
        float x;
        int used;
        double weight;
    } *slots = calloc(SLOTS, sizeof *slots);
    struct lowkey_keyed items[2 * FEW];
    if (!slots) return lowkey_fail(err, LOWKEY_ENOMEM, "k-means: no memory");
    size_t count = 0;
    *few = 1;
    for (size_t i = 0; i < points->n && *few; i++) {
        const double weight = weight_of(points, i);
        if (weight == 0) continue;
        uint32_t s = (lowkey_float_key(points->x[i]) * 2654435761u) % SLOTS;
        while (slots[s].used && slots[s].x != points->x[i]) s = (s + 1) % SLOTS;
        if (!slots[s].used) {
            *few = isfinite(points->x[i]) && isfinite(weight) && weight > 0 && count < FEW;
            slots[s] = (struct slot) { .x = points->x[i], .used = 1 };
            if (*few) items[count++] = (struct lowkey_keyed) { lowkey_float_key(points->x[i]), s };
        }
        *few &= isfinite(weight) && weight > 0; /* bad ones are named when the bins are summed */
        slots[s].weight += weight;
    }
    lowkey_status status = LOWKEY_OK;
    if (*few) {
        lowkey_sort_keyed(count, items, items + FEW);
        points->origin = count ? (double)slots[items[count / 2].load].x : 0;
        status = lowkey_runs_alloc(runs, count, err);
        for (size_t i = 0; i < count && status == LOWKEY_OK; i++) {
            const double weight = slots[items[i].load].weight,
                         d = (double)slots[items[i].load].x - points->origin;
            lowkey_runs_add(runs, d, weight, weight * d);
            runs->square += weight * d * d;
        }
    }
    free(slots);
    return status;
}

static lowkey_status solve(struct points *points, int n_centroids, struct lowkey_runs *runs,
                           struct lowkey_centroids *out, lowkey_error *err)
{
    size_t ends[LOWKEY_MAX_CENTROIDS];
    int few = 0, n_clusters = 0;
    LOWKEY_TRY(try_few(points, runs, &few, err));
    if (few) {
        if (runs->n == 0) return lowkey_fail(err, LOWKEY_EINVAL, "k-means: no value of positive weight");
        n_clusters = runs->n < (size_t)n_centroids ? (int)runs->n : n_centroids;
        LOWKEY_TRY(lowkey_partition(runs->n, runs->sums, n_clusters, ends, err));
    } else {
        LOWKEY_TRY(look_at_sample(points, err));
        LOWKEY_TRY(solve_binned(points, n_centroids, runs, &n_clusters, ends, err));
        LOWKEY_TRY(refine(points, runs, n_clusters, ends, err));
    }
    lowkey_centroids_of(runs, n_clusters, ends, points->origin, out);
    if (few && runs->n == (size_t)n_clusters) out->cost = 0; /* each value its own centroid */
    return LOWKEY_OK;
}

lowkey_status lowkey_kmeans_points(size_t n, const float *x, const float *w, int n_centroids,
                                   struct lowkey_centroids *out, lowkey_error *err)
{
    LOWKEY_TRY(lowkey_check_centroids(n_centroids, err));
    struct points *points = malloc(sizeof *points);
    uint16_t *bin_of = malloc((n + 1) * sizeof *bin_of);
    struct lowkey_runs runs = { 0 };
    lowkey_status status;
    if (points && bin_of) {
        memset(points->cell_weight, 0, sizeof points->cell_weight);
        points->n = n;
        points->x = x;
        points->w = w;
        points->bin_of = bin_of;
        status = solve(points, n_centroids, &runs, out, err);
    } else {
        status = lowkey_fail(err, LOWKEY_ENOMEM, "k-means: no memory for %zu values", n);
    }
    lowkey_runs_free(&runs);
    free(points);
    free(bin_of);
    return status;
}
