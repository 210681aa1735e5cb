/* codes.h - where the bits of a code are: planes of 64 slots, for C and CUDA both.
 *
 * A code of b bits is split into planes of 1, 2, 4, 8 or 16 bits: 3 = 2 + 1 and 5 = 4 + 1 (the wide plane
 * holds the low bits), the others are one plane. A row of a plane of p <= 8 bits is 8 p bytes: slot t is in
 * byte t mod 8p, at bits p * (t div 8p) and up. A 16-bit row is 64 little-endian words. So a code never
 * straddles a byte, and a register of a row unpacks by shift and mask into slots in order. */
#ifndef LOWKEY_CODES_H
#define LOWKEY_CODES_H

#include <stdint.h>

#if defined(__CUDACC__)
#define LOWKEY_INLINE static __host__ __device__ inline
#else
#define LOWKEY_INLINE static inline
#endif

enum { LOWKEY_PAGE_SLOTS = 64, LOWKEY_MAX_HEAD_DIM = 256, LOWKEY_MAX_TABLE = 64 };

/* Bits of the wide plane of a code of that many bits: 1, 2, 2, 4, 4, 8, 16; 0: no such width. */
LOWKEY_INLINE int lowkey_wide_bits(int bits)
{
    return bits == 3 ? 2 : bits == 5 ? 4 : bits == 1 || bits == 2 || bits == 4 || bits == 8 || bits == 16 ? bits : 0;
}

/* Does a code of that many bits have a second plane, of one bit, for its top bit? */
LOWKEY_INLINE int lowkey_has_top_bit(int bits)
{
    return bits == 3 || bits == 5;
}

LOWKEY_INLINE int lowkey_row_bytes(int plane_bits)
{
    return plane_bits * LOWKEY_PAGE_SLOTS / 8;
}

LOWKEY_INLINE unsigned lowkey_plane_get(const uint8_t *row, int plane_bits, int slot)
{
    if (plane_bits == 16) return (unsigned)(row[2 * slot] | row[2 * slot + 1] << 8);
    const int row_bytes = lowkey_row_bytes(plane_bits);
    const int shift = plane_bits * (slot / row_bytes);
    return (unsigned)row[slot % row_bytes] >> shift & ((1u << plane_bits) - 1);
}

/* Sets the slot's bits and no others. code < 2^plane_bits. */
LOWKEY_INLINE void lowkey_plane_set(uint8_t *row, int plane_bits, int slot, unsigned code)
{
    if (plane_bits == 16) {
        row[2 * slot] = (uint8_t)code;
        row[2 * slot + 1] = (uint8_t)(code >> 8);
        return;
    }
    const int row_bytes = lowkey_row_bytes(plane_bits);
    const int shift = plane_bits * (slot / row_bytes);
    uint8_t *byte = row + slot % row_bytes;
    *byte = (uint8_t)((*byte & ~(((1u << plane_bits) - 1) << shift)) | code << shift);
}

#endif
