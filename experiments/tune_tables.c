/* tune_tables.c - tables as parameters. Moves are kept in f64 beside the tables they began from, so that many steps that
 * are each smaller than f16's add up, and what is stored is made anew from them each time. */
#include "experiments/tune_tables.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/half.h"
#include "formats/pool.h"
#include "runtime/error.h"

enum { MAX_ENTRIES = 64, F16_LARGEST = 0x7bff };

static const lowkey_side_desc *side_of(const lowkey_layer_desc *layer, int which)
{
    return which ? &layer->value : &layer->key;
}

static int head_dim_of(const lowkey_layer_desc *layer, int which)
{
    return which ? layer->value_head_dim : layer->key_head_dim;
}

static lowkey_status side_init(struct lowkey_tuned_side *side, const lowkey_layer_desc *layer, int which,
                               const struct lowkey_side_report *report, lowkey_error *err)
{
    const lowkey_side_desc *desc = side_of(layer, which);
    const size_t n_channels = (size_t)layer->n_kv_heads * (size_t)head_dim_of(layer, which);
    *side = (struct lowkey_tuned_side) { .desc = desc,
                                         .n_channels = n_channels,
                                         .n_table = (size_t)desc->table_entries,
                                         .unit = calloc(n_channels, sizeof *side->unit) };
    if (!side->unit) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory to tune layer %d", layer->index);
    const char *other = desc->token_scale != LOWKEY_SCALE_NONE      ? "a scale for each token"
                        : desc->outlier_rule != LOWKEY_OUTLIER_NONE ? "outliers"
                        : desc->rule_8 || desc->rule_16             ? "channels of 8 or 16 bits"
                                                                    : NULL;
    if (other)
        return lowkey_fail(err, LOWKEY_EUNSUPPORTED,
                           "layer %d %s: only static tables are tuned, and this has %s", layer->index,
                           which ? "value" : "key", other);
    for (size_t c = 0; c < n_channels; c++) side->unit[c] = sqrt(report->mse[c]);
    return LOWKEY_OK;
}

static lowkey_status tables_init(struct lowkey_tuned_tables *tables, const struct lowkey_fit_record *record,
                                 lowkey_error *err)
{
    const size_t n_sides = 2 * (size_t)tables->desc->n_layers;
    int n_moving = 0;
    tables->sides = calloc(n_sides, sizeof *tables->sides);
    if (!tables->sides) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory to tune %zu sides", n_sides);
    for (size_t i = 0; i < n_sides; i++) {
        struct lowkey_tuned_side *side = &tables->sides[i];
        LOWKEY_TRY(
            side_init(side, &tables->desc->layers[i / 2], (int)(i % 2), &record->reports[i / 2][i % 2], err));
        side->first = tables->n;
        tables->n += side->n_channels * side->n_table;
        for (size_t c = 0; c < side->n_channels; c++) n_moving += side->unit[c] > 0;
    }
    if (!n_moving)
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "no channel makes errors by its report: there is nothing to tune");
    tables->move = calloc(4 * tables->n, sizeof *tables->move);
    if (!tables->move) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory to tune %zu entries", tables->n);
    tables->momentum = tables->move + tables->n;
    tables->square = tables->momentum + tables->n;
    tables->best = tables->square + tables->n;
    return LOWKEY_OK;
}

lowkey_status lowkey_tuned_tables_create(const lowkey_quantizer_desc *desc,
                                         const struct lowkey_fit_record *record,
                                         struct lowkey_tuned_tables **out, lowkey_error *err)
{
    *out = NULL;
    struct lowkey_tuned_tables *tables = calloc(1, sizeof *tables);
    if (!tables) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory to tune tables");
    tables->desc = desc;
    const lowkey_status status = tables_init(tables, record, err);
    if (status != LOWKEY_OK) {
        lowkey_tuned_tables_free(tables);
        return status;
    }
    *out = tables;
    return LOWKEY_OK;
}

void lowkey_tuned_tables_free(struct lowkey_tuned_tables *tables)
{
    if (!tables) return;
    for (int i = 0; tables->sides && i < 2 * tables->desc->n_layers; i++) free(tables->sides[i].unit);
    free(tables->sides);
    free(tables->move);
    free(tables);
}

/* ---- a step ---- */

/* The nearest rising numbers in the sense of least squares: runs that fall become their mean (pool adjacent violators). */
static void make_rising(double *x, int n)
{
    double mean[MAX_ENTRIES];
    int count[MAX_ENTRIES], n_runs = 0;
    for (int k = 0; k < n; k++) {
        mean[n_runs] = x[k];
        count[n_runs++] = 1;
        for (; n_runs > 1 && mean[n_runs - 2] > mean[n_runs - 1]; n_runs--) {
            const int both = count[n_runs - 2] + count[n_runs - 1];
            mean[n_runs - 2] += (mean[n_runs - 1] - mean[n_runs - 2]) * count[n_runs - 1] / both;
            count[n_runs - 2] = both;
        }
    }
    for (int run = 0, k = 0; run < n_runs; run++)
        for (int i = 0; i < count[run]; i++) x[k++] = mean[run];
}

static double entry_at(const struct lowkey_tuned_side *side, size_t c, int k, const double *move)
{
    return (double)side->desc->table[c * side->n_table + (size_t)k] + side->unit[c] * move[k];
}

/* move: of channel c, [n_table] */
static void keep_order(const struct lowkey_tuned_side *side, size_t c, double *move)
{
    const int n = side->desc->n_entries[c];
    double entry[MAX_ENTRIES];
    int falls = 0;
    for (int k = 0; k < n; k++) {
        entry[k] = entry_at(side, c, k, move);
        falls |= k && entry[k] < entry[k - 1];
    }
    if (!falls) return;
    make_rising(entry, n);
    for (int k = 0; k < n; k++)
        move[k] = (entry[k] - (double)side->desc->table[c * side->n_table + (size_t)k]) / side->unit[c];
}

void lowkey_tuned_tables_step(struct lowkey_tuned_tables *tables, const double *gradient, double rate,
                              int step)
{
    const double decay = 0.9, decay_of_square = 0.98, tiny = 1e-12;
    const double seen = 1 - pow(decay, step + 1), seen_of_square = 1 - pow(decay_of_square, step + 1);
    for (int i = 0; i < 2 * tables->desc->n_layers; i++) {
        const struct lowkey_tuned_side *side = &tables->sides[i];
        for (size_t c = 0; c < side->n_channels; c++) {
            if (!(side->unit[c] > 0)) continue;
            const size_t first = side->first + c * side->n_table;
            for (size_t j = first; j < first + side->desc->n_entries[c]; j++) {
                const double g = gradient[j] * side->unit[c];
                tables->momentum[j] = decay * tables->momentum[j] + (1 - decay) * g;
                tables->square[j] = decay_of_square * tables->square[j] + (1 - decay_of_square) * g * g;
                tables->move[j] -= rate * (tables->momentum[j] / seen) /
                                   (sqrt(tables->square[j] / seen_of_square) + tiny);
            }
            keep_order(side, c, tables->move + first);
        }
    }
}

/* ---- rounding to what is stored ---- */

struct grid { /* numbers center + f16 * 2^exponent, counted from 0 (the center) up and down */
    double center;
    int exponent;
};

static float grid_value(struct grid grid, int i)
{
    const uint16_t code = (uint16_t)(i < 0 ? 0x8000 | -i : i);
    return (float)(grid.center + ldexp((double)lowkey_f16_to_f32(code), grid.exponent)) +
           0.0f; /* -0 becomes 0 */
}

static int grid_nearest(struct grid grid, double x)
{
    const uint16_t code = lowkey_f32_to_f16_saturate((float)ldexp(x - grid.center, -grid.exponent), NULL);
    return code & 0x8000 ? -(code & 0x7fff) : code;
}

/* entry [n], rising, to numbers of the grid within [low, high] that rise strictly. There are n such: the table as fitted. */
static void round_table(struct grid grid, double low, double high, int n, const double *entry, float *out)
{
    int at[MAX_ENTRIES];
    for (int k = 0; k < n; k++) {
        at[k] = grid_nearest(grid, fmin(fmax(entry[k], low), high));
        while (at[k] < F16_LARGEST && ((double)grid_value(grid, at[k]) < low ||
                                       (k && grid_value(grid, at[k]) <= grid_value(grid, at[k - 1]))))
            at[k]++;
    }
    for (int k = n - 1; k >= 0; k--)
        while (at[k] > -F16_LARGEST &&
               ((double)grid_value(grid, at[k]) > high ||
                (k + 1 < n && grid_value(grid, at[k]) >= grid_value(grid, at[k + 1]))))
            at[k]--;
    for (int k = 0; k < n; k++) out[k] = grid_value(grid, at[k]);
}

/* The largest float that is at most x. */
static float float_below(double x)
{
    const float nearest = (float)x;
    return (double)nearest > x ? nextafterf(nearest, -INFINITY) : nearest;
}

static void move_boundaries(const float *from, const float *table, const float *moved, int n, float *boundary)
{
    for (int k = 0; k + 1 < n; k++) {
        const double by = ((double)moved[k] - (double)table[k]) / 2 +
                          ((double)moved[k + 1] - (double)table[k + 1]) / 2;
        boundary[k] = float_below((double)from[k] + by);
        if (k && boundary[k] < boundary[k - 1]) boundary[k] = boundary[k - 1];
    }
}

/* table [n_table], boundary [n_table - 1] of channel c, which hold what was fitted. */
static void move_channel(const struct lowkey_tuned_side *side, size_t c, const double *move, float *table,
                         float *boundary)
{
    const lowkey_side_desc *desc = side->desc;
    const int n = desc->n_entries[c];
    const double lower = (double)desc->lower[c], upper = (double)desc->upper[c], reach = 2 * (upper - lower);
    const struct grid grid = { (double)desc->center[c], desc->exponent[c] };
    double entry[MAX_ENTRIES];
    int moves = 0;
    for (int k = 0; k < n; k++) {
        entry[k] = entry_at(side, c, k, move);
        moves |= move[k] != 0;
    }
    if (!moves) return;
    round_table(grid, lower - reach, upper + reach, n, entry, table);
    for (size_t k = (size_t)n; k < side->n_table; k++) table[k] = table[n - 1];
    if (!boundary) return;
    move_boundaries(desc->boundary + c * (side->n_table - 1), desc->table + c * side->n_table, table, n,
                    boundary);
}

/* desc becomes one with tables of its own, which live in pool. */
static lowkey_status move_side(const struct lowkey_tuned_side *side, const double *move,
                               struct lowkey_pool *pool, lowkey_side_desc *desc, lowkey_error *err)
{
    const size_t n_boundary = side->n_table - 1;
    float *table, *boundary = NULL;
    LOWKEY_TRY(lowkey_pool_take(pool, side->n_channels * side->n_table, sizeof *table, &table, err));
    memcpy(table, side->desc->table, side->n_channels * side->n_table * sizeof *table);
    if (side->desc->boundary) { /* none with a trellis */
        LOWKEY_TRY(lowkey_pool_take(pool, side->n_channels * n_boundary, sizeof *boundary, &boundary, err));
        memcpy(boundary, side->desc->boundary, side->n_channels * n_boundary * sizeof *boundary);
    }
    for (size_t c = 0; c < side->n_channels; c++)
        if (side->unit[c] > 0)
            move_channel(side, c, move + side->first + c * side->n_table, table + c * side->n_table,
                         boundary ? boundary + c * n_boundary : NULL);
    desc->table = table;
    desc->boundary = boundary;
    return LOWKEY_OK;
}

static lowkey_status make(const struct lowkey_tuned_tables *tables, const double *move,
                          struct lowkey_pool *pool, lowkey_quantizer **out, lowkey_error *err)
{
    lowkey_quantizer_desc desc = *tables->desc;
    lowkey_layer_desc *layers;
    LOWKEY_TRY(lowkey_pool_take(pool, (size_t)desc.n_layers, sizeof *layers, &layers, err));
    memcpy(layers, desc.layers, (size_t)desc.n_layers * sizeof *layers);
    for (int l = 0; l < desc.n_layers; l++) {
        LOWKEY_TRY(move_side(&tables->sides[2 * l], move, pool, &layers[l].key, err));
        LOWKEY_TRY(move_side(&tables->sides[2 * l + 1], move, pool, &layers[l].value, err));
    }
    desc.layers = layers;
    return lowkey_quantizer_create(&desc, NULL, out, err);
}

lowkey_status lowkey_tuned_tables_quantizer(const struct lowkey_tuned_tables *tables, const double *move,
                                            lowkey_quantizer **out, lowkey_error *err)
{
    struct lowkey_pool pool = { 0 };
    *out = NULL;
    const lowkey_status status = make(tables, move, &pool, out, err);
    lowkey_pool_free(&pool);
    return status;
}
