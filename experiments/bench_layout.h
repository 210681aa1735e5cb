/* bench_layout.h - which bytes should a page have? Times decode loops over candidate code layouts.
 *
 * The loops are in layout_<level>.c, one table of variants each; bench_layout.c packs pages, checks
 * every variant against a plain decode and only then times it. All test values are small integers,
 * exact in every number type used, so that a variant is right when it is equal.
 */
#ifndef LOWKEY_BENCH_LAYOUT_H
#define LOWKEY_BENCH_LAYOUT_H

#include <stdint.h>

enum {
    LOWKEY_LAYOUT_TOKENS = 64,
    LOWKEY_LAYOUT_CHANNELS = 128, /* head_dim */
    LOWKEY_LAYOUT_PAIRS = 64, /* RoPE pairs: rows 2j and 2j + 1 */
    LOWKEY_LAYOUT_HEADS = 4, /* query heads that share the KV head */
    LOWKEY_LAYOUT_LANES = 16, /* partial sums a value channel and head keeps, at most */
    LOWKEY_LAYOUT_BIAS = 64 /* u8 tables hold value + 64, at most 127: see layout_avx2.c */
};

/* Where token t of row r is in a plane of p bits; rows have 8p bytes. */
enum lowkey_layout_packing {
    LOWKEY_LAYOUT_STRIDED, /* A: byte t mod 8p, bits p * (t div 8p) */
    LOWKEY_LAYOUT_NATURAL, /* B: bits p * t of the little-endian row */
    LOWKEY_LAYOUT_PAIR_BYTES, /* C: as A, the bytes of rows 2j and 2j + 1 alternate */
    LOWKEY_LAYOUT_PAIR_WORDS /* C: as A, the 16-bit words of rows 2j and 2j + 1 alternate */
};

/* Tables hold 2^bits values repeated to 16 entries, by code. Byte tables are for index bytes of
 * layout_avx2.c: 3-bit codes have their high bit at bit 3. Weights are in the variant's order.
 * Names ending in 16 are bf16 or integers, by the variant's product. */
struct lowkey_layout_inputs {
    _Alignas(64) float f32_table[LOWKEY_LAYOUT_CHANNELS][16];
    _Alignas(64) uint16_t table16[LOWKEY_LAYOUT_CHANNELS][16];
    _Alignas(64) uint8_t u8_table[LOWKEY_LAYOUT_CHANNELS][16];
    _Alignas(64) uint8_t u8_pair_table[LOWKEY_LAYOUT_PAIRS][16]; /* bit 2: the pair's second row */
    _Alignas(64) uint8_t i16_low[LOWKEY_LAYOUT_CHANNELS][16];
    _Alignas(64) uint8_t i16_high[LOWKEY_LAYOUT_CHANNELS][16];
    _Alignas(64) float q_f32[LOWKEY_LAYOUT_CHANNELS][LOWKEY_LAYOUT_HEADS];
    _Alignas(64) uint16_t q16[LOWKEY_LAYOUT_PAIRS][LOWKEY_LAYOUT_HEADS][2];
    _Alignas(64) int8_t q_i8[LOWKEY_LAYOUT_PAIRS / 2][LOWKEY_LAYOUT_HEADS][4];
    int32_t q_bias[LOWKEY_LAYOUT_HEADS]; /* LOWKEY_LAYOUT_BIAS * sum of q */
    _Alignas(64) uint16_t w16[LOWKEY_LAYOUT_HEADS][LOWKEY_LAYOUT_TOKENS];
};

/* One page. Keys: out[h][64] = scores, in the variant's token order. Values: out[c][h][16] +=
 * partial sums. 64 bytes after the page are readable. */
typedef void lowkey_layout_fn(const uint8_t *page, const struct lowkey_layout_inputs *in,
                              float *out);

struct lowkey_layout_variant {
    const char *side, *layout,
        *product; /* "keys", "A", "bf16"; a ' says rows are interleaved when loaded */
    int bits;
    enum lowkey_layout_packing packing;
    lowkey_layout_fn *run;
    int (*token)(int position); /* which token a score or weight position is */
};

/* End with run == NULL. Empty where the level could not be compiled. */
extern const struct lowkey_layout_variant lowkey_layout_avx2[], lowkey_layout_avx512[];

/* Checks, times and prints a table, or one JSON object. 0: all variants right; 1: one is wrong or
 * memory ran out. */
int lowkey_bench_layout(int json);

#endif
