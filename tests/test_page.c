/* test_page.c - pages and side pages: offsets and bytes worked out by hand from formats/README.md, "Pages". */
#include <stdlib.h>

#include "formats/page.h"
#include "tests/check.h"

enum { SLOTS = 64 };

static unsigned next(unsigned *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

static void one_width_fills_a_page_evenly(void **state)
{
    (void)state;
    static const struct {
        uint8_t bits;
        int head_dim;
        size_t bytes;
    } pages[] = {
        { 1, 8, 64 },     { 1, 72, 576 },        { 1, 256, 2048 },      { 2, 8, 128 },
        { 2, 80, 1280 },  { 3, 64, 1024 + 512 }, { 3, 8, 128 + 64 },    { 4, 64, 2048 },
        { 4, 128, 4096 }, { 5, 64, 2048 + 512 }, { 5, 96, 3072 + 768 }, { 8, 64, 4096 },
        { 16, 8, 1024 },  { 16, 256, 32768 },
    };
    for (size_t i = 0; i < sizeof pages / sizeof pages[0]; i++) {
        uint8_t bits[LOWKEY_MAX_HEAD_DIM];
        uint16_t order[LOWKEY_MAX_HEAD_DIM];
        struct lowkey_row rows[LOWKEY_MAX_HEAD_DIM];
        memset(bits, pages[i].bits, sizeof bits);
        for (int c = 0; c < pages[i].head_dim; c++) order[c] = (uint16_t)c;
        assert_int_equal(lowkey_page_layout(pages[i].head_dim, bits, order, rows), pages[i].bytes);
    }
}

/* 8 channels of every width, rows in the order 7 6 5 4 3 2 1 0: row r holds channel 7 - r. */
static const uint8_t mixed_bits[8] = { 16, 8, 5, 4, 3, 2, 1, 1 };
static const uint16_t mixed_order[8] = { 7, 6, 5, 4, 3, 2, 1, 0 };

static void mixed_widths_are_laid_out_widest_plane_first(void **state)
{
    (void)state;
    struct lowkey_row rows[8];
    assert_int_equal(lowkey_page_layout(8, mixed_bits, mixed_order, rows), 384);
    /* 16 bits at 0, 8 at 128, 4 at 192 (channels 3, 2), 2 at 256 (5, 4), 1 at 320 (7, 6, top of 4, top of 2) */
    static const struct lowkey_row golden[8] = {
        { 320, 0, 7, 1, 1 }, { 328, 0, 6, 1, 1 },   { 256, 0, 5, 2, 2 }, { 272, 336, 4, 3, 2 },
        { 192, 0, 3, 4, 4 }, { 224, 344, 2, 5, 4 }, { 128, 0, 1, 8, 8 }, { 0, 0, 0, 16, 16 },
    };
    for (int r = 0; r < 8; r++) {
        assert_int_equal(rows[r].wide_offset, golden[r].wide_offset);
        assert_int_equal(rows[r].top_offset, golden[r].top_offset);
        assert_int_equal(rows[r].channel, golden[r].channel);
        assert_int_equal(rows[r].bits, golden[r].bits);
        assert_int_equal(rows[r].wide_bits, golden[r].wide_bits);
    }
}

static void the_ramp_of_codes_gives_these_bytes(void **state)
{
    (void)state;
    struct lowkey_row rows[8];
    uint8_t page[384], golden[384];
    memset(page, 0, sizeof page);
    memset(golden, 0, sizeof golden);
    lowkey_page_layout(8, mixed_bits, mixed_order, rows);
    for (int r = 0; r < 8; r++)
        for (int t = 0; t < SLOTS; t++)
            lowkey_code_set(page, &rows[r], t, (unsigned)t & ((1u << rows[r].bits) - 1));
    for (int t = 0; t < 64; t++) golden[2 * t] = (uint8_t)t; /* 16 bits: words 0..63 */
    for (int t = 0; t < 64; t++) golden[128 + t] = (uint8_t)t; /* 8 bits */
    for (int i = 0; i < 32; i++)
        golden[192 + i] = (uint8_t)(i % 16 * 0x11); /* 4 bits: slots i and i + 32 alike */
    for (int i = 0; i < 32; i++) golden[224 + i] = (uint8_t)(i % 16 * 0x11); /* low 4 of 5 bits */
    for (int i = 0; i < 16; i++)
        golden[256 + i] = (uint8_t)(i % 4 * 0x55); /* 2 bits: slots i, i + 16, .. alike */
    for (int i = 0; i < 16; i++) golden[272 + i] = (uint8_t)(i % 4 * 0x55); /* low 2 of 3 bits */
    for (int i = 0; i < 8; i++) {
        golden[320 + i] = golden[328 + i] = i % 2 ? 0xff
                                                  : 0; /* 1 bit: slots i, i + 8, .. have the parity of i */
        golden[336 + i] = i >= 4 ? 0xff : 0; /* top of 3 bits: slots 4..7 of each 8 */
        golden[344 + i] = 0xcc; /* top of 5 bits: slots 16..31 and 48..63 */
    }
    assert_memory_equal(page, golden, sizeof golden);
}

/* The bit of a code, found from the specification alone: planes widest first, rows in order, padded to 64. */
static void locate(const uint8_t *bits, const uint16_t *order, int head_dim, int row, int bit, int slot,
                   size_t *byte, int *at)
{
    static const int planes[] = { 16, 8, 4, 2, 1 };
    const int b = bits[order[row]], low = b == 3 ? 2 : b == 5 ? 4 : b, plane_of_bit = bit < low ? low : 1;
    size_t start = 0;
    for (int p = 0; p < 5; p++) {
        size_t n = 0;
        for (int r = 0; r < head_dim; r++) {
            const int w = bits[order[r]];
            const int has = planes[p] == 1   ? w == 1 || w == 3 || w == 5
                            : planes[p] == 2 ? w == 2 || w == 3
                            : planes[p] == 4 ? w == 4 || w == 5
                                             : w == planes[p];
            if (r == row && planes[p] == plane_of_bit) {
                const int k = bit < low ? bit : 0, row_bytes = 8 * planes[p];
                *byte = start + n * (size_t)row_bytes +
                        (size_t)(planes[p] == 16 ? 2 * slot + k / 8 : slot % row_bytes);
                *at = planes[p] == 16 ? k % 8 : planes[p] * (slot / row_bytes) + k;
                return;
            }
            n += (size_t)has;
        }
        start += (n * 8 * (size_t)planes[p] + 63) / 64 * 64;
    }
    fail();
}

static void any_mix_is_where_the_specification_puts_it(void **state)
{
    (void)state;
    static const int dims[] = { 8, 64, 72, 80, 96, 128, 256 };
    static const uint8_t widths[] = { 1, 2, 3, 4, 5, 8, 16 };
    unsigned seed = 3;
    for (size_t i = 0; i < 3 * sizeof dims / sizeof dims[0]; i++) {
        const int d = dims[i % 7];
        uint8_t bits[LOWKEY_MAX_HEAD_DIM];
        uint16_t order[LOWKEY_MAX_HEAD_DIM];
        struct lowkey_row rows[LOWKEY_MAX_HEAD_DIM];
        for (int c = 0; c < d; c++) bits[c] = widths[next(&seed) % 7], order[c] = (uint16_t)c;
        for (int c = d - 1; c > 0; c--) {
            const int j = (int)(next(&seed) % (unsigned)(c + 1));
            const uint16_t kept = order[c];
            order[c] = order[j], order[j] = kept;
        }
        const size_t bytes = lowkey_page_layout(d, bits, order, rows);
        assert_int_equal(bytes % 64, 0);
        uint8_t *page = malloc(bytes), *want = malloc(bytes); /* exact sizes: ASan sees what lies outside */
        for (size_t b = 0; b < bytes; b++) page[b] = want[b] = (uint8_t)next(&seed);
        for (int n = 0; n < 2000; n++) { /* random codes in random places of a page full of noise */
            const int r = (int)(next(&seed) % (unsigned)d), t = (int)(next(&seed) % SLOTS);
            const unsigned code = next(&seed) & ((1u << bits[order[r]]) - 1);
            lowkey_code_set(page, &rows[r], t, code);
            for (int bit = 0; bit < bits[order[r]]; bit++) {
                size_t byte = 0;
                int at = 0;
                locate(bits, order, d, r, bit, t, &byte, &at);
                want[byte] = (uint8_t)((want[byte] & ~(1u << at)) | (code >> bit & 1) << at);
            }
            assert_int_equal(lowkey_code_get(page, &rows[r], t), code);
        }
        assert_memory_equal(page, want, bytes);
        free(page);
        free(want);
    }
}

static void side_pages_hold_scales_then_outliers(void **state)
{
    (void)state;
    static const struct {
        int n_blocks, scale_bytes, capacity;
        struct lowkey_side_layout golden;
    } pages[] = {
        { 0, 2, 0, { 0, 0, 0, 0, 0 } },
        { 1, 2, 0, { 0, 128, 0, 0, 256 } },
        { 1, 4, 0, { 0, 256, 0, 0, 512 } },
        { 12, 2, 0, { 0, 1536, 0, 0, 3072 } },
        { 0, 2, 1, { 0, 0, 0, 128, 192 } },
        { 0, 2, 16, { 0, 0, 0, 128, 192 } },
        { 0, 2, 17, { 0, 0, 0, 128, 256 } },
        { 1, 4, 65535, { 0, 256, 512, 640, 640 + 262144 } },
        { 8192, 4, 65535, { 0, 2097152, 4194304, 4194432, 4194432 + 262144 } },
    };
    for (size_t i = 0; i < sizeof pages / sizeof pages[0]; i++) {
        const struct lowkey_side_layout got = lowkey_side_page_layout(pages[i].n_blocks, pages[i].scale_bytes,
                                                                      pages[i].capacity);
        assert_int_equal(got.bytes, pages[i].golden.bytes);
        if (pages[i].n_blocks) assert_int_equal(got.scale_offset, 0);
        if (pages[i].n_blocks) assert_int_equal(got.zero_offset, pages[i].golden.zero_offset);
        if (pages[i].capacity) assert_int_equal(got.end_offset, pages[i].golden.end_offset);
        if (pages[i].capacity) assert_int_equal(got.outlier_offset, pages[i].golden.outlier_offset);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_width_fills_a_page_evenly),
        cmocka_unit_test(mixed_widths_are_laid_out_widest_plane_first),
        cmocka_unit_test(the_ramp_of_codes_gives_these_bytes),
        cmocka_unit_test(any_mix_is_where_the_specification_puts_it),
        cmocka_unit_test(side_pages_hold_scales_then_outliers),
    };
    return lowkey_run_tests(tests);
}
