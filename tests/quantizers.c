/* quantizers.c - makes good descriptions: tables on the grid of center and exponent, boundaries at midpoints, orders
 * that keep RoPE partners together but are shuffled otherwise, factors exact in f16. */
#include "tests/quantizers.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/check.h"
#include "tests/make_quantizer.h"

static void *array(size_t count, size_t bytes_each)
{
    void *block = calloc(count ? count : 1, bytes_each); /* exact, so that ASan sees reads beyond it */
    assert_non_null(block);
    return block;
}

/* Shuffle pairs of rows, or single rows where there is no RoPE. */
static void make_order(const lowkey_layer_desc *layer, int which, int head_dim, uint16_t *order,
                       struct lowkey_random *random)
{
    const int step = which == 0 && layer->rope_dims ? 2 : 1;
    lowkey_default_order(head_dim, which ? 0 : layer->rope_dims, layer->rope_pairing, order);
    for (int i = head_dim / step - 1; i > 0; i--) {
        const int j = lowkey_random_below(random, i + 1);
        for (int k = 0; k < step; k++) {
            const uint16_t kept = order[i * step + k];
            order[i * step + k] = order[j * step + k];
            order[j * step + k] = kept;
        }
    }
}

/* boundary: NULL with a trellis. */
static void make_channel(int bits, int n_table, struct lowkey_random *random, float *table, float *boundary,
                         uint8_t *n_entries, float *center, int16_t *exponent, float *lower, float *upper)
{
    *exponent = (int16_t)(lowkey_random_below(random, 40) - 30);
    *center = lowkey_random_below(random, 3)
                  ? 0.0f
                  : ldexpf((float)(lowkey_random_below(random, 2001) - 1000), *exponent);
    *lower = *center - ldexpf(40, *exponent), *upper = *center + ldexpf(44, *exponent);
    if (bits > 5) {
        for (int k = 0; k + 1 < n_table; k++) boundary[k] = FLT_MAX;
        return;
    }
    const int most = 1 << (bits + !boundary);
    *n_entries = (uint8_t)(lowkey_random_below(random, 8) ? most : 1 + lowkey_random_below(random, most));
    float h = -60; /* in units of 2^exponent, within twice the range of 84 */
    for (int k = 0; k < n_table; k++) {
        if (k < *n_entries) h += 0.25f * (float)(1 + lowkey_random_below(random, 12));
        table[k] = *center + ldexpf(h, *exponent);
        if (k > 0 && boundary)
            boundary[k - 1] = k < *n_entries ? 0.5f * table[k - 1] + 0.5f * table[k] : FLT_MAX;
    }
}

static void make_factor(int head_dim, float *factor, struct lowkey_random *random)
{
    for (int i = 0; i < head_dim; i++)
        for (int j = 0; j < i; j++)
            factor[i * head_dim + j] = ldexpf((float)(lowkey_random_below(random, 2001) - 1000), -11);
}

static lowkey_side_desc make_side(const lowkey_layer_desc *layer, int which,
                                  const struct lowkey_test_side *spec, struct lowkey_random *random)
{
    const int head_dim = which ? layer->value_head_dim : layer->key_head_dim;
    const size_t d = (size_t)head_dim, n = (size_t)layer->n_kv_heads * d;
    int n_table = 0, any_8 = 0, any_16 = 0;
    for (size_t c = 0; c < n; c++) {
        const int bits = spec->bits[c % (size_t)spec->n_bits];
        if (bits <= 5 && 1 << (bits + !!spec->trellis) > n_table) n_table = 1 << (bits + !!spec->trellis);
        any_8 |= bits == 8;
        any_16 |= bits == 16;
    }
    const size_t n_boundary = n_table ? (size_t)n_table - 1 : 0;
    uint8_t *bits = array(n, 1), *n_entries = array(n, 1);
    uint16_t *order = array(n, 2);
    int16_t *exponent = array(n, 2);
    float *table = n_table ? array(n * (size_t)n_table, 4) : NULL,
          *boundary = n_table && !spec->trellis ? array(n * n_boundary, 4) : NULL;
    float *center = array(n, 4), *lower = array(n, 4), *upper = array(n, 4), *rule_scale = array(n, 4);
    float *factor = spec->feedback ? array(n * d, 4) : NULL;
    float *metric_weight = spec->trellis ? array(n, 4) : NULL;
    for (size_t c = 0; c < n; c++) {
        bits[c] = (uint8_t)spec->bits[c % (size_t)spec->n_bits];
        make_channel(bits[c], n_table, random, n_table ? table + c * (size_t)n_table : NULL,
                     boundary ? boundary + c * n_boundary : NULL, &n_entries[c], &center[c], &exponent[c],
                     &lower[c], &upper[c]);
        if (metric_weight) metric_weight[c] = ldexpf((float)(1 + lowkey_random_below(random, 99)), -7);
        rule_scale[c] = bits[c] == 8 ? ldexpf((float)(1 + lowkey_random_below(random, 99)), -7) : 1.0f;
    }
    for (int h = 0; h < layer->n_kv_heads; h++) {
        make_order(layer, which, head_dim, order + (size_t)h * d, random);
        if (factor) make_factor(head_dim, factor + (size_t)h * d * d, random);
    }
    const int any = spec->outlier_rule != LOWKEY_OUTLIER_NONE;
    return (lowkey_side_desc) {
        .struct_size = sizeof(lowkey_side_desc),
        .bits = bits,
        .order = order,
        .table_entries = n_table,
        .n_entries = n_entries,
        .table = table,
        .boundary = boundary,
        .center = center,
        .exponent = exponent,
        .lower = lower,
        .upper = upper,
        .rule_8 = any_8 ? spec->rule_8 : LOWKEY_RULE_NONE,
        .rule_16 = any_16 ? spec->rule_16 : LOWKEY_RULE_NONE,
        .rule_scale = rule_scale,
        .token_scale = spec->token_scale,
        .scale_block = spec->scale_block,
        .outlier_rule = spec->outlier_rule,
        .outlier_rank = spec->outlier_rule == LOWKEY_OUTLIER_RANK ? 2 : 0,
        .outlier_cap = any ? 4 : 0,
        .outlier_page_capacity = any ? 200 : 0,
        .factor = factor,
        .metric_weight = metric_weight,
        .trellis = spec->trellis,
    };
}

struct lowkey_test_spec lowkey_test_spec_rich(void)
{
    return (struct lowkey_test_spec) {
        .n_layers = 2,
        .first_layer = 3,
        .n_q_heads = 6,
        .n_kv_heads = 2,
        .key_head_dim = 24,
        .value_head_dim = 16,
        .rope_dims = 16,
        .n_sink_tokens = 5,
        .seed = 1,
        .side = { { .bits = { 4, 4, 3, 8, 1, 5, 16, 2 },
                    .n_bits = 8,
                    .rule_8 = LOWKEY_RULE_E4M3,
                    .rule_16 = LOWKEY_RULE_BF16,
                    .outlier_rule = LOWKEY_OUTLIER_LIMIT,
                    .feedback = 1 },
                  { .bits = { 2, 4, 3 },
                    .n_bits = 3,
                    .token_scale = LOWKEY_SCALE_F16,
                    .scale_block = 8,
                    .outlier_rule = LOWKEY_OUTLIER_RANK } },
    };
}

struct lowkey_test_spec lowkey_test_spec_trellis(void)
{
    struct lowkey_test_spec spec = lowkey_test_spec_rich();
    spec.side[0] = (struct lowkey_test_side) {
        .bits = { 4, 3, 2, 5, 1 }, .n_bits = 5, .trellis = 2, .feedback = 1
    };
    spec.side[1] = (struct lowkey_test_side) { .bits = { 2, 3 }, .n_bits = 2, .trellis = 4 };
    return spec;
}

lowkey_quantizer_desc *lowkey_test_desc_make(const struct lowkey_test_spec *spec)
{
    struct lowkey_random random = { spec->seed };
    lowkey_layer_desc *layers = array((size_t)spec->n_layers, sizeof *layers);
    for (int i = 0; i < spec->n_layers; i++) {
        lowkey_layer_desc *layer = &layers[i];
        double *inv_freq = array((size_t)spec->rope_dims / 2, sizeof *inv_freq);
        for (int p = 0; p < spec->rope_dims / 2; p++) inv_freq[p] = pow(1e4, -2.0 * p / spec->rope_dims);
        *layer = (lowkey_layer_desc) { .struct_size = sizeof *layer,
                                       .index = spec->first_layer + 2 * i,
                                       .n_q_heads = spec->n_q_heads,
                                       .n_kv_heads = spec->n_kv_heads,
                                       .key_head_dim = spec->key_head_dim,
                                       .value_head_dim = spec->value_head_dim,
                                       .logit_scale = 0.125,
                                       .rope_dims = spec->rope_dims,
                                       .rope_pairing = spec->rope_pairing,
                                       .rope_attention_factor = 1.25,
                                       .rope_inv_freq = inv_freq };
        layer->key = make_side(layer, 0, &spec->side[0], &random);
        layer->value = make_side(layer, 1, &spec->side[1], &random);
    }
    lowkey_quantizer_desc *desc = array(1, sizeof *desc);
    *desc = (lowkey_quantizer_desc) { .struct_size = sizeof *desc,
                                      .n_layers = spec->n_layers,
                                      .layers = layers,
                                      .n_sink_tokens = spec->n_sink_tokens,
                                      .sink_rule = LOWKEY_RULE_BF16,
                                      .model_name = "test-model" };
    for (int i = 0; i < 32; i++) desc->model_sha256[i] = (unsigned char)(7 * i + 1);
    return desc;
}

void lowkey_test_desc_free(lowkey_quantizer_desc *desc)
{
    for (int i = 0; i < desc->n_layers; i++) {
        lowkey_test_side_free(&desc->layers[i].key);
        lowkey_test_side_free(&desc->layers[i].value);
        free((void *)desc->layers[i].rope_inv_freq);
    }
    free((void *)desc->layers);
    free(desc);
}

static void same_array(const char *name, const void *a, const void *b, size_t bytes)
{
    if (!a != !b || (a && memcmp(a, b, bytes) != 0)) fail_msg("%s differs", name);
}

static void same_side(const lowkey_side_desc *a, const lowkey_side_desc *b, size_t n_heads, size_t d)
{
    const size_t n = n_heads * d, n_table = (size_t)a->table_entries;
    assert_int_equal(a->table_entries, b->table_entries);
    same_array("bits", a->bits, b->bits, n);
    same_array("order", a->order, b->order, 2 * n);
    same_array("n_entries", a->n_entries, b->n_entries, n);
    same_array("table", a->table, b->table, 4 * n * n_table);
    assert_int_equal(a->trellis, b->trellis);
    same_array("metric_weight", a->metric_weight, b->metric_weight, 4 * n);
    same_array("boundary", a->boundary, b->boundary, n_table && !a->trellis ? 4 * n * (n_table - 1) : 0);
    same_array("center", a->center, b->center, 4 * n);
    same_array("exponent", a->exponent, b->exponent, 2 * n);
    same_array("lower", a->lower, b->lower, 4 * n);
    same_array("upper", a->upper, b->upper, 4 * n);
    same_array("rule_scale", a->rule_scale, b->rule_scale, 4 * n);
    same_array("factor", a->factor, b->factor, 4 * n * d);
    assert_int_equal(a->rule_8, b->rule_8);
    assert_int_equal(a->rule_16, b->rule_16);
    assert_int_equal(a->token_scale, b->token_scale);
    assert_int_equal(a->scale_block, b->scale_block);
    assert_int_equal(a->outlier_rule, b->outlier_rule);
    assert_int_equal(a->outlier_rank, b->outlier_rank);
    assert_int_equal(a->outlier_cap, b->outlier_cap);
    assert_int_equal(a->outlier_page_capacity, b->outlier_page_capacity);
}

void lowkey_test_desc_equal(const lowkey_quantizer_desc *a, const lowkey_quantizer_desc *b)
{
    assert_int_equal(a->struct_size, b->struct_size);
    assert_int_equal(a->n_layers, b->n_layers);
    assert_int_equal(a->n_sink_tokens, b->n_sink_tokens);
    assert_int_equal(a->sink_rule, b->sink_rule);
    assert_string_equal(a->model_name, b->model_name);
    assert_memory_equal(a->model_sha256, b->model_sha256, 32);
    for (int i = 0; i < a->n_layers; i++) {
        const lowkey_layer_desc *x = &a->layers[i], *y = &b->layers[i];
        assert_int_equal(x->struct_size, y->struct_size);
        assert_int_equal(x->index, y->index);
        assert_int_equal(x->n_q_heads, y->n_q_heads);
        assert_int_equal(x->n_kv_heads, y->n_kv_heads);
        assert_int_equal(x->key_head_dim, y->key_head_dim);
        assert_int_equal(x->value_head_dim, y->value_head_dim);
        assert_true(x->logit_scale == y->logit_scale);
        assert_int_equal(x->rope_dims, y->rope_dims);
        assert_int_equal(x->rope_pairing, y->rope_pairing);
        assert_true(x->rope_attention_factor == y->rope_attention_factor);
        same_array("rope_inv_freq", x->rope_inv_freq, y->rope_inv_freq,
                   (size_t)x->rope_dims / 2 * sizeof(double));
        same_side(&x->key, &y->key, (size_t)x->n_kv_heads, (size_t)x->key_head_dim);
        same_side(&x->value, &y->value, (size_t)x->n_kv_heads, (size_t)x->value_head_dim);
    }
}
