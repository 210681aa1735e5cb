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
typedef uint8_t lanes_u8 __attribute__((vector_size(LANES)));

struct row {
    const float *table; /* [n_entries] */
    float weight, x;
    int n_entries;
};

/* An entry that is taken: which, its value, and t less it. */
struct choice {
    half_i32 entry;
    half_f32 value, distance;
};

/* What survivors could become: [u][v] lane i is lane i of the group u_{j+1} = v, gone on with the bit u. */
struct candidates {
    half_f32 cost[2][2], value[2][2];
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

ALWAYS_INLINE half_i32 choose_entry(half_i32 mask, half_i32 yes, half_i32 no)
{
    return (mask & yes) | (~mask & no);
}

ALWAYS_INLINE half_f32 magnitude(half_f32 x)
{
    return (half_f32)((half_i32)x & INT32_MAX);
}

ALWAYS_INLINE half_f32 splat(float x)
{
    return (half_f32) { x, x, x, x, x, x, x, x };
}

/* Two groups side by side. */
ALWAYS_INLINE lanes_f32 join(const half_f32 group[2])
{
    return __builtin_shufflevector(group[0], group[1], 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

/* from[which[i]]; those of two vectors as of one of both. */
#if defined(__GNUC__) && !defined(__clang__)
#define GATHER(from, which) __builtin_shuffle(from, which)
#define GATHER_OF_TWO(a, b, which) __builtin_shuffle(a, b, which)
#else
ALWAYS_INLINE half_i32 gather_half(half_i32 from, half_i32 which)
{
    half_i32 to;
    for (int i = 0; i < HALF; i++) to[i] = from[which[i]];
    return to;
}
ALWAYS_INLINE lanes_f32 gather_of_two(lanes_f32 a, lanes_f32 b, lanes_i32 which)
{
    lanes_f32 to;
    for (int i = 0; i < LANES; i++) to[i] = which[i] < LANES ? a[which[i]] : b[which[i] - LANES];
    return to;
}
#define GATHER(from, which) gather_half(from, which)
#define GATHER_OF_TWO(a, b, which) gather_of_two(a, b, which)
#endif

/* Of the entries first, first + 4, ... the one nearest to each t, of equals the lowest. */
ALWAYS_INLINE struct choice find_nearest(half_f32 t, const struct row *row, int first)
{
    struct choice nearest = { (half_i32) { 0 } + first, splat(row->table[first]),
                              t - splat(row->table[first]) };
    for (int k = first + 4; k < row->n_entries; k += 4) {
        const half_f32 value = splat(row->table[k]), distance = t - value;
        const half_i32 is_nearer = magnitude(distance) < magnitude(nearest.distance);
        nearest.distance = choose(is_nearer, distance, nearest.distance);
        nearest.value = choose(is_nearer, value, nearest.value);
        nearest.entry = choose_entry(is_nearer, (half_i32) { 0 } + k, nearest.entry);
    }
    return nearest;
}

ALWAYS_INLINE void make_candidates(const struct row *row, const half_f32 t[2], const half_f32 cost[2],
                                   struct candidates *out)
{
    const half_i32 is_first = { -1, -1, -1, -1, 0, 0, 0, 0 }; /* of the group's states: u_{j+2} = 0 */
    for (int v = 0; v < 2; v++) {
        half_f32 sum[2];
        struct choice nearest[2];
        for (int b = 0; b < 2;
             b++) { /* the subset of entries k with k mod 4 = 2b + v, where b = u xor u_{j+2} */
            nearest[b] = find_nearest(t[v], row, 2 * b + v);
            const half_f32 square = nearest[b].distance * nearest[b].distance, metric = row->weight * square,
                           all = cost[v] + metric;
            sum[b] = choose(all > FLT_MAX, splat(FLT_MAX), all);
            sum[b] = choose(cost[v] > FLT_MAX, cost[v], sum[b]); /* that of no survivor stays infinite */
        }
        for (int u = 0; u < 2; u++) {
            out->cost[u][v] = choose(is_first, sum[u], sum[1 - u]);
            out->value[u][v] = choose(is_first, nearest[u].value, nearest[1 - u].value);
            out->entry[u][v] = choose_entry(is_first, nearest[u].entry, nearest[1 - u].entry);
        }
    }
}

/* The lanes of the four candidates of the least cost, in its order, equal ones as they are: a byte each, the first lowest;
 * the same in all lanes. */
ALWAYS_INLINE half_i32 find_least(half_f32 cost)
{
    const half_i32 number = { 0, 1, 2, 3, 4, 5, 6, 7 };
    half_i32 place = { 0 };
    for (int k = 0; k < HALF; k++) {
        const half_f32 other = (half_f32)GATHER((half_i32)cost, (half_i32) { 0 } + k);
        place -= (other < cost) | ((other == cost) & (k < number));
    }
    half_i32 found = (number << (8 * place & 31)) & (place < OF_STATE);
    for (int step = HALF / 2; step > 0; step /= 2) found |= GATHER(found, number ^ step);
    return found;
}

/* The per_state of the least cost of each state's candidates. */
ALWAYS_INLINE void select_survivors(int per_state, const struct row *row, const struct candidates *from,
                                    struct survivors *to, struct lowkey_trellis_choices *choices)
{
    const lanes_i32 shift = { 0, 8, 16, 24, 0, 8, 16, 24, 0, 8, 16, 24, 0, 8, 16, 24 },
                    group = { 0, 0, 0, 0, 8, 8, 8, 8, 0, 0, 0, 0, 8, 8, 8, 8 },
                    u = { 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1 };
    half_i32 least[2];
    for (int next = 0; next < 2; next++)
        least[next] = __builtin_shufflevector(find_least(from->cost[next][0]),
                                              find_least(from->cost[next][1]), 0, 0, 0, 0, 8, 8, 8, 8);
    const lanes_i32 found = __builtin_shufflevector(least[0], least[1], 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,
                                                    12, 13, 14, 15);
    to->parent = ((found >> shift) & (HALF - 1)) + group;
    const lanes_i32 which = to->parent + u * LANES;
    const half_i32 is_kept = (half_i32) { 0, 1, 2, 3, 0, 1, 2, 3 } < per_state;
    const half_f32 none[2] = { choose(is_kept, splat(0), splat(INFINITY)),
                               choose(is_kept, splat(0), splat(INFINITY)) };
    to->cost = GATHER_OF_TWO(join(from->cost[0]), join(from->cost[1]), which) + join(none);
    to->error = GATHER_OF_TWO(join(from->value[0]), join(from->value[1]), which) - row->x;
    const half_f32 entries[2][2] = { { (half_f32)from->entry[0][0], (half_f32)from->entry[0][1] },
                                     { (half_f32)from->entry[1][0], (half_f32)from->entry[1][1] } };
    const lanes_i32 entry = (lanes_i32)GATHER_OF_TWO(join(entries[0]), join(entries[1]), which);
    const lanes_u8 code = __builtin_convertvector((entry >> 2 << 1) | u, lanes_u8),
                   parent = __builtin_convertvector(to->parent, lanes_u8);
    memcpy(choices->code, &code, sizeof code);
    memcpy(choices->parent, &parent, sizeof parent);
}

/* t_i = fma(-factor[j][i], e_j, t_i) for the rows i < j, each survivor along its own path. */
ALWAYS_INLINE void feed_back(int n_rows, const float *factor, const struct survivors *survivors,
                             lanes_f32 *target)
{
    float error[LANES], t[LANES];
    memcpy(error, &survivors->error, sizeof error);
    for (int i = 0; i < n_rows; i++) {
        const lanes_f32 before = GATHER_OF_TWO(target[i], target[i], survivors->parent);
        memcpy(t, &before, sizeof t);
#pragma GCC unroll 1
        for (int s = 0; s < LANES; s++) t[s] = fmaf(-factor[i], error[s], t[s]);
        memcpy(&target[i], t, sizeof t);
    }
}

static void read_codes(int n_rows, const lanes_f32 *cost, const struct lowkey_trellis_choices *choices,
                       uint8_t *codes)
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
        for (int v = 0; v < 2; v++) t[v] = choose(magnitude(t[v]) <= FLT_MAX, t[v], splat(row.x));
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
