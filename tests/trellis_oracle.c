/* trellis_oracle.c - survivors in one list, by rising state and in a state by their order; each row makes a new
 * list of them. */
#include "tests/trellis_oracle.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_DIM = 256, MAX_SURVIVORS = 4 * 4 };

struct survivor {
    float cost;
    int state; /* 2 * the last row's lowest bit + that of the row behind it */
    float targets[MAX_DIM]; /* by row, like all here */
    unsigned codes[MAX_DIM];
    float values[MAX_DIM];
};

struct candidate {
    const struct survivor *from;
    int entry, is_taken;
    float cost;
};

/* What a survivor becomes with the lowest bit u at row j. table: of the row's channel; x: its element. */
static struct candidate candidate_of(const struct survivor *from, int u, int bits, const float *table,
                                     float weight, float x, int j)
{
    const float t = isfinite(from->targets[j]) ? from->targets[j] : x;
    const int subset = 2 * (u ^ from->state % 2) + from->state / 2;
    int best = -1;
    float best_d = 0;
    for (int k = 0; k < 1 << (bits + 1); k++) {
        if (k % 4 != subset) continue;
        const float d = t - table[k];
        if (best < 0 || fabsf(d) < fabsf(best_d)) best = k, best_d = d;
    }
    const float square = best_d * best_d;
    const float weighted = weight * square;
    const float cost = from->cost + weighted;
    return (struct candidate) { from, best, 0, cost <= FLT_MAX ? cost : FLT_MAX };
}

/* The first of the cheapest that is not taken; NULL: all are. */
static struct candidate *cheapest(struct candidate *candidates, int n)
{
    struct candidate *best = NULL;
    for (int i = 0; i < n; i++)
        if (!candidates[i].is_taken && (!best || candidates[i].cost < best->cost)) best = &candidates[i];
    return best;
}

/* The survivors of the next list for row j; channel: of the side. Returns how many. */
static int search_row(const lowkey_side_desc *side, const float *factor, int channel, int head_dim, int j,
                      float x, const struct survivor *old, int n_old, struct survivor *new)
{
    const float *table = side->table + (size_t)channel * (size_t)side->table_entries;
    int n_new = 0;
    for (int state = 0; state < 4; state++) {
        const int u = state / 2;
        struct candidate candidates[2 * MAX_SURVIVORS];
        int n = 0;
        for (int i = 0; i < n_old; i++)
            if (old[i].state / 2 == state % 2)
                candidates[n++] = candidate_of(&old[i], u, side->bits[channel], table,
                                               side->metric_weight[channel], x, j);
        for (int kept = 0; kept < side->trellis; kept++) {
            struct candidate *best = cheapest(candidates, n);
            if (!best) break;
            best->is_taken = 1;
            struct survivor *next = &new[n_new++];
            *next = *best->from;
            next->cost = best->cost;
            next->state = state;
            next->codes[j] = (unsigned)(best->entry / 4 * 2 + u);
            next->values[j] = table[best->entry];
            const float error = next->values[j] - x;
            for (int i = 0; factor && i < j; i++)
                next->targets[i] = fmaf(-factor[j * head_dim + i], error, next->targets[i]);
        }
    }
    return n_new;
}

void lowkey_oracle_trellis(const lowkey_side_desc *side, int head, int head_dim, const float *x,
                           unsigned *codes, float *values)
{
    const uint16_t *order = side->order + head * head_dim;
    const size_t square = (size_t)head_dim * (size_t)head_dim;
    const float *factor = side->factor ? side->factor + (size_t)head * square : NULL;
    struct survivor *lists = calloc(2 * MAX_SURVIVORS, sizeof *lists);
    struct survivor *old = lists, *new = lists + MAX_SURVIVORS;
    int n = 1;
    for (int i = 0; i < head_dim; i++) old[0].targets[i] = x[order[i]];
    for (int j = head_dim - 1; j >= 0; j--) {
        n = search_row(side, factor, head * head_dim + order[j], head_dim, j, x[order[j]], old, n, new);
        struct survivor *const kept = old;
        old = new, new = kept;
    }
    const struct survivor *best = &old[0];
    for (int i = 1; i < n; i++)
        if (old[i].cost < best->cost) best = &old[i];
    for (int i = 0; i < head_dim; i++) codes[order[i]] = best->codes[i], values[order[i]] = best->values[i];
    free(lists);
}

float lowkey_oracle_trellis_value(const lowkey_side_desc *side, int head, int head_dim, const unsigned *codes,
                                  int row)
{
    const uint16_t *order = side->order + head * head_dim;
    unsigned low[3] = { 0 }; /* of this row and the next two */
    for (int i = 0; i < 3 && row + i < head_dim; i++) low[i] = codes[order[row + i]] % 2;
    const unsigned entry = codes[order[row]] / 2 * 4 + (low[0] != low[2]) * 2u + low[1];
    return side->table[(size_t)(head * head_dim + order[row]) * (size_t)side->table_entries + entry];
}
