/* bootstrap.h - how sure a figure over windows of a text is: windows drawn anew, with replacement. Windows are the unit,
 * since tokens of one window are not independent. */
#ifndef LOWKEY_BOOTSTRAP_H
#define LOWKEY_BOOTSTRAP_H

enum { LOWKEY_RESAMPLES = 2000 };

struct lowkey_interval {
    double low, high;
};

/* The 2.5 % and 97.5 % quantiles of sum of numerators / sum of denominators over LOWKEY_RESAMPLES draws of n windows out of
 * n. The draws depend on n alone, so that figures of several formats over the same windows are compared pair by pair.
 * NaN under 2 windows, or where there is no memory. */
struct lowkey_interval lowkey_bootstrap(int n, const double *numerators, const double *denominators);

#endif
