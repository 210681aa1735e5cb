/* page.h - what a page is made of: 64 slots of one layer and KV head, keys or values; and the side page of
 * a layer, for what belongs to a token of all its heads. formats/README.md, "Pages", says the same in prose.
 *
 * A page holds its planes one after the other, widest first (16, 8, 4, 2, 1 bits), each plane's rows
 * contiguous in the order of the head's rows and each plane padded to 64 bytes. */
#ifndef LOWKEY_PAGE_H
#define LOWKEY_PAGE_H

#include <stddef.h>
#include <stdint.h>

#include "formats/codes.h"

#ifdef __cplusplus
extern "C" {
#endif

struct lowkey_row {          /* one channel's place in a page */
    uint32_t wide_offset;    /* bytes from the page's start to the row in its wide plane */
    uint32_t top_offset;     /* ... to the row in the 1-bit plane, for 3 and 5 bits; else 0 */
    uint16_t channel;        /* of the head, 0..head_dim-1 */
    uint8_t bits;            /* 1..5, 8, 16 */
    uint8_t wide_bits;       /* of the wide plane: 1, 2, 4, 8, 16 */
};

/* Lay out a page: row r holds channel order[r], of bits[order[r]] bits. rows: [head_dim]. Returns the page's bytes,
 * a multiple of 64. */
size_t lowkey_page_layout(int head_dim, const uint8_t *bits, const uint16_t *order, struct lowkey_row *rows);

LOWKEY_INLINE unsigned lowkey_code_get(const uint8_t *page, const struct lowkey_row *row, int slot)
{
    unsigned code = lowkey_plane_get(page + row->wide_offset, row->wide_bits, slot);
    if (lowkey_has_top_bit(row->bits)) code |= lowkey_plane_get(page + row->top_offset, 1, slot) << row->wide_bits;
    return code;
}

LOWKEY_INLINE void lowkey_code_set(uint8_t *page, const struct lowkey_row *row, int slot, unsigned code)
{
    lowkey_plane_set(page + row->wide_offset, row->wide_bits, slot, code & ((1u << row->wide_bits) - 1));
    if (lowkey_has_top_bit(row->bits)) lowkey_plane_set(page + row->top_offset, 1, slot, code >> row->wide_bits);
}

/* The entry of a table that a code of a trellis stands for; next, after: codes of the next two rows, 0 behind the last. */
LOWKEY_INLINE unsigned lowkey_trellis_entry(unsigned code, unsigned next, unsigned after)
{
    return code >> 1 << 2 | ((code ^ after) & 1) << 1 | (next & 1);
}

/* The number of the entry at row r: the code itself without a trellis. rows: [head_dim], all of the page's. */
LOWKEY_INLINE unsigned lowkey_entry_get(const uint8_t *page, const struct lowkey_row *rows, int head_dim, int r, int slot,
                                        int trellis)
{
    const unsigned code = lowkey_code_get(page, &rows[r], slot);
    if (!trellis) return code;
    return lowkey_trellis_entry(code, r + 1 < head_dim ? lowkey_code_get(page, &rows[r + 1], slot) : 0,
                                r + 2 < head_dim ? lowkey_code_get(page, &rows[r + 2], slot) : 0);
}

struct lowkey_outlier { /* one entry of a side page, 4 bytes, little-endian */
    uint16_t channel;   /* h * head_dim + c, over all KV heads of the layer */
    uint16_t residual;  /* f16, times 2^exponent of the channel: what is added to its reconstruction */
};

struct lowkey_side_layout {    /* offsets in a layer's side page, in bytes; each section padded to 64 */
    uint32_t scale_offset;     /* [64][n_blocks] f16 or f32 */
    uint32_t zero_offset;      /* [64][n_blocks] */
    uint32_t end_offset;       /* [64] u16: entries of this page up to and with slot t */
    uint32_t outlier_offset;   /* [capacity] struct lowkey_outlier */
    uint32_t bytes;            /* 0: no side page */
};

/* n_blocks: scales a token has (0: none), scale_bytes: 2 or 4; capacity: outlier entries a page (0: none). */
struct lowkey_side_layout lowkey_side_page_layout(int n_blocks, int scale_bytes, int capacity);

#ifdef __cplusplus
}
#endif

#if !defined(__cplusplus)
_Static_assert(sizeof(struct lowkey_row) == 12, "a row is 12 bytes");
_Static_assert(sizeof(struct lowkey_outlier) == 4, "an outlier entry is 32 bits");
#endif

#endif
