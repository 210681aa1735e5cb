/* side_fit.c - one side of a layer: from options to a description, around the fit of its columns. */
#include "calib/side_fit.h"

#include <math.h>
#include <string.h>

#include "calib/feedback.h"
#include "calib/range.h"
#include "formats/geometry.h"
#include "runtime/error.h"

static const char *const scope_names[] = { "channel", "head", "layer" };
static const char *const codebook_names[] = { "fitted", "uniform", "normal_float" };

lowkey_status lowkey_side_fit_passed(struct lowkey_side_fit *fit, double n_tokens, lowkey_error *err)
{
    *fit->work_done += n_tokens;
    lowkey_progress_at(fit->progress, *fit->work_done);
    return lowkey_interrupted() ? lowkey_fail(err, LOWKEY_ECANCELLED, "interrupted") : LOWKEY_OK;
}

static lowkey_status take_arrays(struct lowkey_side_fit *fit, struct lowkey_pool *pool, lowkey_error *err)
{
    const size_t C = fit->n_channels, E = (size_t)fit->n_table, D = (size_t)fit->head_dim;
    struct lowkey_side_report *report = &fit->report;
    const struct {
        void *out;
        size_t count, bytes_each;
    } arrays[] = {
        { &fit->low, C, sizeof(double) },
        { &fit->high, C, sizeof(double) },
        { &fit->zero, C, sizeof(double) },
        { &fit->scale, C, sizeof(double) },
        { &fit->flags, C, 1 },
        { &fit->shapes, C, sizeof *fit->shapes },
        { &fit->tables, C, sizeof *fit->tables },
        { &fit->n_entries, C, 1 },
        { &fit->center, C, sizeof(float) },
        { &fit->exponent, C, sizeof *fit->exponent },
        { &fit->lower, C, sizeof(float) },
        { &fit->upper, C, sizeof(float) },
        { &fit->rule_scale, C, sizeof(float) },
        { &report->mean, C, sizeof(double) },
        { &report->variance, C, sizeof(double) },
        { &report->mse, C, sizeof(double) },
        { &report->weighted_mse, C, sizeof(double) },
        { &report->gain, C, sizeof(float) },
    };
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++)
        LOWKEY_TRY(lowkey_pool_take(pool, arrays[i].count, arrays[i].bytes_each, arrays[i].out, err));
    if (E) {
        LOWKEY_TRY(lowkey_pool_take(pool, C * E, sizeof(float), &fit->table, err));
        if (!fit->side->trellis)
            LOWKEY_TRY(lowkey_pool_take(pool, C * (E - 1), sizeof(float), &fit->boundary, err));
        LOWKEY_TRY(lowkey_pool_take(pool, C * E, sizeof(uint64_t), &report->histogram, err));
    }
    if (fit->side->trellis) LOWKEY_TRY(lowkey_pool_take(pool, C, sizeof(float), &fit->metric_weight, err));
    if (fit->side->feedback) LOWKEY_TRY(lowkey_pool_take(pool, C * D, sizeof(float), &fit->factor, err));
    return LOWKEY_OK;
}

/* Widths as allocated, or in turn: over RoPE pairs and then the other channels of keys, over channels of values; the same
 * in every head. */
static void lay_widths(struct lowkey_side_fit *fit, const lowkey_layer_desc *geometry)
{
    const struct lowkey_side_options *side = fit->side;
    uint16_t plain[LOWKEY_MAX_HEAD_DIM];
    const int rope_dims = fit->which ? 0 : geometry->rope_dims;
    lowkey_default_order(fit->head_dim, rope_dims, geometry->rope_pairing, plain);
    for (int r = 0, turn = 0; r < fit->head_dim; r++) {
        for (int h = 0; h < fit->n_heads; h++) {
            const size_t c = (size_t)h * (size_t)fit->head_dim + plain[r];
            fit->bits[c] = fit->widths ? fit->widths[c] : side->widths[turn % side->n_widths];
        }
        turn += r >= rope_dims || r % 2;
    }
    for (int h = 0; h < fit->n_heads; h++) {
        const size_t at = (size_t)h * (size_t)fit->head_dim;
        lowkey_row_order(fit->head_dim, rope_dims, geometry->rope_pairing, fit->bits + at, fit->order + at);
    }
}

/* Outliers by limit: about fraction * C a token, unevenly: room for four times that in a token, 1.5 times
 * in a page. By rank: exactly two ranks' worth. */
static void lay_outliers(struct lowkey_side_fit *fit, int has_any_coded)
{
    const struct lowkey_side_options *side = fit->side;
    lowkey_side_desc *desc = &fit->desc;
    const int C = (int)fit->n_channels;
    if (!(side->outlier_fraction > 0) || !has_any_coded) return;
    const double expected = side->outlier_fraction * C;
    desc->outlier_rule = side->token_scale == LOWKEY_SCALE_NONE ? LOWKEY_OUTLIER_LIMIT : LOWKEY_OUTLIER_RANK;
    int cap = (int)fmin(ceil(4 * expected), C),
        capacity = (int)fmin(ceil(1.5 * LOWKEY_PAGE_TOKENS * expected) + 8, UINT16_MAX);
    if (desc->outlier_rule == LOWKEY_OUTLIER_RANK) {
        desc->outlier_rank = lowkey_outlier_rank(C, side->outlier_fraction);
        cap = 2 * desc->outlier_rank;
        capacity = LOWKEY_PAGE_TOKENS * cap < UINT16_MAX ? LOWKEY_PAGE_TOKENS * cap : UINT16_MAX;
    }
    if (side->outlier_cap) cap = side->outlier_cap < C ? side->outlier_cap : C;
    if (side->outlier_cap && desc->outlier_rule == LOWKEY_OUTLIER_LIMIT && capacity < cap) capacity = cap;
    desc->outlier_cap = cap;
    desc->outlier_page_capacity = side->outlier_page_capacity ? side->outlier_page_capacity : capacity;
}

static lowkey_status lay_scale(struct lowkey_side_fit *fit, lowkey_error *err)
{
    const struct lowkey_side_options *side = fit->side;
    if (side->token_scale == LOWKEY_SCALE_NONE) return LOWKEY_OK;
    const int C = (int)fit->n_channels, block = side->scale_block ? side->scale_block : C;
    if (block % 8 || C % block)
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "layer %d %s: a scale for every %d channels: expected a multiple of 8 that "
                           "divides %d channels",
                           fit->captures->info->layers[fit->layer].index, fit->which ? "value" : "key", block,
                           C);
    fit->desc.token_scale = side->token_scale;
    fit->desc.scale_block = block;
    return LOWKEY_OK;
}

lowkey_status lowkey_side_fit_init(struct lowkey_side_fit *fit, struct lowkey_pool *pool, lowkey_error *err)
{
    const lowkey_layer_desc *geometry = &fit->captures->info->layers[fit->layer];
    int widest = 0, any_8 = 0, any_16 = 0;
    fit->n_heads = geometry->n_kv_heads;
    fit->head_dim = lowkey_side_head_dim(geometry, fit->which);
    fit->n_channels = (size_t)fit->n_heads * (size_t)fit->head_dim;
    LOWKEY_TRY(lowkey_pool_take(pool, fit->n_channels, 1, &fit->bits, err));
    LOWKEY_TRY(lowkey_pool_take(pool, fit->n_channels, sizeof *fit->order, &fit->order, err));
    lay_widths(fit, geometry);
    for (size_t c = 0; c < fit->n_channels; c++) {
        if (fit->bits[c] <= 5 && fit->bits[c] > widest) widest = fit->bits[c];
        any_8 |= fit->bits[c] == 8;
        any_16 |= fit->bits[c] == 16;
    }
    fit->n_table = widest ? lowkey_most_entries(fit->side->trellis, widest) : 0;
    LOWKEY_TRY(take_arrays(fit, pool, err));
    for (size_t c = 0; c < fit->n_channels; c++) fit->rule_scale[c] = fit->report.gain[c] = 1;
    for (size_t c = 0; c < fit->n_channels && fit->metric_weight; c++) fit->metric_weight[c] = 1;
    fit->desc = (lowkey_side_desc) {
        .struct_size = sizeof fit->desc,
        .bits = fit->bits,
        .order = fit->order,
        .table_entries = fit->n_table,
        .n_entries = fit->n_entries,
        .table = fit->table,
        .boundary = fit->boundary,
        .center = fit->center,
        .exponent = fit->exponent,
        .lower = fit->lower,
        .upper = fit->upper,
        .rule_scale = fit->rule_scale,
        .rule_8 = any_8 ? fit->side->rule_8 : LOWKEY_RULE_NONE,
        .rule_16 = any_16 ? fit->side->rule_16 : LOWKEY_RULE_NONE,
        .factor = fit->factor,
        .trellis = fit->side->trellis,
        .metric_weight = fit->metric_weight,
    };
    fit->report.table_scope = scope_names[fit->side->scope];
    fit->report.codebook = widest ? codebook_names[fit->side->codebook] : "none";
    fit->report.qnorm = widest ? fit->side->qnorm : 0;
    fit->report.gain_corrected = widest ? fit->side->gain : 0;
    lay_outliers(fit, widest || any_8);
    return widest ? lay_scale(fit, err) : LOWKEY_OK;
}

void lowkey_side_fit_weigh_rows(struct lowkey_side_fit *fit)
{
    const size_t D = (size_t)fit->head_dim;
    for (size_t first = 0; first < fit->n_channels; first += D) {
        double weight[LOWKEY_MAX_HEAD_DIM], largest = 0;
        for (size_t c = 0; c < D; c++) {
            const struct lowkey_weight_shape *shape = &fit->shapes[first + c];
            const double half_range = fit->scale[first + c];
            weight[c] = fit->weights.source != LOWKEY_WEIGHTS_NONE ? lowkey_weight_unit(shape) * shape->mean
                        : half_range > 0                           ? 1 / half_range / half_range
                                                                   : 0;
            if (isfinite(weight[c])) largest = fmax(largest, weight[c]);
        }
        for (size_t c = 0; c < D; c++)
            fit->metric_weight[first + c] = lowkey_metric_weight(weight[c], largest);
    }
}

/* The farthest that a channel's values are from the middle of its limits. */
static double reach_of(const struct lowkey_side_fit *fit, size_t c)
{
    if (fit->grids) return 0;
    const double middle = 0.5 * (double)fit->lower[c] + 0.5 * (double)fit->upper[c];
    return fmax(fit->high[c] - middle, middle - fit->low[c]);
}

void lowkey_side_fit_store(struct lowkey_side_fit *fit)
{
    const size_t E = (size_t)fit->n_table;
    for (size_t c = 0; c < fit->n_channels; c++) {
        struct lowkey_stored_table stored = { .n_entries = 0 };
        if (fit->bits[c] <= 5) {
            lowkey_table_store(&fit->tables[c], reach_of(fit, c), &stored);
            if (stored.center != 0) fit->flags[c] |= LOWKEY_FLAG_OFFSET;
        } else { /* no table; the exponent is the unit of outliers */
            const double reach = reach_of(fit, c);
            stored.exponent = reach > 0 ? ilogb(reach) : 0;
            if (stored.exponent < -126) stored.exponent = -126;
            if (stored.exponent > 112) stored.exponent = 112;
            for (int k = 0; k < LOWKEY_MAX_CENTROIDS - 1; k++) stored.boundary[k] = 0x1.fffffep127f;
        }
        fit->n_entries[c] = (uint8_t)stored.n_entries;
        fit->center[c] = stored.center;
        fit->exponent[c] = (int16_t)stored.exponent;
        for (size_t k = 0; k < E; k++) fit->table[c * E + k] = stored.entry[k];
        for (size_t k = 0; k + 1 < E && fit->boundary; k++) fit->boundary[c * (E - 1) + k] = stored.boundary[k];
    }
}

/* Entries may lie as far outside of the limits as a range; the format allows two. */
static int stays_near(const struct lowkey_side_fit *fit, size_t c, struct lowkey_correction correction)
{
    const struct lowkey_table *table = &fit->tables[c];
    const double lower = (double)fit->lower[c], upper = (double)fit->upper[c], range = upper - lower;
    const double first = correction.to + correction.factor * (table->entry[0] - correction.from);
    const double last = correction.to + correction.factor * (table->entry[table->n - 1] - correction.from);
    return first >= lower - range && last <= upper + range && fabs(first) < 0x1p127 && fabs(last) < 0x1p127;
}

static void correct_channel(struct lowkey_side_fit *fit, size_t c, struct lowkey_correction correction)
{
    struct lowkey_table *table = &fit->tables[c];
    if (table->n < 2) return; /* one entry has no spread to correct */
    if (!stays_near(fit, c, correction)) {
        fit->notes.tables_clamped_to_range++;
        return;
    }
    for (int k = 0; k < table->n; k++)
        table->entry[k] = correction.to + correction.factor * (table->entry[k] - correction.from);
    fit->report.gain[c] = (float)correction.factor;
}

void lowkey_side_fit_correct(struct lowkey_side_fit *fit, const struct lowkey_moments *moments)
{
    const enum lowkey_scope scope = fit->side->scope;
    const size_t group = scope == LOWKEY_SCOPE_CHANNEL ? 1
                         : scope == LOWKEY_SCOPE_HEAD  ? (size_t)fit->head_dim
                                                       : fit->n_channels;
    for (size_t c = 0; c < fit->n_channels && fit->side->gain; c++)
        if (fit->bits[c] <= 5)
            correct_channel(fit, c, lowkey_gain_correction(&moments->channel[c], moments->shift[c]));
    for (size_t first = 0; first < fit->n_channels && fit->side->qnorm; first += group) {
        const struct lowkey_correction shared = lowkey_qnorm_correction(
            (int)group, moments->channel + first, moments->shift + first, fit->zero + first,
            fit->scale + first);
        for (size_t c = first; c < first + group; c++) {
            if (fit->bits[c] > 5 || !(fit->scale[c] > 0)) continue;
            const double zero = fit->zero[c],
                         scale = fit->scale[c]; /* from the codebook to the channel's units */
            correct_channel(fit, c,
                            (struct lowkey_correction) { shared.factor, zero + scale * shared.from,
                                                         zero + scale * shared.to });
        }
    }
}

void lowkey_side_fit_report(struct lowkey_side_fit *fit, const struct lowkey_moments *moments)
{
    struct lowkey_side_report *report = &fit->report;
    const size_t E = (size_t)fit->n_table;
    const double n = (double)fit->captures->n_tokens;
    size_t n_offset = 0;
    report->n_tokens = (uint64_t)fit->captures->n_tokens;
    report->n_outliers = moments->counts.outliers;
    report->n_clamped = moments->counts.clamped;
    report->n_saturated = moments->counts.saturated;
    for (size_t c = 0; c < fit->n_channels; c++) {
        const struct lowkey_channel_moments *m = &moments->channel[c];
        const double mean = m->x / n;
        report->mean[c] = moments->shift_x[c] + mean;
        report->variance[c] = fmax(m->xx / n - mean * mean, 0);
        report->mse[c] = m->error / n;
        report->weighted_mse[c] = m->weight > 0 ? m->weighted_error / m->weight : 0;
        if (E) memcpy(report->histogram + c * E, moments->histogram + c * E, E * sizeof(uint64_t));
        for (int k = 0; fit->bits[c] <= 5 && k < lowkey_most_entries(fit->side->trellis, fit->bits[c]); k++)
            if (moments->histogram[c * E + (size_t)k] == 0) fit->flags[c] |= LOWKEY_FLAG_UNUSED_CODES;
        n_offset += (fit->flags[c] & LOWKEY_FLAG_OFFSET) && !(fit->flags[c] & LOWKEY_FLAG_CONSTANT);
    }
    report->flags = fit->flags;
    if (n_offset * 10 > fit->n_channels) fit->notes.suspicions |= LOWKEY_SUSPECT_OFFSETS;
}

lowkey_status lowkey_side_fit_suspect(struct lowkey_side_fit *fit, lowkey_error *err)
{
    const enum lowkey_stream stream = fit->which ? LOWKEY_VALUE : LOWKEY_KEY;
    int any_f16 = 0;
    for (int f = 0; f < fit->captures->n_files; f++) {
        const char *type;
        LOWKEY_TRY(lowkey_activations_type(fit->captures->files[f], fit->layer, stream, &type, err));
        any_f16 |= strcmp(type, "f16") == 0;
    }
    int all_equal = 1;
    for (size_t c = 0; c < fit->n_channels; c++)
        all_equal &= fit->low[c] == fit->low[0] && fit->high[c] == fit->low[0];
    if (all_equal)
        fit->notes.suspicions |= LOWKEY_SUSPECT_ALL_EQUAL;
    else if (any_f16 && !(fit->mantissa_bits & 0xffff))
        fit->notes.suspicions |= LOWKEY_SUSPECT_BF16_AS_F16;
    return LOWKEY_OK;
}

lowkey_status lowkey_side_fit_pack(struct lowkey_side_fit *fit, const struct lowkey_side *side,
                                   struct lowkey_moments *moments, struct lowkey_pool *pool,
                                   lowkey_error *err)
{
    const size_t C = fit->n_channels, E = (size_t)fit->n_table;
    *moments = (struct lowkey_moments) { .n_channels = (int)C,
                                         .n_table = fit->n_table,
                                         .shapes = fit->shapes };
    LOWKEY_TRY(lowkey_pool_take(pool, C, sizeof(double), &moments->shift, err));
    LOWKEY_TRY(lowkey_pool_take(pool, C, sizeof(double), &moments->shift_x, err));
    LOWKEY_TRY(lowkey_pool_take(pool, C, sizeof *moments->channel, &moments->channel, err));
    LOWKEY_TRY(lowkey_pool_take(pool, C * E + 1, sizeof(uint64_t), &moments->histogram, err));
    for (size_t c = 0; c < C; c++) {
        moments->shift[c] = 0.5 * (double)fit->lower[c] + 0.5 * (double)fit->upper[c];
        moments->shift_x[c] = 0.5 * fit->low[c] + 0.5 * fit->high[c];
    }
    const struct lowkey_pack_pass pass = {
        .captures = fit->captures,
        .layer = fit->layer,
        .stream = fit->which ? LOWKEY_VALUE : LOWKEY_KEY,
        .side = side,
        .weights = &fit->weights,
        .n_threads = fit->options->n_threads,
    };
    LOWKEY_TRY(lowkey_moments_run(&pass, moments, err));
    return lowkey_side_fit_passed(fit, (double)fit->captures->n_tokens, err);
}
