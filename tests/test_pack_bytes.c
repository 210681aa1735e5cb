/* test_pack_bytes.c - packing by hand: bytes of pages, ties, outliers and scales that a person can work out. */
#include <float.h>
#include <math.h>

#include "tests/check.h"
#include "tests/make_quantizer.h"
#include "tests/pack_oracle.h"
#include "tests/packed.h"

static int is_same_float(float a, float b)
{
    return memcmp(&a, &b, sizeof a) == 0;
}

/* ---- by hand: 8 channels, tables 0, 1, 2, ...: the code of x is x itself ---- */

struct ramp {
    lowkey_quantizer *quantizer;
    const struct lowkey_layer *layer;
};

/* boundaries at k + 1/2. bits of all 8 channels, keys and values alike. */
static struct ramp make_ramp(int bits, lowkey_outlier_rule rule, int rank, int cap, int capacity)
{
    enum { N = 8 };
    uint8_t widths[N];
    float table[N * 32], boundary[N * 32], lower[N], upper[N];
    const int n_table = 1 << bits;
    for (int c = 0; c < N; c++) {
        widths[c] = (uint8_t)bits;
        lower[c] = 0, upper[c] = (float)(n_table - 1);
        for (int k = 0; k < n_table; k++) table[c * n_table + k] = (float)k;
        for (int k = 0; k + 1 < n_table; k++) boundary[c * (n_table - 1) + k] = (float)k + 0.5f;
    }
    const lowkey_side_desc side = { .struct_size = sizeof side,
                                    .bits = widths,
                                    .table_entries = n_table,
                                    .table = table,
                                    .boundary = boundary,
                                    .lower = lower,
                                    .upper = upper,
                                    .outlier_rule = rule,
                                    .outlier_rank = rank,
                                    .outlier_cap = cap,
                                    .outlier_page_capacity = capacity };
    const lowkey_layer_desc layer = { .struct_size = sizeof layer,
                                      .n_q_heads = 1,
                                      .n_kv_heads = 1,
                                      .key_head_dim = N,
                                      .value_head_dim = N,
                                      .key = side,
                                      .value = side };
    const lowkey_quantizer_desc desc = { .struct_size = sizeof desc, .n_layers = 1, .layers = &layer };
    struct ramp ramp = { 0 };
    lowkey_error err;
    assert_ok(lowkey_quantizer_create(&desc, NULL, &ramp.quantizer, &err), err);
    ramp.layer = lowkey_quantizer_layer_at(ramp.quantizer, 0);
    return ramp;
}

/* Channel 0 holds the token's number mod 2^bits, channel 1 the same with all bits turned, the others 0. */
static void test_pages_by_hand(void **state)
{
    (void)state;
    static const struct {
        int bits;
        size_t page_bytes;
        struct {
            size_t offset;
            int value;
        } bytes[12];
    } golden[] = {
        /* 2 bits: byte b of channel 0's row holds slots b, b + 16, b + 32, b + 48: all b mod 4, so b mod 4 * 0x55 */
        { 2,
          128,
          { { 0, 0x00 },
            { 1, 0x55 },
            { 2, 0xaa },
            { 3, 0xff },
            { 15, 0xff },
            { 16, 0xff },
            { 17, 0xaa },
            { 18, 0x55 },
            { 32, 0 } } },
        /* 3 bits: the low two as above at 0, then from 128 on the top bit: byte b holds slots b, b + 8, ...: slots of equal code */
        { 3,
          192,
          { { 0, 0x00 },
            { 1, 0x55 },
            { 3, 0xff },
            { 4, 0x00 },
            { 16, 0xff },
            { 128, 0x00 },
            { 131, 0x00 },
            { 132, 0xff },
            { 135, 0xff },
            { 136, 0xff },
            { 140, 0x00 },
            { 144, 0 } } },
        /* 4 bits: byte b holds slots b and b + 32: b mod 16 twice */
        { 4,
          256,
          { { 0, 0x00 },
            { 1, 0x11 },
            { 9, 0x99 },
            { 15, 0xff },
            { 16, 0x00 },
            { 31, 0xff },
            { 32, 0xff },
            { 33, 0xee },
            { 47, 0x00 },
            { 64, 0 } } },
        /* 1 bit: byte b holds slots b, b + 8, ... */
        { 1,
          64,
          { { 0, 0x00 }, { 1, 0xff }, { 2, 0x00 }, { 7, 0xff }, { 8, 0xff }, { 9, 0x00 }, { 16, 0 } } },
        /* 5 bits: 4 low bits at 0, the top bit from 256 on: slots b, b + 8, ... are b, b + 8, b + 16, b + 24 and again: 0xcc */
        { 5,
          320,
          { { 0, 0x00 },
            { 1, 0x11 },
            { 16, 0x00 },
            { 33, 0xee },
            { 256, 0xcc },
            { 263, 0xcc },
            { 264, 0x33 },
            { 272, 0 } } },
    };
    for (size_t g = 0; g < sizeof golden / sizeof golden[0]; g++) {
        const struct ramp ramp = make_ramp(golden[g].bits, LOWKEY_OUTLIER_NONE, 0, 0, 0);
        const int mask = (1 << golden[g].bits) - 1;
        float x[64][8] = { { 0 } };
        for (int t = 0; t < 64; t++) x[t][0] = (float)(t & mask), x[t][1] = (float)(~t & mask);
        assert_int_equal(ramp.layer->side[0].heads[0].page_bytes, golden[g].page_bytes);
        for (const struct lowkey_kernels *kernels = lowkey_kernels; kernels->isa; kernels++) {
            struct lowkey_packed packed;
            lowkey_packed_init(&packed, &ramp.layer->side[0], 0, 0xee);
            lowkey_packed_add(&packed, kernels, 0, 64, &x[0][0]);
            for (int i = 0; i < 12; i++)
                if (i == 0 || golden[g].bytes[i].offset)
                    assert_int_equal(packed.pages[0][golden[g].bytes[i].offset], golden[g].bytes[i].value);
            lowkey_packed_free(&packed);
        }
        lowkey_quantizer_free(ramp.quantizer);
    }
}

/* Vectors of n codes 0, 1, 2, ... packed over noise: the slots before and behind keep their bits. */
static void test_few_slots_by_hand(void **state)
{
    (void)state;
    const struct ramp ramp = make_ramp(2, LOWKEY_OUTLIER_NONE, 0, 0, 0);
    struct lowkey_packed packed;
    lowkey_packed_init(&packed, &ramp.layer->side[0], 0, 0xff);
    float x[11][8] = { { 0 } };
    for (int t = 0; t < 11; t++) x[t][0] = (float)(t & 3);
    lowkey_packed_add(&packed, lowkey_kernels_find("scalar"), 14, 11, &x[0][0]); /* slots 14..24 */
    static const uint8_t want[16] = { 0xfb, 0xff, 0xf3, 0xf7, 0xfb, 0xff, 0xf3, 0xf7,
                                      0xfb, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfc, 0xfd };
    assert_memory_equal(packed.pages[0], want, 16);
    lowkey_packed_free(&packed);
    lowkey_quantizer_free(ramp.quantizer);
}

/* n codes 0, 1, 2, ... at 1 to 64 slots over ones: byte by byte what the planes' rule says, written here for one row. */
static void test_lengths(void **state)
{
    (void)state;
    static const int lengths[] = { 1, 10, 11, 31, 32, 33, 63, 64 };
    for (int bits = 1; bits <= 5; bits++) {
        const struct ramp ramp = make_ramp(bits, LOWKEY_OUTLIER_NONE, 0, 0, 0);
        const int wide = bits == 3 ? 2 : bits == 5 ? 4 : bits, wide_plane = (8 * 8 * wide + 63) / 64 * 64;
        for (int i = 0; i < 8; i++) {
            const int n = lengths[i];
            float x[64][8] = { { 0 } };
            uint8_t want[32 + 8];
            memset(want, 0xff, sizeof want);
            for (int t = 0; t < n; t++) {
                const int code = t % (1 << bits);
                x[t][0] = (float)code;
                for (int b = 0; b < bits;
                     b++) { /* bit b of the code: in the wide row, or the top row behind it */
                    const int plane = b < wide ? wide : 1, at = t % (8 * plane),
                              bit = plane * (t / (8 * plane)) + (b < wide ? b : 0);
                    uint8_t *byte = want + (b < wide ? 0 : 32) + at;
                    *byte = (uint8_t)((*byte & ~(1 << bit)) | (code >> b & 1) << bit);
                }
            }
            for (const struct lowkey_kernels *kernels = lowkey_kernels; kernels->isa; kernels++) {
                struct lowkey_packed packed;
                lowkey_packed_init(&packed, &ramp.layer->side[0], 0, 0xff);
                lowkey_packed_add(&packed, kernels, 0, n, &x[0][0]);
                assert_memory_equal(packed.pages[0], want, (size_t)(8 * wide));
                if (bits != wide) assert_memory_equal(packed.pages[0] + wide_plane, want + 32, 8);
                lowkey_packed_free(&packed);
            }
        }
        lowkey_quantizer_free(ramp.quantizer);
    }
}

static void pack_one(const struct ramp *ramp, const float *x, struct lowkey_packed *packed)
{
    lowkey_packed_init(packed, &ramp->layer->side[0], 0, 0x11);
    lowkey_packed_add(packed, lowkey_kernels_find("scalar"), 0, 1, x);
}

static void test_boundary_ties_go_to_the_lower_code(void **state)
{
    (void)state;
    const struct ramp ramp = make_ramp(3, LOWKEY_OUTLIER_NONE, 0, 0, 0);
    const float x[8] = { 0.5f, nextafterf(0.5f, 1), 6.5f, nextafterf(6.5f, 7), -0.0f, -1e30f, 1e30f, 3.5f };
    static const unsigned want[8] = { 0, 1, 6, 7, 0, 0, 7, 3 };
    struct lowkey_packed packed;
    pack_one(&ramp, x, &packed);
    for (int c = 0; c < 8; c++)
        assert_int_equal(lowkey_oracle_code(&ramp.layer->desc->key, 8, 0, packed.pages[0], c, 0), want[c]);
    lowkey_packed_free(&packed);
    lowkey_quantizer_free(ramp.quantizer);
}

static void test_limit_outliers_by_hand(void **state)
{
    (void)state;
    /* Limits 0..3. Relative distances 1, 1, 2, 1/3, ... cap 3: channel 3 (the farthest), then 1 and 2 by number. */
    const struct ramp ramp = make_ramp(2, LOWKEY_OUTLIER_LIMIT, 0, 3, 192);
    const float x[8] = { 0, 6, -3, 9, 3, 4, -3, 2 };
    struct lowkey_packed packed;
    pack_one(&ramp, x, &packed);
    struct lowkey_oracle_outlier found[192];
    assert_int_equal(lowkey_oracle_outliers(&ramp.layer->desc->key, 8, packed.side_page, 0, 0, found), 3);
    assert_int_equal(found[0].channel, 1), assert_true(found[0].residual == 3);
    assert_int_equal(found[1].channel, 2), assert_true(found[1].residual == -3);
    assert_int_equal(found[2].channel, 3), assert_true(found[2].residual == 6);
    assert_int_equal(packed.counts.outliers, 3);
    assert_int_equal(packed.counts.clamped, 2); /* channels 5 and 6 */
    lowkey_packed_free(&packed);
    lowkey_quantizer_free(ramp.quantizer);
}

static void test_rank_outliers_by_hand(void **state)
{
    (void)state;
    /* Two at each end: 3, 3 at channels 1 and 4 (5 ties and is higher); 0, 0 at channels 0 and 2 (7 ties). */
    const struct ramp ramp = make_ramp(2, LOWKEY_OUTLIER_RANK, 2, 8, 6);
    const float x[8] = { 0, 3, 0, 1, 3, 3, 2, 0 };
    struct lowkey_packed packed;
    pack_one(&ramp, x, &packed);
    struct lowkey_oracle_outlier found[192];
    assert_int_equal(lowkey_oracle_outliers(&ramp.layer->desc->key, 8, packed.side_page, 0, 0, found), 4);
    static const int want[4] = { 0, 1, 2, 4 };
    for (int i = 0; i < 4; i++) assert_int_equal(found[i].channel, want[i]);
    /* The page has room for two more: the lowest channels get it. Then for none. */
    lowkey_packed_add(&packed, lowkey_kernels_find("scalar"), 1, 1, x);
    assert_int_equal(lowkey_oracle_outliers(&ramp.layer->desc->key, 8, packed.side_page, 1, 0, found), 2);
    assert_int_equal(found[0].channel, 0), assert_int_equal(found[1].channel, 1);
    lowkey_packed_add(&packed, lowkey_kernels_find("scalar"), 2, 1, x);
    assert_int_equal(lowkey_oracle_outliers(&ramp.layer->desc->key, 8, packed.side_page, 2, 0, found), 0);
    assert_int_equal(packed.counts.outliers, 6);
    assert_int_equal(packed.counts.clamped, 2 + 4);
    lowkey_packed_free(&packed);
    lowkey_quantizer_free(ramp.quantizer);
}

static void test_saturation_is_counted(void **state)
{
    (void)state;
    const struct ramp ramp = make_ramp(2, LOWKEY_OUTLIER_LIMIT, 0, 8, 512);
    const float x[8] = { 65519 + 3, 65520 + 3, -70000, 3e38f, 1, 2, 3, 0 };
    struct lowkey_packed packed;
    pack_one(&ramp, x, &packed);
    assert_int_equal(packed.counts.outliers, 4);
    assert_int_equal(packed.counts.saturated, 3);
    float out[8];
    lowkey_packed_read(&packed, lowkey_kernels_find("scalar"), 0, 0, 1, out);
    assert_true(out[0] == 65504 + 3 && out[2] == -65504 && out[3] == 65504 + 3);
    lowkey_packed_free(&packed);
    lowkey_quantizer_free(ramp.quantizer);
}

/* ---- token scales by hand: 8 channels, 2 bits, entries -1 and 1 in use, boundary 0 ---- */

static lowkey_quantizer *make_scaled(lowkey_outlier_rule rule, int rank, int cap)
{
    enum { N = 8, E = 4 };
    uint8_t widths[N], n_entries[N];
    float table[N * E], boundary[N * (E - 1)], lower[N], upper[N];
    for (int c = 0; c < N; c++) {
        widths[c] = 2, n_entries[c] = 2, lower[c] = -1, upper[c] = 1;
        for (int k = 0; k < E; k++) table[c * E + k] = k ? 1 : -1;
        for (int k = 0; k < E - 1; k++) boundary[c * (E - 1) + k] = k ? FLT_MAX : 0;
    }
    const lowkey_side_desc side = { .struct_size = sizeof side,
                                    .bits = widths,
                                    .table_entries = E,
                                    .n_entries = n_entries,
                                    .table = table,
                                    .boundary = boundary,
                                    .lower = lower,
                                    .upper = upper,
                                    .token_scale = LOWKEY_SCALE_F32,
                                    .scale_block = N,
                                    .outlier_rule = rule,
                                    .outlier_rank = rank,
                                    .outlier_cap = cap,
                                    .outlier_page_capacity = 64 * cap };
    const lowkey_layer_desc layer = { .struct_size = sizeof layer,
                                      .n_q_heads = 1,
                                      .n_kv_heads = 1,
                                      .key_head_dim = N,
                                      .value_head_dim = N,
                                      .key = side,
                                      .value = side };
    const lowkey_quantizer_desc desc = { .struct_size = sizeof desc, .n_layers = 1, .layers = &layer };
    lowkey_quantizer *quantizer;
    lowkey_error err;
    assert_ok(lowkey_quantizer_create(&desc, NULL, &quantizer, &err), err);
    return quantizer;
}

static void check_scaled(lowkey_quantizer *quantizer, const float *x, float scale, float zero,
                         const unsigned *codes)
{
    const struct lowkey_layer *layer = lowkey_quantizer_layer_at(quantizer, 0);
    for (const struct lowkey_kernels *kernels = lowkey_kernels; kernels->isa; kernels++) {
        struct lowkey_packed packed;
        lowkey_packed_init(&packed, &layer->side[0], 0, 0x77);
        lowkey_packed_add(&packed, kernels, 0, 1, x);
        assert_true(
            is_same_float(lowkey_oracle_scale(&layer->desc->key, 8, packed.side_page, 0, 0, 0), scale));
        assert_true(
            is_same_float(lowkey_oracle_scale(&layer->desc->key, 8, packed.side_page, 0, 0, 1), zero));
        for (int c = 0; c < 8; c++)
            assert_int_equal(lowkey_oracle_code(&layer->desc->key, 8, 0, packed.pages[0], c, 0), codes[c]);
        lowkey_packed_free(&packed);
    }
    lowkey_quantizer_free(quantizer);
}

static void test_scales_by_hand(void **state)
{
    (void)state;
    check_scaled(make_scaled(LOWKEY_OUTLIER_NONE, 0, 0), (float[8]) { 3, -1, 1, 1.5f, 0, 3, 0.5f, 1 }, 2, 1,
                 (unsigned[8]) { 1, 0, 0, 1, 0, 1, 0, 0 });
    /* A constant token: scale 0, code 0, whatever the zero. All -0: the stored zero is +0. */
    check_scaled(make_scaled(LOWKEY_OUTLIER_NONE, 0, 0),
                 (float[8]) { 7.5f, 7.5f, 7.5f, 7.5f, 7.5f, 7.5f, 7.5f, 7.5f }, 0, 7.5f, (unsigned[8]) { 0 });
    check_scaled(make_scaled(LOWKEY_OUTLIER_NONE, 0, 0),
                 (float[8]) { -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f }, 0, 0,
                 (unsigned[8]) { 0 });
    /* A huge outlier without room beside a tiny scale: FLT_MAX behind the entries in use is not scaled. */
    check_scaled(make_scaled(LOWKEY_OUTLIER_RANK, 1, 1),
                 (float[8]) { -1, 2e-40f, 0, 3e38f, 0, 2e-40f, 1e-40f, 0 }, 1e-40f, 1e-40f,
                 (unsigned[8]) { 0, 1, 0, 1, 0, 1, 0, 0 });
}

/* A channel whose range is a point: whatever is beside it is infinitely far, by its range. */
static void test_constant_channel_outliers(void **state)
{
    (void)state;
    struct lowkey_quantizer_choice choice = { .n_q_heads = 1,
                                              .n_kv_heads = 1,
                                              .key_head_dim = 32,
                                              .value_head_dim = 8,
                                              .key = { .bits = 2,
                                                       .outlier_rule = LOWKEY_OUTLIER_LIMIT,
                                                       .outlier_cap = 1,
                                                       .outlier_page_capacity = 64,
                                                       .constant_channels = 1 },
                                              .value = { .bits = 2 },
                                              .seed = 4 };
    lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
    const struct lowkey_layer *layer = lowkey_quantizer_layer_at(quantizer, 0);
    const lowkey_side_desc *desc = &layer->desc->key;
    int constant = -1;
    float x[32];
    for (int c = 0; c < 32; c++) {
        x[c] = desc->upper[c] + 5 * (desc->upper[c] - desc->lower[c]);
        if (desc->upper[c] == desc->lower[c]) constant = c;
    }
    assert_true(constant >= 0);
    x[constant] = nextafterf(x[constant], 1e9f);
    struct lowkey_packed packed;
    lowkey_packed_init(&packed, &layer->side[0], 0, 0);
    lowkey_packed_add(&packed, lowkey_kernels_find(NULL), 0, 1, x);
    struct lowkey_oracle_outlier found[64];
    assert_int_equal(lowkey_oracle_outliers(desc, 32, packed.side_page, 0, 0, found), 1);
    assert_int_equal(found[0].channel, constant);
    float out[32];
    lowkey_packed_read(&packed, lowkey_kernels_find(NULL), 0, 0, 1, out);
    assert_true(fabsf(out[constant] - x[constant]) <= fabsf(x[constant]) * 0x1p-23f);
    lowkey_packed_free(&packed);
    lowkey_quantizer_free(quantizer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        { "pack: pages of 1 to 5 bits are the bytes written by hand", test_pages_by_hand, NULL, NULL, NULL },
        { "pack: eleven slots in the middle leave the others' bits", test_few_slots_by_hand, NULL, NULL,
          NULL },
        { "pack: 1, 10, 11, 31, 32, 33, 63, 64 slots of 1 to 5 bits", test_lengths, NULL, NULL, NULL },
        { "pack: a tie on a boundary goes to the lower code", test_boundary_ties_go_to_the_lower_code, NULL,
          NULL, NULL },
        { "pack: outliers by limit, cap and ties by hand", test_limit_outliers_by_hand, NULL, NULL, NULL },
        { "pack: outliers by rank, ties and a full page by hand", test_rank_outliers_by_hand, NULL, NULL,
          NULL },
        { "pack: token scales by hand", test_scales_by_hand, NULL, NULL, NULL },
        { "pack: beside a constant is farther than anything", test_constant_channel_outliers, NULL, NULL,
          NULL },
        { "pack: residuals beyond f16 saturate and are counted", test_saturation_is_counted, NULL, NULL,
          NULL },
    };
    return lowkey_run_tests(tests);
}
