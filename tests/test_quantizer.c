/* test_quantizer.c - quantizers made from descriptions: what is copied and filled in, the layout by rows, memory, and
 * structs of other versions. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "formats/side.h"
#include "tests/check.h"
#include "tests/quantizers.h"

static lowkey_error err;

static lowkey_quantizer *made(const lowkey_quantizer_desc *desc)
{
    lowkey_quantizer *quantizer;
    assert_ok(lowkey_quantizer_create(desc, NULL, &quantizer, &err), err);
    return quantizer;
}

/* ---- what a good description becomes ---- */

static void copies_outlive_the_callers_arrays(void **state)
{
    (void)state;
    const struct lowkey_test_spec spec = lowkey_test_spec_rich();
    lowkey_quantizer_desc *desc = lowkey_test_desc_make(&spec), *twin = lowkey_test_desc_make(&spec);
    lowkey_quantizer *quantizer = made(desc);
    lowkey_test_desc_free(desc);
    lowkey_test_desc_equal(lowkey_quantizer_describe(quantizer), twin);
    lowkey_quantizer *again = made(lowkey_quantizer_describe(quantizer)); /* a description is a description */
    lowkey_test_desc_equal(lowkey_quantizer_describe(again), twin);
    lowkey_quantizer_free(quantizer);
    lowkey_quantizer_free(again);
    lowkey_quantizer_free(NULL);
    lowkey_test_desc_free(twin);
}

static void rows_match_channels(const lowkey_quantizer *quantizer, int i)
{
    const lowkey_layer_desc *desc = &lowkey_quantizer_describe(quantizer)->layers[i];
    const struct lowkey_layer *layer = lowkey_quantizer_layer_at(quantizer, i);
    assert_ptr_equal(layer->desc, desc);
    for (int which = 0; which < 2; which++) {
        const lowkey_side_desc *given = which ? &desc->value : &desc->key;
        const struct lowkey_side *side = &layer->side[which];
        const int d = which ? desc->value_head_dim : desc->key_head_dim, n_table = given->table_entries;
        assert_int_equal(side->head_dim, d);
        assert_int_equal(side->n_heads, desc->n_kv_heads);
        assert_int_equal(side->table_entries, n_table);
        assert_int_equal(side->n_blocks, given->token_scale ? desc->n_kv_heads * d / given->scale_block : 0);
        for (int h = 0; h < desc->n_kv_heads; h++) {
            const struct lowkey_head *head = &side->heads[h];
            struct lowkey_row rows[LOWKEY_MAX_HEAD_DIM];
            assert_int_equal(head->page_bytes,
                             lowkey_page_layout(d, given->bits + h * d, given->order + h * d, rows));
            assert_memory_equal(head->rows, rows, (size_t)d * sizeof rows[0]);
            for (int r = 0; r < d; r++) {
                const int c = h * d + given->order[h * d + r];
                for (int k = 0; k < n_table; k++)
                    assert_true(head->table[r * n_table + k] == given->table[c * n_table + k]);
                if (given->trellis) assert_true(head->metric_weight[r] == given->metric_weight[c]);
                for (int k = 0; k + 1 < n_table && !given->trellis; k++)
                    assert_true(head->boundary[r * (n_table - 1) + k] ==
                                given->boundary[c * (n_table - 1) + k]);
                assert_int_equal(head->n_boundary[r],
                                 given->n_entries[c] && !given->trellis ? given->n_entries[c] - 1 : 0);
                assert_true((double)side->unit[c] == pow(2, given->exponent[c]));
                assert_true(side->rule_scale[c] == given->rule_scale[c]);
                assert_true(side->lower[c] == given->lower[c] && side->upper[c] == given->upper[c]);
                for (int j = 0; j < d && given->factor; j++)
                    assert_true(head->factor[r * d + j] ==
                                given->factor[((size_t)h * (size_t)d + (size_t)r) * (size_t)d + (size_t)j]);
            }
            if (!given->factor) assert_null(head->factor);
            if (!n_table) assert_null(head->table);
            if (given->trellis)
                assert_null(head->boundary);
            else
                assert_null(head->metric_weight);
            assert_int_equal(side->trellis, given->trellis);
        }
        const struct lowkey_side_layout layout = lowkey_side_page_layout(
            side->n_blocks, given->token_scale == LOWKEY_SCALE_F32 ? 4 : 2, given->outlier_page_capacity);
        assert_memory_equal(&side->layout, &layout, sizeof layout);
    }
}

static void every_width_dim_and_head_ratio_is_accepted(void **state)
{
    (void)state;
    static const int dims[] = { 8, 16, 64, 72, 80, 96, 128, 256 },
                     heads[][2] = { { 1, 1 }, { 8, 1 }, { 9, 3 }, { 28, 4 } };
    static const struct lowkey_test_side sides[] = {
        { .bits = { 1 }, .n_bits = 1 },
        { .bits = { 2 }, .n_bits = 1, .feedback = 1 },
        { .bits = { 3 }, .n_bits = 1, .outlier_rule = LOWKEY_OUTLIER_LIMIT },
        { .bits = { 4 }, .n_bits = 1, .token_scale = LOWKEY_SCALE_F32, .outlier_rule = LOWKEY_OUTLIER_RANK },
        { .bits = { 5 }, .n_bits = 1, .token_scale = LOWKEY_SCALE_F16, .scale_block = 8 },
        { .bits = { 8 }, .n_bits = 1, .rule_8 = LOWKEY_RULE_INT8, .feedback = 1 },
        { .bits = { 16 }, .n_bits = 1, .rule_16 = LOWKEY_RULE_F16 },
        { .bits = { 1, 2, 3, 4, 5, 8, 16 },
          .n_bits = 7,
          .rule_8 = LOWKEY_RULE_E5M2,
          .rule_16 = LOWKEY_RULE_BF16 },
        { .bits = { 2 }, .n_bits = 1, .trellis = 1, .feedback = 1 },
        { .bits = { 5, 1, 2, 4, 3 }, .n_bits = 5, .trellis = 4 },
    };
    enum { N = sizeof sides / sizeof sides[0] };
    for (size_t i = 0; i < N; i++)
        for (size_t d = 0; d < sizeof dims / sizeof dims[0]; d++) {
            const struct lowkey_test_spec spec = {
                .n_layers = 1,
                .n_q_heads = heads[(i + d) % 4][0],
                .n_kv_heads = heads[(i + d) % 4][1],
                .key_head_dim = dims[d],
                .value_head_dim = dims[(d + i) % 8],
                .rope_dims = d % 3 == 0   ? 0
                             : d % 3 == 1 ? dims[d]
                                          : dims[d] / 4 * 2,
                .rope_pairing = (lowkey_pairing)(i % 2),
                .seed = (unsigned)(17 * i + d),
                .side = { sides[i], sides[(i + 3) % N] },
            };
            lowkey_quantizer_desc *desc = lowkey_test_desc_make(&spec);
            lowkey_quantizer *quantizer = made(desc);
            rows_match_channels(quantizer, 0);
            lowkey_quantizer_free(quantizer);
            lowkey_test_desc_free(desc);
        }
}

static void defaults_are_filled_in(void **state)
{
    (void)state;
    enum { D = 16, E = 4 };
    static uint8_t bits[D];
    static float table[D][E], boundary[D][E - 1], lower[D], upper[D];
    for (int c = 0; c < D; c++) {
        bits[c] = c % 2 ? 2 : 1;
        for (int k = 0; k < E; k++) table[c][k] = (float)(bits[c] == 1 && k > 1 ? 1 : k);
        for (int k = 0; k < E - 1; k++) boundary[c][k] = bits[c] == 1 && k > 0 ? FLT_MAX : (float)k + 0.5f;
        upper[c] = 3;
    }
    const lowkey_side_desc side = { .struct_size = sizeof side,
                                    .bits = bits,
                                    .table_entries = E,
                                    .table = table[0],
                                    .boundary = boundary[0],
                                    .lower = lower,
                                    .upper = upper,
                                    .token_scale = LOWKEY_SCALE_F16 };
    const double inv_freq[2] = { 1, 0.5 };
    const lowkey_layer_desc layer = { .struct_size = sizeof layer,
                                      .n_q_heads = 1,
                                      .n_kv_heads = 1,
                                      .key_head_dim = D,
                                      .value_head_dim = D,
                                      .rope_dims = 4,
                                      .rope_inv_freq = inv_freq,
                                      .key = side,
                                      .value = side };
    lowkey_quantizer *quantizer = made(&(lowkey_quantizer_desc) {
        .struct_size = sizeof(lowkey_quantizer_desc), .n_layers = 1, .layers = &layer });
    const lowkey_quantizer_desc *desc = lowkey_quantizer_describe(quantizer);
    const lowkey_side_desc *key = &desc->layers[0].key, *value = &desc->layers[0].value;
    assert_string_equal(desc->model_name, "");
    assert_int_equal(desc->sink_rule, LOWKEY_RULE_F16);
    assert_true(desc->layers[0].logit_scale == 0.25 && desc->layers[0].rope_attention_factor == 1);
    assert_int_equal(key->scale_block, D);
    static const uint16_t key_order[D] = { 0, 2, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
    assert_memory_equal(key->order, key_order, sizeof key_order);
    for (int c = 0; c < D; c++) {
        assert_int_equal(value->order[c], c);
        assert_int_equal(key->n_entries[c], 1 << bits[c]);
        assert_true(key->center[c] == 0 && key->exponent[c] == 0 && key->rule_scale[c] == 1);
    }
    lowkey_quantizer_free(quantizer);
}

static void the_default_order_puts_partners_together(void **state)
{
    (void)state;
    uint16_t order[12];
    lowkey_default_order(12, 8, LOWKEY_PAIR_HALF, order);
    assert_memory_equal(order, ((uint16_t[]) { 0, 4, 1, 5, 2, 6, 3, 7, 8, 9, 10, 11 }), sizeof order);
    lowkey_default_order(12, 8, LOWKEY_PAIR_INTERLEAVED, order);
    assert_memory_equal(order, ((uint16_t[]) { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 }), sizeof order);
    lowkey_default_order(12, 0, LOWKEY_PAIR_HALF, order);
    assert_memory_equal(order, ((uint16_t[]) { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 }), sizeof order);
}

static void layers_are_found_by_their_index(void **state)
{
    (void)state;
    for (int n = 1; n <= 5; n++) {
        struct lowkey_test_spec spec = lowkey_test_spec_rich();
        spec.n_layers = n;
        lowkey_quantizer_desc *desc = lowkey_test_desc_make(&spec); /* layers 3, 5, 7 .. */
        lowkey_quantizer *quantizer = made(desc);
        for (int i = -2; i < 3 + 2 * n + 2; i++) {
            const struct lowkey_layer *layer = lowkey_quantizer_layer(quantizer, i);
            if (i >= 3 && i < 3 + 2 * n && i % 2)
                assert_ptr_equal(layer, lowkey_quantizer_layer_at(quantizer, (i - 3) / 2));
            else
                assert_null(layer);
        }
        lowkey_quantizer_free(quantizer);
        lowkey_test_desc_free(desc);
    }
}

static void the_way_back_is_16_bits_everywhere(void **state)
{
    (void)state;
    const struct lowkey_test_spec spec = lowkey_test_spec_rich();
    lowkey_quantizer_desc *desc = lowkey_test_desc_make(&spec);
    const lowkey_side_desc key = desc->layers[1].key;
    ((lowkey_layer_desc *)desc->layers)[1].key = (lowkey_side_desc) { 0 }; /* geometry alone is looked at */
    for (int bf16 = 0; bf16 < 2; bf16++) {
        lowkey_quantizer *quantizer;
        const lowkey_rule rule = bf16 ? LOWKEY_RULE_BF16 : LOWKEY_RULE_F16;
        assert_ok(lowkey_quantizer_create_16bit(desc, rule, NULL, &quantizer, &err), err);
        const lowkey_quantizer_desc *got = lowkey_quantizer_describe(quantizer);
        assert_int_equal(got->n_layers, 2);
        assert_int_equal(got->n_sink_tokens, 0);
        assert_string_equal(got->model_name, desc->model_name);
        assert_memory_equal(got->model_sha256, desc->model_sha256, 32);
        for (int i = 0; i < 2; i++) {
            const lowkey_layer_desc *layer = &got->layers[i];
            assert_int_equal(layer->index, desc->layers[i].index);
            assert_int_equal(layer->rope_dims, desc->layers[i].rope_dims);
            assert_memory_equal(layer->rope_inv_freq, desc->layers[i].rope_inv_freq, 8 * sizeof(double));
            for (int c = 0; c < layer->n_kv_heads * layer->key_head_dim; c++) {
                assert_int_equal(layer->key.bits[c], 16);
                assert_true(layer->key.upper[c] == (bf16 ? ldexpf(255, 120) : 65504) &&
                            layer->key.lower[c] == -layer->key.upper[c]);
            }
            assert_int_equal(layer->value.rule_16, rule);
            assert_int_equal(lowkey_quantizer_layer_at(quantizer, i)->side[0].heads[1].page_bytes,
                             24 * 64 * 2);
            assert_int_equal(lowkey_quantizer_layer_at(quantizer, i)->side[1].layout.bytes, 0);
        }
        lowkey_quantizer_free(quantizer);
    }
    lowkey_quantizer *quantizer = (lowkey_quantizer *)&err;
    assert_refused(lowkey_quantizer_create_16bit(desc, LOWKEY_RULE_E4M3, NULL, &quantizer, &err),
                   LOWKEY_EINVAL, err, "expected f16 or bf16");
    assert_null(quantizer);
    ((lowkey_layer_desc *)desc->layers)[1].key = key;
    lowkey_test_desc_free(desc);
}

/* ---- memory ---- */

struct counted {
    size_t live, calls, fail_at;
};

static void *counted_alloc(void *user, size_t bytes, size_t alignment)
{
    struct counted *counted = user;
    if (++counted->calls == counted->fail_at) return NULL;
    counted->live += bytes;
    return aligned_alloc(alignment, bytes);
}

static void counted_free(void *user, void *block, size_t bytes)
{
    ((struct counted *)user)->live -= bytes;
    free(block);
}

static void an_allocation_that_fails_leaves_nothing_behind(void **state)
{
    (void)state;
    const struct lowkey_test_spec spec = lowkey_test_spec_rich();
    lowkey_quantizer_desc *desc = lowkey_test_desc_make(&spec);
    for (int way_back = 0; way_back < 2; way_back++) {
        int status = LOWKEY_ENOMEM;
        for (size_t n = 1; status != LOWKEY_OK; n++) {
            struct counted counted = { .fail_at = n };
            const lowkey_allocator allocator = { counted_alloc, counted_free, &counted };
            lowkey_quantizer *quantizer = (lowkey_quantizer *)&counted;
            status = way_back
                         ? lowkey_quantizer_create_16bit(desc, LOWKEY_RULE_F16, &allocator, &quantizer, &err)
                         : lowkey_quantizer_create(desc, &allocator, &quantizer, &err);
            if (status == LOWKEY_OK) {
                assert_true(n > 2 && counted.calls == n - 1); /* it did fail at every call */
                assert_int_equal(counted.live, lowkey_quantizer_bytes(quantizer));
                lowkey_quantizer_free(quantizer);
            } else {
                assert_int_equal(status, LOWKEY_ENOMEM);
                assert_null(quantizer);
            }
            assert_int_equal(counted.live, 0);
        }
    }
    lowkey_test_desc_free(desc);
}

static void half_an_allocator_is_refused(void **state)
{
    (void)state;
    const lowkey_allocator half = { .free = counted_free };
    const struct lowkey_test_spec spec = lowkey_test_spec_rich();
    lowkey_quantizer_desc *desc = lowkey_test_desc_make(&spec);
    lowkey_quantizer *quantizer;
    assert_refused(lowkey_quantizer_create(desc, &half, &quantizer, &err), LOWKEY_EINVAL, err, "allocator");
    lowkey_test_desc_free(desc);
}

/* ---- structs of other versions ---- */

/* The description as a caller would lay it out whose structs are longer or shorter than ours by these many bytes. */
static lowkey_quantizer_desc *relaid(const lowkey_quantizer_desc *desc, int more_side, int more_layer,
                                     int more_desc)
{
    const size_t side = (size_t)((int)sizeof(lowkey_side_desc) + more_side);
    const size_t head = offsetof(lowkey_layer_desc, key), layer = head + 2 * side + (size_t)more_layer;
    const size_t top = (size_t)((int)sizeof(lowkey_quantizer_desc) + more_desc);
    char *layers = calloc((size_t)desc->n_layers, layer);
    for (int i = 0; i < desc->n_layers; i++) {
        char *to = layers + (size_t)i * layer;
        memcpy(to, &desc->layers[i], head);
        memcpy(to, &layer, sizeof layer);
        for (int which = 0; which < 2; which++) {
            const lowkey_side_desc *from = which ? &desc->layers[i].value : &desc->layers[i].key;
            memcpy(to + head + (size_t)which * side, from, side < sizeof *from ? side : sizeof *from);
            memcpy(to + head + (size_t)which * side, &side, sizeof side);
        }
    }
    char *out = calloc(1, top);
    memcpy(out, desc, top < sizeof *desc ? top : sizeof *desc);
    memcpy(out, &top, sizeof top);
    memcpy(out + offsetof(lowkey_quantizer_desc, layers), &layers, sizeof layers);
    return (lowkey_quantizer_desc *)out;
}

static void relaid_free(lowkey_quantizer_desc *desc)
{
    void *layers; /* read by bytes: the struct may be shorter than its type */
    memcpy(&layers, (const char *)desc + offsetof(lowkey_quantizer_desc, layers), sizeof layers);
    free(layers);
    free(desc);
}

static void longer_structs_of_a_newer_caller_are_read_where_the_rest_is_zero(void **state)
{
    (void)state;
    const struct lowkey_test_spec spec = lowkey_test_spec_rich();
    lowkey_quantizer_desc *desc = lowkey_test_desc_make(&spec), *longer = relaid(desc, 24, 16, 8);
    lowkey_quantizer *quantizer = made(longer);
    lowkey_test_desc_equal(lowkey_quantizer_describe(quantizer), desc);
    lowkey_quantizer_free(quantizer);

    const size_t side = sizeof(lowkey_side_desc) + 24, head = offsetof(lowkey_layer_desc, key);
    char *layer_1 = (char *)longer->layers + head + 2 * side + 16;
    const struct {
        char *byte;
        const char *words;
    } set[] = {
        { (char *)longer + sizeof *longer + 7, "description 0: byte" },
        { layer_1 + head + sizeof(lowkey_side_desc), "key of layers 1: byte" },
        { layer_1 + head + 2 * side - 1, "value of layers 1: byte" },
        { layer_1 + head + 2 * side + 15, "layers[1]: fields behind value" },
    };
    for (size_t i = 0; i < sizeof set / sizeof set[0]; i++) {
        *set[i].byte = 1;
        assert_refused(lowkey_quantizer_create(longer, NULL, &quantizer, &err), LOWKEY_EUNSUPPORTED, err,
                       set[i].words);
        *set[i].byte = 0;
    }
    relaid_free(longer);
    lowkey_test_desc_free(desc);
}

static void shorter_structs_of_an_older_caller_are_zero_beyond(void **state)
{
    (void)state;
    struct lowkey_test_spec spec = lowkey_test_spec_rich();
    spec.side[0].feedback = 0; /* the last field of a side */
    lowkey_quantizer_desc *desc = lowkey_test_desc_make(&spec);
    const int without_factor = (int)offsetof(lowkey_side_desc, factor) - (int)sizeof(lowkey_side_desc);
    const int without_sha256 = (int)offsetof(lowkey_quantizer_desc, model_sha256) -
                               (int)sizeof(lowkey_quantizer_desc);
    lowkey_quantizer_desc *shorter = relaid(desc, without_factor, 0, without_sha256);
    lowkey_quantizer *quantizer = made(shorter);
    memset(desc->model_sha256, 0, sizeof desc->model_sha256);
    lowkey_test_desc_equal(lowkey_quantizer_describe(quantizer), desc);
    lowkey_quantizer_free(quantizer);
    relaid_free(shorter);
    lowkey_test_desc_free(desc);
}

static void struct_sizes_of_zero_or_at_odds_are_refused(void **state)
{
    (void)state;
    const struct lowkey_test_spec spec = lowkey_test_spec_rich();
    lowkey_quantizer_desc *desc = lowkey_test_desc_make(&spec);
    lowkey_layer_desc *layer = (lowkey_layer_desc *)&desc->layers[1];
    lowkey_quantizer *quantizer;
    const struct {
        size_t *size;
        size_t wrong;
        const char *words;
    } sizes[] = {
        { &desc->struct_size, 0, "description 0: struct_size" },
        { &layer->struct_size, 0, "layers[1]: struct_size" },
        { &layer->struct_size, 64, "layers[1]: struct_size" },
        { &layer->key.struct_size, 0, "layers[1]: struct_size of key and value" },
        { &layer->key.struct_size, 12, "layers[1]: struct_size of key and value" },
        { &layer->key.struct_size, (size_t)-8, "layers[1]: struct_size of key and value" },
        { &layer->value.struct_size, 0, "layers[1]: struct_size of key and value" },
        { &layer->value.struct_size, sizeof(lowkey_side_desc) + 8,
          "layers[1]: struct_size of key and value" },
    };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const size_t right = *sizes[i].size;
        *sizes[i].size = sizes[i].wrong;
        assert_refused(lowkey_quantizer_create(desc, NULL, &quantizer, &err), LOWKEY_EINVAL, err,
                       sizes[i].words);
        assert_null(quantizer);
        *sizes[i].size = right;
    }
    assert_refused(lowkey_quantizer_create(NULL, NULL, &quantizer, &err), LOWKEY_EINVAL, err, "desc is NULL");
    assert_refused(lowkey_quantizer_create(desc, NULL, NULL, &err), LOWKEY_EINVAL, err, "out is NULL");
    lowkey_test_desc_free(desc);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(copies_outlive_the_callers_arrays),
        cmocka_unit_test(every_width_dim_and_head_ratio_is_accepted),
        cmocka_unit_test(defaults_are_filled_in),
        cmocka_unit_test(the_default_order_puts_partners_together),
        cmocka_unit_test(layers_are_found_by_their_index),
        cmocka_unit_test(the_way_back_is_16_bits_everywhere),
        cmocka_unit_test(an_allocation_that_fails_leaves_nothing_behind),
        cmocka_unit_test(half_an_allocator_is_refused),
        cmocka_unit_test(longer_structs_of_a_newer_caller_are_read_where_the_rest_is_zero),
        cmocka_unit_test(shorter_structs_of_an_older_caller_are_zero_beyond),
        cmocka_unit_test(struct_sizes_of_zero_or_at_odds_are_refused),
    };
    return lowkey_run_tests(tests);
}
