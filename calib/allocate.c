/* allocate.c - the steps of all units' convex hulls, steepest first. */
#include "calib/allocate.h"

#include <stdlib.h>

#include "runtime/error.h"

struct step { /* of a unit, from one width of its hull to the next */
    double slope; /* what the cost falls by, per bit */
    size_t unit;
    uint8_t from, to;
};

static int compare_steps(const void *a, const void *b)
{
    const struct step *x = a, *y = b;
    if (x->slope != y->slope) return x->slope > y->slope ? -1 : 1;
    if (x->unit != y->unit) return x->unit < y->unit ? -1 : 1;
    return (x->from > y->from) - (x->from < y->from);
}

/* Append the steps of a unit's hull that lower its cost: slopes fall from step to step. */
static size_t add_steps(const struct lowkey_unit *unit, size_t number, int low, int high, struct step *steps)
{
    size_t n = 0;
    for (int from = low; from < high;) {
        int to = from;
        double steepest = 0;
        for (int b = from + 1; b <= high; b++) {
            const double slope = (unit->cost[from] - unit->cost[b]) / ((double)(b - from) * unit->n_channels);
            if (!(slope > 0) || slope < steepest) continue; /* of equal slopes the farthest: one step */
            steepest = slope;
            to = b;
        }
        if (to == from) break;
        steps[n++] = (struct step) { steepest, number, (uint8_t)from, (uint8_t)to };
        from = to;
    }
    return n;
}

lowkey_status lowkey_allocate(size_t n_units, const struct lowkey_unit *units, int low, int high, int64_t total_bits,
                              uint8_t *widths, lowkey_error *err)
{
    const size_t most = n_units * (size_t)(high - low);
    struct step *steps = malloc((most + 1) * sizeof *steps);
    if (!steps) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for the widths of %zu units", n_units);
    size_t n = 0;
    for (size_t u = 0; u < n_units; u++) {
        widths[u] = (uint8_t)low;
        total_bits -= (int64_t)low * units[u].n_channels;
        n += add_steps(&units[u], u, low, high, steps + n);
    }
    qsort(steps, n, sizeof *steps, compare_steps);
    for (size_t i = 0; i < n; i++) {
        const int64_t bits = (int64_t)(steps[i].to - steps[i].from) * units[steps[i].unit].n_channels;
        if (bits > total_bits || widths[steps[i].unit] != steps[i].from) continue;
        widths[steps[i].unit] = steps[i].to;
        total_bits -= bits;
    }
    free(steps);
    return LOWKEY_OK;
}
