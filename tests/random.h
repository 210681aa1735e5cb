/* random.h - one seeded generator for all tests: the same numbers on every machine. */
#ifndef LOWKEY_TEST_RANDOM_H
#define LOWKEY_TEST_RANDOM_H

#include <stddef.h>
#include <stdint.h>

struct lowkey_random {
    uint64_t state; /* the seed at first */
};

uint64_t lowkey_random_bits(struct lowkey_random *random);
int lowkey_random_below(struct lowkey_random *random, int n); /* 0..n-1 */
double lowkey_random_uniform(struct lowkey_random *random); /* [0, 1) */
double lowkey_random_normal(struct lowkey_random *random);

enum lowkey_distribution {
    LOWKEY_UNIFORM, /* [-1, 1) */
    LOWKEY_NORMAL,
    LOWKEY_HEAVY_TAILED, /* a ratio of normals, at most 1e6 */
    LOWKEY_CONSTANT, /* one number for all */
    LOWKEY_OUTLIERS, /* normal, one in 20 thirty times as large */
    LOWKEY_N_DISTRIBUTIONS
};
double lowkey_random_draw(struct lowkey_random *random, enum lowkey_distribution distribution);
void lowkey_random_fill(struct lowkey_random *random, enum lowkey_distribution distribution, float *x,
                        size_t n);

/* A permutation of 0..n-1. */
void lowkey_random_permutation(struct lowkey_random *random, int n, int *out);

#endif
