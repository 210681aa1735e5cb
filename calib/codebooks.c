/* codebooks.c - uniform and NormalFloat codebooks. */
#include "calib/codebooks.h"

#include <gsl/gsl_cdf.h>

void lowkey_uniform_codebook(int bits, double *values)
{
    const int n = 1 << bits;
    for (int k = 0; k < n; k++) values[k] = (double)(2 * k - (n - 1)) / (n - 1);
}

/* The outermost quantile leaves out the mean of half a step of either side: QLoRA's 0.9677 at 4 bits. */
void lowkey_normal_float_codebook(int bits, double *values)
{
    const int n_above = 1 << (bits - 1), n_below = n_above - 1;
    const double outermost = 1 - 0.5 * (1 / (4.0 * n_above) + 1 / (4.0 * n_above - 2));
    const double largest = gsl_cdf_ugaussian_Pinv(outermost);
    values[n_below] = 0;
    for (int k = 1; k <= n_above; k++)
        values[n_below + k] = gsl_cdf_ugaussian_Pinv(0.5 + (outermost - 0.5) * k / n_above) / largest;
    for (int k = 1; k <= n_below; k++)
        values[n_below - k] = -gsl_cdf_ugaussian_Pinv(0.5 + (outermost - 0.5) * k / n_below) / largest;
    values[0] = -1; /* the ends, whatever the division rounds to */
    values[n_below + n_above] = 1;
}
