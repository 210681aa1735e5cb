/* make_quantizer.c - random descriptions that keep every rule of formats/README.md, "quantizer.h5". */
#include "tests/make_quantizer.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "tests/check.h"

struct arrays { /* of one side; without a boundary it has a trellis */
    uint8_t *bits, *n_entries;
    uint16_t *order;
    int16_t *exponent;
    float *table, *boundary, *center, *lower, *upper, *rule_scale, *factor, *metric_weight;
};

static int compare_doubles(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double rounded_to_f16(double x) /* |x| <= 60000 */
{
    int exponent;
    frexp(x, &exponent);
    const double step = ldexp(1, exponent > -13 ? exponent - 11 : -24);
    return rint(x / step) * step;
}

/* Entries center + h * 2^exponent with h in [-2, 2] and exact in f16, rising; boundaries between neighbours, where
 * they are not NULL. */
static void make_table(struct lowkey_random *random, int n_used, int n_table, float center, int exponent,
                       float *table, float *boundary)
{
    double h[64];
    for (int tries = 0, rising = 0; !rising; tries++) {
        assert_true(tries < 1000);
        for (int k = 0; k < n_used; k++) h[k] = rounded_to_f16(4 * lowkey_random_uniform(random) - 2);
        qsort(h, (size_t)n_used, sizeof *h, compare_doubles);
        rising = 1;
        for (int k = 0; k < n_used; k++) {
            table[k] = (float)((double)center + ldexp(h[k], exponent));
            rising &= k == 0 || table[k] > table[k - 1];
        }
    }
    for (int k = n_used; k < n_table; k++) table[k] = table[n_used - 1];
    if (!boundary) return;
    for (int k = 0; k < n_table - 1; k++)
        boundary[k] = k < n_used - 1 ? (float)(0.5 * (double)table[k] + 0.5 * (double)table[k + 1]) : FLT_MAX;
    if (n_used > 3 && lowkey_random_below(random, 4) == 0)
        boundary[1] = boundary[0]; /* a code that never comes */
}

static int draw_bits(struct lowkey_random *random, const struct lowkey_side_choice *choice)
{
    static const int widths[] = { 1, 2, 3, 4, 5, 8, 16 };
    if (choice->bits != LOWKEY_MIXED_BITS) return choice->bits;
    return widths[lowkey_random_below(random, choice->trellis ? 5 : 7)];
}

static void make_channel(struct lowkey_random *random, const struct lowkey_side_choice *choice, int n_table,
                         size_t c, const struct arrays *a)
{
    const int bits = a->bits[c], is_scaled = choice->token_scale != LOWKEY_SCALE_NONE;
    int exponent = choice->magnitude > 0 ? ilogb(choice->magnitude) - 1 : lowkey_random_below(random, 9) - 4;
    if (exponent < -126) exponent = -126;
    const int spread = exponent > 112 ? exponent - 112 : 0; /* entries are h * 2^spread with h of -2..2 */
    if (exponent > 112) exponent = 112;
    a->exponent[c] = (int16_t)(!is_scaled ? exponent : choice->magnitude > 1e38 ? 1 : -1);
    const int has_center = !is_scaled && choice->magnitude == 0 && bits <= 5 &&
                           lowkey_random_below(random, 8) == 0;
    const float center = a->center[c] = has_center ? 600.0f : 0;
    const float span = ldexpf(2, a->exponent[c] + (is_scaled ? 0 : spread));
    a->lower[c] = center - span * 0.9f, a->upper[c] = center + span * 0.95f;
    a->rule_scale[c] = bits == 8 ? span / 100 : 1;
    while (bits == 8 && !isfinite(a->rule_scale[c] * 57344)) a->rule_scale[c] /= 2;
    if (bits == 8 && !(a->rule_scale[c] >= FLT_MIN)) a->rule_scale[c] = FLT_MIN;
    a->n_entries[c] = 0;
    if (n_table)
        for (int k = 0; k < n_table; k++) a->table[c * (size_t)n_table + (size_t)k] = 0;
    if (a->boundary)
        for (int k = 0; k < n_table - 1; k++) a->boundary[c * (size_t)(n_table - 1) + (size_t)k] = FLT_MAX;
    if (bits > 5) return;
    if (a->metric_weight)
        a->metric_weight[c] = (float)ldexp(1 + lowkey_random_uniform(random),
                                           lowkey_random_below(random, 12) - 6);
    const int is_constant = choice->constant_channels && lowkey_random_below(random, 4) == 0;
    int n_used = 1 << (bits + !!choice->trellis);
    if (is_constant)
        n_used = 1;
    else if (choice->few_entries && lowkey_random_below(random, 3) == 0)
        n_used = 1 + lowkey_random_below(random, n_used);
    make_table(random, n_used, n_table, center, a->exponent[c] + (is_scaled ? 0 : spread),
               a->table + c * (size_t)n_table,
               a->boundary ? a->boundary + c * (size_t)(n_table - 1) : NULL);
    a->n_entries[c] = (uint8_t)n_used;
    if (is_constant && !is_scaled) a->lower[c] = a->upper[c] = a->table[c * (size_t)n_table];
}

/* Pairs of rows, each pair two channels that RoPE turns together, else two neighbours. */
static void shuffle_order(struct lowkey_random *random, int head_dim, int rope_dims, lowkey_pairing pairing,
                          uint16_t *order)
{
    uint16_t plain[256];
    int pairs[128];
    lowkey_default_order(head_dim, rope_dims, pairing, plain);
    lowkey_random_permutation(random, head_dim / 2, pairs);
    for (int i = 0; i < head_dim / 2; i++) {
        order[2 * i] = plain[2 * pairs[i]];
        order[2 * i + 1] = plain[2 * pairs[i] + 1];
    }
}

static void make_factor(struct lowkey_random *random, size_t head_dim, float *factor)
{
    for (size_t i = 0; i < head_dim; i++)
        for (size_t j = 0; j < head_dim; j++) {
            const double l = rounded_to_f16(0.3 * lowkey_random_normal(random) / sqrt((double)head_dim));
            factor[i * head_dim + j] = i > j ? (float)l : 0;
        }
}

static void *take(size_t count, size_t bytes_each)
{
    void *block = calloc(count ? count : 1, bytes_each);
    assert_non_null(block);
    return block;
}

static struct arrays make_arrays(size_t n, size_t d, int n_table, const struct lowkey_side_choice *choice)
{
    const size_t e = (size_t)n_table;
    return (struct arrays) {
        .bits = take(n, 1),
        .n_entries = take(n, 1),
        .order = take(n, 2),
        .exponent = take(n, 2),
        .table = take(n * e, sizeof(float)),
        .boundary = choice->trellis ? NULL : take(e ? n * (e - 1) : 0, sizeof(float)),
        .center = take(n, sizeof(float)),
        .lower = take(n, sizeof(float)),
        .upper = take(n, sizeof(float)),
        .rule_scale = take(n, sizeof(float)),
        .factor = choice->feedback ? take(n * d, sizeof(float)) : NULL,
        .metric_weight = choice->trellis ? take(n, sizeof(float)) : NULL,
    };
}

void lowkey_test_side_free(const lowkey_side_desc *side)
{
    const void *const arrays[] = { side->bits,     side->order,      side->n_entries, side->table,
                                   side->boundary, side->center,     side->exponent,  side->lower,
                                   side->upper,    side->rule_scale, side->factor,    side->metric_weight };
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) free((void *)arrays[i]);
}

static lowkey_side_desc make_side(struct lowkey_random *random, const struct lowkey_side_choice *choice,
                                  int n_heads, int head_dim, int rope_dims, lowkey_pairing pairing)
{
    const size_t d = (size_t)head_dim, n = (size_t)n_heads * d;
    const int most = choice->bits == LOWKEY_MIXED_BITS ? 5 : choice->bits,
              n_table = most <= 5 ? 1 << (most + !!choice->trellis) : 0;
    const struct arrays a = make_arrays(n, d, n_table, choice);
    int any_8 = 0, any_16 = 0;
    for (size_t c = 0; c < n; c++) {
        a.bits[c] = (uint8_t)(c == 0 && n_table ? most : draw_bits(random, choice));
        any_8 |= a.bits[c] == 8, any_16 |= a.bits[c] == 16;
        make_channel(random, choice, n_table, c, &a);
    }
    for (size_t h = 0; h < (size_t)n_heads; h++) {
        if (choice->shuffled)
            shuffle_order(random, head_dim, rope_dims, pairing, a.order + h * d);
        else
            lowkey_default_order(head_dim, rope_dims, pairing, a.order + h * d);
        if (a.factor) make_factor(random, d, a.factor + h * d * d);
    }
    const int any = choice->outlier_rule != LOWKEY_OUTLIER_NONE;
    const int capacity = n * 64 < UINT16_MAX ? (int)n * 64 : UINT16_MAX;
    if (!n_table) free(a.table), free(a.boundary);
    return (lowkey_side_desc) {
        .struct_size = sizeof(lowkey_side_desc),
        .bits = a.bits,
        .order = a.order,
        .table_entries = n_table,
        .n_entries = a.n_entries,
        .table = n_table ? a.table : NULL,
        .boundary = n_table ? a.boundary : NULL,
        .center = a.center,
        .exponent = a.exponent,
        .lower = a.lower,
        .upper = a.upper,
        .rule_8 = !any_8           ? LOWKEY_RULE_NONE
                  : choice->rule_8 ? choice->rule_8
                                   : LOWKEY_RULE_E4M3,
        .rule_16 = !any_16           ? LOWKEY_RULE_NONE
                   : choice->rule_16 ? choice->rule_16
                                     : LOWKEY_RULE_F16,
        .rule_scale = a.rule_scale,
        .token_scale = choice->token_scale,
        .scale_block = choice->scale_block,
        .outlier_rule = choice->outlier_rule,
        .outlier_rank = choice->outlier_rank,
        .outlier_cap = any && !choice->outlier_cap ? (int)n : choice->outlier_cap,
        .outlier_page_capacity = any && !choice->outlier_page_capacity ? capacity
                                                                       : choice->outlier_page_capacity,
        .factor = a.factor,
        .metric_weight = a.metric_weight,
        .trellis = choice->trellis,
    };
}

lowkey_quantizer *lowkey_make_quantizer(const struct lowkey_quantizer_choice *choice,
                                        const lowkey_allocator *allocator)
{
    struct lowkey_random random = { choice->seed };
    const int n_layers = choice->n_layers ? choice->n_layers : 1;
    lowkey_layer_desc *layers = take((size_t)n_layers, sizeof *layers);
    double inv_freq[128], slower[128];
    for (int i = 0; i < choice->rope_dims / 2; i++) {
        inv_freq[i] = pow(1e4, -2.0 * i / choice->rope_dims);
        slower[i] = 0.5 * inv_freq[i];
    }
    for (int i = 0; i < n_layers; i++)
        layers[i] = (lowkey_layer_desc) {
            .struct_size = sizeof *layers,
            .index = 2 * i + 1,
            .n_q_heads = choice->n_q_heads,
            .n_kv_heads = choice->n_kv_heads,
            .key_head_dim = choice->key_head_dim,
            .value_head_dim = choice->value_head_dim,
            .logit_scale = choice->logit_scale,
            .rope_dims = choice->rope_dims,
            .rope_pairing = choice->rope_pairing,
            .rope_attention_factor = choice->rope_attention_factor,
            .rope_inv_freq = choice->rope_varies && i % 3 == 1 ? slower : inv_freq,
            .key = make_side(&random, &choice->key, choice->n_kv_heads, choice->key_head_dim,
                             choice->rope_dims, choice->rope_pairing),
            .value = make_side(&random, &choice->value, choice->n_kv_heads, choice->value_head_dim, 0, 0),
        };
    lowkey_quantizer_desc desc = { .struct_size = sizeof desc,
                                   .n_layers = n_layers,
                                   .layers = layers,
                                   .n_sink_tokens = choice->n_sink_tokens,
                                   .sink_rule = choice->sink_rule,
                                   .model_name = "made for a test" };
    lowkey_quantizer *quantizer = NULL;
    lowkey_error err = { 0 };
    const lowkey_status status = lowkey_quantizer_create(&desc, allocator, &quantizer, &err);
    for (int i = 0; i < n_layers; i++)
        lowkey_test_side_free(&layers[i].key), lowkey_test_side_free(&layers[i].value);
    free(layers);
    if (status != LOWKEY_OK) fail_msg("%s", err.message);
    return quantizer;
}

/* A boundary of the channel; with a trellis an entry, or the middle of two that the same states allow. */
static double tie(struct lowkey_random *random, const lowkey_side_desc *side, int c)
{
    const int n_table = side->table_entries, n_pairs = (1 << (side->bits[c] + 1)) - 4;
    const float *table = side->table + c * n_table;
    if (!side->trellis)
        return (double)side->boundary[c * (n_table - 1) + lowkey_random_below(random, n_table - 1)];
    if (n_pairs == 0 || lowkey_random_below(random, 2))
        return (double)table[lowkey_random_below(random, n_table)];
    const int k = lowkey_random_below(random, n_pairs);
    return 0.5 * (double)table[k] + 0.5 * (double)table[k + 4];
}

void lowkey_make_rows(struct lowkey_random *random, const lowkey_layer_desc *layer, int which,
                      enum lowkey_distribution distribution, int n, float *x)
{
    const lowkey_side_desc *side = which ? &layer->value : &layer->key;
    const int n_channels = layer->n_kv_heads * (which ? layer->value_head_dim : layer->key_head_dim);
    const int n_table = side->table_entries;
    double size = 1;
    for (int i = 0; i < n * n_channels; i++) {
        const int c = i % n_channels;
        if (c == 0 && side->token_scale != LOWKEY_SCALE_NONE)
            size = ldexp(1, lowkey_random_below(random, 12) - 6);
        const double middle = 0.5 * (double)side->lower[c] + 0.5 * (double)side->upper[c];
        const double half = 0.5 * (double)side->upper[c] - 0.5 * (double)side->lower[c];
        double value = size * (middle + 0.5 * half * lowkey_random_draw(random, distribution));
        if (side->bits[c] <= 5 && n_table > 1 && lowkey_random_below(random, 16) == 0) /* a tie */
            value = tie(random, side, c);
        if (half == 0 &&
            lowkey_random_below(random, 4) == 0) /* a constant channel, now and then beside its constant */
            value += ldexp(lowkey_random_normal(random), -10);
        if (fabs(value) >= (double)FLT_MAX) value = middle;
        x[i] = (float)value;
    }
}
