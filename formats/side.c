/* side.c - a checked description laid out by rows, as kernels walk it: row r of a page is channel order[r], and its
 * table, boundaries and place in the page are at r. */
#include <math.h>
#include <string.h>

#include "formats/geometry.h"
#include "formats/quantizer_parts.h"

static void fill_head(const lowkey_side_desc *desc, int h, int head_dim, struct lowkey_row *rows,
                      float *table, float *boundary, uint8_t *n_boundary, float *metric_weight,
                      struct lowkey_head *head)
{
    const size_t n_table = (size_t)desc->table_entries, n_between = lowkey_n_between(desc);
    const size_t first = (size_t)h * (size_t)head_dim; /* channel 0 of the head among all channels */
    const uint16_t *order = desc->order + first;
    const size_t bytes = lowkey_page_layout(head_dim, desc->bits + first, order, rows);
    for (size_t r = 0; r < (size_t)head_dim; r++) {
        const size_t c = first + order[r];
        n_boundary[r] = (uint8_t)(n_between > 0 && desc->n_entries[c] > 0 ? desc->n_entries[c] - 1 : 0);
        if (desc->trellis) metric_weight[r] = desc->metric_weight[c];
        if (n_table == 0) continue;
        memcpy(table + r * n_table, desc->table + c * n_table, n_table * sizeof *table);
        if (n_between > 0)
            memcpy(boundary + r * n_between, desc->boundary + c * n_between, n_between * sizeof *boundary);
    }
    *head = (struct lowkey_head) {
        .rows = rows,
        .table = n_table > 0 ? table : NULL,
        .boundary = n_between > 0 ? boundary : NULL,
        .n_boundary = n_boundary,
        .factor = desc->factor ? desc->factor + first * (size_t)head_dim : NULL,
        .metric_weight = desc->trellis ? metric_weight : NULL,
        .page_bytes = (uint32_t)bytes,
    };
}

static float largest_entry(const float *table, size_t n)
{
    float largest = 0;
    for (size_t i = 0; i < n; i++) largest = fmaxf(largest, fabsf(table[i]));
    return largest;
}

static struct lowkey_side_layout side_page(const lowkey_side_desc *desc, int n_blocks)
{
    return lowkey_side_page_layout(n_blocks, desc->token_scale == LOWKEY_SCALE_F32 ? 4 : 2,
                                   desc->outlier_page_capacity);
}

static void build_side(struct lowkey_block *block, const lowkey_layer_desc *layer, int which,
                       struct lowkey_side *side)
{
    const lowkey_side_desc *desc = lowkey_side_of(layer, which);
    const int n_heads = layer->n_kv_heads, head_dim = lowkey_side_head_dim(layer, which);
    const size_t d = (size_t)head_dim, n = (size_t)n_heads * d;
    const size_t n_table = (size_t)desc->table_entries, n_between = lowkey_n_between(desc);

    struct lowkey_head *heads = lowkey_block_take(block, (size_t)n_heads, sizeof *heads);
    struct lowkey_row *rows = lowkey_block_take(block, n, sizeof *rows);
    float *table = lowkey_block_take(block, n * n_table, sizeof *table);
    float *boundary = lowkey_block_take(block, n * n_between, sizeof *boundary);
    uint8_t *n_boundary = lowkey_block_take(block, n, sizeof *n_boundary);
    float *metric_weight = lowkey_block_take(block, desc->trellis ? n : 0, sizeof *metric_weight);
    float *unit = lowkey_block_take(block, n, sizeof *unit);
    if (!block->base) return;

    for (int h = 0; h < n_heads; h++) {
        const size_t first = (size_t)h * d;
        fill_head(desc, h, head_dim, rows + first, table + first * n_table, boundary + first * n_between,
                  n_boundary + first, desc->trellis ? metric_weight + first : NULL, &heads[h]);
    }
    for (size_t c = 0; c < n; c++) unit[c] = ldexpf(1, desc->exponent[c]);
    const int n_blocks = desc->token_scale == LOWKEY_SCALE_NONE ? 0 : (int)(n / (size_t)desc->scale_block);
    *side = (struct lowkey_side) {
        .n_heads = n_heads,
        .head_dim = head_dim,
        .table_entries = desc->table_entries,
        .trellis = desc->trellis,
        .heads = heads,
        .lower = desc->lower,
        .upper = desc->upper,
        .unit = unit,
        .rule_scale = desc->rule_scale,
        .rule_8 = desc->rule_8,
        .rule_16 = desc->rule_16,
        .token_scale = desc->token_scale,
        .largest_entry = largest_entry(table, n * n_table),
        .scale_block = desc->scale_block,
        .n_blocks = n_blocks,
        .outlier_rule = desc->outlier_rule,
        .outlier_rank = desc->outlier_rank,
        .outlier_cap = desc->outlier_cap,
        .outlier_page_capacity = desc->outlier_page_capacity,
        .layout = side_page(desc, n_blocks),
    };
}

void lowkey_layer_build(struct lowkey_block *block, const lowkey_layer_desc *desc, struct lowkey_layer *layer)
{
    if (block->base) layer->desc = desc;
    for (int which = 0; which < 2; which++)
        build_side(block, desc, which, block->base ? &layer->side[which] : NULL);
}
