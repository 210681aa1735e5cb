/* half.h - f16, bf16, E4M3, E5M2 and E2M1 <-> f32: exact one way, round to nearest, ties to even the other
 * way. For C and CUDA both; no tables, and no arithmetic that a flush-to-zero mode could change. Subnormals
 * are kept.
 *
 * One body serves all five: a sign bit, exponent bits, mantissa bits, bias 2^(exponent bits - 1) - 1, and a
 * rule for the codes at the top. Every argument but the number is a constant, so the compiler makes a version
 * of each. NaN stays NaN, quiet, with its sign and the top of its payload (as the F16C instructions do). */
#ifndef LOWKEY_HALF_H
#define LOWKEY_HALF_H

#include <stdint.h>
#include <string.h>

#include "formats/codes.h"

enum {                  /* what the codes with all exponent bits set mean */
    LOWKEY_TOP_IEEE,    /* infinity and NaN: f16, bf16, E5M2 */
    LOWKEY_TOP_NAN,     /* numbers, but for the last, which is NaN; no infinity: E4M3 */
    LOWKEY_TOP_NUMBERS  /* numbers: E2M1 */
};

LOWKEY_INLINE uint32_t lowkey_f32_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

LOWKEY_INLINE float lowkey_f32_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* By its bits, 1 or 0: unlike isfinite, compilers make vectors of loops over it. */
LOWKEY_INLINE uint32_t lowkey_f32_is_finite(float x)
{
    return (lowkey_f32_bits(x) & 0x7f800000u) != 0x7f800000u;
}

/* The code of the largest finite value, sign left out. */
LOWKEY_INLINE uint32_t lowkey_largest_code(int exponent_bits, int mantissa_bits, int top)
{
    const uint32_t last = (1u << (exponent_bits + mantissa_bits)) - 1;
    return top == LOWKEY_TOP_IEEE ? last - (1u << mantissa_bits) : top == LOWKEY_TOP_NAN ? last - 1 : last;
}

/* Without branches, so that compilers make vectors of loops over it. */
LOWKEY_INLINE float lowkey_small_decode(uint32_t code, int exponent_bits, int mantissa_bits, int top)
{
    const int width = exponent_bits + mantissa_bits, bias = (1 << (exponent_bits - 1)) - 1;
    const uint32_t sign = (code >> width & 1) << 31, magnitude = code & ((1u << width) - 1);
    const uint32_t moved = magnitude << (23 - mantissa_bits), raise = (uint32_t)(127 - bias) << 23;
    /* A subnormal is the mantissa under the leading one of the smallest normal number, less that number. */
    const uint32_t smallest = raise + 0x00800000u;
    const uint32_t subnormal = lowkey_f32_bits(lowkey_f32_from_bits(smallest + moved) -
                                               lowkey_f32_from_bits(smallest));
    const uint32_t quiet = (uint32_t)((magnitude & ((1u << mantissa_bits) - 1)) != 0) << 22;
    const uint32_t is_normal = 0u - (uint32_t)(magnitude >> mantissa_bits !=
                                               0); /* masks: ?: would be branches again */
    const uint32_t is_special = 0u - (uint32_t)(magnitude >
                                                lowkey_largest_code(exponent_bits, mantissa_bits, top));
    const uint32_t finite = bias == 127 ? moved : ((moved + raise) & is_normal) | (subnormal & ~is_normal);
    const uint32_t special = 0x7f800000u | moved | quiet;
    return lowkey_f32_from_bits(sign | (special & is_special) | (finite & ~is_special));
}

/* What rounds beyond the largest value, infinities too, becomes the largest value and *n_saturated one more
 * (where it is not NULL) if saturate; else infinity, which IEEE formats alone have. */
LOWKEY_INLINE uint32_t lowkey_small_encode(float x, int exponent_bits, int mantissa_bits, int top,
                                           int saturate, uint64_t *n_saturated)
{
    const int width = exponent_bits + mantissa_bits, bias = (1 << (exponent_bits - 1)) - 1;
    const uint32_t bits = lowkey_f32_bits(x), magnitude = bits & 0x7fffffffu;
    const uint32_t sign = (bits >> 31) << width, last = (1u << width) - 1;
    if (magnitude > 0x7f800000u) {
        if (top == LOWKEY_TOP_NUMBERS) return last; /* there is no NaN: the largest value, positive */
        if (top == LOWKEY_TOP_NAN) return sign | last;
        const uint32_t quiet = 1u << (mantissa_bits - 1), payload = magnitude >> (23 - mantissa_bits);
        return sign | (last - (1u << mantissa_bits) + 1) | quiet | (payload & ((1u << mantissa_bits) - 1));
    }
    /* The exponent of the result, as f32 has it, is that of x or the smallest normal one. The mantissa with
     * its leading one is shifted to that exponent and rounded; a carry out of it runs into the exponent, as
     * it should. */
    const int of_x = (int)(magnitude >> 23) > 1 ? (int)(magnitude >> 23) : 1, smallest = 128 - bias;
    const int exponent = of_x > smallest ? of_x : smallest;
    const int shift = 23 - mantissa_bits + exponent - of_x;
    if (shift > 25) return sign; /* below half of the smallest subnormal */
    const uint32_t mantissa = (magnitude & 0x007fffffu) | (magnitude >> 23 ? 0x00800000u : 0);
    const uint32_t rounded = (mantissa + (1u << (shift - 1)) - 1 + (mantissa >> shift & 1)) >> shift;
    const uint32_t code = rounded + ((uint32_t)(exponent - smallest) << mantissa_bits);
    const uint32_t largest = lowkey_largest_code(exponent_bits, mantissa_bits, top);
    if (code <= largest) return sign | code;
    if (!saturate) return sign | (largest + 1);
    if (n_saturated) ++*n_saturated;
    return sign | largest;
}

LOWKEY_INLINE float lowkey_f16_to_f32(uint16_t code)
{
    return lowkey_small_decode(code, 5, 10, LOWKEY_TOP_IEEE);
}
LOWKEY_INLINE float lowkey_bf16_to_f32(uint16_t code)
{
    return lowkey_small_decode(code, 8, 7, LOWKEY_TOP_IEEE);
}
LOWKEY_INLINE float lowkey_e4m3_to_f32(uint8_t code)
{
    return lowkey_small_decode(code, 4, 3, LOWKEY_TOP_NAN);
}
LOWKEY_INLINE float lowkey_e5m2_to_f32(uint8_t code)
{
    return lowkey_small_decode(code, 5, 2, LOWKEY_TOP_IEEE);
}
LOWKEY_INLINE float lowkey_e2m1_to_f32(uint8_t code)
{
    return lowkey_small_decode(code, 2, 1, LOWKEY_TOP_NUMBERS);
}

/* As IEEE 754 has it: what rounds beyond the largest value becomes infinity. */
LOWKEY_INLINE uint16_t lowkey_f32_to_f16(float x)
{
    return (uint16_t)lowkey_small_encode(x, 5, 10, LOWKEY_TOP_IEEE, 0, NULL);
}

LOWKEY_INLINE uint16_t lowkey_f32_to_bf16(float x)
{
    return (uint16_t)lowkey_small_encode(x, 8, 7, LOWKEY_TOP_IEEE, 0, NULL);
}

/* As the cache stores it: what rounds beyond the largest value becomes the largest value, and is counted.
 * n_saturated may be NULL. */
LOWKEY_INLINE uint16_t lowkey_f32_to_f16_saturate(float x, uint64_t *n_saturated)
{
    return (uint16_t)lowkey_small_encode(x, 5, 10, LOWKEY_TOP_IEEE, 1, n_saturated);
}

LOWKEY_INLINE uint16_t lowkey_f32_to_bf16_saturate(float x, uint64_t *n_saturated)
{
    return (uint16_t)lowkey_small_encode(x, 8, 7, LOWKEY_TOP_IEEE, 1, n_saturated);
}

LOWKEY_INLINE uint8_t lowkey_f32_to_e4m3_saturate(float x, uint64_t *n_saturated)
{
    return (uint8_t)lowkey_small_encode(x, 4, 3, LOWKEY_TOP_NAN, 1, n_saturated);
}

LOWKEY_INLINE uint8_t lowkey_f32_to_e5m2_saturate(float x, uint64_t *n_saturated)
{
    return (uint8_t)lowkey_small_encode(x, 5, 2, LOWKEY_TOP_IEEE, 1, n_saturated);
}

/* E2M1 has no NaN: NaN becomes 6. */
LOWKEY_INLINE uint8_t lowkey_f32_to_e2m1_saturate(float x, uint64_t *n_saturated)
{
    return (uint8_t)lowkey_small_encode(x, 2, 1, LOWKEY_TOP_NUMBERS, 1, n_saturated);
}

/* These saturate always. */
LOWKEY_INLINE uint8_t lowkey_f32_to_e4m3(float x) { return lowkey_f32_to_e4m3_saturate(x, NULL); }
LOWKEY_INLINE uint8_t lowkey_f32_to_e5m2(float x) { return lowkey_f32_to_e5m2_saturate(x, NULL); }
LOWKEY_INLINE uint8_t lowkey_f32_to_e2m1(float x) { return lowkey_f32_to_e2m1_saturate(x, NULL); }

#endif
