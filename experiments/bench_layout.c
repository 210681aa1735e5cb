/* bench_layout.c - checks and times the decode loops of layout_<level>.c; see bench_layout.h.
 *
 * Times are per 64 tokens of a pair of channels (two rows) with 4 query heads, without RoPE and
 * softmax, which are the same for every layout. Two places for the codes: a few pages that stay
 * in L1, and a pool read once from end to end. Every round runs all variants, and a ratio is the
 * median of its rounds, so that a slow moment of the machine hits what is compared alike. */
#include "experiments/bench_layout.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    CHANNELS = LOWKEY_LAYOUT_CHANNELS,
    TOKENS = LOWKEY_LAYOUT_TOKENS,
    PAIRS = LOWKEY_LAYOUT_PAIRS,
    HEADS = LOWKEY_LAYOUT_HEADS,
    LANES = LOWKEY_LAYOUT_LANES,
    OUT_SIZE = CHANNELS * HEADS * LANES,
    ROUNDS = 15,
    HOT_PAGES = 4,
    HOT_CALLS = 1000, /* 4 pages of 4 bits are 16 KiB; about 1 ms a round */
    PLACES = 2 /* hot, pool */
};
static const size_t pool_bytes = (size_t)64 << 20, pool_slack = 64;

/* Integers, so that every number type has them exactly and sums have no rounding. */
struct numbers {
    int table[CHANNELS][16], q[CHANNELS][HEADS], weight[TOKENS][HEADS];
};

struct timing {
    const char *level;
    const struct lowkey_layout_variant *variant;
    double ns[PLACES][ROUNDS];
};

static uint64_t next_random(uint64_t *state) /* xorshift64 */
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void make_numbers(struct numbers *numbers)
{
    uint64_t state = 88172645463325252;
    for (int c = 0; c < CHANNELS; c++) {
        for (int k = 0; k < 16; k++)
            numbers->table[c][k] = (int)(next_random(&state) >> 57) - LOWKEY_LAYOUT_BIAS;
        for (int h = 0; h < HEADS; h++) numbers->q[c][h] = (int)(next_random(&state) >> 58) - 32;
    }
    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < HEADS; h++) numbers->weight[t][h] = (int)(next_random(&state) >> 59);
}

/* x as a 16-bit factor: bf16, exact up to 8 significant bits, or a 16-bit integer. */
static uint16_t factor16(int x, const struct lowkey_layout_variant *variant)
{
    const float f = (float)x;
    uint32_t word;
    memcpy(&word, &f, sizeof word);
    return strcmp(variant->product, "bf16") == 0 ? (uint16_t)(word >> 16) : (uint16_t)x;
}

static void make_tables(struct lowkey_layout_inputs *in, const struct numbers *numbers,
                        const struct lowkey_layout_variant *variant)
{
    const int bits = variant->bits;
    for (int c = 0; c < CHANNELS; c++) {
        for (int i = 0; i < 16; i++) {
            const int x = numbers->table[c][i & ((1 << bits) - 1)];
            const int byte_code = bits == 3 ? (i & 3) | (i >> 3 << 2) : i & ((1 << bits) - 1);
            const int y = numbers->table[c][byte_code];
            in->f32_table[c][i] = (float)x;
            in->table16[c][i] = factor16(x, variant);
            in->u8_table[c][i] = (uint8_t)(y + LOWKEY_LAYOUT_BIAS);
            in->i16_low[c][i] = (uint8_t)((unsigned)y & 255);
            in->i16_high[c][i] = (uint8_t)((unsigned)y >> 8 & 255);
            if ((i >> 2 & 1) == c % 2) in->u8_pair_table[c / 2][i] = in->u8_table[c][i];
        }
    }
}

static void make_factors(struct lowkey_layout_inputs *in, const struct numbers *numbers,
                         const struct lowkey_layout_variant *variant)
{
    for (int h = 0; h < HEADS; h++) {
        in->q_bias[h] = 0;
        for (int c = 0; c < CHANNELS; c++) {
            const int q = numbers->q[c][h];
            in->q_f32[c][h] = (float)q;
            in->q16[c / 2][h][c % 2] = factor16(q, variant);
            in->q_i8[c / 4][h][c % 4] = (int8_t)q;
            in->q_bias[h] += LOWKEY_LAYOUT_BIAS * q;
        }
        for (int i = 0; i < TOKENS; i++)
            in->w16[h][i] = factor16(numbers->weight[variant->token(i)][h], variant);
    }
}

/* ---- the plain decode ---- */

static int get_field(const uint8_t *plane, enum lowkey_layout_packing packing, int bits, int row,
                     int token)
{
    const int row_bytes = 8 * bits;
    if (packing == LOWKEY_LAYOUT_NATURAL)
        return plane[row * row_bytes + token * bits / 8] >> token * bits % 8 & ((1 << bits) - 1);
    const int byte = token % row_bytes, side = row % 2;
    int at = row * row_bytes + byte;
    if (packing == LOWKEY_LAYOUT_PAIR_BYTES) at = row / 2 * 2 * row_bytes + 2 * byte + side;
    if (packing == LOWKEY_LAYOUT_PAIR_WORDS)
        at = row / 2 * 2 * row_bytes + byte / 2 * 4 + 2 * side + byte % 2;
    return plane[at] >> bits * (token / row_bytes) & ((1 << bits) - 1);
}

static int get_code(const uint8_t *page, enum lowkey_layout_packing packing, int bits, int row,
                    int token)
{
    if (bits != 3) return get_field(page, packing, bits, row, token);
    return get_field(page, packing, 2, row, token) +
           4 * get_field(page + CHANNELS * 16, packing, 1, row, token);
}

/* The number of scores (keys) or channel sums (values) that are not what the definition says. */
static int count_wrong(const struct lowkey_layout_variant *variant, const struct numbers *numbers,
                       const struct lowkey_layout_inputs *in, const uint8_t *page, float *out)
{
    const int keys = strcmp(variant->side, "keys") == 0;
    static int want[CHANNELS * HEADS];
    int wrong = 0;
    memset(want, 0, sizeof want);
    for (int c = 0; c < CHANNELS; c++) {
        for (int t = 0; t < TOKENS; t++) {
            const int x = numbers->table[c][get_code(page, variant->packing, variant->bits, c, t)];
            for (int h = 0; h < HEADS; h++)
                want[keys ? h * TOKENS + t : c * HEADS + h] += x * (keys ? numbers->q[c][h]
                                                                         : numbers->weight[t][h]);
        }
    }
    memset(out, 0, OUT_SIZE * sizeof *out);
    variant->run(page, in, out);
    for (int i = 0; keys && i < HEADS * TOKENS; i++)
        wrong += lrintf(out[i]) != want[i / TOKENS * TOKENS + variant->token(i % TOKENS)];
    for (int i = 0; !keys && i < CHANNELS * HEADS; i++) {
        float sum = 0;
        for (int lane = 0; lane < LANES; lane++) sum += out[i * LANES + lane];
        wrong += lrintf(sum) != want[i];
    }
    return wrong;
}

/* ---- timing ---- */

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

/* ns per 64 tokens and pair over n_calls pages, which repeat after n_pages. */
static double time_pages(const struct lowkey_layout_variant *variant,
                         const struct lowkey_layout_inputs *in, const uint8_t *pool, size_t n_pages,
                         size_t n_calls, float *out)
{
    const size_t page_bytes = (size_t)CHANNELS * 8 * (size_t)variant->bits;
    const double start = now_ns();
    for (size_t i = 0; i < n_calls; i++) variant->run(pool + i % n_pages * page_bytes, in, out);
    return (now_ns() - start) / (double)n_calls / PAIRS;
}

static void time_round(struct timing *timings, int n, int round, struct lowkey_layout_inputs *in,
                       const struct numbers *numbers, const uint8_t *pool, float *out)
{
    for (int i = 0; i < n; i++) {
        const struct lowkey_layout_variant *variant = timings[i].variant;
        const size_t n_pages = pool_bytes / ((size_t)CHANNELS * 8 * (size_t)variant->bits);
        make_tables(in, numbers, variant);
        make_factors(in, numbers, variant);
        memset(out, 0, OUT_SIZE * sizeof *out);
        time_pages(variant, in, pool, HOT_PAGES, HOT_CALLS / 4, out); /* warm */
        timings[i].ns[0][round] = time_pages(variant, in, pool, HOT_PAGES, HOT_CALLS, out);
        timings[i].ns[1][round] = time_pages(variant, in, pool, n_pages, n_pages, out);
    }
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median of ns, or of its ratio to base where base is not NULL. */
static double median(const double *ns, const double *base)
{
    double sorted[ROUNDS];
    for (int i = 0; i < ROUNDS; i++) sorted[i] = base ? ns[i] / base[i] : ns[i];
    qsort(sorted, ROUNDS, sizeof sorted[0], by_value);
    return sorted[ROUNDS / 2];
}

/* What a variant is compared with: layout A of the same level, side, product and width. */
static const struct timing *find_base(const struct timing *timings, const struct timing *one)
{
    const struct lowkey_layout_variant *v = one->variant;
    for (const struct timing *base = timings;; base++) {
        const struct lowkey_layout_variant *w = base->variant;
        if (base == one ||
            (base->level == one->level && w->bits == v->bits && !strcmp(w->layout, "A") &&
             !strcmp(w->side, v->side) && !strcmp(w->product, v->product)))
            return base;
    }
}

static void print_timings(const struct timing *timings, int n, int json)
{
    const char *row =
        json ? "%s{\"level\": \"%s\", \"side\": \"%s\", \"product\": \"%s\", \"bits\": %d, "
               "\"layout\": \"%s\", \"hot_ns\": %.3f, \"hot_ratio\": %.3f, "
               "\"pool_ns\": %.3f, \"pool_ratio\": %.3f}"
             : "%s%-8s %-7s %-7s %4d  %-6s %8.2f %6.3f %8.2f %6.3f";
    for (int i = 0; i < n; i++) {
        const struct timing *one = &timings[i], *base = find_base(timings, one);
        const struct lowkey_layout_variant *v = one->variant;
        printf(row,
               !i     ? ""
               : json ? ",\n"
                      : "\n",
               one->level, v->side, v->product, v->bits, v->layout, median(one->ns[0], NULL),
               median(one->ns[0], base->ns[0]), median(one->ns[1], NULL),
               median(one->ns[1], base->ns[1]));
    }
}

static int has_avx2(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 0;
#endif
}

static int has_avx512(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("avx512bf16");
#else
    return 0;
#endif
}

static const struct level {
    const char *name;
    int (*supported)(void);
    const struct lowkey_layout_variant *variants;
} levels[] = {
    { "avx2", has_avx2, lowkey_layout_avx2 },
    { "avx512", has_avx512, lowkey_layout_avx512 },
};
enum { N_LEVELS = sizeof levels / sizeof levels[0], MAX_VARIANTS = 128 };

/* Adds the variants of the levels that can run to timings, and says which cannot. */
static int collect(struct timing *timings, int json)
{
    int n = 0;
    for (int l = 0; l < N_LEVELS; l++) {
        const int runs = levels[l].supported() && levels[l].variants[0].run;
        if (json)
            printf("\"%s\": \"%s\",\n", levels[l].name, runs ? "timed" : "skipped");
        else if (!runs)
            printf("%s: skipped, not on this machine\n", levels[l].name);
        for (const struct lowkey_layout_variant *v = levels[l].variants; runs && v->run; v++) {
            timings[n].level = levels[l].name;
            timings[n++].variant = v;
        }
    }
    return n;
}

static int check_all(const struct timing *timings, int n, const struct numbers *numbers,
                     struct lowkey_layout_inputs *in, const uint8_t *pool, float *out)
{
    int n_bad = 0;
    for (int i = 0; i < n; i++) {
        const struct lowkey_layout_variant *v = timings[i].variant;
        int wrong = 0;
        make_tables(in, numbers, v);
        make_factors(in, numbers, v);
        for (size_t page = 0; page < HOT_PAGES; page++)
            wrong += count_wrong(v, numbers, in, pool + page * CHANNELS * 8 * (size_t)v->bits, out);
        if (wrong)
            fprintf(stderr, "layout: %s %s %s %s, %d bits: %d results are wrong\n",
                    timings[i].level, v->side, v->layout, v->product, v->bits, wrong);
        n_bad += wrong != 0;
    }
    return n_bad;
}

int lowkey_bench_layout(int json)
{
    static struct timing timings[MAX_VARIANTS];
    static struct numbers numbers;
    static struct lowkey_layout_inputs in;
    static _Alignas(64) float out[OUT_SIZE];
    uint8_t *pool = aligned_alloc(64, pool_bytes + pool_slack);
    if (!pool) {
        fprintf(stderr, "layout: no memory for %zu bytes of pages\n", pool_bytes);
        return 1;
    }
    uint64_t state = 1;
    for (size_t i = 0; i < pool_bytes + pool_slack; i += 8) {
        const uint64_t word = next_random(&state);
        memcpy(pool + i, &word, 8);
    }
    make_numbers(&numbers);
    if (json) printf("{");
    const int n = collect(timings, json);
    const int n_bad = check_all(timings, n, &numbers, &in, pool, out);
    for (int round = 0; !n_bad && round < ROUNDS; round++)
        time_round(timings, n, round, &in, &numbers, pool, out);
    if (json)
        printf("\"pool_bytes\": %zu,\n\"results\": [", pool_bytes);
    else if (!n_bad)
        printf("ns per 64 tokens x pair x 4 heads; ratio to A\n"
               "level    side    product bits  layout   hot ns  ratio  pool ns  ratio\n");
    if (!n_bad) print_timings(timings, n, json);
    printf(json ? "]}\n" : "\n");
    free(pool);
    return n_bad != 0;
}
