/* columns.c - fits the tables of one side of a layer, channel by channel: all of a channel's values are loaded (a block of
 * channels at a time, as memory allows), its weights tamed, its limits found, and its codebook solved. Where channels
 * share a codebook, their normalised values are summed into bins, channel after channel, and solved together. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "calib/codebooks.h"
#include "calib/kmeans.h"
#include "calib/range.h"
#include "calib/side_fit.h"
#include "calib/sort.h"
#include "calib/threads.h"
#include "runtime/error.h"

enum {
    N_BINS = 1 << 16,     /* of a shared codebook, over [-1, 1] */
    SORTED = 1 << 21,     /* values up to which a channel is sorted; longer ones are solved from bins */
    ROWS = 512,           /* tokens read at once */
    SHARED_AT_ONCE = 16,  /* channels with bins of their own at one time */
};
static const int64_t usual_bytes = INT64_C(320) << 20, jobs_bytes = INT64_C(384) << 20;

struct shared { /* the values of channels that share a codebook */
    struct lowkey_mass bins[N_BINS];
    double square;
};

struct column {
    struct lowkey_side_fit *fit;
    size_t channel;
    int64_t n;
    float *x, *w;          /* [n]; w: raw weights; NULL: all 1 */
    struct shared *shared; /* NULL where the channel has a codebook of its own */
    lowkey_status status;
    lowkey_error err;
};

static int has_own_codebook(const struct lowkey_side_fit *fit)
{
    return fit->side->scope == LOWKEY_SCOPE_CHANNEL || fit->side->codebook != LOWKEY_CODEBOOK_FITTED;
}

/* Extremes, and which mantissa bits are in use. */
static uint32_t look_over(struct column *column)
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

/* Turn raw weights into those of the fit. */
static void tame_weights(struct column *column)
{
    struct lowkey_side_fit *fit = column->fit;
    struct lowkey_weight_shape *shape = &fit->shapes[column->channel];
    const struct lowkey_fit_options *options = fit->options;
    lowkey_weight_learn(column->n, column->w, fit->weights.source == LOWKEY_WEIGHTS_GRADIENT, options->weight_clip,
                        options->weight_floor, shape);
    for (int64_t i = 0; column->w && i < column->n; i++) column->w[i] = lowkey_weight_made(shape, column->w[i]);
    if (column->w && shape->largest == 0) fit->flags[column->channel] |= LOWKEY_FLAG_ZERO_WEIGHTS;
    if (shape->any_tiny) fit->flags[column->channel] |= LOWKEY_FLAG_TINY_WEIGHTS;
}

static int is_rank_outlier(const struct lowkey_grids *grids, int64_t token, size_t channel)
{
    const uint16_t *outliers = grids->outliers + token * grids->n_outliers;
    int low = 0, high = grids->n_outliers;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (outliers[middle] < channel) low = middle + 1;
        else high = middle;
    }
    return low < grids->n_outliers && outliers[low] == channel && channel != UINT16_MAX;
}

/* Keep what is no outlier by rank, in units of its token's scale; weights as they count on normalised values. */
static void onto_grids(struct column *column)
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
        if (column->w) column->w[kept] = column->w[t] * (float)(fit->options->normalised_units ? 1 : share * share);
        column->x[kept++] = (float)(((double)column->x[t] - zero) / scale);
    }
    column->n = kept;
}

/* Sort values with their weights, in place. */
static lowkey_status sort_column(struct column *column)
{
    const size_t n = (size_t)column->n;
    struct lowkey_keyed *items = malloc((2 * n + 1) * sizeof *items);
    if (!items) return lowkey_fail(&column->err, LOWKEY_ENOMEM, "no memory to sort %zu values", n);
    for (size_t i = 0; i < n; i++) {
        items[i] = (struct lowkey_keyed){ lowkey_float_key(column->x[i]), 0 };
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
static void cut_to_limits(struct column *column, float lower, float upper)
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
static lowkey_status find_limits(struct column *column, int is_sorted)
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
    if (fit->side->codebook == LOWKEY_CODEBOOK_UNIFORM) lowkey_uniform_codebook(bits, codebook);
    else lowkey_normal_float_codebook(bits, codebook);
    lowkey_midpoints(n, codebook, midpoint);
    lowkey_table_make(n, codebook, midpoint, fit->zero[c], fit->scale[c], &fit->tables[c]);
}

/* Sum normalised values into bins, weighted as they count in original units. */
static void share(struct column *column)
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
        const int at = (int)((u + 1) * (N_BINS / 2)), bin = at < N_BINS ? at : N_BINS - 1;
        column->shared->bins[bin].weight += weight;
        column->shared->bins[bin].moment += weight * u;
        column->shared->square += weight * u * u;
    }
}

static int any_weight(const struct column *column)
{
    for (int64_t i = 0; i < column->n; i++)
        if (column->w[i] > 0) return 1;
    return 0;
}

/* A channel of a table, once its values are between the limits. */
static lowkey_status make_table(struct column *column, int is_sorted)
{
    struct lowkey_side_fit *fit = column->fit;
    const size_t c = column->channel;
    const double lower = (double)fit->lower[c], upper = (double)fit->upper[c];
    fit->zero[c] = 0.5 * lower + 0.5 * upper;
    fit->scale[c] = 0.5 * upper - 0.5 * lower;
    if (lower == upper || column->n == 0) { /* one value, whatever the scope */
        fit->tables[c] = (struct lowkey_table){ .n = 1, .entry = { column->n ? lower : 0 } };
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
    LOWKEY_TRY((is_sorted ? lowkey_kmeans_sorted : lowkey_kmeans_points)((size_t)column->n, column->x, column->w,
                                                                          1 << fit->bits[c], &centroids, &column->err));
    lowkey_table_make(centroids.n, centroids.value, centroids.boundary, 0, 1, &fit->tables[c]);
    return LOWKEY_OK;
}

/* The scale of a rule's codes puts the farther limit at its largest number. */
static float rule_scale_of(lowkey_rule rule, double lower, double upper)
{
    const double largest = rule == LOWKEY_RULE_E4M3 ? 448 : rule == LOWKEY_RULE_E5M2 ? 57344 : 127;
    const double reach = fmax(fabs(lower), fabs(upper));
    return reach > 0 ? (float)fmax(reach / largest, 0x1p-126) : 1;
}

static lowkey_status fit_column(struct column *column)
{
    struct lowkey_side_fit *fit = column->fit;
    const size_t c = column->channel;
    const int is_table = fit->bits[c] <= 5, on_grid = is_table && fit->grids;
    tame_weights(column);
    if (fit->low[c] == fit->high[c]) fit->flags[c] |= LOWKEY_FLAG_CONSTANT;
    if (on_grid) onto_grids(column);
    const int is_sorted = column->n <= SORTED && is_table && has_own_codebook(fit) &&
                          fit->side->codebook == LOWKEY_CODEBOOK_FITTED;
    if (is_sorted) LOWKEY_TRY(sort_column(column));
    if (on_grid) {
        fit->lower[c] = -1;
        fit->upper[c] = 1;
    } else {
        LOWKEY_TRY(find_limits(column, is_sorted));
    }
    if (fit->bits[c] == 8) fit->rule_scale[c] = rule_scale_of(fit->side->rule_8, (double)fit->lower[c], (double)fit->upper[c]);
    return is_table ? make_table(column, is_sorted) : LOWKEY_OK;
}

static void run_column(void *arg, int i)
{
    struct column *column = (struct column *)arg + i;
    column->status = fit_column(column);
}

/* Give every channel of a group its part of the codebook: one for each width in the group. */
static lowkey_status solve_shared(struct lowkey_side_fit *fit, size_t first, size_t last, const struct shared *shared,
                                  lowkey_error *err)
{
    int solved_bits = 0, n_shared = 0;
    struct lowkey_centroids centroids = { 0 };
    for (size_t c = first; c < last; c++) n_shared += fit->bits[c] <= 5 && fit->scale[c] > 0;
    if (n_shared == 0) return LOWKEY_OK;
    for (int bits = 1; bits <= 5; bits++)
        for (size_t c = first; c < last; c++) {
            if (fit->bits[c] != bits || !(fit->scale[c] > 0)) continue;
            if (solved_bits != bits)
                LOWKEY_TRY(lowkey_kmeans_bins(N_BINS, shared->bins, shared->square, 1 << bits, &centroids, err));
            solved_bits = bits;
            lowkey_table_make(centroids.n, centroids.value, centroids.boundary, fit->zero[c], fit->scale[c], &fit->tables[c]);
        }
    return LOWKEY_OK;
}

static int weighs_nothing(const struct shared *shared)
{
    for (int b = 0; b < N_BINS; b++)
        if (shared->bins[b].weight > 0) return 0;
    return 1;
}

/* What a pass over the columns of a side holds. */
struct pass {
    struct lowkey_side_fit *fit;
    size_t first, last;    /* the block of channels that is loaded */
    float *x, *w;          /* [last - first][n_tokens] */
    float *rows;           /* [ROWS][heads of the block][head_dim] */
    struct shared *total;  /* of the group of channels at hand; NULL without shared codebooks */
    struct shared *parts;  /* [SHARED_AT_ONCE] */
    int dead_group;        /* a group's weights are all zero */
};

/* Load the block's channels of one stream into columns. */
static lowkey_status load_columns(struct pass *pass, int is_weights, float *columns, lowkey_error *err)
{
    struct lowkey_side_fit *fit = pass->fit;
    const lowkey_captures *captures = fit->captures;
    const size_t D = (size_t)fit->head_dim, n_tokens = (size_t)captures->n_tokens;
    const int first_head = (int)(pass->first / D), n_heads = (int)((pass->last - 1) / D) - first_head + 1;
    const size_t row = (size_t)n_heads * D, skip = pass->first - (size_t)first_head * D;
    const enum lowkey_stream stream = fit->which ? LOWKEY_VALUE : LOWKEY_KEY;
    for (int s = 0; s < captures->n_samples; s++) {
        const struct lowkey_sample *sample = &captures->samples[s];
        for (int64_t first = sample->n_sinks; first < sample->n_tokens; first += ROWS) {
            const int64_t n = sample->n_tokens - first < ROWS ? sample->n_tokens - first : ROWS;
            if (is_weights && fit->weights.source == LOWKEY_WEIGHTS_NONE)
                for (size_t i = 0; i < (size_t)n * row; i++) pass->rows[i] = 1;
            else if (is_weights)
                LOWKEY_TRY(lowkey_weights_read(&fit->weights, s, first, n, first_head, n_heads, pass->rows, err));
            else
                LOWKEY_TRY(lowkey_captures_read(captures, fit->layer, stream, s, first, n, first_head, n_heads, pass->rows,
                                                err));
            const size_t start = (size_t)(sample->start + first - sample->n_sinks);
            for (size_t c = pass->first; c < pass->last; c++)
                for (size_t t = 0; t < (size_t)n; t++)
                    columns[(c - pass->first) * n_tokens + start + t] = pass->rows[t * row + skip + c - pass->first];
        }
        LOWKEY_TRY(lowkey_side_fit_passed(fit, 0, err));
    }
    return LOWKEY_OK;
}

/* Add what channels first..first+n-1 shared, in their order; a group that is complete is solved. */
static lowkey_status gather(struct pass *pass, size_t first, size_t n, lowkey_error *err)
{
    struct lowkey_side_fit *fit = pass->fit;
    const size_t D = fit->side->scope == LOWKEY_SCOPE_HEAD ? (size_t)fit->head_dim : fit->n_channels;
    for (size_t c = first; c < first + n; c++) {
        if (c % D == 0) memset(pass->total, 0, sizeof *pass->total);
        const struct shared *part = &pass->parts[c - first];
        if (fit->bits[c] <= 5 && fit->scale[c] > 0) {
            for (int b = 0; b < N_BINS; b++) {
                pass->total->bins[b].weight += part->bins[b].weight;
                pass->total->bins[b].moment += part->bins[b].moment;
            }
            pass->total->square += part->square;
        }
        if ((c + 1) % D != 0) continue;
        pass->dead_group |= weighs_nothing(pass->total);
        if (!weighs_nothing(pass->total)) LOWKEY_TRY(solve_shared(fit, c + 1 - D, c + 1, pass->total, err));
    }
    return LOWKEY_OK;
}

/* Fit the block's channels, as many at a time as threads, and memory for them, allow. */
static lowkey_status fit_block(struct pass *pass, lowkey_error *err)
{
    struct lowkey_side_fit *fit = pass->fit;
    const int64_t n_tokens = fit->captures->n_tokens;
    const int64_t job_bytes = n_tokens <= SORTED ? 40 * n_tokens : (INT64_C(12) << 20) + 2 * n_tokens;
    int threads = fit->options->n_threads;
    while (threads > 1 && threads * job_bytes > jobs_bytes) threads--;
    struct column columns[SHARED_AT_ONCE * 16];
    const size_t most = pass->total ? SHARED_AT_ONCE : sizeof columns / sizeof columns[0];
    for (size_t first = pass->first; first < pass->last; first += most) {
        const size_t n = pass->last - first < most ? pass->last - first : most;
        for (size_t i = 0; i < n; i++) {
            const size_t at = (first - pass->first + i) * (size_t)n_tokens;
            columns[i] = (struct column){ .fit = fit, .channel = first + i, .n = n_tokens, .x = pass->x + at,
                                          .w = pass->w ? pass->w + at : NULL,
                                          .shared = pass->parts ? &pass->parts[i] : NULL };
            fit->mantissa_bits |= look_over(&columns[i]);
        }
        lowkey_threads_run(&threads, (int)n, run_column, columns);
        for (size_t i = 0; i < n; i++)
            if (columns[i].status != LOWKEY_OK)
                return lowkey_fail(err, columns[i].status, "layer %d %s channel %zu: %s",
                                   fit->captures->info->layers[fit->layer].index, fit->which ? "value" : "key", first + i,
                                   columns[i].err.message);
        if (pass->total) LOWKEY_TRY(gather(pass, first, n, err));
        LOWKEY_TRY(lowkey_side_fit_passed(fit, (double)n_tokens * (double)n / (double)fit->n_channels, err));
    }
    return LOWKEY_OK;
}

static lowkey_status run_pass(struct pass *pass, lowkey_error *err)
{
    struct lowkey_side_fit *fit = pass->fit;
    const int64_t n_tokens = fit->captures->n_tokens;
    /* on normalised values even equal weights differ: by the square of the token's scale */
    const int has_weights = fit->weights.source != LOWKEY_WEIGHTS_NONE || (fit->grids && !fit->options->normalised_units);
    const int64_t block_bytes = fit->options->column_bytes ? fit->options->column_bytes : usual_bytes;
    const int64_t fitting = block_bytes / (n_tokens * 4 * (1 + has_weights));
    const size_t at_once = fitting < 1 ? 1 : fitting < (int64_t)fit->n_channels ? (size_t)fitting : fit->n_channels;
    pass->x = malloc(at_once * (size_t)n_tokens * sizeof(float));
    pass->w = has_weights ? malloc(at_once * (size_t)n_tokens * sizeof(float)) : NULL;
    pass->rows = malloc(ROWS * (at_once + 2 * (size_t)fit->head_dim) * sizeof(float));
    if (!has_own_codebook(fit)) {
        pass->total = malloc(sizeof *pass->total);
        pass->parts = malloc(SHARED_AT_ONCE * sizeof *pass->parts);
    }
    if (!pass->x || (has_weights && !pass->w) || !pass->rows || (!has_own_codebook(fit) && (!pass->total || !pass->parts)))
        return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %zu channels of %lld tokens", at_once, (long long)n_tokens);
    for (pass->first = 0; pass->first < fit->n_channels; pass->first = pass->last) {
        pass->last = fit->n_channels - pass->first < at_once ? fit->n_channels : pass->first + at_once;
        LOWKEY_TRY(load_columns(pass, 0, pass->x, err));
        if (pass->w) LOWKEY_TRY(load_columns(pass, 1, pass->w, err));
        LOWKEY_TRY(fit_block(pass, err));
    }
    return LOWKEY_OK;
}

lowkey_status lowkey_columns_fit(struct lowkey_side_fit *fit, lowkey_error *err)
{
    const int64_t most = INT64_C(1) << 26;
    if (fit->captures->n_tokens > most)
        return lowkey_fail(err, LOWKEY_EUNSUPPORTED, "%lld tokens: at most %lld fit into memory, channel by channel",
                           (long long)fit->captures->n_tokens, (long long)most);
    for (int attempt = 0;; attempt++) {
        struct pass pass = { .fit = fit };
        const lowkey_status status = run_pass(&pass, err);
        free(pass.x);
        free(pass.w);
        free(pass.rows);
        free(pass.total);
        free(pass.parts);
        LOWKEY_TRY(status);
        if (!pass.dead_group || attempt > 0) return LOWKEY_OK;
        /* no channel that shares a codebook has any weight: take 1 for all, as for a channel by itself */
        fit->weights.source = LOWKEY_WEIGHTS_NONE;
        for (size_t c = 0; c < fit->n_channels; c++) fit->flags[c] |= LOWKEY_FLAG_ZERO_WEIGHTS;
    }
}
