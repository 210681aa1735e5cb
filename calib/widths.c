/* widths.c - costs of all channels by width, one layer after another; then units of channels, their widths, and what
 * these are predicted to cost. */
#include "calib/widths.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "calib/allocate.h"
#include "formats/geometry.h"
#include "runtime/error.h"

struct side_channels { /* the channels of keys or values of a layer */
    struct lowkey_width_costs *costs; /* [n] */
    uint8_t *bits; /* [n] */
    size_t n;
    int n_heads, head_dim, n_paired; /* the first n_paired of a head in plain order are pairs */
    uint16_t plain[LOWKEY_MAX_HEAD_DIM];
};

static lowkey_status side_init(struct side_channels *side, const lowkey_layer_desc *layer, int which,
                               const struct lowkey_fit_options *options, struct lowkey_pool *pool,
                               lowkey_error *err)
{
    side->n_heads = layer->n_kv_heads;
    side->head_dim = lowkey_side_head_dim(layer, which);
    side->n = (size_t)side->n_heads * (size_t)side->head_dim;
    side->n_paired = which ? 0 : layer->rope_dims;
    lowkey_default_order(side->head_dim, side->n_paired, layer->rope_pairing, side->plain);
    LOWKEY_TRY(lowkey_pool_take(pool, side->n, sizeof *side->costs, &side->costs, err));
    LOWKEY_TRY(lowkey_pool_take(pool, side->n, 1, &side->bits, err));
    memset(side->costs, 0, side->n * sizeof *side->costs);
    memset(side->bits, options->high_width, side->n); /* while costs are found: room for the widest */
    return LOWKEY_OK;
}

/* Channels of the unit that begins at row r of a head's plain order. */
static int unit_size(const struct side_channels *side, int r)
{
    return r < side->n_paired ? 2 : 1;
}

static void add_units(const struct side_channels *side, struct lowkey_unit *units, size_t *n)
{
    for (int h = 0; h < side->n_heads; h++)
        for (int r = 0; r < side->head_dim; r += unit_size(side, r)) {
            struct lowkey_unit *unit = &units[(*n)++];
            *unit = (struct lowkey_unit) { .n_channels = unit_size(side, r) };
            for (int i = 0; i < unit->n_channels; i++)
                for (int b = 0; b <= LOWKEY_WIDEST_TABLE; b++)
                    unit->cost[b] += side->costs[h * side->head_dim + side->plain[r + i]].at[b];
        }
}

/* Spread the widths of units over their channels; what they cost together. */
static double spread_widths(struct side_channels *side, const struct lowkey_unit *units, const uint8_t *widths,
                            size_t *n)
{
    double cost = 0;
    for (int h = 0; h < side->n_heads; h++)
        for (int r = 0; r < side->head_dim; r += unit_size(side, r), ++*n) {
            cost += units[*n].cost[widths[*n]];
            for (int i = 0; i < unit_size(side, r); i++)
                side->bits[h * side->head_dim + side->plain[r + i]] = widths[*n];
        }
    return cost;
}

static lowkey_status share_out(int n_sides, struct side_channels *sides, const struct lowkey_fit_options *options,
                               struct lowkey_widths *widths, lowkey_error *err)
{
    size_t n_channels = 0, n = 0;
    for (int i = 0; i < n_sides; i++) n_channels += sides[i].n;
    const int64_t total = (int64_t)floor(options->budget * (double)n_channels + 1e-6);
    struct lowkey_unit *units = malloc(n_channels * sizeof *units);
    uint8_t *found = malloc(n_channels);
    lowkey_status status;
    if (units && found) {
        for (int i = 0; i < n_sides; i++) add_units(&sides[i], units, &n);
        status = lowkey_allocate(n, units, options->low_width, options->high_width, total, found, err);
    } else {
        status = lowkey_fail(err, LOWKEY_ENOMEM, "no memory for the widths of %zu channels", n_channels);
    }
    n = 0;
    for (int i = 0; i < n_sides && status == LOWKEY_OK; i++)
        widths->predicted[i % 2] += spread_widths(&sides[i], units, found, &n);
    free(units);
    free(found);
    return status;
}

lowkey_status lowkey_widths_find(const lowkey_captures *captures, const struct lowkey_fit_options *options,
                                 enum lowkey_sensitivity sensitivity, const char *out,
                                 struct lowkey_progress *progress, double *work_done, struct lowkey_pool *pool,
                                 struct lowkey_widths *widths, lowkey_error *err)
{
    const int n_layers = captures->info->n_layers;
    struct side_channels *sides;
    widths->predicted[0] = widths->predicted[1] = 0;
    LOWKEY_TRY(lowkey_pool_take(pool, (size_t)n_layers, sizeof *widths->bits, &widths->bits, err));
    LOWKEY_TRY(lowkey_pool_take(pool, 2 * (size_t)n_layers, sizeof *sides, &sides, err));
    for (int i = 0; i < n_layers; i++) {
        struct lowkey_layer_fit fit = {
            .captures = captures, .options = options, .sensitivity = sensitivity, .out = out, .layer = i
        };
        for (int which = 0; which < 2; which++) {
            struct side_channels *side = &sides[2 * i + which];
            LOWKEY_TRY(side_init(side, &captures->info->layers[i], which, options, pool, err));
            lowkey_layer_fit_side(&fit, which, side->bits, progress, work_done);
            widths->bits[i][which] = side->bits;
        }
        struct lowkey_width_costs *const costs[2] = { sides[2 * i].costs, sides[2 * i + 1].costs };
        LOWKEY_TRY(lowkey_layer_fit_costs(&fit, costs, err));
    }
    return share_out(2 * n_layers, sides, options, widths, err);
}
