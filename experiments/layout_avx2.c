/* layout_avx2.c - decode loops over candidate page layouts, AVX2 with FMA and F16C. Timed by
 * bench_layout.c; nothing else uses them. A page's planes follow each other, largest first;
 * 3-bit codes are a 2-bit plane and a 1-bit plane.
 *
 * Keys in f32, and in int8 with four channels (two RoPE pairs) contracted: vpmaddubsw adds two
 * products in 16 bits, so that u8 keys must stay below 128, and a second step must leave 16 bits
 * at once. 16-bit keys (vpmaddwd, vpaddd) need as many instructions as f32 for the products, so
 * only values have them. */
#include "experiments/bench_layout.h"

#include <stddef.h>
#include <string.h>

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

enum { HEADS = LOWKEY_LAYOUT_HEADS, TOKENS = LOWKEY_LAYOUT_TOKENS };

INLINE const uint8_t *plane_of_ones(const uint8_t *page)
{
    return page + LOWKEY_LAYOUT_CHANNELS * 16;
}

INLINE __m256i load_128_twice(const void *p)
{
    return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)p));
}

INLINE __m256i load_64_times_4(const void *p)
{
    long long x;
    memcpy(&x, p, sizeof x);
    return _mm256_set1_epi64x(x);
}

INLINE __m256i load_32_times_8(const void *p)
{
    int x;
    memcpy(&x, p, sizeof x);
    return _mm256_set1_epi32(x);
}

/* (two & 3) | (one & 8): index bytes of a 3-bit code. */
INLINE __m256i join_planes(__m256i two, __m256i one)
{
    return _mm256_or_si256(_mm256_and_si256(two, _mm256_set1_epi8(3)),
                           _mm256_and_si256(one, _mm256_set1_epi8(8)));
}

/* A: index bytes for tokens 32 * half .. + 31 of a row; junk only where the repeated table
 * allows it. */
INLINE __m256i codes_strided(const uint8_t *page, int row, const int bits, const int half)
{
    const __m256i low_nibble = _mm256_set1_epi8(15);
    if (bits == 4) {
        const __m256i x = _mm256_load_si256((const __m256i *)(page + (size_t)row * 32));
        return _mm256_and_si256(half ? _mm256_srli_epi16(x, 4) : x, low_nibble);
    }
    const long long s = half * 4;
    const __m256i two = _mm256_srlv_epi64(load_128_twice(page + (size_t)row * 16),
                                          _mm256_setr_epi64x(s, s, s + 2, s + 2));
    if (bits == 2) return _mm256_and_si256(two, low_nibble);
    const __m256i x = load_64_times_4(plane_of_ones(page) + (size_t)row * 8);
    return join_planes(two, half ? _mm256_srlv_epi64(x, _mm256_setr_epi64x(1, 2, 3, 4))
                                 : _mm256_sllv_epi64(x, _mm256_setr_epi64x(3, 2, 1, 0)));
}

/* B: widen, then copy each field to its byte by shift and or. */
INLINE __m256i codes_natural(const uint8_t *page, int row, const int bits, const int half)
{
    const __m256i low_nibble = _mm256_set1_epi8(15);
    if (bits == 4) {
        const __m256i x = _mm256_cvtepu8_epi16(
            _mm_load_si128((const __m128i *)(page + (size_t)row * 32 + half * 16)));
        return _mm256_and_si256(_mm256_or_si256(x, _mm256_slli_epi16(x, 4)), low_nibble);
    }
    __m256i two = _mm256_cvtepu8_epi32(
        _mm_loadl_epi64((const __m128i *)(page + (size_t)row * 16 + half * 8)));
    two = _mm256_or_si256(two, _mm256_slli_epi32(two, 6));
    two = _mm256_or_si256(two, _mm256_slli_epi32(two, 12));
    if (bits == 2) return _mm256_and_si256(two, low_nibble);
    const __m256i bytes = _mm256_shuffle_epi8(
        load_32_times_8(plane_of_ones(page) + (size_t)row * 8 + half * 4),
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
    const __m256i each = _mm256_set1_epi64x((long long)0x8040201008040201);
    return join_planes(two, _mm256_cmpeq_epi8(_mm256_and_si256(bytes, each), each));
}

INLINE __m256i codes(const uint8_t *page, int row, const int bits, const int half,
                     const int natural)
{
    return natural ? codes_natural(page, row, bits, half) : codes_strided(page, row, bits, half);
}

INLINE __m256i look_up(const uint8_t table[16], __m256i index)
{
    return _mm256_shuffle_epi8(load_128_twice(table), index);
}

/* ---- keys, f32: one permute of 8 entries, two for 4 bits; 16 tokens at a time, so that sums
 * stay in registers. Both layouts have a dword per lane that holds the lane's tokens, in an
 * order that is the same for all planes (A: 32s + 4 lane + b; B: 8 lane + k), so that a shift is
 * the whole unpacking. ---- */

/* Indices in the low three bits of dwords; for 4 bits *sign has the fourth bit at bit 31. */
INLINE __m256i dwords_strided(const uint8_t *page, int row, const int bits, const int step,
                              __m256i *sign)
{
    const int s = step / 4, b = step % 4;
    if (bits == 4) {
        const __m256i x = _mm256_load_si256((const __m256i *)(page + (size_t)row * 32));
        *sign = _mm256_slli_epi32(x, 28 - 4 * s - 8 * b);
        return step ? _mm256_srli_epi32(x, 4 * s + 8 * b) : x;
    }
    const __m256i x = load_128_twice(page + (size_t)row * 16);
    if (bits == 2) {
        const int low = 4 * s + 8 * b, high = low + 2;
        return _mm256_srlv_epi32(x, _mm256_setr_epi32(low, low, low, low, high, high, high, high));
    }
    const int k = 4 * s;
    const __m256i two = _mm256_srlv_epi64(x, _mm256_setr_epi64x(k, k, k + 2, k + 2));
    const __m256i one = _mm256_srlv_epi64(load_64_times_4(plane_of_ones(page) + (size_t)row * 8),
                                          _mm256_setr_epi64x(k, k + 1, k + 2, k + 3));
    const __m256i joined = _mm256_or_si256(
        _mm256_and_si256(two, _mm256_set1_epi8(3)),
        _mm256_slli_epi32(_mm256_and_si256(one, _mm256_set1_epi8(1)), 2));
    return b ? _mm256_srli_epi32(joined, 8 * b) : joined;
}

INLINE __m256i dwords_natural(const uint8_t *page, int row, const int bits, const int step,
                              __m256i *sign)
{
    if (bits == 4) {
        const __m256i x = _mm256_load_si256((const __m256i *)(page + (size_t)row * 32));
        *sign = _mm256_slli_epi32(x, 28 - 4 * step);
        return step ? _mm256_srli_epi32(x, 4 * step) : x;
    }
    const __m256i two = _mm256_srli_epi32(
        _mm256_cvtepu16_epi32(_mm_load_si128((const __m128i *)(page + (size_t)row * 16))),
        2 * step);
    if (bits == 2) return two;
    const __m256i one = _mm256_slli_epi32(
        _mm256_cvtepu8_epi32(
            _mm_loadl_epi64((const __m128i *)(plane_of_ones(page) + (size_t)row * 8))),
        2);
    return _mm256_or_si256(_mm256_and_si256(two, _mm256_set1_epi32(3)),
                           _mm256_and_si256(_mm256_srli_epi32(one, step), _mm256_set1_epi32(4)));
}

INLINE __m256 key_f32(const uint8_t *page, const struct lowkey_layout_inputs *in, int row,
                      const int bits, const int step, const int natural)
{
    __m256i sign = _mm256_setzero_si256();
    const __m256i index = natural ? dwords_natural(page, row, bits, step, &sign)
                                  : dwords_strided(page, row, bits, step, &sign);
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(in->f32_table[row]), index);
    if (bits < 4) return low;
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(in->f32_table[row] + 8), index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(sign));
}

INLINE void keys_f32(const uint8_t *page, const struct lowkey_layout_inputs *in, float *out,
                     const int bits, const int natural)
{
#pragma GCC unroll 4
    for (int group = 0; group < 4; group++) {
        __m256 sum[HEADS][2] = { 0 };
#pragma GCC unroll 1
        for (int j = 0; j < LOWKEY_LAYOUT_PAIRS; j++) {
#pragma GCC unroll 2
            for (int side = 0; side < 2; side++) {
                const int row = 2 * j + side;
                const __m256 key0 = key_f32(page, in, row, bits, 2 * group, natural);
                const __m256 key1 = key_f32(page, in, row, bits, 2 * group + 1, natural);
#pragma GCC unroll 4
                for (int h = 0; h < HEADS; h++) {
                    const __m256 q = _mm256_broadcast_ss(&in->q_f32[row][h]);
                    sum[h][0] = _mm256_fmadd_ps(key0, q, sum[h][0]);
                    sum[h][1] = _mm256_fmadd_ps(key1, q, sum[h][1]);
                }
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < 2 * HEADS; i++)
            _mm256_storeu_ps(out + i / 2 * TOKENS + group * 16 + i % 2 * 8, sum[i / 2][i % 2]);
    }
}

static int token_strided_dwords(int position)
{
    const int step = position / 8;
    return step / 4 * 32 + position % 8 * 4 + step % 4;
}

static int token_natural_dwords(int position)
{
    return position % 8 * 8 + position / 8;
}

/* ---- keys, int8: decode the page to quads (4 channels of a token in a dword), then multiply
 * ---- */

/* The 16 tokens of one step of pair j, the two rows' bytes alternating; C only. */
INLINE __m256i pair_keys(const uint8_t *page, const struct lowkey_layout_inputs *in, int j,
                         const int bits, const int step)
{
    const __m256i second = _mm256_set1_epi16(bits == 4 ? (short)0x8000 : 0x0400);
    if (bits == 4) {
        const __m256i x = _mm256_and_si256(
            _mm256_srli_epi16(
                _mm256_load_si256((const __m256i *)(page + (size_t)j * 64 + step % 2 * 32)),
                step / 2 * 4),
            _mm256_set1_epi8(15));
        return _mm256_blendv_epi8(look_up(in->u8_table[2 * j], x),
                                  look_up(in->u8_table[2 * j + 1], x), second);
    }
    const __m256i x = _mm256_srli_epi16(_mm256_load_si256((const __m256i *)(page + (size_t)j * 32)),
                                        2 * step);
    const __m256i two = _mm256_and_si256(x, _mm256_set1_epi8(3));
    if (bits == 2) return look_up(in->u8_pair_table[j], _mm256_or_si256(two, second));
    const __m256i row = load_128_twice(plane_of_ones(page) + (size_t)j * 16);
    const long long k = 2 * step - 3; /* bits 2 step and 2 step + 1 go to bit 3 */
    const __m256i one = k < 0 ? _mm256_sllv_epi64(row, _mm256_setr_epi64x(-k, -k, -k - 1, -k - 1))
                              : _mm256_srlv_epi64(row, _mm256_setr_epi64x(k, k, k + 1, k + 1));
    const __m256i bit = _mm256_and_si256(one, _mm256_set1_epi8(8));
    return look_up(in->u8_pair_table[j], _mm256_or_si256(_mm256_or_si256(two, second), bit));
}

/* Pairs of rows, [2 vectors of 16 tokens], from A or B: look up, then interleave. */
INLINE void pair_keys_after(const uint8_t *page, const struct lowkey_layout_inputs *in, int j,
                            const int bits, const int half, const int natural, __m256i pair[2])
{
    const __m256i first = look_up(in->u8_table[2 * j], codes(page, 2 * j, bits, half, natural));
    const __m256i second = look_up(in->u8_table[2 * j + 1],
                                   codes(page, 2 * j + 1, bits, half, natural));
    pair[0] = _mm256_unpacklo_epi8(first, second);
    pair[1] = _mm256_unpackhi_epi8(first, second);
}

/* The same from A, 2 and 3 bits: interleave packed rows, so that a pair's table serves both. */
INLINE void pair_keys_before(const uint8_t *page, const struct lowkey_layout_inputs *in, int j,
                             const int bits, const int half, __m256i pair[2])
{
    const __m256i second = _mm256_set1_epi16(0x0400);
    const __m256i first_row = load_128_twice(page + (size_t)j * 32);
    const __m256i second_row = load_128_twice(page + (size_t)j * 32 + 16);
    const __m256i ones = _mm256_shuffle_epi8(
        load_128_twice(plane_of_ones(page) + (size_t)j * 16),
        _mm256_setr_epi64x(0x0b030a0209010800, 0x0f070e060d050c04, 0x0b030a0209010800,
                           0x0f070e060d050c04));
#pragma GCC unroll 2
    for (int high = 0; high < 2; high++) {
        const __m256i row = high ? _mm256_unpackhi_epi8(first_row, second_row)
                                 : _mm256_unpacklo_epi8(first_row, second_row);
        const long long s = 4 * half, k = 4 * half + high; /* bits k and k + 2 go to bit 3 */
        const __m256i two = _mm256_srlv_epi64(row, _mm256_setr_epi64x(s, s, s + 2, s + 2));
        __m256i index = _mm256_or_si256(_mm256_and_si256(two, _mm256_set1_epi8(3)), second);
        if (bits == 3) {
            const __m256i one =
                half ? _mm256_srlv_epi64(ones, _mm256_setr_epi64x(k - 3, k - 3, k - 1, k - 1))
                     : _mm256_sllv_epi64(ones, _mm256_setr_epi64x(3 - k, 3 - k, 1 - k, 1 - k));
            index = _mm256_or_si256(index, _mm256_and_si256(one, _mm256_set1_epi8(8)));
        }
        pair[high] = look_up(in->u8_pair_table[j], index);
    }
}

/* quads[8][i]: 8 vectors of 8 tokens for the quad i of channels. */
INLINE void decode_quads(const uint8_t *page, const struct lowkey_layout_inputs *in,
                         __m256i quads[8][LOWKEY_LAYOUT_PAIRS / 2], const int bits,
                         const int packing, const int before)
{
#pragma GCC unroll 1
    for (int i = 0; i < LOWKEY_LAYOUT_PAIRS / 2; i++) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            __m256i a[2], b[2];
            if (packing == LOWKEY_LAYOUT_PAIR_BYTES) {
                a[0] = pair_keys(page, in, 2 * i, bits, 2 * half);
                a[1] = pair_keys(page, in, 2 * i, bits, 2 * half + 1);
                b[0] = pair_keys(page, in, 2 * i + 1, bits, 2 * half);
                b[1] = pair_keys(page, in, 2 * i + 1, bits, 2 * half + 1);
            } else if (before) {
                pair_keys_before(page, in, 2 * i, bits, half, a);
                pair_keys_before(page, in, 2 * i + 1, bits, half, b);
            } else {
                pair_keys_after(page, in, 2 * i, bits, half, packing == LOWKEY_LAYOUT_NATURAL, a);
                pair_keys_after(page, in, 2 * i + 1, bits, half, packing == LOWKEY_LAYOUT_NATURAL,
                                b);
            }
            quads[4 * half][i] = _mm256_unpacklo_epi16(a[0], b[0]);
            quads[4 * half + 1][i] = _mm256_unpackhi_epi16(a[0], b[0]);
            quads[4 * half + 2][i] = _mm256_unpacklo_epi16(a[1], b[1]);
            quads[4 * half + 3][i] = _mm256_unpackhi_epi16(a[1], b[1]);
        }
    }
}

INLINE void keys_i8(const uint8_t *page, const struct lowkey_layout_inputs *in, float *out,
                    const int bits, const int packing, const int before)
{
    __m256i quads[8][LOWKEY_LAYOUT_PAIRS / 2];
    decode_quads(page, in, quads, bits, packing, before);
#pragma GCC unroll 1
    for (int v = 0; v < 8; v += 2) {
        __m256i sum[HEADS][2] = { 0 };
#pragma GCC unroll 1
        for (int i = 0; i < LOWKEY_LAYOUT_PAIRS / 2; i++) {
#pragma GCC unroll 8
            for (int k = 0; k < 2 * HEADS; k++) {
                const __m256i q = load_32_times_8(in->q_i8[i][k / 2]);
                const __m256i two = _mm256_maddubs_epi16(quads[v + k % 2][i], q);
                sum[k / 2][k % 2] = _mm256_add_epi32(sum[k / 2][k % 2],
                                                     _mm256_madd_epi16(two, _mm256_set1_epi16(1)));
            }
        }
#pragma GCC unroll 8
        for (int k = 0; k < 2 * HEADS; k++) {
            const __m256i unbiased = _mm256_sub_epi32(sum[k / 2][k % 2],
                                                      _mm256_set1_epi32(in->q_bias[k / 2]));
            _mm256_storeu_ps(out + k / 2 * TOKENS + (v + k % 2) * 8, _mm256_cvtepi32_ps(unbiased));
        }
    }
}

/* Unpacks within 128-bit halves: vector 4 half + 2 byte + word, byte and word 0 for low, 1 for
 * high. */
static int token_rows_i8(int position)
{
    const int lane = position % 8, v = position / 8;
    return v / 4 * 32 + lane / 4 * 16 + v / 2 % 2 * 8 + v % 2 * 4 + lane % 4;
}

static int token_pairs_i8(int position)
{
    const int lane = position % 8, v = position / 8;
    return v / 2 * 16 + lane / 4 * 8 + v % 2 * 4 + lane % 4;
}

/* ---- values, 16-bit products of two tokens ---- */

INLINE void values_i16(const uint8_t *page, const struct lowkey_layout_inputs *in, float *out,
                       const int bits, const int natural)
{
#pragma GCC unroll 1
    for (int row = 0; row < LOWKEY_LAYOUT_CHANNELS; row++) {
        __m256i value[4];
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const __m256i x = codes(page, row, bits, half, natural);
            const __m256i low = look_up(in->i16_low[row], x), high = look_up(in->i16_high[row], x);
            value[2 * half] = _mm256_unpacklo_epi8(low, high);
            value[2 * half + 1] = _mm256_unpackhi_epi8(low, high);
        }
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; h++) {
            const __m256i *weight = (const __m256i *)in->w16[h];
            float *out_h = out + ((size_t)row * HEADS + (size_t)h) * LOWKEY_LAYOUT_LANES;
            const __m256i a = _mm256_add_epi32(_mm256_madd_epi16(value[0], weight[0]),
                                               _mm256_madd_epi16(value[1], weight[1]));
            const __m256i b = _mm256_add_epi32(_mm256_madd_epi16(value[2], weight[2]),
                                               _mm256_madd_epi16(value[3], weight[3]));
            _mm256_store_ps(out_h, _mm256_add_ps(_mm256_load_ps(out_h),
                                                 _mm256_cvtepi32_ps(_mm256_add_epi32(a, b))));
        }
    }
}

static int token_unpacked(int position)
{
    return position / 32 * 32 + position % 16 / 8 * 16 + position % 32 / 16 * 8 + position % 8;
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

VARIANTS(keys_a_f32, keys_f32, 0)
VARIANTS(keys_b_f32, keys_f32, 1)
VARIANTS(keys_a_int8, keys_i8, LOWKEY_LAYOUT_STRIDED, 0)
VARIANT(keys_a_before_int8, keys_i8, 2, LOWKEY_LAYOUT_STRIDED, 1)
VARIANT(keys_a_before_int8, keys_i8, 3, LOWKEY_LAYOUT_STRIDED, 1)
VARIANTS(keys_b_int8, keys_i8, LOWKEY_LAYOUT_NATURAL, 0)
VARIANTS(keys_c_int8, keys_i8, LOWKEY_LAYOUT_PAIR_BYTES, 0)
VARIANTS(values_a_int16, values_i16, 0)
VARIANTS(values_b_int16, values_i16, 1)

#define ROWS(side, layout, product, packing, name, token)                                          \
    { side, layout, product, 2, packing, name##_2, token },                                        \
        { side, layout, product, 3, packing, name##_3, token },                                    \
    {                                                                                              \
        side, layout, product, 4, packing, name##_4, token                                         \
    }

const struct lowkey_layout_variant lowkey_layout_avx2[] = {
    ROWS("keys", "A", "f32", LOWKEY_LAYOUT_STRIDED, keys_a_f32, token_strided_dwords),
    ROWS("keys", "B", "f32", LOWKEY_LAYOUT_NATURAL, keys_b_f32, token_natural_dwords),
    ROWS("keys", "A", "int8", LOWKEY_LAYOUT_STRIDED, keys_a_int8, token_rows_i8),
    { "keys", "A'", "int8", 2, LOWKEY_LAYOUT_STRIDED, keys_a_before_int8_2, token_rows_i8 },
    { "keys", "A'", "int8", 3, LOWKEY_LAYOUT_STRIDED, keys_a_before_int8_3, token_rows_i8 },
    ROWS("keys", "B", "int8", LOWKEY_LAYOUT_NATURAL, keys_b_int8, token_rows_i8),
    ROWS("keys", "C", "int8", LOWKEY_LAYOUT_PAIR_BYTES, keys_c_int8, token_pairs_i8),
    ROWS("values", "A", "int16", LOWKEY_LAYOUT_STRIDED, values_a_int16, token_unpacked),
    ROWS("values", "B", "int16", LOWKEY_LAYOUT_NATURAL, values_b_int16, token_unpacked),
    { 0 }
};
#else
const struct lowkey_layout_variant lowkey_layout_avx2[] = { { 0 } };
#endif
