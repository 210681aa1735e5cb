/* test_quantizer_check.c - every refusal of a description, each as a mutation of one good one, and the grid that table
 * entries lie on, against a search of all f16. */
#include <float.h>
#include <math.h>

#include "tests/check.h"
#include "tests/quantizers.h"

static lowkey_error err;

/* ---- the grid of table entries: every f16 tried, in 64-bit long double, against the rule ---- */

static double f16_value(unsigned bits)
{
    const int exponent = (int)(bits >> 10 & 31);
    const double value = exponent ? ldexp((double)(1024 + (bits & 1023)), exponent - 25) : ldexp((double)(bits & 1023), -24);
    return bits >> 15 ? -value : value;
}

static int any_f16_gives(float entry, float center, int exponent)
{
    for (unsigned bits = 0; bits < 65536; bits++) {
        if ((bits >> 10 & 31) == 31) continue;
        const long double sum = (long double)center + ldexpl((long double)f16_value(bits), exponent);
        if ((float)sum == entry) return 1;
    }
    return 0;
}

static int accepts_entry(float entry, float center, int exponent)
{
    enum { D = 8 };
    uint8_t bits[D], n_entries[D];
    float table[2 * D], boundary[D], lower[D], upper[D], centers[D];
    int16_t exponents[D];
    for (int c = 0; c < D; c++) {
        bits[c] = n_entries[c] = 1;
        table[2 * c] = table[2 * c + 1] = entry;
        boundary[c] = FLT_MAX, lower[c] = -FLT_MAX, upper[c] = FLT_MAX;
        centers[c] = center, exponents[c] = (int16_t)exponent;
    }
    const lowkey_side_desc side = { .struct_size = sizeof side, .bits = bits, .table_entries = 2, .n_entries = n_entries, .table = table,
                                    .boundary = boundary, .center = centers, .exponent = exponents, .lower = lower, .upper = upper };
    const lowkey_layer_desc layer = { .struct_size = sizeof layer, .n_q_heads = 1, .n_kv_heads = 1, .key_head_dim = D,
                                      .value_head_dim = D, .key = side, .value = side };
    const lowkey_quantizer_desc desc = { .struct_size = sizeof desc, .n_layers = 1, .layers = &layer };
    lowkey_quantizer *quantizer;
    const int status = lowkey_quantizer_create(&desc, NULL, &quantizer, &err);
    if (status != LOWKEY_OK && !strstr(err.message, "is not the f32 nearest to center")) fail_msg("%s", err.message);
    lowkey_quantizer_free(quantizer);
    return status == LOWKEY_OK;
}

static void an_entry_is_accepted_iff_some_f16_gives_it(void **state)
{
    (void)state;
    unsigned seed = 5;
    int n_good = 0, n_tried = 0;
    for (int i = 0; i < 600; i++) {
        unsigned r[4];
        for (int k = 0; k < 4; k++) seed = seed * 1664525u + 1013904223u, r[k] = seed >> 8;
        const int exponent = i % 4 == 0 ? (int)(r[0] % 239) - 126 : (int)(r[0] % 30) - 15;
        const float center = i % 3 ? (float)ldexp((double)r[1] - 0x1p23, (int)(r[2] % 50) - 40 + (i % 5 ? 0 : exponent)) : 0;
        float entry = (float)((double)center + ldexp(f16_value(r[3] % 31744), exponent));
        if (!isfinite(entry) || !isfinite(center)) continue;
        for (int ulp = 0; ulp < 3; ulp++) { /* it, and its two neighbours, which may or may not be on the grid */
            const float near = ulp == 0 ? entry : nextafterf(entry, ulp == 1 ? -FLT_MAX : FLT_MAX);
            const int want = any_f16_gives(near, center, exponent);
            if (accepts_entry(near, center, exponent) != want) fail_msg("%a with center %a, exponent %d: wanted %d", (double)near, (double)center, exponent, want);
            n_good += want, n_tried++;
        }
    }
    assert_true(n_good > n_tried / 3 && n_good < n_tried - n_tried / 10); /* both kinds were met */
}

/* ---- refusals ---- */

#define PUT(type, array, i, what) (((type *)(array))[i] = (what))
#define PUT_F(array, i, what) PUT(float, array, i, what)

/* l: layer 3; k, v: its sides; d: the whole. Key: head_dim 24, 2 heads, E 32, bits 4 4 3 8 1 5 16 2 .., outliers by
 * limit, feedback; value: head_dim 16, E 16, bits 2 4 3 .., scales of 8 channels, outliers by rank. */
/* clang-format off: a table */
#define REFUSALS(X)                                                                                                          \
    X(d->n_layers = 0, "n_layers: expected at least 1")                                                                      \
    X(d->layers = NULL, "no layers")                                                                                         \
    X(d->n_sink_tokens = 65, "n_sink_tokens: expected 0 to 64, found 65")                                                    \
    X(d->n_sink_tokens = -1, "n_sink_tokens: expected 0 to 64, found -1")                                                    \
    X(d->sink_rule = LOWKEY_RULE_E4M3, "sink_rule: expected f16 or bf16")                                                    \
    X(l->index = -1, "layer -1: expected an index from 0")                                                                   \
    X(l->index = 5, "layers[1]: expected an index above 5, found 5")                                                         \
    X(l->n_q_heads = 7, "layer 3: n_q_heads: expected a multiple of n_kv_heads 2, at most 65536, found 7")                   \
    X(l->n_q_heads = 0, "layer 3: n_q_heads: expected a multiple")                                                           \
    X(l->n_q_heads = 65538, "layer 3: n_q_heads: expected a multiple")                                                       \
    X(l->n_kv_heads = 0, "layer 3: n_kv_heads: expected at least 1, found 0")                                                \
    X(l->n_kv_heads = l->n_q_heads = 4096, "layer 3: n_kv_heads * key_head_dim: expected at most 65536, found 4096 * 24")    \
    X(l->n_kv_heads = l->n_q_heads = 65536, "expected at most 65536, found 65536 * 24")                                      \
    X(l->key_head_dim = 100, "layer 3: key_head_dim: expected a multiple of 8 from 8 to 256, found 100")                     \
    X(l->key_head_dim = 0, "layer 3: key_head_dim: expected a multiple of 8 from 8 to 256, found 0")                         \
    X(l->value_head_dim = 264, "layer 3: value_head_dim: expected a multiple of 8 from 8 to 256, found 264")                 \
    X(l->value_head_dim = -8, "layer 3: value_head_dim: expected a multiple of 8 from 8 to 256, found -8")                   \
    X(l->logit_scale = -1, "layer 3: logit_scale: expected a finite number > 0, found -1")                                   \
    X(l->logit_scale = NAN, "layer 3: logit_scale")                                                                          \
    X(l->rope_dims = 7, "layer 3: rope_dims: expected an even number from 0 to key_head_dim 24, found 7")                    \
    X(l->rope_dims = 26, "layer 3: rope_dims: expected an even number from 0 to key_head_dim 24, found 26")                  \
    X(l->rope_dims = -2, "layer 3: rope_dims")                                                                               \
    X(l->rope_pairing = (lowkey_pairing)2, "layer 3: rope_pairing: expected half or interleaved, found number 2")            \
    X(l->rope_attention_factor = -0.5, "layer 3: rope_attention_factor: expected a finite number > 0, found -0.5")           \
    X(l->rope_inv_freq = NULL, "layer 3: rope_inv_freq: expected 8 numbers for rope_dims 16, found none")                    \
    X(PUT(double, l->rope_inv_freq, 3, INFINITY), "layer 3: rope_inv_freq pair 3: expected a finite number, found inf")      \
    X(k->table_entries = 33, "layer 3 key: table_entries: expected 0 or 2 to 32, found 33")                                  \
    X(k->table_entries = 1, "layer 3 key: table_entries: expected 0 or 2 to 32, found 1")                                    \
    X(k->table_entries = -5, "layer 3 key: table_entries")                                                                   \
    X(k->table_entries = 0, "layer 3 key: table: expected none, found an array, as table_entries is 0")                      \
    X(k->table = NULL, "layer 3 key: table: expected an array, found none, as table_entries is 32")                          \
    X(v->boundary = NULL, "layer 3 value: boundary: expected an array, found none")                                          \
    X(v->bits = NULL, "layer 3 value: bits: expected an array, found none")                                                  \
    X(k->lower = NULL, "layer 3 key: lower: expected an array, found none")                                                  \
    X(k->upper = NULL, "layer 3 key: upper: expected an array, found none")                                                  \
    X(v->token_scale = (lowkey_token_scale)3, "layer 3 value: token_scale: expected none, f16 or f32, found number 3")       \
    X(v->scale_block = 12, "layer 3 value: scale_block: expected a multiple of 8 that divides 32 channels, found 12")        \
    X(v->scale_block = 24, "layer 3 value: scale_block: expected a multiple of 8 that divides 32 channels, found 24")        \
    X(v->scale_block = -8, "layer 3 value: scale_block")                                                                     \
    X(k->scale_block = 8, "layer 3 key: scale_block: expected 0 where token_scale is none, found 8")                         \
    X(k->outlier_rule = (lowkey_outlier_rule)3, "layer 3 key: outlier_rule: expected none, limit or rank, found number 3")   \
    X(v->outlier_rule = LOWKEY_OUTLIER_LIMIT, "layer 3 value: outlier_rule: expected none or rank with a token_scale")       \
    X(v->outlier_rank = 0, "layer 3 value: outlier_rank: expected 1 to 16 with outlier_rule rank and 32 channels, found 0")  \
    X(v->outlier_rank = 17, "layer 3 value: outlier_rank: expected 1 to 16")                                                 \
    X(k->outlier_rank = 1, "layer 3 key: outlier_rank: expected 0 to 0 with outlier_rule limit")                             \
    X(k->outlier_cap = 0, "layer 3 key: outlier_cap: expected 1 to 48 with outlier_rule limit and 48 channels, found 0")     \
    X(k->outlier_cap = 49, "layer 3 key: outlier_cap: expected 1 to 48")                                                     \
    X(k->outlier_page_capacity = 0, "layer 3 key: outlier_page_capacity: expected 1 to 65535")                               \
    X(k->outlier_page_capacity = 65536, "layer 3 key: outlier_page_capacity: expected 1 to 65535")                           \
    X((k->outlier_rule = LOWKEY_OUTLIER_NONE), "layer 3 key: outlier_cap: expected 0 to 0 with outlier_rule none")           \
    X(PUT(uint8_t, k->bits, 24, 6), "layer 3 key: bits head 1 channel 0: expected 1 to 5, 8 or 16, found 6")                 \
    X(PUT(uint8_t, k->bits, 0, 0), "layer 3 key: bits head 0 channel 0: expected 1 to 5, 8 or 16, found 0")                  \
    X(PUT(uint8_t, k->bits, 0, 255), "layer 3 key: bits head 0 channel 0")                                                   \
    X(k->table_entries = 31, "layer 3 key: table head 0 channel 5: 5 bits need 32 entries, found 31 entries")                \
    X(v->table_entries = 15, "layer 3 value: table head 0 channel 1: 4 bits need 16 entries, found 15 entries")              \
    X(k->rule_8 = LOWKEY_RULE_NONE, "layer 3 key: rule_8: expected e4m3, e5m2 or int8, as some channel has 8 bits")          \
    X(k->rule_8 = LOWKEY_RULE_F16, "layer 3 key: rule_8: expected e4m3, e5m2 or int8")                                       \
    X(k->rule_16 = LOWKEY_RULE_INT8, "layer 3 key: rule_16: expected f16 or bf16, as some channel has 16 bits")              \
    X(k->rule_16 = (lowkey_rule)77, "layer 3 key: rule_16: expected f16 or bf16")                                            \
    X(v->rule_8 = LOWKEY_RULE_INT8, "layer 3 value: rule_8: expected none, as no channel has 8 bits")                        \
    X(v->rule_16 = LOWKEY_RULE_F16, "layer 3 value: rule_16: expected none, as no channel has 16 bits")                      \
    X(memset((void *)v->bits, 8, 32), "layer 3 value: table_entries: expected 0, as no channel has a table, found 16")       \
    X(PUT(uint16_t, v->order, 17, v->order[16]), "layer 3 value: order head 1 row 1: channel")                               \
    X(PUT(uint16_t, v->order, 17, 16), "layer 3 value: order head 1 row 1: expected a channel from 0 to 15, found 16")       \
    X(PUT(uint16_t, v->order, 0, 65535), "layer 3 value: order head 0 row 0: expected a channel from 0 to 15, found 65535")  \
    X(swap(k->order, 24, 25), "layer 3 key: order head 1: expected RoPE partners")                                           \
    X(swap_pairs(k->order), "layer 3 key: order head 0: expected RoPE partners")                                             \
    X(PUT_F(k->lower, 3, NAN), "layer 3 key: lower head 0 channel 3: expected a finite number, found nan")           \
    X(PUT_F(k->upper, 3, INFINITY), "layer 3 key: upper head 0 channel 3: expected a finite number, found inf")      \
    X(PUT_F(k->center, 25, NAN), "layer 3 key: center head 1 channel 1: expected a finite number, found nan")        \
    X(PUT_F(k->lower, 3, k->upper[3] + 1), "layer 3 key: lower head 0 channel 3: expected at most upper")                    \
    X(PUT(int16_t, k->exponent, 2, -127), "layer 3 key: exponent head 0 channel 2: expected -126 to 112, found -127")        \
    X(PUT(int16_t, k->exponent, 2, 113), "layer 3 key: exponent head 0 channel 2: expected -126 to 112, found 113")          \
    X(PUT_F(k->rule_scale, 3, 1e36f), "layer 3 key: rule_scale head 0 channel 3: expected a finite number times 448")        \
    X(PUT_F(k->rule_scale, 3, 0), "layer 3 key: rule_scale head 0 channel 3: expected > 0 at 8 bits, found 0")               \
    X(PUT_F(k->rule_scale, 3, -1), "layer 3 key: rule_scale head 0 channel 3: expected > 0 at 8 bits, found -1")             \
    X(PUT_F(k->rule_scale, 3, NAN), "layer 3 key: rule_scale head 0 channel 3: expected a finite number")            \
    X(PUT_F(k->rule_scale, 2, 2), "layer 3 key: rule_scale head 0 channel 2: expected 1 at 3 bits, found 2")                 \
    X(PUT_F(k->table, 5 * 32 + 2, NAN), "layer 3 key: table head 0 channel 5: entry 2: expected a finite number, found nan")  \
    X(PUT_F(k->table, 47 * 32 + 31, INFINITY), "layer 3 key: table head 1 channel 23: entry 31: expected a finite number")    \
    X(PUT_F(k->table, 3 * 32, 1), "layer 3 key: table head 0 channel 3: entry 0 is not in use: expected 0, found 1")         \
    X(swap_entries(k, 0), "layer 3 key: table head 0 channel 0: entry 1 (")                                                  \
    X(PUT_F(k->table, 1, k->table[0]), ") is not above entry 0 (")                                                           \
    X(PUT_F(k->table, 31, 3), "layer 3 key: table head 0 channel 0: entry 31 is not in use: expected ")                      \
    X(widen(k, 0, 50), "layer 3 key: table head 0 channel 0: entry 0 (")                                                     \
    X(widen(k, 0, 5.5f), ") is farther outside [")                                                                           \
    X((PUT(uint8_t, k->n_entries, 4, 2), PUT_F(k->table, 4 * 32 + 1, nextafterf(k->table[4 * 32 + 1], INFINITY)), repeat(k, 4)), \
      "is not the f32 nearest to center")                                                                                    \
    X(PUT(uint8_t, k->n_entries, 2, 9), "layer 3 key: n_entries head 0 channel 2: expected 1 to 8 at 3 bits, found 9")       \
    X(PUT(uint8_t, k->n_entries, 2, 0), "layer 3 key: n_entries head 0 channel 2: expected 1 to 8 at 3 bits, found 0")       \
    X(PUT(uint8_t, k->n_entries, 3, 1), "layer 3 key: n_entries head 0 channel 3: expected 0 to 0 at 8 bits, found 1")       \
    X(PUT_F(k->boundary, 31 + 3, -INFINITY), "layer 3 key: boundary head 0 channel 1: entry 3: expected a finite number")     \
    X(PUT_F(k->boundary, 1, nextafterf(k->boundary[0], -FLT_MAX)), "layer 3 key: boundary head 0 channel 0: entry 1 (")      \
    X(PUT_F(k->boundary, 30, 1), "layer 3 key: boundary head 0 channel 0: entry 30 is not in use: expected 3.40282347e+38")  \
    X(PUT_F(k->boundary, 0, FLT_MAX), "layer 3 key: boundary head 0 channel 0: entry 0 is in use")                           \
    X(PUT_F(k->boundary, 3 * 31, 1), "layer 3 key: boundary head 0 channel 3: entry 0 is not in use")                        \
    X(PUT_F(k->factor, 24 * 24 + 5 * 24 + 7, 0.5f), "layer 3 key: factor head 1 row 5 column 7: expected 0 on and above")    \
    X(PUT_F(k->factor, 5 * 24 + 5, 1), "layer 3 key: factor head 0 row 5 column 5: expected 0 on and above the diagonal")    \
    X(PUT_F(k->factor, 5 * 24 + 3, 0.1f), "layer 3 key: factor head 0 row 5 column 3: expected a number exact in f16")       \
    X(PUT_F(k->factor, 5 * 24 + 3, 65536), "expected a number exact in f16, found 65536")                                    \
    X(PUT_F(k->factor, 5 * 24 + 3, INFINITY), "expected a number exact in f16, found inf")                                   \
    X(PUT_F(k->factor, 5 * 24 + 3, ldexpf(1, -25)), "expected a number exact in f16")                                        \
    X(PUT_F(k->factor, 5 * 24 + 3, NAN), "expected a number exact in f16, found nan")

/* The same shapes with trellises, of 2 and 4 survivors. Key: E 64, bits 4 3 2 5 1 .., feedback; value: E 16, bits 2 3 ... */
#define TRELLIS_REFUSALS(X)                                                                                                  \
    X(k->trellis = 3, "layer 3 key: trellis: expected 0, 1, 2 or 4 survivors of a state, found 3")                           \
    X(v->trellis = 8, "layer 3 value: trellis: expected 0, 1, 2 or 4 survivors of a state, found 8")                         \
    X(k->trellis = -1, "layer 3 key: trellis: expected 0, 1, 2 or 4")                                                        \
    X(k->trellis = 0, "layer 3 key: table_entries: expected 0 or 2 to 32, found 64")                                         \
    X(v->trellis = 0, "layer 3 value: boundary: expected an array, found none")                                              \
    X(k->reserved = 1, "layer 3 key: reserved: expected 0, found 1")                                                         \
    X(k->table_entries = 65, "layer 3 key: table_entries: expected 4 to 64, found 65")                                       \
    X(k->table_entries = 2, "layer 3 key: table_entries: expected 4 to 64, found 2")                                         \
    X((k->table_entries = 0, k->table = NULL), "layer 3 key: table_entries: expected 4 to 64, found 0")                      \
    X(k->table_entries = 63, "layer 3 key: table head 0 channel 3: 5 bits with a trellis need 64 entries, found 63")         \
    X(v->boundary = v->table, "layer 3 value: boundary: expected none, found an array, as table_entries is 16 and trellis 4") \
    X(v->metric_weight = NULL, "layer 3 value: metric_weight: expected an array, found none")                                \
    X(v->token_scale = LOWKEY_SCALE_F16, "layer 3 value: token_scale: expected none with a trellis")                         \
    X(v->outlier_rule = LOWKEY_OUTLIER_LIMIT, "layer 3 value: outlier_rule: expected none with a trellis")                   \
    X(PUT(uint8_t, k->bits, 26, 8), "layer 3 key: bits head 1 channel 2: expected 1 to 5 with a trellis, found 8")           \
    X(PUT(uint8_t, k->bits, 26, 16), "layer 3 key: bits head 1 channel 2: expected 1 to 5 with a trellis, found 16")         \
    X(PUT(uint8_t, k->n_entries, 4, 5), "layer 3 key: n_entries head 0 channel 4: expected 1 to 4 at 1 bits, found 5")       \
    X(PUT(uint8_t, k->n_entries, 4, 0), "layer 3 key: n_entries head 0 channel 4: expected 1 to 4 at 1 bits, found 0")       \
    X(PUT_F(k->metric_weight, 25, 0), "layer 3 key: metric_weight head 1 channel 1: expected > 0, found 0")                  \
    X(PUT_F(k->metric_weight, 25, -0.5f), "layer 3 key: metric_weight head 1 channel 1: expected > 0, found -0.5")           \
    X(PUT_F(k->metric_weight, 25, NAN), "layer 3 key: metric_weight head 1 channel 1: expected a finite number, found nan")  \
    X(PUT_F(k->metric_weight, 25, INFINITY), "layer 3 key: metric_weight head 1 channel 1: expected a finite number, found inf") \
    X(PUT_F(k->table, 63, 3), "layer 3 key: table head 0 channel 0: entry 63 is not in use: expected ")                      \
    X(swap_entries(k, 0), "layer 3 key: table head 0 channel 0: entry 1 (")

static void swap(const uint16_t *order, int i, int j)
{
    const uint16_t kept = order[i];
    PUT(uint16_t, order, i, order[j]);
    PUT(uint16_t, order, j, kept);
}

static void swap_pairs(const uint16_t *order) /* all rows one down: partners side by side, but at odd rows */
{
    for (int r = 23; r > 0; r--) swap(order, r, r - 1);
}

static void swap_entries(const lowkey_side_desc *side, int c)
{
    float *table = (float *)side->table + c * side->table_entries;
    const float kept = table[0];
    table[0] = table[1], table[1] = kept;
}

static void repeat(const lowkey_side_desc *side, int c)
{
    float *table = (float *)side->table + c * side->table_entries;
    for (int i = side->n_entries[c]; i < side->table_entries; i++) table[i] = table[side->n_entries[c] - 1];
}

static void widen(const lowkey_side_desc *side, int c, float times) /* the range shrinks about its middle */
{
    const float middle = 0.5f * side->lower[c] + 0.5f * side->upper[c], half = (side->upper[c] - middle) / times;
    PUT_F(side->lower, c, middle - half);
    PUT_F(side->upper, c, middle + half);
}

/* Mutation number i of a description, its first layer, and that one's key and value. */
static void mutate(int i, lowkey_quantizer_desc *d, lowkey_layer_desc *l, lowkey_side_desc *k, lowkey_side_desc *v)
{
    int n = 0;
#define MUTATION(code, words) if (n++ == i) code;
    REFUSALS(MUTATION)
    TRELLIS_REFUSALS(MUTATION)
#undef MUTATION
}

static const char *const words_of[] = {
#define WORDS(code, words) words,
    REFUSALS(WORDS)
    TRELLIS_REFUSALS(WORDS)
#undef WORDS
};
#define ONE(code, words) +1
enum { N_REFUSALS = sizeof words_of / sizeof words_of[0], N_PLAIN = REFUSALS(ONE) };

static void is_refused(void **state)
{
    const char *const *words = *state;
    const int has_trellis = words - words_of >= N_PLAIN;
    const struct lowkey_test_spec spec = has_trellis ? lowkey_test_spec_trellis() : lowkey_test_spec_rich();
    lowkey_quantizer_desc *desc = lowkey_test_desc_make(&spec);
    assert_int_equal(desc->layers[0].key.n_entries[0], has_trellis ? 32 : 16); /* the mutated channels use all their entries */
    assert_int_equal(desc->layers[0].key.n_entries[4], has_trellis ? 4 : 2);
    lowkey_quantizer_desc mutated = *desc;
    lowkey_layer_desc layers[2] = { desc->layers[0], desc->layers[1] };
    mutated.layers = layers;
    lowkey_quantizer *quantizer = (lowkey_quantizer *)&mutated;
    mutate((int)(words - words_of), &mutated, &layers[0], &layers[0].key, &layers[0].value);
    assert_refused(lowkey_quantizer_create(&mutated, NULL, &quantizer, &err), LOWKEY_EFORMAT, err, *words);
    assert_null(quantizer);
    assert_int_equal(lowkey_quantizer_create(&mutated, NULL, &quantizer, NULL), LOWKEY_EFORMAT); /* err may be NULL */
    lowkey_test_desc_free(desc);
}

int main(void)
{
    static struct CMUnitTest tests[1 + N_REFUSALS] = { cmocka_unit_test(an_entry_is_accepted_iff_some_f16_gives_it) };
    static char names[N_REFUSALS][200];
    for (int i = 0; i < N_REFUSALS; i++) {
        snprintf(names[i], sizeof names[i], "refused: %s", words_of[i]);
        tests[1 + i] = (struct CMUnitTest){ .name = names[i], .test_func = is_refused, .initial_state = (void *)&words_of[i] };
    }
    return lowkey_run_tests(tests);
}
