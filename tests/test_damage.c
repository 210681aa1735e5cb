/* test_damage.c - captures through exact attention and through a cache. tests/test_error.py has every metric
 * recomputed; here is what must hold without a second computation. */
#include <math.h>
#include <stdlib.h>

#include "experiments/damage.h"
#include "formats/half.h"
#include "tests/caches.h"
#include "tests/cases.h"
#include "tests/check.h"

struct sample {
    struct lowkey_tokens_made tokens;
    int *positions;
    float *queries;
    struct lowkey_capture capture;
};

/* n_queries evenly spaced queries over n tokens; exact_in_f16: keys and values that 16 bits hold. */
static struct sample make_sample(const lowkey_layer_desc *layer, int n, int n_queries, int exact_in_f16)
{
    struct lowkey_random random = { 11 };
    struct sample sample = { .tokens = lowkey_make_tokens(&random, layer, n) };
    const int key_row = layer->n_kv_heads * layer->key_head_dim,
              value_row = layer->n_kv_heads * layer->value_head_dim;
    const int query_row = layer->n_q_heads * layer->key_head_dim;
    uint64_t n_saturated = 0;
    for (int i = 0; exact_in_f16 && i < n * key_row; i++)
        sample.tokens.keys[i] = lowkey_f16_to_f32(
            lowkey_f32_to_f16_saturate(sample.tokens.keys[i], &n_saturated));
    for (int i = 0; exact_in_f16 && i < n * value_row; i++)
        sample.tokens.values[i] = lowkey_f16_to_f32(
            lowkey_f32_to_f16_saturate(sample.tokens.values[i], &n_saturated));
    sample.positions = malloc((size_t)n_queries * sizeof *sample.positions);
    sample.queries = malloc((size_t)(n_queries * query_row) * sizeof *sample.queries);
    for (int j = 0; j < n_queries; j++) {
        sample.positions[j] = (j + 1) * n / n_queries - 1;
        memcpy(sample.queries + j * query_row, sample.tokens.queries + sample.positions[j] * query_row,
               (size_t)query_row * sizeof *sample.queries);
    }
    sample.capture = (struct lowkey_capture) { .layer = layer,
                                               .n_tokens = n,
                                               .n_queries = n_queries,
                                               .positions = sample.positions,
                                               .key = sample.tokens.keys,
                                               .value = sample.tokens.values,
                                               .query = sample.queries };
    return sample;
}

static void free_sample(struct sample *sample)
{
    lowkey_tokens_made_free(&sample->tokens);
    free(sample->positions), free(sample->queries);
}

static struct lowkey_layer_damage new_damage(const lowkey_layer_desc *layer)
{
    return (struct lowkey_layer_damage) {
        .heads = calloc((size_t)layer->n_q_heads, sizeof(struct lowkey_damage)),
        .key = calloc((size_t)layer->n_kv_heads, sizeof(struct lowkey_distortion)),
        .value = calloc((size_t)layer->n_kv_heads, sizeof(struct lowkey_distortion))
    };
}

static void free_damage(struct lowkey_layer_damage *damage)
{
    free(damage->heads), free(damage->key), free(damage->value);
}

static struct lowkey_layer_damage measure(const lowkey_quantizer *quantizer,
                                          const struct lowkey_capture *capture, int n_threads, int times)
{
    struct lowkey_layer_damage damage = new_damage(capture->layer);
    struct lowkey_exact *exact;
    lowkey_error err;
    assert_ok(lowkey_exact_create(capture, n_threads, &exact, &err), err);
    for (int i = 0; i < times; i++)
        assert_ok(lowkey_damage_measure(exact, quantizer, n_threads, &damage, &err), err);
    lowkey_exact_free(exact);
    return damage;
}

static void test_values_that_16_bits_hold_are_not_damaged(void **state)
{
    (void)state;
    static const int lengths[] = { 1, 63, 64, 65, 130 };
    for (int shape = 0; shape < LOWKEY_N_SHAPES; shape++) {
        struct lowkey_quantizer_choice choice = lowkey_case(shape, 0, 0);
        choice.rope_attention_factor = shape % 2 ? 1.25 : 0;
        lowkey_quantizer *of_shape = lowkey_make_quantizer(&choice, NULL), *quantizer;
        lowkey_error err;
        assert_ok(lowkey_quantizer_create_16bit(lowkey_quantizer_describe(of_shape), LOWKEY_RULE_F16, NULL,
                                                &quantizer, &err),
                  err);
        const lowkey_layer_desc *layer = &lowkey_quantizer_describe(quantizer)->layers[0];
        const int n = lengths[shape % 5], n_queries = n < 20 ? n : 20;
        struct sample sample = make_sample(layer, n, n_queries, 1);
        struct lowkey_layer_damage damage = measure(quantizer, &sample.capture, 1, 1);
        for (int h = 0; h < layer->n_q_heads; h++) {
            assert_int_equal(damage.heads[h].n_rows, n_queries);
            assert_int_equal(damage.heads[h].n_flips, 0);
            assert_true(damage.heads[h].logit_error == 0 && damage.heads[h].kl == 0);
            assert_true(n == 1 || damage.heads[h].logit_spread > 0);
            assert_true(damage.heads[h].output_size > 0);
            assert_true(lowkey_relative_output_error(&damage.heads[h]) < 1e-4);
        }
        for (int h = 0; h < layer->n_kv_heads; h++)
            assert_true(damage.key[h].error == 0 && damage.value[h].error == 0);
        assert_int_equal(damage.payload.elements,
                         n * layer->n_kv_heads * (layer->key_head_dim + layer->value_head_dim));
        assert_int_equal(damage.payload.codes_bytes, 2 * damage.payload.elements);
        free_damage(&damage);
        free_sample(&sample);
        lowkey_quantizer_free(quantizer);
        lowkey_quantizer_free(of_shape);
    }
}

static void test_threads_change_nothing_and_samples_add_up(void **state)
{
    (void)state;
    for (int format = 0; format < LOWKEY_N_FORMATS; format += 3) {
        struct lowkey_quantizer_choice choice = lowkey_case(3, format, (format + 1) % LOWKEY_N_FORMATS);
        choice.n_sink_tokens = 5;
        lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
        const lowkey_layer_desc *layer = &lowkey_quantizer_describe(quantizer)->layers[0];
        struct sample sample = make_sample(layer, 100, 33, 0);
        struct lowkey_layer_damage one = measure(quantizer, &sample.capture, 1, 1);
        struct lowkey_layer_damage three = measure(quantizer, &sample.capture, 3, 1);
        struct lowkey_layer_damage twice = measure(quantizer, &sample.capture, 2, 2);
        for (int h = 0; h < layer->n_q_heads; h++) {
            assert_memory_equal(&one.heads[h], &three.heads[h], sizeof *one.heads);
            assert_int_equal(twice.heads[h].n_rows, 66);
            assert_true(fabs(twice.heads[h].kl - 2 * one.heads[h].kl) <= 1e-12 * one.heads[h].kl);
        }
        assert_memory_equal(one.key, three.key, (size_t)layer->n_kv_heads * sizeof *one.key);
        assert_memory_equal(&one.payload, &three.payload, sizeof one.payload);
        assert_int_equal(twice.payload.codes_bytes, 2 * one.payload.codes_bytes);
        free_damage(&one), free_damage(&three), free_damage(&twice);
        free_sample(&sample);
        lowkey_quantizer_free(quantizer);
    }
}

/* An element that is not finite never comes out of a file; here it must be an error, not a number. */
static void test_what_the_cache_refuses_is_handed_up(void **state)
{
    (void)state;
    struct lowkey_quantizer_choice choice = lowkey_case(1, 1, 1);
    lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
    const lowkey_layer_desc *layer = &lowkey_quantizer_describe(quantizer)->layers[0];
    struct sample sample = make_sample(layer, 70, 2, 0);
    struct lowkey_layer_damage damage = new_damage(layer);
    struct lowkey_exact *exact;
    lowkey_error err;
    assert_ok(lowkey_exact_create(&sample.capture, 1, &exact, &err), err);
    sample.tokens.keys[40 * layer->n_kv_heads * layer->key_head_dim] = INFINITY;
    assert_refused(lowkey_damage_measure(exact, quantizer, 1, &damage, &err), LOWKEY_EINVAL, err,
                   "channel 0");
    assert_int_equal(damage.heads[0].n_rows, 0);
    lowkey_exact_free(exact);
    free_damage(&damage);
    free_sample(&sample);
    lowkey_quantizer_free(quantizer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        { "damage: values that 16 bits hold are not damaged", test_values_that_16_bits_hold_are_not_damaged,
          NULL, NULL, NULL },
        { "damage: threads change nothing, samples add up", test_threads_change_nothing_and_samples_add_up,
          NULL, NULL, NULL },
        { "damage: what the cache refuses is handed up", test_what_the_cache_refuses_is_handed_up, NULL, NULL,
          NULL },
    };
    return lowkey_run_tests(tests);
}
