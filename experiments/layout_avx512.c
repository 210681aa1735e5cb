/* layout_avx512.c - decode loops over candidate page layouts, AVX-512 with VBMI, VNNI and BF16.
 * Timed by bench_layout.c; nothing else uses them. A page's planes follow each other, largest
 * first; 3-bit codes are a 2-bit plane and a 1-bit plane. */
#include "experiments/bench_layout.h"

#include <stddef.h>
#include <string.h>

#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

enum { HEADS = LOWKEY_LAYOUT_HEADS, VECTORS = 4 }; /* 64 tokens are 4 vectors of 16 sums */

/* Mask ? a : b, bit by bit. */
INLINE __m512i select_bits(__m512i mask, __m512i a, __m512i b)
{
    return _mm512_ternarylogic_epi64(mask, a, b, 0xca);
}

INLINE uint64_t load_64(const uint8_t *p)
{
    uint64_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE const uint8_t *plane_of_ones(const uint8_t *page)
{
    return page + LOWKEY_LAYOUT_CHANNELS * 16;
}

/* Codes of one row, a byte each in token order; bits above the code are junk, which the permutes
 * ignore because tables are repeated. A: each 8p-byte piece of the result is the row under one
 * shift. */
INLINE __m512i codes_strided(const uint8_t *page, int row, const int bits)
{
    if (bits == 4) {
        const __m256i x = _mm256_load_si256((const __m256i *)(page + (size_t)row * 32));
        return _mm512_srlv_epi64(_mm512_broadcast_i64x4(x),
                                 _mm512_setr_epi64(0, 0, 0, 0, 4, 4, 4, 4));
    }
    const __m128i x = _mm_load_si128((const __m128i *)(page + (size_t)row * 16));
    const __m512i two = _mm512_srlv_epi64(_mm512_broadcast_i32x4(x),
                                          _mm512_setr_epi64(0, 0, 2, 2, 4, 4, 6, 6));
    if (bits == 2) return two;
    const uint64_t bit = load_64(plane_of_ones(page) + (size_t)row * 8);
    const __m512i one = _mm512_rorv_epi64(_mm512_set1_epi64((long long)bit), /* to bit 2 of bytes */
                                          _mm512_setr_epi64(62, 63, 0, 1, 2, 3, 4, 5));
    return select_bits(_mm512_set1_epi8(3), two, one);
}

/* B: widen, so that a quadword has its 8 tokens, then pick 8 bits for each byte. */
INLINE __m512i codes_natural(const uint8_t *page, int row, const int bits)
{
    if (bits == 4) {
        const __m256i x = _mm256_load_si256((const __m256i *)(page + (size_t)row * 32));
        return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x1c1814100c080400),
                                            _mm512_cvtepu32_epi64(x));
    }
    const __m128i x = _mm_load_si128((const __m128i *)(page + (size_t)row * 16));
    const __m512i two = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x0e0c0a0806040200),
                                                     _mm512_cvtepu16_epi64(x));
    if (bits == 2) return two;
    const __mmask64 bit = load_64(plane_of_ones(page) + (size_t)row * 8);
    const __m512i clean = _mm512_and_si512(two, _mm512_set1_epi8(3));
    return _mm512_mask_add_epi8(clean, bit, clean, _mm512_set1_epi8(4));
}

INLINE __m512i codes(const uint8_t *page, int row, const int bits, const int natural)
{
    return natural ? codes_natural(page, row, bits) : codes_strided(page, row, bits);
}

/* ---- keys, f32: rows need no neighbours, so pair-interleaved rows have nothing to win ---- */

INLINE void keys_f32(const uint8_t *page, const struct lowkey_layout_inputs *in, float *out,
                     const int bits, const int natural)
{
    __m512 sum[HEADS][VECTORS] = { 0 };
    for (int row = 0; row < LOWKEY_LAYOUT_CHANNELS; row += 2) {
#pragma GCC unroll 2
        for (int side = 0; side < 2; side++) {
            const __m512i x = codes(page, row + side, bits, natural);
            const __m512 table = _mm512_load_ps(in->f32_table[row + side]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                const __m512i index = v ? _mm512_srli_epi32(x, (unsigned)v * 8) : x;
                const __m512 key = _mm512_permutexvar_ps(index, table);
#pragma GCC unroll 4
                for (int h = 0; h < HEADS; h++)
                    sum[h][v] = _mm512_fmadd_ps(key, _mm512_set1_ps(in->q_f32[row + side][h]),
                                                sum[h][v]);
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < HEADS * VECTORS; i++)
        _mm512_storeu_ps(out + (size_t)i * 16, sum[i / VECTORS][i % VECTORS]);
}

static int token_dwords(int position)
{
    return position % 16 * 4 + position / 16;
}

/* ---- keys, 16-bit products: both channels of a pair in one dword; bf16 (vdpbf16ps) or integers
 * (vpdpwssd), whose sums are 32-bit integers under a float's name until they are stored ---- */

INLINE __m512 dot(__m512 sum, __m512i a, __m512i b, const int integer)
{
    if (!integer) return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    /* Not the intrinsic: gcc 12 copies the sum before and after it, 32 moves in a loop of 40. */
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}

INLINE __m512 dot_result(__m512 sum, const int integer)
{
    return integer ? _mm512_cvtepi32_ps(_mm512_castps_si512(sum)) : sum;
}

INLINE void multiply_pairs(__m512 sum[HEADS][VECTORS], const uint16_t q[HEADS][2], const int v,
                           __m512i keys, const int integer)
{
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++) {
        int pair;
        memcpy(&pair, q[h], sizeof pair);
        sum[h][v] = dot(sum[h][v], keys, _mm512_set1_epi32(pair), integer);
    }
}

INLINE void store_sums(float *out, __m512 sum[HEADS][VECTORS], const int integer)
{
#pragma GCC unroll 16
    for (int i = 0; i < HEADS * VECTORS; i++)
        _mm512_storeu_ps(out + (size_t)i * 16, dot_result(sum[i / VECTORS][i % VECTORS], integer));
}

/* Look up row by row, then interleave the values. */
INLINE void keys_after(const uint8_t *page, const struct lowkey_layout_inputs *in, float *out,
                       const int bits, const int natural, const int integer)
{
    __m512 sum[HEADS][VECTORS] = { 0 };
    for (int j = 0; j < LOWKEY_LAYOUT_PAIRS; j++) {
        __m512i value[2][2];
#pragma GCC unroll 2
        for (int side = 0; side < 2; side++) {
            const __m512i x = codes(page, 2 * j + side, bits, natural);
            const __m512i table = _mm512_broadcast_i64x4(
                _mm256_load_si256((const __m256i *)in->table16[2 * j + side]));
            value[side][0] = _mm512_permutexvar_epi16(x, table);
            value[side][1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(x, 8), table);
        }
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            multiply_pairs(sum, in->q16[j], 2 * odd,
                           _mm512_unpacklo_epi16(value[0][odd], value[1][odd]), integer);
            multiply_pairs(sum, in->q16[j], 2 * odd + 1,
                           _mm512_unpackhi_epi16(value[0][odd], value[1][odd]), integer);
        }
    }
    store_sums(out, sum, integer);
}

static int token_after(int position)
{
    const int lane = position % 16, vector = position / 16;
    return 2 * (lane / 4 * 8 + vector % 2 * 4 + lane % 4) + vector / 2;
}

/* Byte numbers for _mm512_permutexvar_epi8: word i of row 2j, word i of row 2j + 1, repeated to
 * 64 bytes. */
INLINE __m512i word_interleave(const int row_bytes)
{
    _Alignas(64) uint8_t from[64];
    for (int i = 0; i < 64; i++)
        from[i] = (uint8_t)(i / 4 * 2 % row_bytes + (i & 1) + (i & 2) / 2 * row_bytes);
    return _mm512_load_si512(from);
}

/* Byte numbers for natural rows: dword i gets the bits of tokens 4i .. 4i + 3, second row in its
 * high word. */
INLINE __m512i field_interleave(const int plane)
{
    _Alignas(64) uint8_t from[64];
    for (int i = 0; i < 64; i++)
        from[i] = (uint8_t)(i / 4 * plane / 2 + (plane == 4 ? i & 1 : 0) + (i & 2) / 2 * 8 * plane);
    return _mm512_load_si512(from);
}

INLINE __m512i load_pair(const uint8_t *rows, const int plane, const int packing)
{
    if (packing == LOWKEY_LAYOUT_STRIDED)
        return _mm512_permutexvar_epi8(word_interleave(8 * plane), _mm512_loadu_si512(rows));
    if (packing == LOWKEY_LAYOUT_NATURAL)
        return _mm512_permutexvar_epi8(field_interleave(plane), _mm512_loadu_si512(rows));
    if (plane == 4) return _mm512_load_si512(rows);
    if (plane == 2) return _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i *)rows));
    return _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)rows));
}

/* A and C: every plane shifted so that the codes of the four vectors are the nibbles of a word. */
INLINE __m512i pair_nibbles(const uint8_t *page, int j, const int bits, const int packing)
{
    if (bits == 4) return load_pair(page + (size_t)j * 64, 4, packing);
    const __m512i high = _mm512_set_epi64(0x0002000200020002, 0x0002000200020002,
                                          0x0002000200020002, 0x0002000200020002, 0, 0, 0, 0);
    const __m512i two = _mm512_srlv_epi16(load_pair(page + (size_t)j * 32, 2, packing), high);
    if (bits == 2) return two;
    const __m512i one = _mm512_rorv_epi32(
        load_pair(plane_of_ones(page) + (size_t)j * 16, 1, packing),
        _mm512_setr_epi32(30, 30, 30, 30, 31, 31, 31, 31, 0, 0, 0, 0, 1, 1, 1, 1));
    return select_bits(_mm512_set1_epi8(0x33), two, one);
}

/* Interleave packed rows (or have them so), then look both tables up in one register. */
INLINE void keys_before(const uint8_t *page, const struct lowkey_layout_inputs *in, float *out,
                        const int bits, const int packing, const int integer)
{
    const __m512i second = _mm512_set1_epi32(
        0x00100000); /* the second row's table starts at entry 16 */
    const __m512i odd_byte = _mm512_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4);
    __m512 sum[HEADS][VECTORS] = { 0 };
    for (int j = 0; j < LOWKEY_LAYOUT_PAIRS; j++) {
        const __m512i table = _mm512_load_si512(in->table16[2 * j]);
        __m512i x, one = _mm512_setzero_si512();
        if (packing == LOWKEY_LAYOUT_NATURAL) {
            x = load_pair(page + (size_t)j * (bits == 4 ? 64 : 32), bits == 4 ? 4 : 2, packing);
            if (bits == 3) /* 4 tokens are a nibble: bring it down, then up to bits 2 .. 5 */
                one = _mm512_slli_epi32(
                    _mm512_srlv_epi32(load_pair(plane_of_ones(page) + (size_t)j * 16, 1, packing),
                                      odd_byte),
                    2);
        } else {
            x = pair_nibbles(page, j, bits, packing);
        }
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const unsigned step = packing == LOWKEY_LAYOUT_NATURAL && bits < 4 ? 2 : 4;
            __m512i index = v ? _mm512_srli_epi16(x, (unsigned)v * step) : x;
            if (packing == LOWKEY_LAYOUT_NATURAL && bits == 3)
                index = select_bits(_mm512_set1_epi16(3), index,
                                    v ? _mm512_srli_epi16(one, (unsigned)v) : one);
            index = _mm512_ternarylogic_epi64(index, _mm512_set1_epi16(15), second,
                                              0xea); /* (a & b) | c */
            multiply_pairs(sum, in->q16[j], v, _mm512_permutexvar_epi16(index, table), integer);
        }
    }
    store_sums(out, sum, integer);
}

static int token_words(int position)
{
    return position % 16 * 2 + position / 16 % 2 * 32 + position / 32;
}

/* ---- values, 16-bit products: any two tokens of a row may be neighbours, the weights follow
 * ---- */

INLINE void values_dot(const uint8_t *page, const struct lowkey_layout_inputs *in, float *out,
                       const int bits, const int natural, const int integer)
{
    __m512i weight[HEADS][2];
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++) {
        weight[h][0] = _mm512_load_si512(in->w16[h]);
        weight[h][1] = _mm512_load_si512(in->w16[h] + 32);
    }
    for (int row = 0; row < LOWKEY_LAYOUT_CHANNELS; row++) {
        const __m512i x = codes(page, row, bits, natural);
        const __m512i table = _mm512_broadcast_i64x4(
            _mm256_load_si256((const __m256i *)in->table16[row]));
        const __m512i even = _mm512_permutexvar_epi16(x, table);
        const __m512i odd = _mm512_permutexvar_epi16(_mm512_srli_epi16(x, 8), table);
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; h++) {
            float *out_h = out + ((size_t)row * HEADS + (size_t)h) * LOWKEY_LAYOUT_LANES;
            __m512 sum = integer ? _mm512_setzero_ps() : _mm512_load_ps(out_h);
            sum = dot(dot(sum, even, weight[h][0], integer), odd, weight[h][1], integer);
            if (integer) sum = _mm512_add_ps(_mm512_load_ps(out_h), dot_result(sum, integer));
            _mm512_store_ps(out_h, sum);
        }
    }
}

static int token_even_odd(int position)
{
    return position % 32 * 2 + position / 32;
}

#define VARIANT(name, body, bits, ...)                                                             \
    static void name##_##bits(const uint8_t *page, const struct lowkey_layout_inputs *in,          \
                              float *out)                                                          \
    {                                                                                              \
        body(page, in, out, bits, __VA_ARGS__);                                                    \
    }
#define VARIANTS(name, body, ...)                                                                  \
    VARIANT(name, body, 2, __VA_ARGS__)                                                            \
    VARIANT(name, body, 3, __VA_ARGS__) VARIANT(name, body, 4, __VA_ARGS__)
#define DOT_VARIANTS(layout, body, choice)                                                         \
    VARIANTS(layout##_bf16, body, choice, 0) VARIANTS(layout##_int16, body, choice, 1)

VARIANTS(keys_a_f32, keys_f32, 0)
VARIANTS(keys_b_f32, keys_f32, 1)
DOT_VARIANTS(keys_a, keys_after, 0)
DOT_VARIANTS(keys_b, keys_after, 1)
DOT_VARIANTS(keys_a_before, keys_before, LOWKEY_LAYOUT_STRIDED)
DOT_VARIANTS(keys_b_before, keys_before, LOWKEY_LAYOUT_NATURAL)
DOT_VARIANTS(keys_c, keys_before, LOWKEY_LAYOUT_PAIR_WORDS)
DOT_VARIANTS(values_a, values_dot, 0)
DOT_VARIANTS(values_b, values_dot, 1)

#define ROWS(side, layout, product, packing, name, token)                                          \
    { side, layout, product, 2, packing, name##_2, token },                                        \
        { side, layout, product, 3, packing, name##_3, token },                                    \
    {                                                                                              \
        side, layout, product, 4, packing, name##_4, token                                         \
    }
#define DOT_ROWS(product)                                                                          \
    ROWS("keys", "A", #product, LOWKEY_LAYOUT_STRIDED, keys_a_##product, token_after),             \
        ROWS("keys", "A'", #product, LOWKEY_LAYOUT_STRIDED, keys_a_before_##product, token_words), \
        ROWS("keys", "B", #product, LOWKEY_LAYOUT_NATURAL, keys_b_##product, token_after),         \
        ROWS("keys", "B'", #product, LOWKEY_LAYOUT_NATURAL, keys_b_before_##product,               \
             token_dwords),                                                                        \
        ROWS("keys", "C", #product, LOWKEY_LAYOUT_PAIR_WORDS, keys_c_##product, token_words),      \
        ROWS("values", "A", #product, LOWKEY_LAYOUT_STRIDED, values_a_##product, token_even_odd),  \
        ROWS("values", "B", #product, LOWKEY_LAYOUT_NATURAL, values_b_##product, token_even_odd)

const struct lowkey_layout_variant lowkey_layout_avx512[] = {
    ROWS("keys", "A", "f32", LOWKEY_LAYOUT_STRIDED, keys_a_f32, token_dwords),
    ROWS("keys", "B", "f32", LOWKEY_LAYOUT_NATURAL, keys_b_f32, token_dwords),
    DOT_ROWS(bf16),
    DOT_ROWS(int16),
    { 0 }
};
#else
const struct lowkey_layout_variant lowkey_layout_avx512[] = { { 0 } };
#endif
