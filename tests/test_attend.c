/* test_attend.c - attention over one page, every level, against the textbook in double over the unpacked values, within
 * the bound that runtime/lowkey.h states. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "tests/cases.h"
#include "tests/check.h"
#include "tests/oracle.h"
#include "tests/packed.h"

enum { MAX_ROWS = 24 };

struct page { /* a page of keys and of values of one head, where it stands, and sinks */
    const struct lowkey_layer *layer;
    int head, n_slots, n_sinks;
    int64_t position; /* of slot 0, a multiple of 64 */
    lowkey_rule sink_rule;
    struct lowkey_packed key, value;
    uint16_t *key_sinks, *value_sinks; /* [64][n_heads][head_dim] */
    float base_cos[128], base_sin[128], *slot_cos, *slot_sin;
};

static void fill_angles(struct page *page)
{
    const int n_pairs = page->layer->desc->rope_dims / 2;
    page->slot_cos = malloc(sizeof(float) * (size_t)(64 * n_pairs) + 1);
    page->slot_sin = malloc(sizeof(float) * (size_t)(64 * n_pairs) + 1);
    for (int i = 0; i < n_pairs; i++) {
        const double f = page->layer->desc->rope_inv_freq[i];
        page->base_cos[i] = (float)cos((double)page->position * f),
        page->base_sin[i] = (float)sin((double)page->position * f);
        for (int t = 0; t < 64; t++)
            page->slot_cos[t * n_pairs + i] = (float)cos(t * f),
                                         page->slot_sin[t * n_pairs + i] = (float)sin(t * f);
    }
}

static void fill_sinks(struct lowkey_random *random, const struct lowkey_side *side, lowkey_rule rule,
                       uint16_t **sinks)
{
    const size_t n = 64 * (size_t)(side->n_heads * side->head_dim);
    *sinks = malloc(sizeof **sinks * n);
    for (size_t i = 0; i < n; i++) { /* normal numbers of about 1/8 to 8 in either format, with a sign */
        const unsigned mantissa = (unsigned)lowkey_random_below(random,
                                                                rule == LOWKEY_RULE_BF16 ? 128 : 1024);
        const unsigned exponent = (unsigned)lowkey_random_below(random, 6) - 3 +
                                  (rule == LOWKEY_RULE_BF16 ? 127 : 15);
        (*sinks)[i] = (uint16_t)((unsigned)lowkey_random_below(random, 2) << 15 |
                                 exponent << (rule == LOWKEY_RULE_BF16 ? 7 : 10) | mantissa);
    }
}

static double sink_value(uint16_t code, lowkey_rule rule)
{
    const int mantissa_bits = rule == LOWKEY_RULE_BF16 ? 7 : 10, bias = rule == LOWKEY_RULE_BF16 ? 127 : 15;
    const int exponent = (code & 0x7fff) >> mantissa_bits;
    const double mantissa = 1 + ldexp(code & ((1 << mantissa_bits) - 1), -mantissa_bits);
    return (code >> 15 ? -1 : 1) * ldexp(mantissa, exponent - bias);
}

static void make_page(struct page *page, const struct lowkey_layer *layer, int n_slots, int n_sinks,
                      int64_t position, int fill, uint64_t seed)
{
    struct lowkey_random random = { seed };
    *page = (struct page) { .layer = layer,
                            .n_slots = n_slots,
                            .n_sinks = n_sinks,
                            .position = position,
                            .sink_rule = seed % 2 ? LOWKEY_RULE_F16 : LOWKEY_RULE_BF16 };
    page->head = layer->desc->n_kv_heads - 1;
    fill_angles(page);
    for (int which = 0; which < 2; which++) {
        const struct lowkey_side *side = &layer->side[which];
        struct lowkey_packed *packed = which ? &page->value : &page->key;
        float *x = malloc(sizeof *x * (size_t)(64 * side->n_heads * side->head_dim));
        lowkey_packed_init(packed, side, n_sinks, fill);
        lowkey_make_rows(&random, layer->desc, which, LOWKEY_NORMAL, 64, x);
        if (n_slots > n_sinks)
            lowkey_packed_add(packed, lowkey_kernels_find("scalar"), n_sinks, n_slots - n_sinks, x);
        fill_sinks(&random, side, page->sink_rule, which ? &page->value_sinks : &page->key_sinks);
        free(x);
    }
}

static void free_page(struct page *page)
{
    lowkey_packed_free(&page->key), lowkey_packed_free(&page->value);
    free(page->key_sinks), free(page->value_sinks), free(page->slot_cos), free(page->slot_sin);
}

static void attend(const struct page *page, const struct lowkey_kernels *kernels, int n_rows, const float *q,
                   const int *n_visible, struct lowkey_state state)
{
    const struct lowkey_side *key = &page->layer->side[0], *value = &page->layer->side[1];
    float *scratch = lowkey_guarded_new(lowkey_attend_scratch_bytes(key, value), 0xff);
    const struct lowkey_attend_page_args args = {
        .key = key,
        .value = value,
        .head = page->head,
        .key_page = page->key.pages[page->head],
        .value_page = page->value.pages[page->head],
        .key_side_page = page->key.side_page,
        .value_side_page = page->value.side_page,
        .n_slots = page->n_slots,
        .n_sink_slots = page->n_sinks < page->n_slots ? page->n_sinks : page->n_slots,
        .key_sinks = page->key_sinks + page->head * key->head_dim,
        .value_sinks = page->value_sinks + page->head * value->head_dim,
        .key_sink_stride = key->n_heads * key->head_dim,
        .value_sink_stride = value->n_heads * value->head_dim,
        .sink_rule = page->sink_rule,
        .rope_dims = page->layer->desc->rope_dims,
        .rope_pairing = page->layer->desc->rope_pairing,
        .base_cos = page->base_cos,
        .base_sin = page->base_sin,
        .slot_cos = page->slot_cos,
        .slot_sin = page->slot_sin,
        .n_rows = n_rows,
        .q = q,
        .n_visible = n_visible,
        .state = state,
        .scratch = scratch,
    };
    kernels->attend_page(&args);
    lowkey_guarded_free(scratch);
}

/* The head's stored values of all slots: out[n_slots][head_dim]. */
static void read_head(const struct page *page, int which, float *out)
{
    const struct lowkey_side *side = &page->layer->side[which];
    const uint16_t *sinks = which ? page->value_sinks : page->key_sinks;
    const int d = side->head_dim, n_sinks = page->n_sinks < page->n_slots ? page->n_sinks : page->n_slots;
    for (int t = 0; t < n_sinks; t++)
        for (int c = 0; c < d; c++)
            out[t * d + c] = (float)sink_value(sinks[t * side->n_heads * d + page->head * d + c],
                                               page->sink_rule);
    if (page->n_slots > n_sinks)
        lowkey_packed_read(which ? &page->value : &page->key, lowkey_kernels_find("scalar"), page->head,
                           n_sinks, page->n_slots - n_sinks, out + n_sinks * d);
}

/* Rows that see 0, 1, n, ... slots; each against the oracle of a query at the last token it sees. Returns the worst. */
static double check_page(const struct page *page, const struct lowkey_kernels *kernels, int n_rows,
                         uint64_t seed)
{
    const lowkey_layer_desc *desc = page->layer->desc;
    const int dk = desc->key_head_dim, dv = desc->value_head_dim;
    lowkey_layer_desc one_head = *desc; /* what the oracle is to see */
    one_head.n_q_heads = one_head.n_kv_heads = 1;
    float keys[64 * 256], values[64 * 256], plain_q[MAX_ROWS * 256], q[MAX_ROWS * 256];
    struct lowkey_random random = { seed };
    read_head(page, 0, keys), read_head(page, 1, values);
    lowkey_random_fill(&random, LOWKEY_NORMAL, plain_q, (size_t)(n_rows * dk));
    int n_visible[MAX_ROWS];
    for (int j = 0; j < n_rows; j++) {
        double turned[256];
        n_visible[j] = j == 0   ? 0
                       : j == 1 ? 1
                       : j == 2 ? page->n_slots
                                : lowkey_random_below(&random, page->n_slots + 1);
        for (int c = 0; c < dk; c++) turned[c] = (double)plain_q[j * dk + c];
        lowkey_oracle_rope(desc, (double)page->position + n_visible[j] - 1, turned);
        for (int c = 0; c < dk; c++)
            q[j * dk + c] = (float)(turned[c] * desc->logit_scale *
                                    (c < desc->rope_dims ? desc->rope_attention_factor : 1));
    }
    float *out = lowkey_guarded_new(sizeof *out * (size_t)(n_rows * dv), 0),
          *max = lowkey_guarded_new(sizeof *max * (size_t)n_rows, 0);
    float *sum = lowkey_guarded_new(sizeof *sum * (size_t)n_rows, 0);
    for (int j = 0; j < n_rows; j++) max[j] = -INFINITY;
    attend(page, kernels, n_rows, q, n_visible, (struct lowkey_state) { out, max, sum });
    double worst = 0;
    for (int j = 0; j < n_rows; j++) {
        double want[256], lse, bound;
        if (n_visible[j] == 0) {
            assert_true(max[j] == -INFINITY && sum[j] == 0);
            for (int c = 0; c < dv; c++) assert_true(out[j * dv + c] == 0);
            continue;
        }
        lowkey_oracle_attend(&one_head, n_visible[j], page->position, keys, values, 1, plain_q + j * dk, want,
                             &lse, &bound);
        const double share = lowkey_oracle_worst(1, dv, out + j * dv, want, &bound);
        if (!(share <= 1)) fail_msg("row %d of %d slots: %g times the bound", j, n_visible[j], share);
        assert_true(fabs((double)max[j] + log((double)sum[j]) - lse) < 1e-4 * (1 + fabs(lse)));
        worst = fmax(worst, share);
    }
    lowkey_guarded_free(out), lowkey_guarded_free(max), lowkey_guarded_free(sum);
    return worst;
}

static void test_every_format_and_shape(void **state)
{
    (void)state;
    static const int slots[] = { 1, 31, 63, 64 }, sinks[] = { 0, 1, 5, 64 }, rows[] = { 1, 3, 4, 7, 8, 24 };
    static const int64_t positions[] = { 0, 64, 4032, 1 << 17 };
    double worst = 0;
    for (const struct lowkey_kernels *kernels = lowkey_kernels; kernels->isa; kernels++)
        for (int shape = 0; kernels->supported() && shape < LOWKEY_N_SHAPES; shape++)
            for (int format = 0; format < LOWKEY_N_FORMATS; format++) {
                struct lowkey_quantizer_choice choice = lowkey_case(shape, format,
                                                                    (format + 5) % LOWKEY_N_FORMATS);
                if (format % 2) choice.rope_pairing = 1 - choice.rope_pairing;
                choice.rope_attention_factor = format % 4 ? 0 : 1.3;
                lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
                for (int i = 0; i < 4; i++) {
                    struct page page;
                    const uint64_t seed = (uint64_t)(shape * 1000 + format * 10 + i);
                    make_page(&page, lowkey_quantizer_layer_at(quantizer, 0), slots[(shape + format + i) % 4],
                              sinks[(format + i) % 4], positions[i], 0x99, seed);
                    worst = fmax(worst, check_page(&page, kernels, rows[(shape + format + i) % 6], seed));
                    free_page(&page);
                }
                lowkey_quantizer_free(quantizer);
            }
    print_message("# at most %.3f of the bound\n", worst);
}

/* Bits of unused and dead slots, and of the side pages' unused entries, never reach the output. */
static void test_noise_in_unused_slots(void **state)
{
    (void)state;
    static const int fills[] = { 0x00, 0xff, 0x7c };
    for (int format = 0; format < LOWKEY_N_FORMATS; format++) {
        const struct lowkey_quantizer_choice choice = lowkey_case(1, format, format);
        lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
        float q[2 * 64], out[3][2 * 64] = { { 0 } }, max[3][2], sum[3][2] = { { 0 } };
        const int n_visible[2] = { 9, 20 };
        struct lowkey_random random = { 8 };
        lowkey_random_fill(&random, LOWKEY_NORMAL, q, 2 * 64);
        for (int i = 0; i < 3; i++) {
            struct page page;
            make_page(&page, lowkey_quantizer_layer_at(quantizer, 0), 20, 3, 128, fills[i], 4);
            max[i][0] = max[i][1] = -INFINITY;
            attend(&page, lowkey_kernels_find(NULL), 2, q, n_visible,
                   (struct lowkey_state) { out[i], max[i], sum[i] });
            free_page(&page);
            assert_memory_equal(out[0], out[i], sizeof out[0]);
            assert_memory_equal(max[0], max[i], sizeof max[0]);
            assert_memory_equal(sum[0], sum[i], sizeof sum[0]);
        }
        lowkey_quantizer_free(quantizer);
    }
}

/* Values of FLT_MAX: weights that add up to a little more than 1 must not make the mean infinite, nor may merging. */
static void test_values_at_the_end_of_f32(void **state)
{
    (void)state;
    struct lowkey_quantizer_choice choice = lowkey_case(1, 0,
                                                        9); /* 1 bit; bf16, which saturates at 0x1.fep127 */
    choice.key.magnitude = 1e-3;
    choice.value = (struct lowkey_side_choice) { .bits = 2, .token_scale = LOWKEY_SCALE_F32 };
    lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
    const struct lowkey_layer *layer = lowkey_quantizer_layer_at(quantizer, 0);
    struct page page;
    make_page(&page, layer, 64, 0, 64, 0, 2);
    float values[64 * 3 * 64];
    for (int i = 0; i < 64 * 3 * 64; i++) values[i] = FLT_MAX; /* a token of one value is stored exactly */
    lowkey_packed_free(&page.value);
    lowkey_packed_init(&page.value, &layer->side[1], 0, 0x31);
    lowkey_packed_add(&page.value, lowkey_kernels_find(NULL), 0, 64, values);
    int n_largest = 0;
    for (const struct lowkey_kernels *kernels = lowkey_kernels; kernels->isa; kernels++)
        for (int n_visible = 1; n_visible <= 64; n_visible++) {
            if (!kernels->supported()) continue;
            float q[64], out[64] = { 0 }, max = -INFINITY, sum = 0;
            for (int c = 0; c < 64; c++) q[c] = (float)((c * 37 + n_visible) % 11);
            for (int i = 0; i < 9; i++) { /* nine pages */
                attend(&page, kernels, 1, q, &n_visible, (struct lowkey_state) { out, &max, &sum });
                for (int c = 0; c < 64; c++) {
                    assert_true(out[c] <= FLT_MAX && out[c] > 0.99f * FLT_MAX);
                    n_largest += out[c] == FLT_MAX;
                }
            }
        }
    assert_true(n_largest > 0);
    free_page(&page);
    lowkey_quantizer_free(quantizer);
}

/* 600 + N(0,1) in some channels (Qwen2's key bias): nothing special happens, the bound holds; and scores beyond f32. */
static void test_huge_scores(void **state)
{
    (void)state;
    struct lowkey_quantizer_choice choice = lowkey_case(1, 9, 9); /* bf16 */
    choice.key.magnitude = 3e38, choice.value.magnitude = 3e38;
    lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
    struct page page;
    make_page(&page, lowkey_quantizer_layer_at(quantizer, 0), 64, 0, 64, 0, 2);
    float q[64], out[64] = { 0 }, max = -INFINITY, sum = 0;
    const int n_visible = 64;
    for (int c = 0; c < 64; c++) q[c] = c % 2 ? 1e30f : -1e30f;
    attend(&page, lowkey_kernels_find(NULL), 1, q, &n_visible, (struct lowkey_state) { out, &max, &sum });
    for (int c = 0; c < 64; c++) assert_true(isfinite(out[c]));
    free_page(&page);
    lowkey_quantizer_free(quantizer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        { "attend: every level, format and shape within the stated bound, positions to 2^17",
          test_every_format_and_shape, NULL, NULL, NULL },
        { "attend: noise in unused slots changes no bit", test_noise_in_unused_slots, NULL, NULL, NULL },
        { "attend: the mean of values at the end of f32 is finite", test_values_at_the_end_of_f32, NULL, NULL,
          NULL },
        { "attend: scores beyond f32's range give finite numbers", test_huge_scores, NULL, NULL, NULL },
    };
    return lowkey_run_tests(tests);
}
