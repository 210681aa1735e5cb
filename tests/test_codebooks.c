/* Codebooks without data: against QLoRA's published NF4, and the shape that all widths share. */
#include <math.h>

#include "calib/codebooks.h"
#include "tests/check.h"

static void normal_float_of_4_bits_is_the_published_one(void **state)
{
    (void)state;
    static const double nf4[16] = { -1.0,
                                    -0.6961928009986877,
                                    -0.5250730514526367,
                                    -0.39491748809814453,
                                    -0.28444138169288635,
                                    -0.18477343022823334,
                                    -0.09105003625154495,
                                    0.0,
                                    0.07958029955625534,
                                    0.16093020141124725,
                                    0.24611230194568634,
                                    0.33791524171829224,
                                    0.44070982933044434,
                                    0.5626170039176941,
                                    0.7229568362236023,
                                    1.0 };
    double values[16];
    lowkey_normal_float_codebook(4, values);
    for (int k = 0; k < 16; k++) assert_true(fabs(values[k] - nf4[k]) < 1e-6);
}

static void every_codebook_rises_from_minus_one_to_one(void **state)
{
    (void)state;
    double values[32];
    for (int bits = 1; bits <= 5; bits++) {
        for (int kind = 0; kind < 2; kind++) {
            if (kind && bits == 1) continue;
            (kind ? lowkey_normal_float_codebook : lowkey_uniform_codebook)(bits, values);
            const int n = 1 << bits;
            assert_true(values[0] == -1 && values[n - 1] == 1);
            for (int k = 1; k < n; k++) assert_true(values[k] > values[k - 1]);
            if (kind)
                assert_true(values[n / 2 - 1] == 0);
            else
                for (int k = 1; k < n; k++)
                    assert_true(fabs(values[k] - values[k - 1] - 2.0 / (n - 1)) < 1e-15);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(normal_float_of_4_bits_is_the_published_one),
        cmocka_unit_test(every_codebook_rises_from_minus_one_to_one),
    };
    return lowkey_run_tests(tests);
}
