/* test_pack_trellis.c - the search for the codes of trellis-coded rows: examples that a person can work out, and every
 * width, number of survivors and head_dim against the document's rules written a second time (trellis_oracle.c). */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "tests/check.h"
#include "tests/make_quantizer.h"
#include "tests/pack_oracle.h"
#include "tests/packed.h"
#include "tests/trellis_oracle.h"

/* ---- by hand: one head of 8 channels, row r holds channel r ---- */

enum { D = 8 };

/* Tables 0, step, 2 step, ... of n_used entries, weights 1 but for that of the last row. */
static lowkey_quantizer *make_weighted(int bits, int n_used, float step, float last_weight, int survivors)
{
    enum { E = 64 };
    uint8_t widths[D], n_entries[D];
    float table[D * E], lower[D], upper[D], metric_weight[D];
    const int n_table = 2 << bits;
    for (int c = 0; c < D; c++) {
        widths[c] = (uint8_t)bits, n_entries[c] = (uint8_t)n_used;
        lower[c] = 0, upper[c] = step * (float)(n_table - 1), metric_weight[c] = 1;
        for (int k = 0; k < n_table; k++)
            table[c * n_table + k] = step * (float)(k < n_used ? k : n_used - 1);
    }
    metric_weight[D - 1] = last_weight;
    int16_t exponent[D];
    for (int c = 0; c < D; c++) exponent[c] = (int16_t)ilogb(step);
    const lowkey_side_desc side = { .struct_size = sizeof side,
                                    .bits = widths,
                                    .table_entries = n_table,
                                    .n_entries = n_entries,
                                    .table = table,
                                    .exponent = exponent,
                                    .lower = lower,
                                    .upper = upper,
                                    .metric_weight = metric_weight,
                                    .trellis = survivors };
    const lowkey_layer_desc layer = { .struct_size = sizeof layer,
                                      .n_q_heads = 1,
                                      .n_kv_heads = 1,
                                      .key_head_dim = D,
                                      .value_head_dim = D,
                                      .key = side,
                                      .value = side };
    const lowkey_quantizer_desc desc = { .struct_size = sizeof desc, .n_layers = 1, .layers = &layer };
    lowkey_quantizer *quantizer = NULL;
    lowkey_error err;
    assert_ok(lowkey_quantizer_create(&desc, NULL, &quantizer, &err), err);
    return quantizer;
}

static lowkey_quantizer *make_ramp(int bits, int n_used, float step, int survivors)
{
    return make_weighted(bits, n_used, step, 1, survivors);
}

/* Every level packs x into these codes, and unpacks these values. */
static void check_codes(lowkey_quantizer *quantizer, const float *x, const unsigned *codes,
                        const float *values)
{
    const struct lowkey_layer *layer = lowkey_quantizer_layer_at(quantizer, 0);
    for (const struct lowkey_kernels *kernels = lowkey_kernels; kernels->isa; kernels++) {
        if (!kernels->supported()) continue;
        struct lowkey_packed packed;
        float got[D];
        lowkey_packed_init(&packed, &layer->side[0], 0, 0x5a);
        lowkey_packed_add(&packed, kernels, 0, 1, x);
        lowkey_packed_read(&packed, kernels, 0, 0, 1, got);
        for (int c = 0; c < D; c++) {
            const unsigned code = lowkey_oracle_code(&layer->desc->key, D, 0, packed.pages[0], c, 0);
            if (code != codes[c] || got[c] != values[c])
                fail_msg("%s: row %d: code %u, value %g; wanted %u, %g", kernels->isa, c, code,
                         (double)got[c], codes[c], (double)values[c]);
        }
        lowkey_packed_free(&packed);
    }
    lowkey_quantizer_free(quantizer);
}

/* 1 bit, entries 0 1 2 3. Row r's is 2 (u_r xor u_r+2) + u_r+1: of the codes 1 1 0 1 0 0 1 1 they are, from the last row,
 * 2(1+0)+0, 2(1+0)+1, 2(0+1)+1, 2(0+1)+0, 2(1+0)+0, 2(0+0)+1, 2(1+1)+0, 2(1+0)+1. */
static void test_entries_that_codes_reach(void **state)
{
    (void)state;
    static const unsigned codes[D] = { 1, 1, 0, 1, 0, 0, 1, 1 };
    static const float x[D] = { 3, 0, 1, 2, 2, 3, 3, 2 };
    for (int survivors = 1; survivors <= 4; survivors *= 2)
        check_codes(make_ramp(1, 4, 1, survivors), x, codes, x);
    /* 3 bits: the two high bits of a code are those of the entry: here 3 0 2 1 1 3 0 2. */
    static const unsigned wide[D] = { 7, 1, 4, 3, 2, 6, 1, 5 };
    static const float wide_x[D] = { 15, 0, 9, 6, 6, 15, 3, 10 };
    for (int survivors = 1; survivors <= 4; survivors *= 2)
        check_codes(make_ramp(3, 16, 1, survivors), wide_x, wide, wide_x);
}

/* The last row alone would take entry 0 (0.81 against 1.21 for entry 2), but behind entry 2 the row before it reaches 1
 * (0 against 1): 1.21 wins over 1.81. The rows before those cost it nothing. */
static void test_a_dear_row_that_pays(void **state)
{
    (void)state;
    static const unsigned codes[D] = { 0, 0, 0, 0, 0, 1, 0, 1 };
    static const float values[D] = { 0, 0, 0, 2, 1, 0, 1, 2 };
    float x[D];
    memcpy(x, values, sizeof x);
    x[7] = 0.9f;
    for (int survivors = 1; survivors <= 4; survivors *= 2)
        check_codes(make_ramp(1, 4, 1, survivors), x, codes, values);
}

/* Where all costs are equal the lowest entries, the first survivors and at the end state 0 win: codes 0. */
static void test_ties(void **state)
{
    (void)state;
    static const unsigned codes[D] = { 0 };
    static const float values[D] = { 0 };
    float x[D];
    for (int bits = 1; bits <= 5; bits++)
        for (int survivors = 1; survivors <= 4; survivors *= 2) {
            for (int c = 0; c < D; c++) x[c] = (float)(c + 1); /* one entry, repeated */
            check_codes(make_ramp(bits, 1, 1, survivors), x, codes, values);
            for (int c = 0; c < D; c++) x[c] = c % 2 ? 3e38f : -3e38f; /* squares that are infinite */
            check_codes(make_ramp(bits, 2 << bits, 1, survivors), x, codes, values);
            for (int c = 0; c < D; c++) x[c] = c % 2 ? 1e-30f : 0; /* squares that are 0 */
            check_codes(make_ramp(bits, 1, 1, survivors), x, codes, values);
        }
}

/* Entry 2 of the last row costs FLT_MAX, entry 0 more than f32 holds, which counts as FLT_MAX: a tie from there on. */
static void test_the_dearest_cost(void **state)
{
    (void)state;
    static const unsigned codes[D] = { 0 };
    static const float x[D] = { [7] = 3 }, values[D] = { 0 };
    for (int survivors = 1; survivors <= 4; survivors *= 2)
        check_codes(make_weighted(1, 4, 1, FLT_MAX, survivors), x, codes, values);
}

/* Squares among the denormals count: 2^-140 against 2^-138 and 0. */
static void test_denormal_costs(void **state)
{
    (void)state;
    static const unsigned codes[D] = { 0, 0, 0, 0, 0, 1, 0, 1 };
    static const float times[D] = { 0, 0, 0, 2, 1, 0, 1, 2 };
    const float step = ldexpf(1, -69);
    float x[D], values[D];
    for (int c = 0; c < D; c++) x[c] = values[c] = step * times[c];
    x[7] = 0.9f * step;
    check_codes(make_ramp(1, 4, step, 1), x, codes, values);
}

/* ---- against the oracle ---- */

static lowkey_quantizer *make_side(int head_dim, const struct lowkey_side_choice *side, uint64_t seed)
{
    const struct lowkey_quantizer_choice choice = { .n_q_heads = 2,
                                                    .n_kv_heads = 2,
                                                    .key_head_dim = head_dim,
                                                    .value_head_dim = 8,
                                                    .rope_dims = head_dim / 4 * 2,
                                                    .key = *side,
                                                    .value = { .bits = 2 },
                                                    .seed = seed };
    return lowkey_make_quantizer(&choice, NULL);
}

/* Pack n tokens x with every level, at once and cut at `cut`; compare codes and unpacked values with the oracle's. */
static void check_tokens(const struct lowkey_layer *layer, int n, int cut, const float *x, const char *what)
{
    const struct lowkey_side *side = &layer->side[0];
    const int d = side->head_dim, n_channels = 2 * d;
    struct lowkey_oracle_token **want = calloc((size_t)n, sizeof *want);
    float *got = malloc(sizeof *got * (size_t)(n * d));
    for (int t = 0; t < n; t++) {
        want[t] = lowkey_oracle_token_new(n_channels);
        lowkey_oracle_pack(&layer->desc->key, 2, d, x + t * n_channels, 0, want[t]);
    }
    for (const struct lowkey_kernels *kernels = lowkey_kernels; kernels->isa; kernels++) {
        if (!kernels->supported()) continue;
        struct lowkey_packed packed;
        lowkey_packed_init(&packed, side, 0, 0xd7);
        if (cut) lowkey_packed_add(&packed, kernels, 64 - n, cut, x);
        lowkey_packed_add(&packed, kernels, 64 - n + cut, n - cut, x + cut * n_channels);
        assert_int_equal(packed.counts.saturated + packed.counts.clamped + packed.counts.outliers, 0);
        for (int h = 0; h < 2; h++) {
            lowkey_packed_read(&packed, kernels, h, 64 - n, n, got);
            for (int i = 0; i < n * d; i++) {
                const int t = i / d, c = i % d;
                const unsigned code = lowkey_oracle_code(&layer->desc->key, d, h, packed.pages[h], c,
                                                         64 - n + t);
                if (code != want[t]->codes[h * d + c])
                    fail_msg("%s: %s: token %d head %d channel %d: code %u, wanted %u", kernels->isa, what, t,
                             h, c, code, want[t]->codes[h * d + c]);
                if (memcmp(&got[i], &want[t]->values[h * d + c], sizeof got[i]))
                    fail_msg("%s: %s: token %d head %d channel %d: value %a, wanted %a", kernels->isa, what,
                             t, h, c, (double)got[i], (double)want[t]->values[h * d + c]);
            }
        }
        lowkey_packed_free(&packed);
    }
    for (int t = 0; t < n; t++) lowkey_oracle_token_free(want[t]);
    free(want), free(got);
}

static void test_every_width_and_survivors(void **state)
{
    (void)state;
    static const int dims[] = { 8, 64, 72, 80, 96, 128, 256 };
    enum { N = 12 };
    char what[100];
    float *x = malloc(sizeof *x * (size_t)(N * 2 * 256));
    for (int bits = LOWKEY_MIXED_BITS; bits <= 5; bits++)
        for (int survivors = 1; survivors <= 4; survivors *= 2)
            for (int feedback = 0; feedback < 2; feedback++)
                for (int i = 0; i < 7; i++) {
                    const int number = 7 * (6 * bits + 2 * (survivors / 2) + feedback) + i;
                    if (dims[i] > 128 && bits % 2) continue; /* slow */
                    const struct lowkey_side_choice side = { .bits = bits,
                                                             .trellis = survivors,
                                                             .feedback = feedback,
                                                             .few_entries = number % 3 == 0,
                                                             .constant_channels = number % 5 == 0,
                                                             .shuffled = number % 2 };
                    lowkey_quantizer *quantizer = make_side(dims[i], &side, (uint64_t)number);
                    const struct lowkey_layer *layer = lowkey_quantizer_layer_at(quantizer, 0);
                    struct lowkey_random random = { (uint64_t)number };
                    lowkey_make_rows(&random, layer->desc, 0,
                                     (enum lowkey_distribution)(number % LOWKEY_N_DISTRIBUTIONS), N, x);
                    snprintf(what, sizeof what, "%d bits, %d survivors, feedback %d, head_dim %d", bits,
                             survivors, feedback, dims[i]);
                    check_tokens(layer, N, number % N, x, what);
                    lowkey_quantizer_free(quantizer);
                }
    free(x);
}

/* Channels so small that squares are 0 or denormal, and so large that costs overflow at once, or on the way. */
static void test_magnitudes(void **state)
{
    (void)state;
    static const double magnitudes[] = { 1e-40, 1e-37, 1e-22, 1e-20, 1e-18, 3e17, 2e18, 1e19, 1e30, 3e38 };
    enum { N = 12, DIM = 64 };
    float x[N * 2 * DIM];
    char what[100];
    for (int m = 0; m < 10; m++)
        for (int survivors = 1; survivors <= 4; survivors *= 2)
            for (int feedback = 0; feedback < 2; feedback++) {
                const struct lowkey_side_choice side = { .trellis = survivors,
                                                         .feedback = feedback,
                                                         .magnitude = magnitudes[m] };
                lowkey_quantizer *quantizer = make_side(DIM, &side, (uint64_t)m);
                const struct lowkey_layer *layer = lowkey_quantizer_layer_at(quantizer, 0);
                struct lowkey_random random = { (uint64_t)(10 * m + survivors) };
                lowkey_make_rows(&random, layer->desc, 0, LOWKEY_OUTLIERS, N, x);
                for (int i = 0; i < 2 * DIM; i++)
                    x[i] = i % 3 ? FLT_MAX : -FLT_MAX; /* errors that are infinite, then NaN */
                snprintf(what, sizeof what, "magnitude %g, %d survivors, feedback %d", magnitudes[m],
                         survivors, feedback);
                check_tokens(layer, N, 0, x, what);
                lowkey_quantizer_free(quantizer);
            }
}

/* Any codes at all, as other runtimes or noise may have left them, decode to what the document says. */
static void test_decoding_of_any_codes(void **state)
{
    (void)state;
    static const int dims[] = { 8, 72, 128 };
    for (int bits = LOWKEY_MIXED_BITS; bits <= 5; bits++)
        for (int i = 0; i < 3; i++) {
            const int d = dims[i];
            const struct lowkey_side_choice side = { .bits = bits, .trellis = 1, .shuffled = 1 };
            lowkey_quantizer *quantizer = make_side(d, &side, (uint64_t)(10 * bits + i));
            const struct lowkey_layer *layer = lowkey_quantizer_layer_at(quantizer, 0);
            const lowkey_side_desc *desc = &layer->desc->key;
            struct lowkey_random random = { 7 };
            struct lowkey_packed packed;
            lowkey_packed_init(&packed, &layer->side[0], 0, 0);
            for (size_t b = 0; b < layer->side[0].heads[1].page_bytes; b++)
                packed.pages[1][b] = (uint8_t)lowkey_random_below(&random, 256);
            float got[64 * 128];
            for (const struct lowkey_kernels *kernels = lowkey_kernels; kernels->isa; kernels++) {
                if (!kernels->supported()) continue;
                lowkey_packed_read(&packed, kernels, 1, 0, 64, got);
                for (int t = 0; t < 64; t++) {
                    unsigned codes[128];
                    for (int c = 0; c < d; c++)
                        codes[c] = lowkey_oracle_code(desc, d, 1, packed.pages[1], c, t);
                    for (int r = 0; r < d; r++)
                        assert_true(got[t * d + desc->order[d + r]] ==
                                    lowkey_oracle_trellis_value(desc, 1, d, codes, r));
                }
            }
            lowkey_packed_free(&packed);
            lowkey_quantizer_free(quantizer);
        }
}

/* Three tokens of keys, and the second of values, with a file written by h5py, as the NumPy packer coded them. */
static void test_golden_codes(void **state)
{
    (void)state;
    static const unsigned keys[3][8] = { { 0, 0, 2, 12, 0, 2, 0, 1 },
                                         { 0, 0, 6, 15, 1, 1, 1, 1 },
                                         { 1, 3, 1, 1, 0, 2, 0, 0 } },
                          value[16] = { 3, 2, 3, 2, 0, 0, 1, 0, 2, 0, 1, 1, 3, 2, 2, 1 };
    lowkey_quantizer *quantizer;
    lowkey_error err;
    assert_ok(lowkey_quantizer_open("tests/golden/quantizer-1.3.h5", NULL, &quantizer, &err), err);
    const struct lowkey_layer *layer = lowkey_quantizer_layer_at(quantizer, 0);
    float x[3][8], v[16];
    for (int t = 0; t < 3; t++)
        for (int c = 0; c < 8; c++) x[t][c] = (float)((5 * t + 3 * c) % 16 - 8) / 4;
    for (int c = 0; c < 16; c++) v[c] = (float)((5 + 3 * c) % 16 - 8) / 4;
    for (const struct lowkey_kernels *kernels = lowkey_kernels; kernels->isa; kernels++) {
        if (!kernels->supported()) continue;
        struct lowkey_packed packed;
        lowkey_packed_init(&packed, &layer->side[0], 0, 0x33);
        lowkey_packed_add(&packed, kernels, 30, 3, x[0]);
        for (int i = 0; i < 24; i++)
            assert_int_equal(lowkey_oracle_code(&layer->desc->key, 8, 0, packed.pages[0], i % 8, 30 + i / 8),
                             keys[i / 8][i % 8]);
        lowkey_packed_free(&packed);
        lowkey_packed_init(&packed, &layer->side[1], 0, 0x33);
        lowkey_packed_add(&packed, kernels, 63, 1, v);
        for (int c = 0; c < 16; c++)
            assert_int_equal(lowkey_oracle_code(&layer->desc->value, 16, 0, packed.pages[0], c, 63),
                             value[c]);
        lowkey_packed_free(&packed);
    }
    lowkey_quantizer_free(quantizer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        { "trellis: codes reach the entries that the document says", test_entries_that_codes_reach, NULL,
          NULL, NULL },
        { "trellis: a row may cost more where the next gains more", test_a_dear_row_that_pays, NULL, NULL,
          NULL },
        { "trellis: of equal costs the lowest entries and states win", test_ties, NULL, NULL, NULL },
        { "trellis: costs beyond f32 count as its largest number", test_the_dearest_cost, NULL, NULL, NULL },
        { "trellis: costs among the denormals count", test_denormal_costs, NULL, NULL, NULL },
        { "trellis: every width, survivors, feedback and head_dim gives the oracle's codes",
          test_every_width_and_survivors, NULL, NULL, NULL },
        { "trellis: magnitudes of 1e-40 to 3e38 give the oracle's codes", test_magnitudes, NULL, NULL, NULL },
        { "trellis: the golden file's codes", test_golden_codes, NULL, NULL, NULL },
        { "trellis: any codes decode to the document's values", test_decoding_of_any_codes, NULL, NULL,
          NULL },
    };
    return lowkey_run_tests(tests);
}
