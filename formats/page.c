/* page.c - lays out pages and side pages. Everything that reads or writes one takes its offsets from here. */
#include "formats/page.h"

static uint32_t pad64(uint32_t bytes)
{
    return (bytes + 63u) & ~63u;
}

size_t lowkey_page_layout(int head_dim, const uint8_t *bits, const uint16_t *order, struct lowkey_row *rows)
{
    for (int r = 0; r < head_dim; r++) {
        const int b = bits[order[r]];
        rows[r] = (struct lowkey_row) { .channel = order[r],
                                        .bits = (uint8_t)b,
                                        .wide_bits = (uint8_t)lowkey_wide_bits(b) };
    }
    uint32_t offset = 0;
    for (int plane = 16; plane >= 1; plane /= 2) {
        for (int r = 0; r < head_dim; r++) {
            uint32_t *place = rows[r].wide_bits == plane                       ? &rows[r].wide_offset
                              : plane == 1 && lowkey_has_top_bit(rows[r].bits) ? &rows[r].top_offset
                                                                               : NULL;
            if (!place) continue;
            *place = offset;
            offset += (uint32_t)lowkey_row_bytes(plane);
        }
        offset = pad64(offset);
    }
    return offset;
}

struct lowkey_side_layout lowkey_side_page_layout(int n_blocks, int scale_bytes, int capacity)
{
    struct lowkey_side_layout layout = { 0 };
    uint32_t offset = 0;
    if (n_blocks > 0) {
        const uint32_t section = pad64((uint32_t)(LOWKEY_PAGE_SLOTS * n_blocks * scale_bytes));
        layout.scale_offset = 0;
        layout.zero_offset = section;
        offset = 2 * section;
    }
    if (capacity > 0) {
        layout.end_offset = offset;
        offset += pad64(LOWKEY_PAGE_SLOTS * (uint32_t)sizeof(uint16_t));
        layout.outlier_offset = offset;
        offset += pad64((uint32_t)capacity * (uint32_t)sizeof(struct lowkey_outlier));
    }
    layout.bytes = offset;
    return layout;
}
