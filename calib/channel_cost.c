/* channel_cost.c - errors of a table on a channel, and the costs they add up to, in the order of tokens. */
#include "calib/channel_cost.h"

enum { BLOCK = 256 }; /* tokens coded at once */

/* e[i] = table's value - x[i] */
static void errors_of(const struct lowkey_stored_table *table, int n, const float *x, double *e)
{
    int code[BLOCK] = { 0 };
    for (int k = 0; k + 1 < table->n_entries; k++) {
        const float boundary = table->boundary[k];
        for (int i = 0; i < n; i++) code[i] += boundary < x[i];
    }
    for (int i = 0; i < n; i++) e[i] = (double)table->entry[code[i]] - (double)x[i];
}

/* Of one sample: sums of p and of p^2, p = g e; or in squares of w e^2. */
static void add_sample(const struct lowkey_stored_table *table, int64_t n, const float *x, const float *weight,
                       double each, int by_gradient, double *sum, double *squares)
{
    double e[BLOCK];
    for (int64_t first = 0; first < n; first += BLOCK) {
        const int count = n - first < BLOCK ? (int)(n - first) : BLOCK;
        errors_of(table, count, x + first, e);
        for (int i = 0; i < count; i++) {
            const double w = weight ? (double)weight[first + i] : each, product = w * e[i];
            *sum += product;
            *squares += by_gradient ? product * product : product * e[i];
        }
    }
}

double lowkey_channel_cost(const lowkey_captures *captures, const struct lowkey_stored_table *table, const float *x,
                           const float *weight, double each, int by_gradient)
{
    double coherent = 0, squares = 0;
    for (int s = 0; s < captures->n_samples; s++) {
        const struct lowkey_sample *sample = &captures->samples[s];
        double sum = 0;
        add_sample(table, sample->n_tokens - sample->n_sinks, x + sample->start,
                   weight ? weight + sample->start : NULL, each, by_gradient, &sum, &squares);
        coherent += sum * sum;
    }
    const double total = by_gradient ? 0.5 * squares + 0.5 * coherent : squares;
    return total / (2 * (double)captures->n_tokens);
}
