/* minmax.c - groups that share a scale and a zero, as KIVI (arXiv 2402.02750) has them, in rows and in
 * columns; and the look-up of a table's nearest entry. */
#include "experiments/peers/minmax.h"

#include "formats/half.h"

/* Halves to even, for |x| < 2^22; unlike rintf, compilers make vectors of it. */
static inline float nearest_integer(float x)
{
    const float shift = 12582912.f; /* 1.5 * 2^23: beyond it f32 has integers only */
    return (x + shift) - shift;
}

struct lowkey_group_scale lowkey_minmax_scale(float low, float high, int bits)
{
    const float scale = (high - low) / (float)((1 << bits) - 1);
    return (struct lowkey_group_scale) { lowkey_f16_to_f32(lowkey_f32_to_f16_saturate(scale, NULL)),
                                         lowkey_f16_to_f32(lowkey_f32_to_f16_saturate(low, NULL)) };
}

static inline float step_of(float scale, float zero, float last, float x)
{
    float code = scale > 0 ? (x - zero) / scale : 0;
    code = code > last ? last : code;
    code = code > 0 ? code : 0;
    return zero + scale * nearest_integer(code);
}

float lowkey_minmax_step(struct lowkey_group_scale group, int bits, float x)
{
    return step_of(group.scale, group.zero, (float)((1 << bits) - 1), x);
}

void lowkey_minmax_row(float *x, int n, int bits)
{
    float low = x[0], high = x[0];
    for (int i = 1; i < n; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    const struct lowkey_group_scale group = lowkey_minmax_scale(low, high, bits);
    const float last = (float)((1 << bits) - 1);
    for (int i = 0; i < n; i++) x[i] = step_of(group.scale, group.zero, last, x[i]);
}

void lowkey_minmax_columns(float *x, int n_rows, size_t row_stride, int n_columns, const unsigned char *bits,
                           int all_bits)
{
    enum { BLOCK = 64 };
    for (int first = 0; first < n_columns; first += BLOCK) {
        const int n = n_columns - first < BLOCK ? n_columns - first : BLOCK;
        float low[BLOCK], high[BLOCK], scale[BLOCK], zero[BLOCK], last[BLOCK];
        for (int c = 0; c < n; c++) low[c] = high[c] = x[first + c];
        for (int r = 1; r < n_rows; r++) {
            const float *row = x + (size_t)r * row_stride + first;
            for (int c = 0; c < n; c++) {
                low[c] = row[c] < low[c] ? row[c] : low[c];
                high[c] = row[c] > high[c] ? row[c] : high[c];
            }
        }
        for (int c = 0; c < n; c++) {
            const int width = bits ? bits[first + c] : all_bits;
            const struct lowkey_group_scale group = lowkey_minmax_scale(low[c], high[c], width);
            scale[c] = group.scale;
            zero[c] = group.zero;
            last[c] = (float)((1 << width) - 1);
        }
        for (int r = 0; r < n_rows; r++) {
            float *row = x + (size_t)r * row_stride + first;
            for (int c = 0; c < n; c++) row[c] = step_of(scale[c], zero[c], last[c], row[c]);
        }
    }
}

void lowkey_nearest_entries(float *x, int n, const float *table, const float *boundary, int n_entries)
{
    enum { BLOCK = 64, FEW = 16 };
    for (int first = 0; first < n; first += BLOCK) {
        const int m = n - first < BLOCK ? n - first : BLOCK;
        float *block = x + first;
        int code[BLOCK] = { 0 };
        if (n_entries <= FEW) {
            for (int k = 0; k < n_entries - 1; k++)
                for (int i = 0; i < m; i++) code[i] += block[i] > boundary[k];
        } else {
            for (int i = 0; i < m; i++) { /* the first boundary that is not below */
                int low = 0, high = n_entries - 1;
                while (low < high) {
                    const int middle = (low + high) / 2;
                    if (block[i] > boundary[middle])
                        low = middle + 1;
                    else
                        high = middle;
                }
                code[i] = low;
            }
        }
        for (int i = 0; i < m; i++) block[i] = table[code[i]];
    }
}
