/* side.h - keys or values of one layer as kernels see them: a description (lowkey_side_desc) laid out by rows.
 * Built once by formats/quantizer.c from a checked description; plain data, all pointers borrowed. */
#ifndef LOWKEY_SIDE_H
#define LOWKEY_SIDE_H

#include "formats/page.h"
#include "runtime/lowkey.h"

struct lowkey_head {               /* one KV head; arrays by row, not by channel */
    const struct lowkey_row *rows; /* [head_dim] */
    const float *table;            /* [head_dim][table_entries]; NULL: no channel has a table */
    const float *boundary;         /* [head_dim][table_entries - 1]; NULL with a trellis */
    const uint8_t *n_boundary;     /* [head_dim] boundaries in use: n_entries - 1, 0 where there is no table */
    const float *factor;           /* [head_dim][head_dim], factor[i][j] for rows i > j; NULL: no feedback */
    const float *metric_weight;    /* [head_dim]; NULL: no trellis */
    uint32_t page_bytes;
};

struct lowkey_side {
    int n_heads, head_dim, table_entries;
    int trellis;                     /* survivors of a state that packing keeps; 0: no trellis */
    const struct lowkey_head *heads; /* [n_heads] */
    const float *lower, *upper;      /* [n_heads][head_dim] by channel */
    const float *unit;               /* [n_heads][head_dim] 2^exponent: the unit of stored residuals */
    const float *rule_scale;         /* [n_heads][head_dim] */
    lowkey_rule rule_8, rule_16;
    lowkey_token_scale token_scale;
    float largest_entry;             /* of |table| */
    int scale_block, n_blocks;       /* n_blocks = n_heads * head_dim / scale_block; 0 without token_scale */
    lowkey_outlier_rule outlier_rule;
    int outlier_rank, outlier_cap, outlier_page_capacity;
    struct lowkey_side_layout layout; /* of the side page */
};

struct lowkey_layer {                /* what a cache needs of one layer */
    const lowkey_layer_desc *desc;
    struct lowkey_side side[2];      /* 0 keys, 1 values */
};

#if !defined(__cplusplus)
_Static_assert((int)LOWKEY_PAGE_SLOTS == LOWKEY_PAGE_TOKENS, "a page has a slot for each of its tokens");
#endif

/* Entries that a channel's table has room for: 2^bits, twice that with a trellis; none beyond 5 bits. */
static inline int lowkey_most_entries(int trellis, int bits)
{
    return bits > 5 ? 0 : 1 << (bits + (trellis > 0));
}

/* The layer of that index in the model, or NULL. */
const struct lowkey_layer *lowkey_quantizer_layer(const lowkey_quantizer *quantizer, int index);
/* Layer number i of those described, i < n_layers. */
const struct lowkey_layer *lowkey_quantizer_layer_at(const lowkey_quantizer *quantizer, int i);
/* Bytes taken for it: tables, boundaries, rows, factors; and what desc copies add. */
size_t lowkey_quantizer_bytes(const lowkey_quantizer *quantizer);

#endif
