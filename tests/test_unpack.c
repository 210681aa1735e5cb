/* test_unpack.c - unpacking is exact: the values that the document's rules give, to the bit. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "tests/cases.h"
#include "tests/check.h"
#include "tests/pack_oracle.h"
#include "tests/packed.h"

enum { N_TOKENS = 64 };

/* values[slot - first_live][channel] by the oracle, of the rows that were packed. */
static float *want_values(const lowkey_side_desc *desc, const struct lowkey_side *side, int first_live,
                          const float *x)
{
    const int n = side->n_heads * side->head_dim;
    float *values = malloc(sizeof *values * (size_t)(N_TOKENS * n));
    struct lowkey_oracle_token *token = lowkey_oracle_token_new(n);
    int stored = 0;
    for (int i = 0; i < N_TOKENS - first_live; i++) {
        lowkey_oracle_pack(desc, side->n_heads, side->head_dim, x + i * n,
                           desc->outlier_page_capacity - stored, token);
        stored += token->n_outliers;
        memcpy(values + i * n, token->values, sizeof *values * (size_t)n);
    }
    lowkey_oracle_token_free(token);
    return values;
}

/* Each head's slots first.. against the oracle's. */
static void check_range(const struct lowkey_packed *packed, const struct lowkey_kernels *kernels, int first,
                        int n_slots, const float *want, const char *what)
{
    const int d = packed->side->head_dim, n = packed->side->n_heads * d;
    for (int h = 0; h < packed->side->n_heads; h++) {
        float *out = lowkey_guarded_new(sizeof *out * (size_t)(n_slots * d), 0xff);
        lowkey_packed_read(packed, kernels, h, first, n_slots, out);
        for (int s = 0; s < n_slots; s++)
            if (memcmp(out + s * d, want + (first - packed->first_live_slot + s) * n + h * d,
                       sizeof *out * (size_t)d))
                fail_msg("%s: head %d slot %d", what, h, first + s);
        lowkey_guarded_free(out);
    }
}

static void test_every_format_and_shape(void **state)
{
    (void)state;
    for (int shape = 0; shape < LOWKEY_N_SHAPES; shape++)
        for (int format = 0; format < LOWKEY_N_FORMATS; format++) {
            const struct lowkey_quantizer_choice choice = lowkey_case(shape, format, format);
            lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
            const struct lowkey_layer *layer = lowkey_quantizer_layer_at(quantizer, 0);
            const struct lowkey_side *side = &layer->side[0];
            struct lowkey_random random = { (uint64_t)(shape * 77 + format) };
            const int first_live = shape % 2 ? 5 : 0;
            float *x = malloc(sizeof *x * (size_t)(N_TOKENS * side->n_heads * side->head_dim));
            lowkey_make_rows(&random, layer->desc, 0,
                             (enum lowkey_distribution)(format % LOWKEY_N_DISTRIBUTIONS),
                             N_TOKENS - first_live, x);
            float *want = want_values(&layer->desc->key, side, first_live, x);
            for (const struct lowkey_kernels *kernels = lowkey_kernels; kernels->isa; kernels++) {
                if (!kernels->supported()) continue;
                struct lowkey_packed packed;
                lowkey_packed_init(&packed, side, first_live, 0x5a);
                lowkey_packed_add(&packed, kernels, first_live, N_TOKENS - first_live, x);
                check_range(&packed, kernels, first_live, N_TOKENS - first_live, want,
                            lowkey_formats[format].name);
                check_range(&packed, kernels, first_live, 1, want, lowkey_formats[format].name);
                check_range(&packed, kernels, 31, 7, want, lowkey_formats[format].name);
                check_range(&packed, kernels, 63, 1, want, lowkey_formats[format].name);
                lowkey_packed_free(&packed);
            }
            free(want), free(x);
            lowkey_quantizer_free(quantizer);
        }
}

/* What stands in the page beside three packed slots changes nothing. */
static void test_noise_in_other_slots(void **state)
{
    (void)state;
    for (int format = 0; format < LOWKEY_N_FORMATS; format++) {
        const struct lowkey_quantizer_choice choice = lowkey_case(1, format, format);
        lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
        const struct lowkey_layer *layer = lowkey_quantizer_layer_at(quantizer, 0);
        const struct lowkey_side *side = &layer->side[0];
        struct lowkey_random random = { 3 };
        float x[3 * 192], want[3 * 64], out[3 * 64];
        lowkey_make_rows(&random, layer->desc, 0, LOWKEY_OUTLIERS, 3, x);
        static const int fills[] = { 0x00, 0xff, 0x7c, 0xe1 };
        for (int i = 0; i < 4; i++) {
            struct lowkey_packed packed;
            lowkey_packed_init(&packed, side, 0, fills[i]);
            lowkey_packed_add(&packed, lowkey_kernels_find(NULL), 0, 3, x);
            lowkey_packed_read(&packed, lowkey_kernels_find(NULL), 1, 0, 3, i ? out : want);
            if (i) assert_memory_equal(out, want, sizeof want);
            lowkey_packed_free(&packed);
        }
        lowkey_quantizer_free(quantizer);
    }
}

/* Rows at the end of f32: what comes back is finite, and the document's. */
static void test_the_end_of_f32(void **state)
{
    (void)state;
    static const float extremes[] = { FLT_MAX,      -FLT_MAX, 3e38f,  -3.2e38f, 1.7e38f,
                                      0x1.ffep127f, 1e30f,    1e-45f, 0 };
    for (int format = 0; format < LOWKEY_N_FORMATS; format++)
        for (int seed = 0; seed < 4; seed++) {
            struct lowkey_quantizer_choice choice = lowkey_case(0, format, format);
            choice.n_kv_heads = choice.n_q_heads = 3;
            choice.key.magnitude = choice.value.magnitude = seed % 2 ? 3e38 : 1e36;
            choice.seed = (uint64_t)seed;
            lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
            const struct lowkey_layer *layer = lowkey_quantizer_layer_at(quantizer, 0);
            struct lowkey_random random = { (uint64_t)(10 * format + seed) };
            float x[N_TOKENS * 24], out[N_TOKENS * 8];
            for (int i = 0; i < N_TOKENS * 24; i++) /* some tokens are one of them throughout */
                x[i] = i % 24 && i / 24 % 3 == 0 ? x[i - 1] : extremes[lowkey_random_below(&random, 9)];
            float *want = want_values(&layer->desc->key, &layer->side[0], 0, x);
            for (const struct lowkey_kernels *kernels = lowkey_kernels; kernels->isa; kernels++) {
                if (!kernels->supported()) continue;
                struct lowkey_packed packed;
                lowkey_packed_init(&packed, &layer->side[0], 0, 0x5a);
                lowkey_packed_add(&packed, kernels, 0, N_TOKENS, x);
                check_range(&packed, kernels, 0, N_TOKENS, want, lowkey_formats[format].name);
                for (int h = 0; h < 3; h++) {
                    lowkey_packed_read(&packed, kernels, h, 0, N_TOKENS, out);
                    for (int i = 0; i < N_TOKENS * 8; i++)
                        if (!isfinite(out[i]))
                            fail_msg("%s: %a", lowkey_formats[format].name, (double)out[i]);
                }
                lowkey_packed_free(&packed);
            }
            free(want);
            lowkey_quantizer_free(quantizer);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        { "unpack: every level gives the document's values, every format and shape",
          test_every_format_and_shape, NULL, NULL, NULL },
        { "unpack: rows at the end of f32 come back finite", test_the_end_of_f32, NULL, NULL, NULL },
        { "unpack: noise in other slots changes nothing", test_noise_in_other_slots, NULL, NULL, NULL },
    };
    return lowkey_run_tests(tests);
}
