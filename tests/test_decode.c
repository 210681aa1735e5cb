/* test_decode.c - lowkey_attend against the textbook in double over what the cache holds, within the bound that the
 * header states; the batch, the threads and the cut of the work change nothing. */
#include <math.h>
#include <stdlib.h>

#include "tests/caches.h"
#include "tests/cases.h"
#include "tests/check.h"
#include "tests/oracle.h"

/* out of the last n_queries tokens of a sequence within the bound; returns the share of it that was taken. */
static double check_sequence(const lowkey_cache *cache, const lowkey_layer_desc *layer, int sequence,
                             int n_queries, const struct lowkey_tokens_made *tokens, const float *out,
                             const float *lse)
{
    const int length = lowkey_cache_length(cache, sequence, layer->index),
              n_rows = n_queries * layer->n_q_heads;
    const size_t n_key = (size_t)(length * layer->n_kv_heads * layer->key_head_dim);
    const size_t n_value = (size_t)(length * layer->n_kv_heads * layer->value_head_dim);
    float *keys = malloc(n_key * sizeof *keys + 1), *values = malloc(n_value * sizeof *values + 1);
    double *want = malloc(sizeof *want * (size_t)(n_rows * layer->value_head_dim) + 1);
    double *want_lse = malloc(sizeof *want_lse * (size_t)n_rows + 1),
           *bound = malloc(sizeof *bound * (size_t)n_rows + 1);
    lowkey_error err;
    assert_ok(lowkey_cache_read(cache, sequence, layer->index, 0, length, keys, values, &err), err);
    lowkey_oracle_attend(layer, length, 0, keys, values, n_queries,
                         tokens->queries + (length - n_queries) * layer->n_q_heads * layer->key_head_dim,
                         want, want_lse, bound);
    const double worst = lowkey_oracle_worst(n_rows, layer->value_head_dim, out, want, bound);
    if (worst > 1) fail_msg("%d tokens, %d queries: %g times the bound", length, n_queries, worst);
    for (int i = 0; i < n_rows && lse; i++)
        if (!(fabs((double)lse[i] - want_lse[i]) < 1e-4 * (1 + fabs(want_lse[i]))))
            fail_msg("%d tokens: row %d: lse %g, wanted %g", length, i, (double)lse[i], want_lse[i]);
    free(keys), free(values), free(want), free(want_lse), free(bound);
    return worst;
}

static float *new_out(const lowkey_layer_desc *layer, int n_queries)
{
    const size_t n = (size_t)(n_queries * layer->n_q_heads * layer->value_head_dim);
    float *out = malloc(n * sizeof *out + 1);
    for (size_t i = 0; i < n; i++) out[i] = NAN;
    return out;
}

static void test_every_format_and_shape(void **state)
{
    (void)state;
    static const int lengths[] = { 1, 63, 64, 65, 200 };
    double worst = 0;
    for (int shape = 0; shape < LOWKEY_N_SHAPES; shape++)
        for (int format = 0; format < LOWKEY_N_FORMATS; format++) {
            struct lowkey_quantizer_choice choice = lowkey_case(shape, format,
                                                                (format + 3 * shape) % LOWKEY_N_FORMATS);
            choice.n_sink_tokens = (int[]) { 0, 1, 5, 64 }[(shape + format) % 4];
            choice.sink_rule = format % 2 ? LOWKEY_RULE_BF16 : LOWKEY_RULE_F16;
            choice.rope_attention_factor = format % 3 ? 0 : 1.2;
            lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
            const lowkey_layer_desc *layer = &lowkey_quantizer_describe(quantizer)->layers[0];
            lowkey_context *context = lowkey_test_context(NULL, NULL);
            lowkey_cache *cache = lowkey_test_cache(context, quantizer, 4, 1, 0);
            struct lowkey_random random = { (uint64_t)(shape + format) };
            struct lowkey_tokens_made tokens = lowkey_make_tokens(&random, layer, 200);
            const int sequence = 0;
            for (int i = 0, length = 0; i < 5; length = lengths[i++]) {
                lowkey_test_append(cache, 0, layer, &tokens, length, lengths[i] - length);
                const int n_queries = i % 2 && lengths[i] < 100 ? lengths[i] : 1;
                float *out = new_out(layer, n_queries),
                      *lse = malloc(sizeof *lse * (size_t)(n_queries * layer->n_q_heads));
                lowkey_test_attend(cache, layer, 1, &sequence, &n_queries, &tokens, out, lse);
                worst = fmax(worst, check_sequence(cache, layer, 0, n_queries, &tokens, out, lse));
                free(out), free(lse);
            }
            lowkey_tokens_made_free(&tokens);
            lowkey_cache_free(cache);
            lowkey_context_free(context);
            lowkey_quantizer_free(quantizer);
        }
    print_message("# at most %.3f of the bound\n", worst);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        { "attend: every format and shape within the stated bound", test_every_format_and_shape, NULL, NULL,
          NULL },
    };
    return lowkey_run_tests(tests);
}
