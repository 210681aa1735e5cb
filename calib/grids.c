/* grids.c - scales, zeros and outliers by rank of every token, from the packing kernel itself, so that
 * tables are fitted on what packing will normalise. None of them depends on tables: the kernel is given
 * ones of two entries. */
#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "calib/side_fit.h"
#include "formats/geometry.h"
#include "kernels/element.h"
#include "runtime/error.h"

static void note_page(void *user, void *sums, const struct lowkey_packed_page *page)
{
    struct lowkey_grids *grids = user;
    const struct lowkey_side *side = page->side;
    (void)sums;
    for (int t = 0; t < page->n_tokens; t++) {
        const int slot = page->first_slot + t;
        const int64_t token = page->start + t;
        for (int b = 0; b < grids->n_blocks; b++) {
            const struct lowkey_grid grid = lowkey_grid_of(side, page->side_page, slot,
                                                           b * grids->scale_block);
            grids->scale[token * grids->n_blocks + b] = grid.scale;
            grids->zero[token * grids->n_blocks + b] = grid.zero;
        }
        uint16_t *outliers = grids->outliers + token * grids->n_outliers;
        if (grids->n_outliers == 0) continue;
        memset(outliers, 0xff, (size_t)grids->n_outliers * sizeof *outliers);
        const int first = lowkey_first_outlier(side, page->side_page, slot, page->first_live_slot);
        const int end = lowkey_end_outlier(side, page->side_page, slot);
        for (int e = first; e < end; e++)
            outliers[e - first] = lowkey_get_outlier(side, page->side_page, e).channel;
    }
}

static lowkey_status find(struct lowkey_side_fit *fit, struct lowkey_grids *grids, struct lowkey_pool *pool,
                          lowkey_error *err)
{
    const lowkey_layer_desc *geometry = &fit->captures->info->layers[fit->layer];
    const size_t other = (size_t)fit->n_heads * (size_t)lowkey_side_head_dim(geometry, !fit->which);
    uint8_t *bits, *other_bits;
    float *table, *boundary, *lower, *upper, *zeros;
    LOWKEY_TRY(lowkey_pool_take(pool, fit->n_channels, 1, &bits, err));
    LOWKEY_TRY(lowkey_pool_take(pool, 2 * fit->n_channels, sizeof(float), &table, err));
    LOWKEY_TRY(lowkey_pool_take(pool, fit->n_channels, sizeof(float), &boundary, err));
    LOWKEY_TRY(lowkey_pool_take(pool, fit->n_channels, sizeof(float), &lower, err));
    LOWKEY_TRY(lowkey_pool_take(pool, fit->n_channels, sizeof(float), &upper, err));
    LOWKEY_TRY(lowkey_pool_take(pool, other, 1, &other_bits, err));
    LOWKEY_TRY(lowkey_pool_take(pool, other, sizeof(float), &zeros, err));
    for (size_t c = 0; c < fit->n_channels; c++) {
        bits[c] = fit->bits[c] <= 5 ? 1 : fit->bits[c];
        table[2 * c] = lower[c] = -1;
        table[2 * c + 1] = upper[c] = 1;
        if (bits[c] > 1) table[2 * c] = table[2 * c + 1] = 0;
        boundary[c] = bits[c] == 1 ? 0 : FLT_MAX;
    }
    memset(other_bits, 16, other);
    lowkey_side_desc side = fit->desc;
    side.bits = bits;
    side.order = NULL;
    side.n_entries = NULL;
    side.table_entries = 2;
    side.table = table;
    side.boundary = boundary;
    side.center = side.factor = side.rule_scale = NULL;
    side.exponent = NULL;
    side.lower = lower;
    side.upper = upper;
    lowkey_layer_desc layer = *geometry;
    *(fit->which ? &layer.value : &layer.key) = side;
    *(fit->which ? &layer.key : &layer.value) = (lowkey_side_desc) { .struct_size = sizeof(lowkey_side_desc),
                                                                     .bits = other_bits,
                                                                     .lower = zeros,
                                                                     .upper = zeros,
                                                                     .rule_16 = LOWKEY_RULE_F16 };
    const lowkey_quantizer_desc desc = {
        .struct_size = sizeof desc, .n_layers = 1, .layers = &layer, .n_sink_tokens = fit->options->n_sinks
    };
    lowkey_quantizer *quantizer;
    LOWKEY_TRY(lowkey_quantizer_create(&desc, NULL, &quantizer, err));
    const struct lowkey_pack_pass pass = {
        .captures = fit->captures,
        .layer = fit->layer,
        .stream = fit->which ? LOWKEY_VALUE : LOWKEY_KEY,
        .side = &lowkey_quantizer_layer_at(quantizer, 0)->side[fit->which],
        .n_threads = fit->options->n_threads,
        .visit = note_page,
        .user = grids,
    };
    const lowkey_status status = lowkey_pack_pass(&pass, NULL, err);
    lowkey_quantizer_free(quantizer);
    return status;
}

lowkey_status lowkey_grids_find(struct lowkey_side_fit *fit, struct lowkey_grids *grids, lowkey_error *err)
{
    const size_t n_tokens = (size_t)fit->captures->n_tokens;
    grids->scale_block = fit->desc.scale_block;
    grids->n_blocks = (int)fit->n_channels / grids->scale_block;
    grids->n_outliers = 2 * fit->desc.outlier_rank;
    grids->scale = malloc(n_tokens * (size_t)grids->n_blocks * sizeof(float));
    grids->zero = malloc(n_tokens * (size_t)grids->n_blocks * sizeof(float));
    grids->outliers = malloc((n_tokens * (size_t)grids->n_outliers + 1) * sizeof(uint16_t));
    if (!grids->scale || !grids->zero || !grids->outliers)
        return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for the scales of %zu tokens", n_tokens);
    struct lowkey_pool pool = { 0 };
    const lowkey_status status = find(fit, grids, &pool, err);
    lowkey_pool_free(&pool);
    LOWKEY_TRY(status);
    for (size_t i = 0; i < n_tokens * (size_t)grids->n_blocks; i++)
        if ((double)grids->scale[i] > grids->largest_scale) grids->largest_scale = (double)grids->scale[i];
    return lowkey_side_fit_passed(fit, (double)n_tokens, err);
}

void lowkey_grids_free(struct lowkey_grids *grids)
{
    free(grids->scale);
    free(grids->zero);
    free(grids->outliers);
    memset(grids, 0, sizeof *grids);
}
