/* exponential.h - exp in f32 for whole rows: attention and the vocabulary take hundreds of millions of them a window, and
 * libm's one at a time are a quarter of all the time. Plain C that compilers make vectors of; the same bits whatever the
 * instruction set. */
#ifndef LOWKEY_EXPONENTIAL_H
#define LOWKEY_EXPONENTIAL_H

#include "formats/half.h"

/* Within 1.1e-7 of exp(x), relative, for x in -87..87; x beyond counts as the nearer end (so that nothing underflows:
 * e^-87 is 1.6e-38), NaN as one of them. x = n ln 2 + r with |r| <= ln 2 / 2 and a polynomial in r of degree 6, which is
 * within 3.1e-9; the rest is rounding. The range is kept by integers: compilers make no vectors of f32 comparisons. */
static inline float lowkey_exp(float x)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, in the low bits */
    const int32_t end = 0x42ae0000, size = (int32_t)(lowkey_f32_bits(x) & 0x7fffffffu); /* of 87, of |x| */
    const float within = lowkey_f32_from_bits((uint32_t)(size < end ? size : end) |
                                              (lowkey_f32_bits(x) & 0x80000000u));
    const float shifted = within * 1.44269504f + shift, n = shifted - shift;
    const float r = (within - n * 0.693359375f) -
                    n * -2.12194440e-4f; /* ln 2 in two parts; the first product is exact */
    float p = 1.38146e-3f;
    p = p * r + 8.36872e-3f;
    p = p * r + 4.166839e-2f;
    p = p * r + 1.6666521e-1f;
    p = p * r + 0.49999993f;
    const float exp_r = (p * (r * r) + r) + 1.0f;
    const uint32_t exponent = (lowkey_f32_bits(shifted) - lowkey_f32_bits(shift) + 127) << 23;
    return exp_r * lowkey_f32_from_bits(exponent);
}

/* The largest of x[n], n >= 1, and in *at, where not NULL, the first place it stands at. */
float lowkey_largest(const float *x, int n, int *at);

/* x[i] = exp(x[i] - shift); returns their sum, in f64. */
double lowkey_exp_row(float *x, int n, float shift);

/* sum_i exp(x[i] - shift), in f64. */
double lowkey_exp_sum(const float *x, int n, float shift);

/* gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i] */
void lowkey_swiglu(float *gate, const float *up, size_t n);
/* gate[i] = gelu(gate[i]) * up[i], gelu(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) */
void lowkey_geglu(float *gate, const float *up, size_t n);

#endif
