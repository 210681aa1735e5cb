/* range.c - exact order statistics. */
#include "calib/range.h"

#include <math.h>
#include <stdlib.h>

#include "calib/sort.h"

int64_t lowkey_outliers_each_end(int64_t n, double fraction)
{
    const double product = 0.5 * (double)n * fraction, nearest = rint(product);
    const double k = fabs(product - nearest) <= ldexp(fmax(nearest, 1), -40) ? nearest : floor(product);
    const int64_t most = (n - 1) / 2;
    return (int64_t)k < most ? (int64_t)k : most;
}

int lowkey_outlier_rank(int n, double fraction)
{
    if (!(fraction > 0)) return 0;
    const int rank = (int)lround(0.5 * n * fraction);
    return rank < 1 ? 1 : rank > n / 2 ? n / 2 : rank;
}

/* Two counting passes: over the upper 16 bits of the float's key, then the lower ones of those that share
 * them. */
float lowkey_order_statistic(int64_t n, const float *x, int64_t rank)
{
    enum { DIGITS = 1 << 16 };
    static const int shift[2] = { 16, 0 };
    int64_t count[DIGITS];
    uint32_t key = 0;
    for (int pass = 0; pass < 2; pass++) {
        memset(count, 0, sizeof count);
        for (int64_t i = 0; i < n; i++) {
            const uint32_t k = lowkey_float_key(x[i]);
            if (pass == 0 || k >> 16 == key >> 16) count[k >> shift[pass] & (DIGITS - 1)]++;
        }
        uint32_t digit = 0;
        while (rank >= count[digit]) rank -= count[digit++];
        key |= digit << shift[pass];
    }
    return lowkey_key_float(key);
}
