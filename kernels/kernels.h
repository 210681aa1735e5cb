/* kernels.h - the operations on packed pages, their contracts, and the table of variants.
 *
 * Kernels get pointers, sizes and strides: no files, no memory of their own, no context. PACK is EXACT: every
 * variant writes the same bytes. UNPACK is EXACT: the same f32 values. ATTEND is BOUNDED: see lowkey_attend in
 * runtime/lowkey.h; products and sums are f32, multiply-adds fused or not, softmax online, in slot order. */
#ifndef LOWKEY_KERNELS_H
#define LOWKEY_KERNELS_H

#include "formats/side.h"

struct lowkey_pack_counts {
    uint64_t outliers; /* entries written */
    /* Outliers by the rule beyond a token's cap or the page's capacity: clamped to the table's ends. */
    uint64_t clamped;
    uint64_t saturated; /* elements whose residual, rule or scale met the end of its number format */
};

/* Pack n_tokens tokens of one layer's keys or values into slots first_slot.. of one page. EXACT, as METHOD's
 * "Packing, to the bit" (formats/README.md, "Packing") says. Clears and sets its own slots only. */
struct lowkey_pack_args {
    const struct lowkey_side *side;
    const float *x; /* [n_tokens][n_heads][head_dim], all finite */
    ptrdiff_t token_stride, head_stride;
    int n_tokens, first_slot; /* first_slot + n_tokens <= 64 */
    int first_live_slot; /* of the page: sinks in page 0, else 0; its outliers start at entry 0 */
    uint8_t *const *pages; /* [n_heads] */
    uint8_t *side_page; /* NULL where side->layout.bytes == 0 */
    void *scratch; /* lowkey_pack_scratch_bytes(side), 64-byte aligned */
    struct lowkey_pack_counts *counts; /* added to */
};
typedef void lowkey_pack_fn(const struct lowkey_pack_args *args);
/* For every variant. */
size_t lowkey_pack_scratch_bytes(const struct lowkey_side *side);

/* Dequantize slots first_slot..+n_slots of one head's page, residuals added, before RoPE:
 * out[s][c], channels in Hugging Face order. */
struct lowkey_unpack_args {
    const struct lowkey_side *side;
    int head;
    const uint8_t *page, *side_page;
    int first_slot, n_slots;
    int first_live_slot;
    float *out; /* [n_slots][out_stride] */
    ptrdiff_t out_stride;
};
typedef void lowkey_unpack_fn(const struct lowkey_unpack_args *args);

/* The partial result of attention over some tokens, per query row: out is normalised by sum.
 * Empty: out 0, max -INFINITY, sum 0. */
struct lowkey_state {
    float *out; /* [n_rows][value_head_dim] */
    float *max, *sum; /* [n_rows] */
};

/* Attend query rows over one page of one KV head and fold the result into state (online softmax, so a run of
 * pages is a run of calls). A row is one query head of one query: row j sees slots 0..n_visible[j]-1. */
struct lowkey_attend_page_args {
    const struct lowkey_side *key, *value;
    int head;
    const uint8_t *key_page, *value_page, *key_side_page, *value_side_page;
    int n_slots; /* valid slots of the page, sinks included */
    int n_sink_slots; /* slots 0..n-1 come from the sink store instead */
    const uint16_t *key_sinks, *value_sinks; /* [n_sink_slots][..] of this head, f16 or bf16 by sink_rule */
    ptrdiff_t key_sink_stride, value_sink_stride; /* in elements, from token to token */
    lowkey_rule sink_rule;
    int rope_dims;
    lowkey_pairing rope_pairing;
    const float *base_cos, *base_sin; /* [rope_dims/2] of the page's first position; they carry no factor */
    const float *slot_cos, *slot_sin; /* [64][rope_dims/2] of positions 0..63 */
    int n_rows;
    /* [n_rows][key_head_dim], after RoPE, times logit_scale (rotated channels: and attention_factor^2). */
    const float *q;
    const int *n_visible; /* [n_rows], 0..n_slots; rows may see nothing */
    struct lowkey_state state;
    void *scratch; /* lowkey_attend_scratch_bytes(key, value), 64-byte aligned */
};
typedef void lowkey_attend_page_fn(const struct lowkey_attend_page_args *args);
/* For every variant. */
size_t lowkey_attend_scratch_bytes(const struct lowkey_side *key, const struct lowkey_side *value);

/* into = merge(into, from), row by row. Associative up to rounding; merging with an empty state changes nothing. */
typedef void lowkey_merge_fn(int n_rows, int value_head_dim, struct lowkey_state into,
                             struct lowkey_state from);

lowkey_pack_fn lowkey_pack_scalar;
lowkey_unpack_fn lowkey_unpack_scalar;
lowkey_attend_page_fn lowkey_attend_page_scalar;
lowkey_merge_fn lowkey_merge_scalar;

struct lowkey_kernels {
    const char *isa;
    int (*supported)(void);
    lowkey_pack_fn *pack;
    lowkey_unpack_fn *unpack;
    lowkey_attend_page_fn *attend_page;
    lowkey_merge_fn *merge;
};
extern const struct lowkey_kernels lowkey_kernels[]; /* best first; ends with isa == NULL */

/* The row of that name, or the best supported one for NULL; NULL: no such row here. */
const struct lowkey_kernels *lowkey_kernels_find(const char *isa);

#endif
