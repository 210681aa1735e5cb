/* test_codes.c - where the bits of a plane's codes are: rows written by hand from formats/README.md, "Pages". */
#include "formats/codes.h"
#include "tests/check.h"

enum { SLOTS = 64 };

static void fill(uint8_t *row, int plane_bits, unsigned (*code_of)(int slot))
{
    for (int t = 0; t < SLOTS; t++) lowkey_plane_set(row, plane_bits, t, code_of(t));
    for (int t = 0; t < SLOTS; t++) assert_int_equal(lowkey_plane_get(row, plane_bits, t), code_of(t));
}

static unsigned few(int t)
{
    return t == 0 || t == 9 || t == 18 || t == 63;
}

static void one_bit_is_in_byte_t_mod_8_at_bit_t_div_8(void **state)
{
    (void)state;
    uint8_t row[8];
    memset(row, 0xff, sizeof row);
    fill(row, 1, few);
    static const uint8_t golden[8] = { 0x01, 0x02, 0x04, 0, 0, 0, 0, 0x80 };
    assert_memory_equal(row, golden, sizeof golden);
}

static unsigned stepping(int t) /* 0 1 2 3 .. in slots 0..15, 1 2 3 0 .. in 16..31, and so on */
{
    return (unsigned)(t + t / 16) % 4;
}

static void two_bits_are_in_byte_t_mod_16(void **state)
{
    (void)state;
    uint8_t row[16];
    memset(row, 0xff, sizeof row);
    fill(row, 2, stepping);
    static const uint8_t golden[16] = { 0xe4, 0x39, 0x4e, 0x93, 0xe4, 0x39, 0x4e, 0x93,
                                        0xe4, 0x39, 0x4e, 0x93, 0xe4, 0x39, 0x4e, 0x93 };
    assert_memory_equal(row, golden, sizeof golden);
}

static unsigned up_then_down(int t)
{
    return (unsigned)(t < 32 ? t % 16 : 15 - t % 16);
}

static void four_bits_are_in_byte_t_mod_32(void **state)
{
    (void)state;
    uint8_t row[32];
    memset(row, 0, sizeof row);
    fill(row, 4, up_then_down);
    static const uint8_t golden[32] = {
        0xf0, 0xe1, 0xd2, 0xc3, 0xb4, 0xa5, 0x96, 0x87, 0x78, 0x69, 0x5a, 0x4b, 0x3c, 0x2d, 0x1e, 0x0f,
        0xf0, 0xe1, 0xd2, 0xc3, 0xb4, 0xa5, 0x96, 0x87, 0x78, 0x69, 0x5a, 0x4b, 0x3c, 0x2d, 0x1e, 0x0f,
    };
    assert_memory_equal(row, golden, sizeof golden);
}

static unsigned byte_of(int t)
{
    return (unsigned)t * 4 + 3;
}

static void eight_bits_are_byte_t(void **state)
{
    (void)state;
    uint8_t row[64];
    fill(row, 8, byte_of);
    for (int t = 0; t < SLOTS; t++) assert_int_equal(row[t], 4 * t + 3);
}

static unsigned word_of(int t)
{
    return 0xff00u - 256u * (unsigned)t + (unsigned)t;
}

static void sixteen_bits_are_little_endian_words(void **state)
{
    (void)state;
    uint8_t row[128];
    fill(row, 16, word_of);
    static const uint8_t golden[6] = { 0x00, 0xff, 0x01, 0xfe, 0x02, 0xfd };
    assert_memory_equal(row, golden, sizeof golden);
    assert_int_equal(row[126], 63);
    assert_int_equal(row[127], 0xff - 63);
}

static void setting_a_slot_touches_no_other_bit(void **state)
{
    (void)state;
    static const int planes[] = { 1, 2, 4, 8, 16 };
    for (int p = 0; p < 5; p++) {
        const int bits = planes[p], bytes = 8 * bits;
        assert_int_equal(lowkey_row_bytes(bits), bytes);
        for (int t = 0; t < SLOTS; t++)
            for (int background = 0; background < 256; background += 51) {
                uint8_t row[128 + 2], want[128 + 2]; /* a guard byte on either side */
                memset(row, background, sizeof row);
                memcpy(want, row, sizeof row);
                const unsigned code = 0xa5c3u >> (16 - bits) & ((1u << bits) - 1);
                lowkey_plane_set(row + 1, bits, t, code);
                for (int b = 0; b < bits; b++) { /* bit by bit, from the specification */
                    const int byte = bits == 16 ? 2 * t + b / 8 : t % bytes,
                              bit = bits == 16 ? b % 8 : bits * (t / bytes) + b;
                    want[1 + byte] = (uint8_t)((want[1 + byte] & ~(1u << bit)) | (code >> b & 1) << bit);
                }
                assert_memory_equal(row, want, sizeof row);
                assert_int_equal(lowkey_plane_get(row + 1, bits, t), code);
            }
    }
}

static void widths_split_into_planes(void **state)
{
    (void)state;
    static const int wide[] = { 0, 1, 2, 2, 4, 4, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0 };
    for (int bits = 0; bits < (int)(sizeof wide / sizeof wide[0]); bits++) {
        assert_int_equal(lowkey_wide_bits(bits), wide[bits]);
        assert_int_equal(lowkey_has_top_bit(bits), bits == 3 || bits == 5);
    }
    assert_int_equal(lowkey_wide_bits(-1), 0);
    assert_int_equal(lowkey_wide_bits(255), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_bit_is_in_byte_t_mod_8_at_bit_t_div_8),
        cmocka_unit_test(two_bits_are_in_byte_t_mod_16),
        cmocka_unit_test(four_bits_are_in_byte_t_mod_32),
        cmocka_unit_test(eight_bits_are_byte_t),
        cmocka_unit_test(sixteen_bits_are_little_endian_words),
        cmocka_unit_test(setting_a_slot_touches_no_other_bit),
        cmocka_unit_test(widths_split_into_planes),
    };
    return lowkey_run_tests(tests);
}
