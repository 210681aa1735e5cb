/* bootstrap.c - percentile bootstrap of a ratio of sums, with GSL's Mersenne twister and a seed that is always the same. */
#include "experiments/bootstrap.h"

#include <gsl/gsl_rng.h>
#include <gsl/gsl_sort.h>
#include <gsl/gsl_statistics.h>
#include <math.h>
#include <stdlib.h>

enum { SEED = 20240131 };

static double resample(gsl_rng *random, int n, const double *numerators, const double *denominators)
{
    double above = 0, below = 0;
    for (int i = 0; i < n; i++) {
        const unsigned long drawn = gsl_rng_uniform_int(random, (unsigned long)n);
        above += numerators[drawn];
        below += denominators[drawn];
    }
    return above / below;
}

struct lowkey_interval lowkey_bootstrap(int n, const double *numerators, const double *denominators)
{
    struct lowkey_interval interval = { (double)NAN, (double)NAN };
    if (n < 2) return interval;
    double *ratios = malloc(LOWKEY_RESAMPLES * sizeof *ratios);
    gsl_rng *random = gsl_rng_alloc(gsl_rng_mt19937);
    if (ratios && random) {
        gsl_rng_set(random, SEED);
        for (int i = 0; i < LOWKEY_RESAMPLES; i++) ratios[i] = resample(random, n, numerators, denominators);
        gsl_sort(ratios, 1, LOWKEY_RESAMPLES);
        interval.low = gsl_stats_quantile_from_sorted_data(ratios, 1, LOWKEY_RESAMPLES, 0.025);
        interval.high = gsl_stats_quantile_from_sorted_data(ratios, 1, LOWKEY_RESAMPLES, 0.975);
    }
    if (random) gsl_rng_free(random);
    free(ratios);
    return interval;
}
