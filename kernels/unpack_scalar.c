/* unpack_scalar.c - codes back to values: row by row, since a row is contiguous, then the outliers' residuals. */
#include "kernels/element.h"
#include "kernels/kernels.h"

/* A plane's row into 64 numbers of plane_bits bits. As lowkey_plane_get for every slot, in the order of the bytes. */
static void unpack_row(const uint8_t *row, int plane_bits, uint16_t codes[LOWKEY_PAGE_SLOTS])
{
    if (plane_bits == 16) {
        for (int t = 0; t < LOWKEY_PAGE_SLOTS; t++) codes[t] = lowkey_get_u16(row + 2 * t);
        return;
    }
    const int row_bytes = lowkey_row_bytes(plane_bits), mask = (1 << plane_bits) - 1;
    for (int shift = 0; shift < 8; shift += plane_bits, codes += row_bytes)
        for (int i = 0; i < row_bytes; i++) codes[i] = (uint16_t)(row[i] >> shift & mask);
}

static void add_outliers(const struct lowkey_unpack_args *args)
{
    const struct lowkey_side *side = args->side;
    const int low = args->head * side->head_dim, high = low + side->head_dim;
    for (int s = 0; s < args->n_slots; s++) {
        const int slot = args->first_slot + s, end = lowkey_end_outlier(side, args->side_page, slot);
        for (int i = lowkey_first_outlier(side, args->side_page, slot, args->first_live_slot); i < end; i++) {
            const struct lowkey_outlier outlier = lowkey_get_outlier(side, args->side_page, i);
            if (outlier.channel < low || outlier.channel >= high) continue;
            float *value = args->out + s * args->out_stride + (outlier.channel - low);
            *value = lowkey_add_residual(*value, outlier.residual, side->unit[outlier.channel]);
        }
    }
}

/* Codes of row r into entries of its table. lows: the lowest bits of the codes of the two rows behind it, which move on. */
static void codes_to_entries(uint16_t codes[LOWKEY_PAGE_SLOTS], uint8_t lows[2][LOWKEY_PAGE_SLOTS])
{
    for (int t = 0; t < LOWKEY_PAGE_SLOTS; t++) {
        const unsigned code = codes[t];
        codes[t] = (uint16_t)lowkey_trellis_entry(code, lows[0][t], lows[1][t]);
        lows[1][t] = lows[0][t];
        lows[0][t] = code & 1;
    }
}

void lowkey_unpack_scalar(const struct lowkey_unpack_args *args)
{
    const struct lowkey_side *side = args->side;
    const struct lowkey_head *head = &side->heads[args->head];
    uint8_t lows[2][LOWKEY_PAGE_SLOTS] = { { 0 } };
    for (int r = side->head_dim - 1; r >= 0; r--) {
        const struct lowkey_row *row = &head->rows[r];
        const int g = args->head * side->head_dim + row->channel;
        uint16_t codes[LOWKEY_PAGE_SLOTS], tops[LOWKEY_PAGE_SLOTS];
        unpack_row(args->page + row->wide_offset, row->wide_bits, codes);
        if (lowkey_has_top_bit(row->bits)) {
            unpack_row(args->page + row->top_offset, 1, tops);
            for (int t = 0; t < LOWKEY_PAGE_SLOTS; t++)
                codes[t] = (uint16_t)(codes[t] | tops[t] << row->wide_bits);
        }
        if (side->trellis) codes_to_entries(codes, lows);
        for (int s = 0; s < args->n_slots; s++) {
            const int slot = args->first_slot + s;
            const float value = lowkey_code_value(side, args->head, r, codes[slot]);
            args->out[s * args->out_stride + row->channel] = lowkey_on_grid(
                side, row, lowkey_grid_of(side, args->side_page, slot, g), value);
        }
    }
    if (side->outlier_rule != LOWKEY_OUTLIER_NONE) add_outliers(args);
}
