/* element.h - one stored element: the value of a code, and what a token's scale and zero do to it. The scalar kernels
 * share these; formats/README.md, "Pages" and "Packing", is what they follow. One rounding to f32 a step. */
#ifndef LOWKEY_ELEMENT_H
#define LOWKEY_ELEMENT_H

#include <float.h>

#include "formats/half.h"
#include "formats/side.h"

/* Compile a function for the base machine and for those that have more, and pick when the program is loaded. Only for code
 * whose results are the same bits either way. (ThreadSanitizer is not up yet when the choice is made, and crashes.) */
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define LOWKEY_CLONES(...) __attribute__((target_clones("default", __VA_ARGS__)))
#else
#define LOWKEY_CLONES(...)
#endif

/* A mean of finite numbers can round beyond the largest of them, to infinity: then the end of f32 it is. */
LOWKEY_INLINE float lowkey_within_f32(float x)
{
    return x > FLT_MAX ? FLT_MAX : x < -FLT_MAX ? -FLT_MAX : x;
}

/* Scale and zero of a token's block of channels, as stored; 1 and 0 where there are none. */
struct lowkey_grid {
    float scale, zero;
};

LOWKEY_INLINE uint16_t lowkey_get_u16(const uint8_t *at)
{
    return (uint16_t)(at[0] | at[1] << 8);
}

LOWKEY_INLINE void lowkey_put_u16(uint8_t *at, unsigned value)
{
    at[0] = (uint8_t)value;
    at[1] = (uint8_t)(value >> 8);
}

/* f16 or bf16 by rule: what sinks and 16-bit channels hold. Beyond the largest number: saturated and counted. */
LOWKEY_INLINE float lowkey_decode_16(lowkey_rule rule, unsigned code)
{
    return rule == LOWKEY_RULE_BF16 ? lowkey_bf16_to_f32((uint16_t)code) : lowkey_f16_to_f32((uint16_t)code);
}

LOWKEY_INLINE uint16_t lowkey_encode_16(lowkey_rule rule, float x, uint64_t *n_saturated)
{
    return rule == LOWKEY_RULE_BF16 ? lowkey_f32_to_bf16_saturate(x, n_saturated) : lowkey_f32_to_f16_saturate(x, n_saturated);
}

/* Number i of a scale or zero section. */
LOWKEY_INLINE float lowkey_get_scale(const uint8_t *section, lowkey_token_scale type, size_t i)
{
    if (type == LOWKEY_SCALE_F16) return lowkey_f16_to_f32(lowkey_get_u16(section + 2 * i));
    const uint8_t *at = section + 4 * i;
    return lowkey_f32_from_bits((uint32_t)lowkey_get_u16(at) | (uint32_t)lowkey_get_u16(at + 2) << 16);
}

LOWKEY_INLINE void lowkey_put_scale(uint8_t *section, lowkey_token_scale type, size_t i, float x,
                                    uint64_t *n_saturated)
{
    if (type == LOWKEY_SCALE_F16) {
        lowkey_put_u16(section + 2 * i, lowkey_f32_to_f16_saturate(x, n_saturated));
    } else {
        lowkey_put_u16(section + 4 * i, lowkey_f32_bits(x) & 0xffff);
        lowkey_put_u16(section + 4 * i + 2, lowkey_f32_bits(x) >> 16);
    }
}

/* The grid of channel h * head_dim + c at a slot. */
LOWKEY_INLINE struct lowkey_grid lowkey_grid_of(const struct lowkey_side *side, const uint8_t *side_page,
                                                int slot, int channel)
{
    struct lowkey_grid grid = { 1, 0 };
    if (side->token_scale == LOWKEY_SCALE_NONE) return grid;
    const size_t i = (size_t)slot * (size_t)side->n_blocks + (size_t)(channel / side->scale_block);
    grid.scale = lowkey_get_scale(side_page + side->layout.scale_offset, side->token_scale, i);
    grid.zero = lowkey_get_scale(side_page + side->layout.zero_offset, side->token_scale, i);
    return grid;
}

/* Which entries of a side page are a token's: first..end-1. */
LOWKEY_INLINE int lowkey_first_outlier(const struct lowkey_side *side, const uint8_t *side_page, int slot,
                                       int first_live_slot)
{
    return slot <= first_live_slot ? 0 : lowkey_get_u16(side_page + side->layout.end_offset + 2 * (slot - 1));
}

LOWKEY_INLINE int lowkey_end_outlier(const struct lowkey_side *side, const uint8_t *side_page, int slot)
{
    return lowkey_get_u16(side_page + side->layout.end_offset + 2 * slot);
}

/* Entry i of a side page. */
LOWKEY_INLINE struct lowkey_outlier lowkey_get_outlier(const struct lowkey_side *side, const uint8_t *side_page, int i)
{
    const uint8_t *at = side_page + side->layout.outlier_offset + (size_t)i * sizeof(struct lowkey_outlier);
    const struct lowkey_outlier outlier = { lowkey_get_u16(at), lowkey_get_u16(at + 2) };
    return outlier;
}

LOWKEY_INLINE void lowkey_put_outlier(const struct lowkey_side *side, uint8_t *side_page, int i, struct lowkey_outlier outlier)
{
    uint8_t *at = side_page + side->layout.outlier_offset + (size_t)i * sizeof(struct lowkey_outlier);
    lowkey_put_u16(at, outlier.channel);
    lowkey_put_u16(at + 2, outlier.residual);
}

/* What a code of row r of head h stands for before a token's scale; of a table it is the number of the entry. */
LOWKEY_INLINE float lowkey_code_value(const struct lowkey_side *side, int h, int r, unsigned code)
{
    const struct lowkey_row *row = &side->heads[h].rows[r];
    if (row->bits == 16) return lowkey_decode_16(side->rule_16, code);
    if (row->bits != 8) return side->heads[h].table[(size_t)r * (size_t)side->table_entries + code];
    const float x = side->rule_8 == LOWKEY_RULE_INT8   ? (float)(code < 128 ? (int)code : (int)code - 256)
                    : side->rule_8 == LOWKEY_RULE_E4M3 ? lowkey_e4m3_to_f32((uint8_t)code)
                                                       : lowkey_e5m2_to_f32((uint8_t)code);
    return side->rule_scale[(size_t)h * (size_t)side->head_dim + row->channel] * x;
}

/* ... and with it. Channels of 8 and 16 bits know none. */
LOWKEY_INLINE float lowkey_on_grid(const struct lowkey_side *side, const struct lowkey_row *row,
                                   struct lowkey_grid grid, float value)
{
    if (side->token_scale == LOWKEY_SCALE_NONE || row->bits > 5) return value;
    const float scaled = grid.scale * value;
    return grid.zero + scaled;
}

LOWKEY_INLINE float lowkey_add_residual(float value, uint16_t residual, float unit)
{
    const float scaled = lowkey_f16_to_f32(residual) * unit;
    return value + scaled;
}

#endif
