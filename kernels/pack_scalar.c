/* pack_scalar.c - packs tokens into pages, one at a time: the outliers, the token's scale, then each head's codes from
 * its last row to its first, so that the error of a row can be fed back into the rows before it.
 *
 * formats/README.md, "Packing", is the rule, step by step; the steps' numbers are named below. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "formats/block.h"
#include "kernels/element.h"
#include "kernels/kernels.h"
#include "kernels/trellis.h"

/* UNSTORED: an outlier by rank without room; it stays outside of the token's range. */
enum mark { ORDINARY, UNSTORED, STORED };

struct pick { /* a candidate outlier */
    float key;
    int channel; /* h * head_dim + c */
};

struct scratch { /* C = n_heads * head_dim channels */
    float *x; /* [C] the token */
    float *target; /* [head_dim] by row: x less the errors fed back so far */
    struct pick *picks; /* greatest key first */
    uint16_t *residuals; /* [C] f16, where an outlier is stored */
    uint8_t *bits; /* [C] */
    uint8_t *marks; /* [C] enum mark */
    uint8_t *codes; /* [head_dim] by row, of a trellis */
    struct lowkey_trellis_scratch trellis;
};

static int max_picks(const struct lowkey_side *side)
{
    const int n_channels = side->n_heads * side->head_dim;
    if (side->outlier_rule == LOWKEY_OUTLIER_RANK) return 2 * side->outlier_rank;
    if (side->outlier_rule == LOWKEY_OUTLIER_NONE) return 0;
    return side->outlier_cap < n_channels ? side->outlier_cap : n_channels;
}

static struct scratch take_scratch(struct lowkey_block *block, const struct lowkey_side *side)
{
    const size_t n_channels = (size_t)side->n_heads * (size_t)side->head_dim;
    struct scratch scratch;
    scratch.x = lowkey_block_take(block, n_channels, sizeof *scratch.x);
    scratch.target = lowkey_block_take(block, (size_t)side->head_dim, sizeof *scratch.target);
    scratch.picks = lowkey_block_take(block, (size_t)max_picks(side), sizeof *scratch.picks);
    scratch.residuals = lowkey_block_take(block, n_channels, sizeof *scratch.residuals);
    scratch.bits = lowkey_block_take(block, n_channels, sizeof *scratch.bits);
    scratch.marks = lowkey_block_take(block, n_channels, sizeof *scratch.marks);
    scratch.codes = lowkey_block_take(block, (size_t)side->head_dim, sizeof *scratch.codes);
    scratch.trellis = lowkey_trellis_take(block, side);
    return scratch;
}

size_t lowkey_pack_scratch_bytes(const struct lowkey_side *side)
{
    struct lowkey_block block = { 0 };
    take_scratch(&block, side);
    return block.used;
}

/* Keep the max greatest keys of those offered, greatest first; an equal key stays behind what came before it, so that
 * channels offered rising give ties to the lower one. Returns how many there are now. */
static int keep_greatest(struct pick *picks, int n, int max, float key, int channel)
{
    if (n == max) {
        if (max == 0 || !(key > picks[n - 1].key)) return n;
        n--;
    }
    int i = n;
    for (; i > 0 && key > picks[i - 1].key; i--) picks[i] = picks[i - 1];
    picks[i] = (struct pick) { key, channel };
    return n + 1;
}

/* Step 1: mark the outlier_rank largest and smallest. Returns how many. Room is given from the lowest channel on. */
static int mark_by_rank(const struct lowkey_side *side, int room, const struct scratch *scratch)
{
    const int n_channels = side->n_heads * side->head_dim;
    int n_outliers = 0;
    for (int end = 0; end < 2; end++) { /* the largest, then the smallest of what is left */
        int n = 0;
        for (int g = 0; g < n_channels; g++) {
            if (scratch->bits[g] == 16 || scratch->marks[g] != ORDINARY) continue;
            const float key = end == 0 ? scratch->x[g] : -scratch->x[g];
            n = keep_greatest(scratch->picks, n, side->outlier_rank, key, g);
        }
        for (int i = 0; i < n; i++) scratch->marks[scratch->picks[i].channel] = UNSTORED;
        n_outliers += n;
    }
    for (int g = 0, n = 0; g < n_channels && n < room; g++)
        if (scratch->marks[g] == UNSTORED) scratch->marks[g] = STORED, n++;
    return n_outliers;
}

/* Step 4: mark up to room of those outside their limits, the farthest first. Returns how many are outside. */
static int mark_by_limit(const struct lowkey_side *side, int room, const struct scratch *scratch)
{
    const int n_channels = side->n_heads * side->head_dim;
    int n_outside = 0, n = 0;
    for (int g = 0; g < n_channels; g++) {
        const float x = scratch->x[g], lower = side->lower[g], upper = side->upper[g];
        if ((x <= upper && x >= lower) || scratch->bits[g] == 16) continue;
        const float distance = x > upper ? x - upper : lower - x, range = upper - lower;
        n = keep_greatest(scratch->picks, n, room, range > 0 ? distance / range : INFINITY, g);
        n_outside++;
    }
    for (int i = 0; i < n; i++) scratch->marks[scratch->picks[i].channel] = STORED;
    return n_outside;
}

/* Steps 1, 4 and 5. first: entries that earlier tokens of the page wrote. */
static void mark_outliers(const struct lowkey_pack_args *args, int first, const struct scratch *scratch)
{
    const struct lowkey_side *side = args->side;
    memset(scratch->marks, ORDINARY, (size_t)side->n_heads * (size_t)side->head_dim);
    if (side->outlier_rule == LOWKEY_OUTLIER_NONE) return;
    const int left = side->outlier_page_capacity - first, picks = max_picks(side);
    int room = side->outlier_cap < left ? side->outlier_cap : left;
    if (room > picks) room = picks;
    const int n = side->outlier_rule == LOWKEY_OUTLIER_RANK ? mark_by_rank(side, room, scratch)
                                                            : mark_by_limit(side, room, scratch);
    if (n > room) args->counts->clamped += (uint64_t)(n - room);
}

/* Step 2, its end: halve the scale at i while an entry times it could be too large for f32. */
static void limit_scale(const struct lowkey_side *side, uint8_t *scales, float zero, size_t i,
                        uint64_t *n_saturated)
{
    float scale = lowkey_get_scale(scales, side->token_scale, i);
    for (int n = 0; !isfinite(fabsf(zero) + scale * side->largest_entry); n++) {
        *n_saturated += n == 0;
        lowkey_put_scale(scales, side->token_scale, i, 0.5f * scale, NULL);
        scale = lowkey_get_scale(scales, side->token_scale, i);
    }
}

/* Step 2. Adding 0 takes -0 as 0, so that the result does not depend on the order of comparing. */
static void put_scales(const struct lowkey_pack_args *args, int slot, const struct scratch *scratch)
{
    const struct lowkey_side *side = args->side;
    for (int b = 0; b < side->n_blocks; b++) {
        float high = -INFINITY, low = INFINITY;
        for (int g = b * side->scale_block; g < (b + 1) * side->scale_block; g++) {
            if (scratch->marks[g] != ORDINARY || scratch->bits[g] > 5) continue;
            const float x = scratch->x[g] + 0.0f;
            if (x > high) high = x;
            if (x < low) low = x;
        }
        const int is_empty = high < low;
        const float zero = is_empty ? 0 : 0.5f * high + 0.5f * low;
        const float scale = is_empty ? 0 : 0.5f * high - 0.5f * low;
        const size_t i = (size_t)slot * (size_t)side->n_blocks + (size_t)b;
        uint8_t *scales = args->side_page + side->layout.scale_offset,
                *zeros = args->side_page + side->layout.zero_offset;
        lowkey_put_scale(scales, side->token_scale, i, scale, &args->counts->saturated);
        lowkey_put_scale(zeros, side->token_scale, i, zero, &args->counts->saturated);
        limit_scale(side, scales, lowkey_get_scale(zeros, side->token_scale, i), i, &args->counts->saturated);
    }
}

static unsigned int8_code(float x, uint64_t *n_saturated)
{
    const float nearest = rintf(x);
    *n_saturated += fabsf(nearest) > 127;
    return (unsigned)(int)fminf(fmaxf(nearest, -127), 127) & 0xff;
}

/* Step 3, for one element: the code of t. */
static unsigned code_of(const struct lowkey_side *side, int h, int r, struct lowkey_grid grid, float t,
                        uint64_t *n_saturated)
{
    const struct lowkey_row *row = &side->heads[h].rows[r];
    if (row->bits == 16) return lowkey_encode_16(side->rule_16, t, n_saturated);
    if (row->bits == 8) {
        const float u = t / side->rule_scale[(size_t)h * (size_t)side->head_dim + row->channel];
        return side->rule_8 == LOWKEY_RULE_INT8   ? int8_code(u, n_saturated)
               : side->rule_8 == LOWKEY_RULE_E4M3 ? lowkey_f32_to_e4m3_saturate(u, n_saturated)
                                                  : lowkey_f32_to_e5m2_saturate(u, n_saturated);
    }
    const int n = side->table_entries - 1;
    const float *boundary = side->heads[h].boundary + (size_t)r * (size_t)n;
    unsigned code = 0;
    if (side->token_scale == LOWKEY_SCALE_NONE) {
        for (int k = 0; k < n; k++) code += boundary[k] < t;
    } else if (grid.scale != 0) {
        for (int k = 0; k < n; k++) { /* FLT_MAX: behind the entries in use */
            const float scaled = grid.scale * boundary[k];
            code += boundary[k] < FLT_MAX && grid.zero + scaled < t;
        }
    }
    return code;
}

/* t_i = fma(-factor[j][i], e_j, t_i) for the rows i < j: the order of j, not of i, is what the rule fixes. A version
 * with the FMA instruction is chosen when the program is loaded, since a call of fmaf costs 15 times as much. */
LOWKEY_CLONES("fma")
static void feed_back(float *t, const float *factor, float error, int n)
{
    for (int i = 0; i < n; i++) t[i] = fmaf(-factor[i], error, t[i]);
}

/* Steps 3 and 6, for one head of one token. */
static void pack_head(const struct lowkey_pack_args *args, int h, int slot, const struct scratch *scratch)
{
    const struct lowkey_side *side = args->side;
    const struct lowkey_head *head = &side->heads[h];
    const int D = side->head_dim;
    const float *x_h = scratch->x + (size_t)h * (size_t)D;
    uint64_t *n_saturated = &args->counts->saturated;
    float *target = scratch->target;
    for (int r = 0; r < D; r++) target[r] = x_h[head->rows[r].channel];
    for (int j = D - 1; j >= 0; j--) {
        const struct lowkey_row *row = &head->rows[j];
        const int g = h * D + row->channel;
        const float x = scratch->x[g];
        const struct lowkey_grid grid = lowkey_grid_of(side, args->side_page, slot, g);
        const unsigned code = code_of(side, h, j, grid, isfinite(target[j]) ? target[j] : x, n_saturated);
        lowkey_code_set(args->pages[h], row, slot, code);
        if (!head->factor && scratch->marks[g] != STORED) continue;
        float value = lowkey_on_grid(side, row, grid, lowkey_code_value(side, h, j, code));
        if (scratch->marks[g] == STORED) {
            scratch->residuals[g] = lowkey_f32_to_f16_saturate((x - value) / side->unit[g], n_saturated);
            if (!isfinite(lowkey_add_residual(value, scratch->residuals[g], side->unit[g])))
                scratch->residuals[g]--; /* x is near the end of f32: the next toward zero */
            value = lowkey_add_residual(value, scratch->residuals[g], side->unit[g]);
        }
        if (head->factor) feed_back(target, head->factor + (size_t)j * (size_t)D, value - x, j);
    }
}

/* Step 3 with a trellis, for one head of one token. */
static void pack_trellis(const struct lowkey_pack_args *args, int h, int slot, const struct scratch *scratch)
{
    const struct lowkey_side *side = args->side;
    const struct lowkey_row *rows = side->heads[h].rows;
    for (int r = 0; r < side->head_dim; r++) scratch->target[r] = scratch->x[h * side->head_dim + rows[r].channel];
    lowkey_trellis_search(side, h, scratch->target, &scratch->trellis, scratch->codes);
    for (int r = 0; r < side->head_dim; r++) lowkey_code_set(args->pages[h], &rows[r], slot, scratch->codes[r]);
}

/* Write the token's entries behind those of earlier tokens, channels rising. */
static void put_outliers(const struct lowkey_pack_args *args, int slot, int first,
                         const struct scratch *scratch)
{
    const struct lowkey_side *side = args->side;
    const int n_channels = side->n_heads * side->head_dim;
    int end = first;
    for (int g = 0; g < n_channels; g++)
        if (scratch->marks[g] == STORED)
            lowkey_put_outlier(side, args->side_page, end++,
                               (struct lowkey_outlier) { (uint16_t)g, scratch->residuals[g] });
    lowkey_put_u16(args->side_page + side->layout.end_offset + 2 * slot, (unsigned)end);
    args->counts->outliers += (uint64_t)(end - first);
}

void lowkey_pack_scalar(const struct lowkey_pack_args *args)
{
    const struct lowkey_side *side = args->side;
    const int D = side->head_dim, has_outliers = side->outlier_rule != LOWKEY_OUTLIER_NONE;
    const struct scratch scratch = take_scratch(&(struct lowkey_block) { .base = args->scratch }, side);
    for (int h = 0; h < side->n_heads; h++)
        for (int r = 0; r < D; r++)
            scratch.bits[h * D + side->heads[h].rows[r].channel] = side->heads[h].rows[r].bits;
    for (int i = 0; i < args->n_tokens; i++) {
        const int slot = args->first_slot + i;
        for (int h = 0; h < side->n_heads; h++)
            memcpy(scratch.x + (size_t)h * (size_t)D,
                   args->x + i * args->token_stride + h * args->head_stride, (size_t)D * sizeof(float));
        const int first = has_outliers
                              ? lowkey_first_outlier(side, args->side_page, slot, args->first_live_slot)
                              : 0;
        mark_outliers(args, first, &scratch);
        put_scales(args, slot, &scratch);
        for (int h = 0; h < side->n_heads; h++) (side->trellis ? pack_trellis : pack_head)(args, h, slot, &scratch);
        if (has_outliers) put_outliers(args, slot, first, &scratch);
    }
}
