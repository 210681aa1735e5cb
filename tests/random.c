/* random.c - splitmix64 and what is drawn from it. */
#include "tests/random.h"

#include <math.h>

uint64_t lowkey_random_bits(struct lowkey_random *random)
{
    uint64_t z = random->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

int lowkey_random_below(struct lowkey_random *random, int n)
{
    return (int)(lowkey_random_bits(random) % (uint64_t)n);
}

double lowkey_random_uniform(struct lowkey_random *random)
{
    return (double)(lowkey_random_bits(random) >> 11) * 0x1p-53;
}

double lowkey_random_normal(struct lowkey_random *random) /* Box and Muller's */
{
    const double radius = sqrt(-2 * log(1 - lowkey_random_uniform(random)));
    return radius * cos(6.283185307179586 * lowkey_random_uniform(random));
}

double lowkey_random_draw(struct lowkey_random *random, enum lowkey_distribution distribution)
{
    switch (distribution) {
    case LOWKEY_UNIFORM: return 2 * lowkey_random_uniform(random) - 1;
    case LOWKEY_HEAVY_TAILED: {
        const double x = lowkey_random_normal(random) / lowkey_random_normal(random);
        return fmax(fmin(x, 1e6), -1e6);
    }
    case LOWKEY_CONSTANT: return 0.7;
    case LOWKEY_OUTLIERS: return lowkey_random_normal(random) * (lowkey_random_below(random, 20) ? 1 : 30);
    default: return lowkey_random_normal(random);
    }
}

void lowkey_random_fill(struct lowkey_random *random, enum lowkey_distribution distribution, float *x,
                        size_t n)
{
    for (size_t i = 0; i < n; i++) x[i] = (float)lowkey_random_draw(random, distribution);
}

void lowkey_random_permutation(struct lowkey_random *random, int n, int *out)
{
    for (int i = 0; i < n; i++) {
        const int j = lowkey_random_below(random, i + 1);
        out[i] = out[j];
        out[j] = i;
    }
}
