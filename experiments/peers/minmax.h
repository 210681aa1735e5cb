/* minmax.h - the two numbers that a group of elements shares, found from the group, and quantizing with them:
 * what most formats of this folder are made of. Both are kept in f16, as their authors do. */
#ifndef LOWKEY_MINMAX_H
#define LOWKEY_MINMAX_H

#include <stddef.h>

struct lowkey_group_scale { /* x ~ zero + scale * code */
    float scale, zero;
};

/* Steps of a group that reaches from low to high: scale = (high - low) / (2^bits - 1), zero = low, each
 * rounded to f16 (beyond 65504: 65504). A scale that f16 cannot hold is 0: every element becomes zero. */
struct lowkey_group_scale lowkey_minmax_scale(float low, float high, int bits);

/* The nearest of a group's 2^bits steps, halves to the even one. */
float lowkey_minmax_step(struct lowkey_group_scale group, int bits, float x);

/* Quantize x[n], one group, in place. */
void lowkey_minmax_row(float *x, int n, int bits);

/* Quantize, in place, n_rows x n_columns numbers, rows row_stride apart: a column is a group. bits:
 * [n_columns], or NULL: all_bits. */
void lowkey_minmax_columns(float *x, int n_rows, size_t row_stride, int n_columns, const unsigned char *bits,
                           int all_bits);

/* The entry next to each of x[n], in place: table[n_entries] rises, boundary[n_entries - 1]; ties to the
 * lower. */
void lowkey_nearest_entries(float *x, int n, const float *table, const float *boundary, int n_entries);

#endif
