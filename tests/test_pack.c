/* test_pack.c - packing is exact: every level of the table against the rules of formats/README.md written a second time
 * (pack_oracle.c). Pages written by hand are in test_pack_bytes.c. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "tests/cases.h"
#include "tests/check.h"
#include "tests/pack_oracle.h"
#include "tests/packed.h"

static int is_same_float(float a, float b)
{
    return memcmp(&a, &b, sizeof a) == 0;
}

/* One slot of a packed side against the oracle's token. */
static void check_slot(const lowkey_side_desc *side, const struct lowkey_packed *packed, int slot,
                       const struct lowkey_oracle_token *want, const char *what)
{
    const int d = packed->side->head_dim, n = packed->side->n_heads * d;
    for (int c = 0; c < n; c++) {
        const unsigned code = lowkey_oracle_code(side, d, c / d, packed->pages[c / d], c % d, slot);
        if (code != want->codes[c])
            fail_msg("%s: slot %d channel %d (%d bits): code %u, wanted %u", what, slot, c, side->bits[c],
                     code, want->codes[c]);
    }
    for (int b = 0; side->token_scale != LOWKEY_SCALE_NONE && b < n / side->scale_block; b++) {
        const float scale = lowkey_oracle_scale(side, n, packed->side_page, slot, b, 0);
        const float zero = lowkey_oracle_scale(side, n, packed->side_page, slot, b, 1);
        if (!is_same_float(scale, want->scales[b]) || !is_same_float(zero, want->zeros[b]))
            fail_msg("%s: slot %d block %d: scale %a zero %a, wanted %a %a", what, slot, b, (double)scale,
                     (double)zero, (double)want->scales[b], (double)want->zeros[b]);
    }
    if (side->outlier_rule == LOWKEY_OUTLIER_NONE) return;
    struct lowkey_oracle_outlier *found = calloc((size_t)n + UINT16_MAX, sizeof *found);
    const int n_found = lowkey_oracle_outliers(side, n, packed->side_page, slot, packed->first_live_slot,
                                               found);
    assert_int_equal(n_found, want->n_outliers);
    for (int i = 0; i < n_found; i++) {
        assert_int_equal(found[i].channel, want->outliers[i].channel);
        assert_true(found[i].residual == want->outliers[i].residual);
    }
    free(found);
}

/* Pack slots first_live..63 with each level, and compare codes, scales, outliers and counts. */
static void check_side(const lowkey_layer_desc *layer, const struct lowkey_side *side, int which,
                       int first_live, const float *x, const char *what)
{
    const lowkey_side_desc *desc = which ? &layer->value : &layer->key;
    const int n = side->n_heads * side->head_dim;
    assert_int_equal(side->layout.bytes, lowkey_oracle_side_page_bytes(desc, n));
    for (int h = 0; h < side->n_heads; h++)
        assert_int_equal(side->heads[h].page_bytes, lowkey_oracle_page_bytes(desc, side->head_dim, h));
    struct lowkey_oracle_token *want = lowkey_oracle_token_new(n);
    for (const struct lowkey_kernels *kernels = lowkey_kernels; kernels->isa; kernels++) {
        if (!kernels->supported()) continue;
        struct lowkey_packed packed;
        lowkey_packed_init(&packed, side, first_live, 0xd7);
        lowkey_packed_add(&packed, kernels, first_live, 64 - first_live, x);
        long outliers = 0, clamped = 0, saturated = 0;
        for (int slot = first_live; slot < 64; slot++) {
            lowkey_oracle_pack(desc, side->n_heads, side->head_dim, x + (slot - first_live) * n,
                               desc->outlier_page_capacity - (int)outliers, want);
            check_slot(desc, &packed, slot, want, what);
            outliers += want->n_outliers, clamped += want->clamped, saturated += want->saturated;
        }
        assert_int_equal(packed.counts.outliers, outliers);
        assert_int_equal(packed.counts.clamped, clamped);
        assert_int_equal(packed.counts.saturated, saturated);
        lowkey_packed_free(&packed);
    }
    lowkey_oracle_token_free(want);
}

static void test_every_format_and_shape(void **state)
{
    (void)state;
    for (int shape = 0; shape < LOWKEY_N_SHAPES; shape++)
        for (int format = 0; format < LOWKEY_N_FORMATS; format++) {
            const struct lowkey_quantizer_choice choice = lowkey_case(shape, format,
                                                                      (format + shape) % LOWKEY_N_FORMATS);
            lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
            const struct lowkey_layer *layer = lowkey_quantizer_layer_at(quantizer, 0);
            struct lowkey_random random = { (uint64_t)(shape * 100 + format) };
            for (int which = 0; which < 2; which++) {
                const struct lowkey_side *side = &layer->side[which];
                float *x = malloc(64 * sizeof *x * (size_t)(side->n_heads * side->head_dim));
                const enum lowkey_distribution distribution = (format + shape + which) %
                                                              LOWKEY_N_DISTRIBUTIONS;
                const int first_live = format % 3 == 0 ? 0 : format % 3 == 1 ? 5 : 63;
                lowkey_make_rows(&random, layer->desc, which, distribution, 64 - first_live, x);
                check_side(layer->desc, side, which, first_live, x, lowkey_formats[format].name);
                free(x);
            }
            lowkey_quantizer_free(quantizer);
        }
}

static void test_magnitudes(void **state)
{
    (void)state;
    static const double magnitudes[] = { 1e-37, 1e-30, 1e-6, 1e5, 1e30, 3e38 };
    for (int m = 0; m < 6; m++)
        for (int format = 0; format < LOWKEY_N_FORMATS; format++) {
            struct lowkey_quantizer_choice choice = lowkey_case(1, format, format);
            choice.key.magnitude = choice.value.magnitude = magnitudes[m];
            lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
            const struct lowkey_layer *layer = lowkey_quantizer_layer_at(quantizer, 0);
            struct lowkey_random random = { (uint64_t)(m * 100 + format) };
            float *x = malloc(64 * 192 * sizeof *x);
            lowkey_make_rows(&random, layer->desc, 0, LOWKEY_OUTLIERS, 64, x);
            if (choice.key.token_scale != LOWKEY_SCALE_NONE) /* there the range is found in the token */
                for (int i = 0; i < 64 * 192; i++) {
                    x[i] = (float)(magnitudes[m] * (double)x[i]);
                    if (!isfinite(x[i])) x[i] = i % 2 ? -FLT_MAX : FLT_MAX;
                }
            check_side(layer->desc, &layer->side[0], 0, 0, x, lowkey_formats[format].name);
            free(x);
            lowkey_quantizer_free(quantizer);
        }
}

/* The same tokens 64 at once, one by one, and 7 + 57, give the same bytes in what they own; and other slots stay. */
static void test_any_cut_gives_the_same_bytes(void **state)
{
    (void)state;
    for (int format = 0; format < LOWKEY_N_FORMATS; format++) {
        const struct lowkey_quantizer_choice choice = lowkey_case(3, format, format);
        lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
        const struct lowkey_layer *layer = lowkey_quantizer_layer_at(quantizer, 0);
        const struct lowkey_side *side = &layer->side[0];
        const int n = side->n_heads * side->head_dim;
        struct lowkey_random random = { 5 };
        float *x = malloc(64 * sizeof *x * (size_t)n);
        lowkey_make_rows(&random, layer->desc, 0, LOWKEY_OUTLIERS, 64, x);
        struct lowkey_packed cuts[3];
        for (int i = 0; i < 3; i++) lowkey_packed_init(&cuts[i], side, 0, 0x3c);
        for (const struct lowkey_kernels *kernels = lowkey_kernels; kernels->isa; kernels++) {
            lowkey_packed_add(&cuts[0], kernels, 0, 64, x);
            for (int i = 0; i < 64; i++) lowkey_packed_add(&cuts[1], kernels, i, 1, x + i * n);
            lowkey_packed_add(&cuts[2], kernels, 0, 7, x);
            lowkey_packed_add(&cuts[2], kernels, 7, 57, x + 7 * n);
            for (int i = 1; i < 3; i++) {
                for (int h = 0; h < side->n_heads; h++)
                    assert_memory_equal(cuts[0].pages[h], cuts[i].pages[h], side->heads[h].page_bytes);
                if (side->layout.bytes)
                    assert_memory_equal(cuts[0].side_page, cuts[i].side_page, side->layout.bytes);
                assert_memory_equal(&cuts[0].counts, &cuts[i].counts, sizeof cuts[0].counts);
            }
        }
        /* Packing slots 10..12 again with other tokens leaves every other code as it is. */
        struct lowkey_oracle_token *before = lowkey_oracle_token_new(n);
        lowkey_packed_add(&cuts[1], lowkey_kernels_find(NULL), 10, 3, x + 20 * n);
        for (int slot = 0; slot < 64; slot++)
            for (int c = 0; c < n; c++) {
                const int d = side->head_dim, from = slot >= 10 && slot < 13 ? slot + 10 : slot;
                if (side->outlier_rule != LOWKEY_OUTLIER_NONE) break; /* room differs */
                assert_int_equal(
                    lowkey_oracle_code(&layer->desc->key, d, c / d, cuts[1].pages[c / d], c % d, slot),
                    lowkey_oracle_code(&layer->desc->key, d, c / d, cuts[0].pages[c / d], c % d, from));
            }
        lowkey_oracle_token_free(before);
        for (int i = 0; i < 3; i++) lowkey_packed_free(&cuts[i]);
        free(x);
        lowkey_quantizer_free(quantizer);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        { "pack: every level writes what the document says, every format and shape",
          test_every_format_and_shape, NULL, NULL, NULL },
        { "pack: channels of magnitude 1e-37 to 3e38", test_magnitudes, NULL, NULL, NULL },
        { "pack: 64 tokens at once, one by one, 7 + 57 give the same bytes",
          test_any_cut_gives_the_same_bytes, NULL, NULL, NULL },
    };
    return lowkey_run_tests(tests);
}
