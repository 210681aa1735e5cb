/* test_half.c - number formats against an oracle in double that knows only the table of formats/README.md: a
 * code's value by ldexp, and encoding by looking for the nearest value among all codes. */
#include "formats/half.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "tests/check.h"

enum special { INFINITY_AND_NAN, ONE_NAN, NO_SPECIAL };

struct format {
    const char *name;
    int exponent_bits, mantissa_bits, bias;
    enum special special;
    double largest;
    unsigned n_finite; /* magnitude codes 0..n_finite-1 are numbers, rising */
    float (*decode)(unsigned code);
    unsigned (*encode)(float x); /* the conversion by that name */
    unsigned (*saturate)(float x, uint64_t *n);
};

#define FORMAT_FUNCTIONS(name, type)                                                                         \
    static float decode_##name(unsigned code)                                                                \
    {                                                                                                        \
        return lowkey_##name##_to_f32((type)code);                                                           \
    }                                                                                                        \
    static unsigned encode_##name(float x)                                                                   \
    {                                                                                                        \
        return lowkey_f32_to_##name(x);                                                                      \
    }                                                                                                        \
    static unsigned saturate_##name(float x, uint64_t *n)                                                    \
    {                                                                                                        \
        return lowkey_f32_to_##name##_saturate(x, n);                                                        \
    }
FORMAT_FUNCTIONS(f16, uint16_t)
FORMAT_FUNCTIONS(bf16, uint16_t)
FORMAT_FUNCTIONS(e4m3, uint8_t)
FORMAT_FUNCTIONS(e5m2, uint8_t)
FORMAT_FUNCTIONS(e2m1, uint8_t)

static const struct format formats[] = {
    { "f16", 5, 10, 15, INFINITY_AND_NAN, 65504, 0x7c00, decode_f16, encode_f16, saturate_f16 },
    { "bf16", 8, 7, 127, INFINITY_AND_NAN, 0x1.fep127, 0x7f80, decode_bf16, encode_bf16, saturate_bf16 },
    { "e4m3", 4, 3, 7, ONE_NAN, 448, 127, decode_e4m3, encode_e4m3, saturate_e4m3 },
    { "e5m2", 5, 2, 15, INFINITY_AND_NAN, 57344, 124, decode_e5m2, encode_e5m2, saturate_e5m2 },
    { "e2m1", 2, 1, 1, NO_SPECIAL, 6, 8, decode_e2m1, encode_e2m1, saturate_e2m1 },
};
enum { N_FORMATS = sizeof formats / sizeof formats[0] };

/* A code's value by the definition of a binary floating-point number; NaN and infinities where the format has
 * them. */
static double value_of(const struct format *f, unsigned code)
{
    const unsigned mantissa = code & ((1u << f->mantissa_bits) - 1);
    const unsigned exponent = code >> f->mantissa_bits & ((1u << f->exponent_bits) - 1);
    const double sign = code >> (f->mantissa_bits + f->exponent_bits) & 1 ? -1 : 1;
    const int is_top = exponent == (1u << f->exponent_bits) - 1;
    if (is_top && f->special == INFINITY_AND_NAN) return mantissa ? (double)NAN : sign * (double)INFINITY;
    if (is_top && f->special == ONE_NAN && mantissa == (1u << f->mantissa_bits) - 1) return (double)NAN;
    if (exponent == 0) return sign * ldexp(mantissa, 1 - f->bias - f->mantissa_bits);
    return sign * ldexp(mantissa + (1u << f->mantissa_bits), (int)exponent - f->bias - f->mantissa_bits);
}

/* Nearest finite value, ties to the even code; *over: a value past the largest, in the same raster, would be
 * as near. */
static unsigned nearest(const struct format *f, double x, int *over)
{
    const double a = fabs(x);
    const unsigned n = f->n_finite;
    unsigned low = 0, high = n - 1;
    while (low < high) { /* the last value <= a */
        const unsigned middle = (low + high + 1) / 2;
        if (value_of(f, middle) <= a)
            low = middle;
        else
            high = middle - 1;
    }
    const double below = value_of(f, low);
    const double above = low + 1 < n ? value_of(f, low + 1) : 2 * below - value_of(f, low - 1);
    unsigned code = low;
    if (a - below > above - a || (a - below == above - a && low & 1)) code = low + 1;
    *over = code >= n;
    const unsigned sign = signbit(x) ? 1u << (f->exponent_bits + f->mantissa_bits) : 0;
    return sign | (code >= n ? n - 1 : code);
}

static void check_encode(const struct format *f, float x)
{
    int over;
    unsigned want = nearest(f, (double)x, &over);
    uint64_t n_saturated = 0;
    const unsigned saturated = f->saturate(x, &n_saturated);
    if (saturated != want || n_saturated != (uint64_t)over)
        fail_msg("%s of %a saturating: code 0x%x, wanted 0x%x; counted %d, wanted %d", f->name, (double)x,
                 saturated, want, (int)n_saturated, over);
    if (over && f->exponent_bits + f->mantissa_bits == 15)
        want++; /* 16-bit formats: infinity follows the largest */
    const unsigned code = f->encode(x);
    if (code != want) fail_msg("%s of %a: code 0x%x, wanted 0x%x", f->name, (double)x, code, want);
}

static void every_code_decodes_to_its_value(void **state)
{
    (void)state;
    for (const struct format *f = formats; f < formats + N_FORMATS; f++) {
        for (unsigned code = 0; code < 2u << (f->exponent_bits + f->mantissa_bits); code++) {
            const float got = f->decode(code);
            const double want = value_of(f, code);
            if (isnan(want) ? !isnan(got) : (double)got != want || !signbit(got) != !signbit(want))
                fail_msg("%s code 0x%x: %a, wanted %a", f->name, code, (double)got, want);
        }
        for (unsigned code = 0; code < 1u << (f->exponent_bits + f->mantissa_bits); code++)
            assert_int_equal(isfinite(value_of(f, code)) != 0, code < f->n_finite);
        assert_true(value_of(f, f->n_finite - 1) == f->largest);
    }
}

static void every_code_comes_back_from_its_value(void **state)
{
    (void)state;
    for (const struct format *f = formats; f < formats + N_FORMATS; f++) {
        for (unsigned code = 0; code < 2u << (f->exponent_bits + f->mantissa_bits); code++) {
            const float x = f->decode(code);
            const unsigned back = f->encode(x);
            if (isnan(x))
                assert_true(isnan(f->decode(back)) && !signbit(f->decode(back)) == !signbit(x));
            else if (isinf(x) && f->bias == 15 && f->mantissa_bits == 2)
                assert_int_equal(back, code - 1);
            else
                assert_int_equal(back, code);
        }
    }
}

/* At each midpoint of two neighbours, and one f32 to either side of it, and one f32 to either side of each
 * value. */
static void rounding_turns_at_every_midpoint(void **state)
{
    (void)state;
    for (const struct format *f = formats; f < formats + N_FORMATS; f++) {
        const unsigned n = f->n_finite;
        for (unsigned code = 0; code < n; code++) {
            const double value = value_of(f, code);
            const double next = code + 1 < n ? value_of(f, code + 1) : 2 * value - value_of(f, code - 1);
            const double points[] = { value, value + (next - value) / 2, next };
            for (int i = 0; i < 3; i++) {
                const float x = (float)points[i];
                if (isinf(x)) continue;
                if ((double)x != points[i]) fail_msg("%s: a midpoint %a that is no f32", f->name, points[i]);
                const float around[] = { x, nextafterf(x, INFINITY), nextafterf(x, -INFINITY) };
                for (int k = 0; k < 3; k++) {
                    if (!isfinite(around[k])) continue;
                    check_encode(f, around[k]);
                    check_encode(f, -around[k]);
                }
            }
        }
    }
}

static void sampled_floats_of_every_exponent_round_to_the_nearest(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 400000; i++) {
        const uint32_t bits = (uint32_t)(i * 0x9e3779b97f4a7c15u >> 32);
        const float x = lowkey_f32_from_bits(bits);
        if (!isfinite(x)) continue;
        for (const struct format *f = formats; f < formats + N_FORMATS; f++) check_encode(f, x);
    }
    for (int shift = 0; shift < 31; shift++)
        for (const struct format *f = formats; f < formats + N_FORMATS; f++)
            check_encode(f, lowkey_f32_from_bits(1u << shift));
}

static void infinities_and_overflow_follow_each_formats_rule(void **state)
{
    (void)state;
    for (const struct format *f = formats; f < formats + N_FORMATS; f++) {
        const unsigned sign = 1u << (f->exponent_bits + f->mantissa_bits), largest = f->n_finite - 1;
        const int is_ieee_16 = f->exponent_bits + f->mantissa_bits == 15;
        const float huge[] = { INFINITY, FLT_MAX };
        for (int i = 0; i < 2; i++) {
            assert_int_equal(f->encode(huge[i]), is_ieee_16 ? largest + 1 : largest);
            assert_int_equal(f->encode(-huge[i]), sign | (is_ieee_16 ? largest + 1 : largest));
            uint64_t n = 5;
            assert_int_equal(f->saturate(huge[i], &n), largest);
            assert_int_equal(f->saturate(-huge[i], &n), sign | largest);
            assert_int_equal(n, 7);
            assert_int_equal(f->saturate(huge[i], NULL), largest);
        }
    }
}

static void nan_stays_nan_where_there_is_one(void **state)
{
    (void)state;
    const uint32_t nans[] = { 0x7fc00000, 0xffc00000, 0x7f800001, 0xff800001,
                              0x7fffffff, 0x7fbfffff, 0xffffffff };
    for (size_t i = 0; i < sizeof nans / sizeof nans[0]; i++) {
        for (const struct format *f = formats; f < formats + N_FORMATS; f++) {
            uint64_t n = 0;
            const float x = lowkey_f32_from_bits(nans[i]);
            const unsigned code = f->encode(x);
            assert_int_equal(code, f->saturate(x, &n));
            assert_int_equal(n, 0);
            if (f->special == NO_SPECIAL)
                assert_int_equal(code, 7);
            else
                assert_true(isnan(value_of(f, code)) && !signbit(f->decode(code)) == !(nans[i] >> 31));
        }
    }
    assert_int_equal(lowkey_f32_bits(lowkey_f16_to_f32(0x7c01)), 0x7fc02000); /* made quiet, payload kept */
    assert_int_equal(lowkey_f32_to_f16(lowkey_f32_from_bits(0xff802000)), 0xfe01);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_code_decodes_to_its_value),
        cmocka_unit_test(every_code_comes_back_from_its_value),
        cmocka_unit_test(rounding_turns_at_every_midpoint),
        cmocka_unit_test(sampled_floats_of_every_exponent_round_to_the_nearest),
        cmocka_unit_test(infinities_and_overflow_follow_each_formats_rule),
        cmocka_unit_test(nan_stays_nan_where_there_is_one),
    };
    return lowkey_run_tests(tests);
}
