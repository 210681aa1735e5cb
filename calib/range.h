/* range.h - exact order statistics of a channel: what its limits are. */
#ifndef LOWKEY_RANGE_H
#define LOWKEY_RANGE_H

#include "runtime/lowkey.h"

/* How many of n values lie outside at each end for a fraction of outliers in [0, 1]: k = floor(n fraction
 * / 2), and at most (n - 1) / 2 so that one value is left. The limits are then sorted[k] and sorted[n - 1
 * - k], without interpolation: no more than k values are below the lower one, and no more than k above the
 * upper one. A product within 2^-40 of an integer is that integer, so that decimal fractions mean what
 * they say (0.01 of 600 is 3 at each end). */
int64_t lowkey_outliers_each_end(int64_t n, double fraction);

/* How many of a token's n elements are outliers by rank at each end: round(n fraction / 2), at least 1 and
 * at most n / 2; 0 where the fraction is 0. */
int lowkey_outlier_rank(int n, double fraction);

/* The value of rank `rank` (0-based, rising) of n finite values, without sorting them. */
float lowkey_order_statistic(int64_t n, const float *x, int64_t rank);

#endif
