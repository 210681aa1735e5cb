/* column.c - the fit of one channel, all of whose values are at hand: its weights are tamed, its limits
 * found, and its codebook solved; or, where channels share one, its normalised values are summed into
 * bins. */
#include "calib/column.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "calib/codebooks.h"
#include "calib/range.h"
#include "calib/sort.h"
#include "runtime/error.h"

int lowkey_has_own_codebook(const struct lowkey_side_fit *fit)
{
    return fit->side->scope == LOWKEY_SCOPE_CHANNEL || fit->side->codebook != LOWKEY_CODEBOOK_FITTED;
}

uint32_t lowkey_column_look_over(const struct lowkey_column *column)
{
    float low = column->x[0], high = low;
    uint32_t all = 0;
    for (int64_t i = 0; i < column->n; i++) {
        uint32_t bits;
        memcpy(&bits, &column->x[i], sizeof bits);
        all |= bits;
        low = column->x[i] < low ? column->x[i] : low;
        high = column->x[i] > high ? column->x[i] : high;
    }
    column->fit->low[column->channel] = (double)low;
    column->fit->high[column->channel] = (double)high;
    return all;
}

void lowkey_column_tame(struct lowkey_column *column)
{
    struct lowkey_side_fit *fit = column->fit;
    struct lowkey_weight_shape *shape = &fit->shapes[column->channel];
    const struct lowkey_fit_options *options = fit->options;
    lowkey_weight_learn(column->n, column->w, fit->weights.source == LOWKEY_WEIGHTS_GRADIENT,
                        options->weight_clip, options->weight_floor, shape);
    for (int64_t i = 0; column->w && i < column->n; i++)
        column->w[i] = lowkey_weight_made(shape, column->w[i]);
    if (column->w && shape->largest == 0) fit->flags[column->channel] |= LOWKEY_FLAG_ZERO_WEIGHTS;
    if (shape->any_tiny) fit->flags[column->channel] |= LOWKEY_FLAG_TINY_WEIGHTS;
}

static int is_rank_outlier(const struct lowkey_grids *grids, int64_t token, size_t channel)
{
    const uint16_t *outliers = grids->outliers + token * grids->n_outliers;
    int low = 0, high = grids->n_outliers;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (outliers[middle] < channel)
            low = middle + 1;
        else
            high = middle;
    }
    return low < grids->n_outliers && outliers[low] == channel && channel != UINT16_MAX;
}

/* Keep what is no outlier by rank, in units of its token's scale; weights as they count on normalised
 * values. */
static void onto_grids(struct lowkey_column *column)
{
    const struct lowkey_side_fit *fit = column->fit;
    const struct lowkey_grids *grids = fit->grids;
    const size_t block = column->channel / (size_t)grids->scale_block;
    int64_t kept = 0;
    for (int64_t t = 0; t < column->n; t++) {
        const double scale = (double)grids->scale[t * grids->n_blocks + (int64_t)block];
        const double zero = (double)grids->zero[t * grids->n_blocks + (int64_t)block];
        if (!(scale > 0) || is_rank_outlier(grids, t, column->channel)) continue;
        const double share = scale / grids->largest_scale;
        if (column->w)
            column->w[kept] = column->w[t] * (float)(fit->options->normalised_units ? 1 : share * share);
        /* Within 1 but for rounding. Where scale or zero met the end of f16 it is not, and would pull entries far out. */
        column->x[kept++] = (float)fmin(fmax(((double)column->x[t] - zero) / scale, -2), 2);
    }
    column->n = kept;
}

lowkey_status lowkey_column_sort(struct lowkey_column *column)
{
    const size_t n = (size_t)column->n;
    struct lowkey_keyed *items = malloc((2 * n + 1) * sizeof *items);
    if (!items) return lowkey_fail(&column->err, LOWKEY_ENOMEM, "no memory to sort %zu values", n);
    for (size_t i = 0; i < n; i++) {
        items[i] = (struct lowkey_keyed) { lowkey_float_key(column->x[i]), 0 };
        if (column->w) memcpy(&items[i].load, &column->w[i], sizeof(float));
    }
    lowkey_sort_keyed(n, items, items + n);
    for (size_t i = 0; i < n; i++) {
        column->x[i] = lowkey_key_float(items[i].key);
        if (column->w) memcpy(&column->w[i], &items[i].load, sizeof(float));
    }
    free(items);
    return LOWKEY_OK;
}

/* Keep what lies within the limits, in order. */
static void cut_to_limits(struct lowkey_column *column, float lower, float upper)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < column->n; i++) {
        if (!(column->x[i] >= lower && column->x[i] <= upper)) continue;
        if (column->w) column->w[kept] = column->w[i];
        column->x[kept++] = column->x[i];
    }
    column->n = kept;
}

/* The limits of a channel in its own units; what lies outside is dropped. */
static lowkey_status find_limits(struct lowkey_column *column, int is_sorted)
{
    struct lowkey_side_fit *fit = column->fit;
    const double fraction = fit->desc.outlier_rule == LOWKEY_OUTLIER_LIMIT ? fit->side->outlier_fraction : 0;
    const int64_t n = column->n, outside = lowkey_outliers_each_end(n, fraction);
    float lower, upper;
    if (is_sorted) {
        lower = column->x[outside];
        upper = column->x[n - 1 - outside];
    } else {
        lower = lowkey_order_statistic(n, column->x, outside);
        upper = lowkey_order_statistic(n, column->x, n - 1 - outside);
    }
    fit->lower[column->channel] = lower;
    fit->upper[column->channel] = upper;
    cut_to_limits(column, lower, upper);
    return LOWKEY_OK;
}

static void fixed_table(struct lowkey_side_fit *fit, size_t c)
{
    double codebook[LOWKEY_MAX_CENTROIDS], midpoint[LOWKEY_MAX_CENTROIDS];
    const int bits = fit->bits[c], n = 1 << bits;
    if (fit->side->codebook == LOWKEY_CODEBOOK_UNIFORM)
        lowkey_uniform_codebook(bits, codebook);
    else
        lowkey_normal_float_codebook(bits, codebook);
    lowkey_midpoints(n, codebook, midpoint);
    lowkey_table_make(n, codebook, midpoint, fit->zero[c], fit->scale[c], &fit->tables[c]);
}

/* Sum normalised values into bins, weighted as they count in original units. */
static void share(struct lowkey_column *column)
{
    const struct lowkey_side_fit *fit = column->fit;
    const double zero = fit->zero[column->channel], scale = fit->scale[column->channel];
    const double unit = column->w ? lowkey_weight_unit(&fit->shapes[column->channel]) : 1;
    const double factor = unit * (fit->options->normalised_units ? 1 : scale * scale);
    memset(column->shared, 0, sizeof *column->shared);
    for (int64_t i = 0; i < column->n; i++) {
        double u = ((double)column->x[i] - zero) / scale;
        u = u < -1 ? -1 : u > 1 ? 1 : u;
        const double weight = factor * (column->w ? (double)column->w[i] : 1);
        const int at = (int)((u + 1) * (LOWKEY_SHARED_BINS / 2)),
                  bin = at < LOWKEY_SHARED_BINS ? at : LOWKEY_SHARED_BINS - 1;
        column->shared->bins[bin].weight += weight;
        column->shared->bins[bin].moment += weight * u;
        column->shared->square += weight * u * u;
    }
}

static int any_weight(const struct lowkey_column *column)
{
    for (int64_t i = 0; i < column->n; i++)
        if (column->w[i] > 0) return 1;
    return 0;
}

/* A channel of a table, once its values are between the limits. */
static lowkey_status make_table(struct lowkey_column *column, int is_sorted)
{
    struct lowkey_side_fit *fit = column->fit;
    const size_t c = column->channel;
    const double lower = (double)fit->lower[c], upper = (double)fit->upper[c];
    fit->zero[c] = 0.5 * lower + 0.5 * upper;
    fit->scale[c] = 0.5 * upper - 0.5 * lower;
    if (lower == upper || column->n == 0) { /* one value, whatever the scope */
        fit->tables[c] = (struct lowkey_table) { .n = 1, .entry = { column->n ? lower : 0 } };
        fit->scale[c] = 0;
        return LOWKEY_OK;
    }
    if (column->shared) return share(column), LOWKEY_OK;
    if (column->w && !any_weight(column)) { /* all weight is on outliers */
        column->w = NULL;
        fit->flags[c] |= LOWKEY_FLAG_ZERO_WEIGHTS;
    }
    if (fit->side->codebook != LOWKEY_CODEBOOK_FITTED) return fixed_table(fit, c), LOWKEY_OK;
    struct lowkey_centroids centroids;
    LOWKEY_TRY((is_sorted ? lowkey_kmeans_sorted : lowkey_kmeans_points)(
        (size_t)column->n, column->x, column->w,
        lowkey_most_entries(fit->side->trellis, fit->bits[c]), &centroids, &column->err));
    lowkey_table_make(centroids.n, centroids.value, centroids.boundary, 0, 1, &fit->tables[c]);
    return LOWKEY_OK;
}

/* The scale of a rule's codes puts the farther limit at its largest number. */
static float rule_scale_of(lowkey_rule rule, double lower, double upper)
{
    const double largest = rule == LOWKEY_RULE_E4M3 ? 448 : rule == LOWKEY_RULE_E5M2 ? 57344 : 127;
    const double reach = fmax(fabs(lower), fabs(upper));
    const float scale = (float)fmax(reach / largest, 0x1p-126);
    if (reach == 0) return 1;
    return isfinite(scale * (float)largest) ? scale : nextafterf(scale, 0);
}

static lowkey_status fit_column(struct lowkey_column *column)
{
    struct lowkey_side_fit *fit = column->fit;
    const size_t c = column->channel;
    const int is_table = fit->bits[c] <= 5, on_grid = is_table && fit->grids;
    lowkey_column_tame(column);
    if (fit->low[c] == fit->high[c]) fit->flags[c] |= LOWKEY_FLAG_CONSTANT;
    if (on_grid) onto_grids(column);
    const int is_sorted = column->n <= LOWKEY_SORTED && is_table && lowkey_has_own_codebook(fit) &&
                          fit->side->codebook == LOWKEY_CODEBOOK_FITTED;
    if (is_sorted) LOWKEY_TRY(lowkey_column_sort(column));
    if (on_grid) {
        fit->lower[c] = -1;
        fit->upper[c] = 1;
    } else {
        LOWKEY_TRY(find_limits(column, is_sorted));
    }
    if (fit->bits[c] == 8)
        fit->rule_scale[c] = rule_scale_of(fit->side->rule_8, (double)fit->lower[c], (double)fit->upper[c]);
    return is_table ? make_table(column, is_sorted) : LOWKEY_OK;
}

void lowkey_column_fit(void *columns, int i)
{
    struct lowkey_column *column = (struct lowkey_column *)columns + i;
    column->status = column->fit->costs ? lowkey_column_costs(column) : fit_column(column);
}

int lowkey_any_shares(const struct lowkey_side_fit *fit, size_t first, size_t last)
{
    for (size_t c = first; c < last; c++)
        if (fit->bits[c] <= 5 && fit->scale[c] > 0) return 1;
    return 0;
}

lowkey_status lowkey_shared_solve(struct lowkey_side_fit *fit, size_t first, size_t last,
                                  const struct lowkey_shared *shared, lowkey_error *err)
{
    for (int bits = 1; bits <= 5; bits++) {
        struct lowkey_centroids centroids = { .n = 0 };
        for (size_t c = first; c < last; c++) {
            if (fit->bits[c] != bits || !(fit->scale[c] > 0)) continue;
            if (centroids.n == 0)
                LOWKEY_TRY(lowkey_kmeans_bins(LOWKEY_SHARED_BINS, shared->bins, shared->square, 1 << bits,
                                              &centroids, err));
            lowkey_table_make(centroids.n, centroids.value, centroids.boundary, fit->zero[c], fit->scale[c],
                              &fit->tables[c]);
        }
    }
    return LOWKEY_OK;
}

int lowkey_shared_is_empty(const struct lowkey_shared *shared)
{
    for (int b = 0; b < LOWKEY_SHARED_BINS; b++)
        if (shared->bins[b].weight > 0) return 0;
    return 1;
}
