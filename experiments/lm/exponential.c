/* exponential.c - loops over rows, each compiled for several vector widths. Sums go over 16 lanes that are added up at the
 * end, whatever the width, so that the result is the same. */
#include "experiments/lm/exponential.h"

#include "kernels/element.h"

enum { LANES = 16 };

LOWKEY_CLONES("avx2", "avx512f")
float lowkey_largest(const float *x, int n, int *at)
{
    float max[LANES];
    int t = 0;
    for (int i = 0; i < LANES; i++) max[i] = x[0];
    for (; t + LANES <= n; t += LANES)
        for (int i = 0; i < LANES; i++) max[i] = x[t + i] > max[i] ? x[t + i] : max[i];
    for (; t < n; t++) max[0] = x[t] > max[0] ? x[t] : max[0];
    for (int i = 1; i < LANES; i++) max[0] = max[i] > max[0] ? max[i] : max[0];
    if (at)
        for (*at = 0; *at < n - 1 && x[*at] != max[0];) ++*at;
    return max[0];
}

/* Stretches that stay in the first cache: one loop makes them, another adds them up. */
enum { STRETCH = 512 };

static inline void add_to(double *sum, const float *x, int n)
{
    int t = 0;
    for (; t + LANES <= n; t += LANES)
        for (int i = 0; i < LANES; i++) sum[i] += (double)x[t + i];
    for (int i = 0; t < n; t++, i++) sum[i] += (double)x[t];
}

static inline double total(const double *lanes)
{
    double sum = 0;
    for (int i = 0; i < LANES; i++) sum += lanes[i];
    return sum;
}

LOWKEY_CLONES("avx2", "avx512f")
double lowkey_exp_row(float *x, int n, float shift)
{
    double sum[LANES] = { 0 };
    for (int first = 0; first < n; first += STRETCH) {
        const int end = n - first < STRETCH ? n : first + STRETCH;
        for (int t = first; t < end; t++) x[t] = lowkey_exp(x[t] - shift);
        add_to(sum, x + first, end - first);
    }
    return total(sum);
}

LOWKEY_CLONES("avx2", "avx512f")
double lowkey_exp_sum(const float *x, int n, float shift)
{
    double sum[LANES] = { 0 };
    for (int first = 0; first < n; first += STRETCH) {
        float e[STRETCH];
        const int size = n - first < STRETCH ? n - first : STRETCH;
        for (int t = 0; t < size; t++) e[t] = lowkey_exp(x[first + t] - shift);
        add_to(sum, e, size);
    }
    return total(sum);
}

LOWKEY_CLONES("avx2", "avx512f")
void lowkey_swiglu(float *gate, const float *up, size_t n)
{
    for (size_t i = 0; i < n; i++) gate[i] = gate[i] / (1 + lowkey_exp(-gate[i])) * up[i];
}

/* (1 + tanh y) / 2 = 1 / (1 + exp(-2 y)) */
LOWKEY_CLONES("avx2", "avx512f")
void lowkey_geglu(float *gate, const float *up, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const float x = gate[i], y = 0.797884560802865f * (x + 0.044715f * x * x * x);
        gate[i] = x / (1 + lowkey_exp(-2 * y)) * up[i];
    }
}
