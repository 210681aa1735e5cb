/* trellis.c - Viterbi's search for the codes of a head's rows, with the errors of every survivor fed back along its own
 * path (per-survivor processing) and several survivors kept for each of the four states.
 *
 * A state is the lowest bits u of the two rows packed before: number 2 u_{j+1} + u_{j+2}. Each has four lanes for its
 * survivors, those it has first; a lane without one has infinite cost. The two states of equal u_{j+1}, a group, take
 * their entries from the same two subsets of the table: they are side by side, and work is done on vectors of them. */
#include "kernels/trellis.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/element.h"

/* Vectors are passed between functions that become one: no call's convention depends on what the machine has. */
#pragma GCC diagnostic ignored "-Wpsabi"
#define ALWAYS_INLINE static inline __attribute__((always_inline))

enum { LANES = LOWKEY_TRELLIS_LANES, HALF = LANES / 2, STATES = 4, OF_STATE = LANES / STATES };

typedef float half_f32 __attribute__((vector_size(HALF * 4)));
typedef int32_t half_i32 __attribute__((vector_size(HALF * 4)));
typedef float lanes_f32 __attribute__((vector_size(LANES * 4)));
typedef int32_t lanes_i32 __attribute__((vector_size(LANES * 4)));

struct row {
    const float *table; /* [n_entries] */
    float weight, x;
    int n_entries;
};

/* What survivors could become: [v][u] lane i is lane i of the group u_{j+1} = v, gone on with the bit u. */
struct candidates {
    half_f32 cost[2][2];
    half_i32 entry[2][2];
};

/* Who goes on: at what cost, from which lane, with which error of the value, x^ - x. */
struct survivors {
    lanes_f32 cost, error;
    lanes_i32 parent;
};

struct lowkey_trellis_scratch lowkey_trellis_take(struct lowkey_block *block, const struct lowkey_side *side)
{
    const size_t n = side->trellis ? (size_t)side->head_dim : 0;
    struct lowkey_trellis_scratch scratch;
    scratch.target = lowkey_block_take(block, n, LANES * sizeof(float));
    scratch.choices = lowkey_block_take(block, n, sizeof *scratch.choices);
    return scratch;
}

ALWAYS_INLINE half_f32 choose(half_i32 mask, half_f32 yes, half_f32 no)
{
    return (half_f32)((mask & (half_i32)yes) | (~mask & (half_i32)no));
}

ALWAYS_INLINE half_f32 magnitude(half_f32 x)
{
    return (half_f32)((half_i32)x & INT32_MAX);
}

/* Of the entries first, first + 4, ... the one nearest to each t, of equals the lowest; returns t less it. */
ALWAYS_INLINE half_f32 find_nearest(half_f32 t, const struct row *row, int first, half_i32 *entry)
{
    half_f32 least = t - row->table[first];
    *entry = (half_i32) { 0 } + first;
    for (int k = first + 4; k < row->n_entries; k += 4) {
        const half_f32 distance = t - row->table[k];
        const half_i32 is_nearer = magnitude(distance) < magnitude(least);
        least = choose(is_nearer, distance, least);
        *entry = (is_nearer & k) | (~is_nearer & *entry);
    }
    return least;
}

ALWAYS_INLINE void make_candidates(const struct row *row, const half_f32 t[2], const half_f32 cost[2],
                                   struct candidates *out)
{
    const half_i32 is_first = { -1, -1, -1, -1, 0, 0, 0, 0 }; /* of the group's states: u_{j+2} = 0 */
    for (int v = 0; v < 2; v++) {
        half_f32 sum[2];
        half_i32 entry[2];
        for (int b = 0; b < 2; b++) { /* the subset of entries k with k mod 4 = 2b + v, where b = u xor u_{j+2} */
            const half_f32 distance = find_nearest(t[v], row, 2 * b + v, &entry[b]);
            const half_f32 square = distance * distance, metric = row->weight * square, all = cost[v] + metric;
            sum[b] = choose(all > FLT_MAX, (half_f32) { 0 } + FLT_MAX, all);
            sum[b] = choose(cost[v] > FLT_MAX, cost[v], sum[b]); /* that of no survivor stays infinite */
        }
        for (int u = 0; u < 2; u++) {
            out->cost[v][u] = choose(is_first, sum[u], sum[1 - u]);
            out->entry[v][u] = (is_first & entry[u]) | (~is_first & entry[1 - u]);
        }
    }
}

/* lane[place]: candidates in the order of their costs, equal ones as they are. */
ALWAYS_INLINE void sort(half_f32 cost, int lane[HALF])
{
    const half_i32 number = { 0, 1, 2, 3, 4, 5, 6, 7 };
    half_i32 place = { 0 };
    for (int k = 0; k < HALF; k++)
        place -= ((cost[k] + (half_f32) { 0 }) < cost) | (((cost[k] + (half_f32) { 0 }) == cost) & (k < number));
    for (int i = 0; i < HALF; i++) lane[place[i]] = i;
}

/* The per_state of the least cost of each state's candidates. */
ALWAYS_INLINE void select_survivors(int per_state, const struct row *row, const struct candidates *from,
                                    struct survivors *to, struct lowkey_trellis_choices *choices)
{
    for (int state = 0; state < STATES; state++) {
        const int u = state / 2, v = state % 2;
        int lane[HALF];
        sort(from->cost[v][u], lane);
        for (int place = 0; place < OF_STATE; place++) {
            const int at = state * OF_STATE + place, i = lane[place], entry = from->entry[v][u][i];
            to->cost[at] = place < per_state ? from->cost[v][u][i] : INFINITY;
            to->error[at] = row->table[entry] - row->x;
            to->parent[at] = v * HALF + i;
            choices->code[at] = (uint8_t)(entry >> 2 << 1 | u);
            choices->parent[at] = (uint8_t)(v * HALF + i);
        }
    }
}

/* from[which[i]] */
ALWAYS_INLINE lanes_f32 gather(lanes_f32 from, lanes_i32 which)
{
#if defined(__GNUC__) && !defined(__clang__)
    return __builtin_shuffle(from, which);
#else
    lanes_f32 to;
    for (int i = 0; i < LANES; i++) to[i] = from[which[i]];
    return to;
#endif
}

/* t_i = fma(-factor[j][i], e_j, t_i) for the rows i < j, each survivor along its own path. */
ALWAYS_INLINE void feed_back(int n_rows, const float *factor, const struct survivors *survivors, lanes_f32 *target)
{
    float error[LANES], t[LANES];
    memcpy(error, &survivors->error, sizeof error);
    for (int i = 0; i < n_rows; i++) {
        const lanes_f32 before = gather(target[i], survivors->parent);
        memcpy(t, &before, sizeof t);
#pragma GCC unroll 1
        for (int s = 0; s < LANES; s++) t[s] = fmaf(-factor[i], error[s], t[s]);
        memcpy(&target[i], t, sizeof t);
    }
}

static void read_codes(int n_rows, const lanes_f32 *cost, const struct lowkey_trellis_choices *choices, uint8_t *codes)
{
    int s = 0;
    for (int i = 1; i < LANES; i++)
        if ((*cost)[i] < (*cost)[s]) s = i;
    for (int j = 0; j < n_rows; j++) {
        codes[j] = choices[j].code[s];
        s = choices[j].parent[s];
    }
}

LOWKEY_CLONES("fma", "avx512f")
static void search(const struct lowkey_side *side, int h, const float *x,
                   const struct lowkey_trellis_scratch *scratch, uint8_t *codes)
{
    const struct lowkey_head *head = &side->heads[h];
    const int D = side->head_dim;
    lanes_f32 *target = (lanes_f32 *)scratch->target;
    struct survivors survivors = { .cost = (lanes_f32) { 0 } + INFINITY };
    survivors.cost[0] = 0;
    for (int i = 0; i < D; i++) target[i] = (lanes_f32) { 0 } + x[i];
    for (int j = D - 1; j >= 0; j--) {
        const struct row row = { .table = head->table + (size_t)j * (size_t)side->table_entries,
                                 .weight = head->metric_weight[j],
                                 .x = x[j],
                                 .n_entries = lowkey_most_entries(1, head->rows[j].bits) };
        half_f32 t[2], cost[2];
        memcpy(t, &target[j], sizeof t);
        memcpy(cost, &survivors.cost, sizeof cost);
        for (int v = 0; v < 2; v++) t[v] = choose(magnitude(t[v]) <= FLT_MAX, t[v], (half_f32) { 0 } + row.x);
        struct candidates candidates;
        make_candidates(&row, t, cost, &candidates);
        select_survivors(side->trellis, &row, &candidates, &survivors, &scratch->choices[j]);
        if (head->factor) feed_back(j, head->factor + (size_t)j * (size_t)D, &survivors, target);
    }
    read_codes(D, &survivors.cost, scratch->choices, codes);
}

void lowkey_trellis_search(const struct lowkey_side *side, int head, const float *x,
                           const struct lowkey_trellis_scratch *scratch, uint8_t *codes)
{
    search(side, head, x, scratch, codes);
}
