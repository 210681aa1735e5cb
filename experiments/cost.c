/* cost.c - sums of gradient times error, and the costs made of them. */
#include "experiments/cost.h"

#include <math.h>
#include <string.h>

void lowkey_cost_add(int n_tokens, int n_channels, const float *exact, const float *stored, const float *grad,
                     size_t stride, double *sums, double *squares)
{
    for (int c = 0; c < n_channels; c++) sums[(size_t)c * stride] = 0;
    for (int t = 0; t < n_tokens; t++) {
        const size_t row = (size_t)t * (size_t)n_channels;
        for (size_t c = 0; c < (size_t)n_channels; c++) {
            const double product = (double)grad[row + c] * ((double)stored[row + c] - (double)exact[row + c]);
            sums[c * stride] += product;
            squares[c] += product * product;
        }
    }
}

void lowkey_cost_add_unit(struct lowkey_cost_total *total, int n_channels, const double *sums,
                          const double *squares, double *scratch)
{
    const size_t n = (size_t)total->n_samples;
    memset(scratch, 0, n * sizeof *scratch);
    for (size_t c = 0; c < (size_t)n_channels; c++) {
        for (size_t s = 0; s < n; s++) scratch[s] += sums[c * n + s];
        total->squares += squares[c];
    }
    for (size_t s = 0; s < n; s++) {
        total->first[s] += scratch[s];
        total->coherent += scratch[s] * scratch[s];
    }
}

struct lowkey_cost lowkey_cost_of(const struct lowkey_cost_total *total, double n_tokens)
{
    const int n = total->n_samples;
    double sum = 0, spread = 0;
    for (int s = 0; s < n; s++) sum += total->first[s];
    for (int s = 0; s < n; s++) spread += (total->first[s] - sum / n) * (total->first[s] - sum / n);
    return (struct lowkey_cost) {
        .first_order = sum / n_tokens,
        .standard_error = n > 1 ? sqrt(n * spread / (n - 1)) / n_tokens : (double)NAN,
        .diagonal = total->squares / (2 * n_tokens),
        .coherent = total->coherent / (2 * n_tokens),
    };
}
