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

/* ---- a batch of sequences of very different lengths ---- */

/* More items than there are lanes, so that a lane has several. */
enum { N_SEQUENCES = 8 };
static const int batch_lengths[N_SEQUENCES] = { 0, 5, 1, 65, 1500, 64, 63, 470 };
static const int batch_queries[N_SEQUENCES] = { 0, 5, 1, 40, 1, 33, 0, 470 };

struct batch {
    lowkey_quantizer *quantizer;
    const lowkey_layer_desc *layer;
    struct lowkey_tokens_made tokens[N_SEQUENCES];
};

static struct batch make_batch(int format)
{
    struct batch batch;
    struct lowkey_quantizer_choice choice = lowkey_case(1, format, (format + 5) % LOWKEY_N_FORMATS);
    choice.n_sink_tokens = 3;
    batch.quantizer = lowkey_make_quantizer(&choice, NULL);
    batch.layer = &lowkey_quantizer_describe(batch.quantizer)->layers[0];
    struct lowkey_random random = { 17 };
    for (int i = 0; i < N_SEQUENCES; i++)
        batch.tokens[i] = lowkey_make_tokens(&random, batch.layer, batch_lengths[i]);
    return batch;
}

static void free_batch(struct batch *batch)
{
    for (int i = 0; i < N_SEQUENCES; i++) lowkey_tokens_made_free(&batch->tokens[i]);
    lowkey_quantizer_free(batch->quantizer);
}

static int total_queries(void)
{
    int n = 0;
    for (int i = 0; i < N_SEQUENCES; i++) n += batch_queries[i];
    return n;
}

/* Fill a cache whose sequences take turns for pages, and attend all at once. lse: [total][n_q_heads] */
static float *attend_batch(const struct batch *batch, int n_threads, int fill, float *lse)
{
    struct lowkey_counter memory = { .fail_at = -1, .fill = (unsigned char)fill };
    const lowkey_allocator allocator = lowkey_counting_allocator(&memory);
    lowkey_context *context = lowkey_test_context(&allocator, n_threads ? &n_threads : NULL);
    lowkey_cache *cache = lowkey_test_cache(context, batch->quantizer, 50, N_SEQUENCES, 0);
    for (int first = 0; first < 1500; first += 50)
        for (int i = 0; i < N_SEQUENCES; i++) {
            const int left = batch_lengths[i] - first, n = left < 0 ? 0 : left < 50 ? left : 50;
            lowkey_test_append(cache, i, batch->layer, &batch->tokens[i], left < 0 ? 0 : first, n);
        }
    int sequences[N_SEQUENCES];
    for (int i = 0; i < N_SEQUENCES; i++) sequences[i] = i;
    float *out = new_out(batch->layer, total_queries());
    const long n_calls = memory.n_calls;
    lowkey_test_attend(cache, batch->layer, N_SEQUENCES, sequences, batch_queries, batch->tokens, out, lse);
    assert_int_equal(memory.n_calls, n_calls);
    const size_t row = (size_t)(batch->layer->n_q_heads * batch->layer->value_head_dim);
    for (int i = 0, query = 0; i < N_SEQUENCES && n_threads == 0;
         query += batch_queries[i++]) /* the others equal this */
        check_sequence(cache, batch->layer, i, batch_queries[i], &batch->tokens[i], out + (size_t)query * row,
                       NULL);
    lowkey_cache_free(cache);
    lowkey_context_free(context);
    assert_int_equal(memory.n_live, 0);
    return out;
}

static void test_threads_and_noise(void **state)
{
    (void)state;
    for (int format = 1; format < LOWKEY_N_FORMATS; format += 7) {
        struct batch batch = make_batch(format);
        const size_t n_lse = (size_t)(total_queries() * batch.layer->n_q_heads);
        const size_t n_out = n_lse * (size_t)batch.layer->value_head_dim;
        float *lse = malloc(2 * n_lse * sizeof *lse), *want = attend_batch(&batch, 0, 0x00, lse);
        for (int i = 0; i < 3; i++) {
            float *out = attend_batch(&batch, (int[]) { 1, 2, 7 }[i], 0xff, lse + n_lse);
            assert_memory_equal(out, want, n_out * sizeof *out);
            assert_memory_equal(lse, lse + n_lse, n_lse * sizeof *lse);
            free(out);
        }
        free(want), free(lse);
        free_batch(&batch);
    }
}

static void test_batch_is_single_runs(void **state)
{
    (void)state;
    struct batch batch = make_batch(10);
    const size_t row = (size_t)(batch.layer->n_q_heads * batch.layer->value_head_dim);
    float *want = attend_batch(&batch, 3, 0x33, NULL);
    lowkey_context *context = lowkey_test_context(NULL, NULL);
    for (int i = 0, query = 0; i < N_SEQUENCES; query += batch_queries[i++]) {
        lowkey_cache *cache = lowkey_test_cache(context, batch.quantizer, 24, 3, 0);
        const int sequence = 2;
        lowkey_test_append(cache, sequence, batch.layer, &batch.tokens[i], 0, batch_lengths[i]);
        float *out = new_out(batch.layer, batch_queries[i]);
        lowkey_test_attend(cache, batch.layer, 1, &sequence, &batch_queries[i], &batch.tokens[i], out, NULL);
        assert_memory_equal(out, want + (size_t)query * row, (size_t)batch_queries[i] * row * sizeof *out);
        free(out);
        lowkey_cache_free(cache);
    }
    lowkey_context_free(context);
    free(want);
    free_batch(&batch);
}

/* Each KV head's values are its index and all keys equal: output head h is h / (n_q_heads / n_kv_heads). */
static void test_which_head_attends_which(void **state)
{
    (void)state;
    static const int heads[][2] = {
        { 1, 1 }, { 5, 5 }, { 9, 3 }, { 32, 8 }, { 28, 4 }, { 8, 1 }, { 32, 32 }
    };
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) {
        const struct lowkey_quantizer_choice choice = { .n_q_heads = heads[i][0],
                                                        .n_kv_heads = heads[i][1],
                                                        .key_head_dim = 16,
                                                        .value_head_dim = 8,
                                                        .rope_dims = 16,
                                                        .key = { .bits = 16 },
                                                        .value = { .bits = 16 } };
        lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
        lowkey_context *context = lowkey_test_context(NULL, NULL);
        lowkey_cache *cache = lowkey_test_cache(context, quantizer, 3, 1, 0);
        const lowkey_layer_desc *layer = &lowkey_quantizer_describe(quantizer)->layers[0];
        struct lowkey_random random = { 3 };
        struct lowkey_tokens_made tokens = lowkey_make_tokens(&random, layer, 70);
        for (int k = 0; k < 70 * heads[i][1] * 16; k++) tokens.keys[k] = 1;
        for (int k = 0; k < 70 * heads[i][1] * 8; k++) tokens.values[k] = (float)(k / 8 % heads[i][1]);
        lowkey_test_append(cache, 0, layer, &tokens, 0, 70);
        const int sequence = 0, n_queries = 3;
        float *out = new_out(layer, n_queries);
        lowkey_test_attend(cache, layer, 1, &sequence, &n_queries, &tokens, out, NULL);
        for (int k = 0; k < n_queries * heads[i][0] * 8; k++) {
            const int h = k / 8 % heads[i][0];
            assert_true(fabsf(out[k] - (float)(h / (heads[i][0] / heads[i][1]))) < 1e-4f);
        }
        free(out);
        lowkey_tokens_made_free(&tokens);
        lowkey_cache_free(cache);
        lowkey_context_free(context);
        lowkey_quantizer_free(quantizer);
    }
}

/* Layers that turn by other angles, or the same, side by side; each layer has its own length for a while. */
static void test_layers_turn_by_their_own_angles(void **state)
{
    (void)state;
    struct lowkey_quantizer_choice choice = lowkey_case(1, 3, 2);
    choice.n_layers = 4, choice.rope_varies = 1;
    lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
    const lowkey_quantizer_desc *desc = lowkey_quantizer_describe(quantizer);
    lowkey_context *context = lowkey_test_context(NULL, NULL);
    lowkey_cache *cache = lowkey_test_cache(context, quantizer, 6, 1, 0);
    struct lowkey_random random = { 3 };
    const int sequence = 0, n_queries = 2;
    for (int i = 0; i < 4; i++) {
        struct lowkey_tokens_made tokens = lowkey_make_tokens(&random, &desc->layers[i], 200);
        lowkey_test_append(cache, 0, &desc->layers[i], &tokens, 0, 140 + i);
        float *out = new_out(&desc->layers[i], n_queries);
        lowkey_test_attend(cache, &desc->layers[i], 1, &sequence, &n_queries, &tokens, out, NULL);
        check_sequence(cache, &desc->layers[i], 0, n_queries, &tokens, out, NULL);
        free(out);
        lowkey_tokens_made_free(&tokens);
    }
    lowkey_cache_free(cache);
    lowkey_context_free(context);
    lowkey_quantizer_free(quantizer);
}

/* Three layers of other heads, dims, formats and RoPE in one quantizer. */
static void test_layers_of_other_geometry(void **state)
{
    (void)state;
    enum { N_LAYERS = 3 };
    lowkey_quantizer *parts[N_LAYERS], *quantizer;
    lowkey_layer_desc layers[N_LAYERS];
    lowkey_error err;
    for (int i = 0; i < N_LAYERS; i++) {
        const struct lowkey_quantizer_choice choice = lowkey_case(
            (int[]) { 6, 2, 7 }[i], (int[]) { 12, 15, 8 }[i], (int[]) { 1, 16, 17 }[i]);
        parts[i] = lowkey_make_quantizer(&choice, NULL);
        layers[i] = lowkey_quantizer_describe(parts[i])->layers[0];
        layers[i].index = 3 * i;
    }
    const lowkey_quantizer_desc desc = {
        .struct_size = sizeof desc, .n_layers = N_LAYERS, .layers = layers, .n_sink_tokens = 2
    };
    assert_ok(lowkey_quantizer_create(&desc, NULL, &quantizer, &err), err);
    for (int i = 0; i < N_LAYERS; i++) lowkey_quantizer_free(parts[i]);
    lowkey_context *context = lowkey_test_context(NULL, NULL);
    lowkey_cache *cache = lowkey_test_cache(context, quantizer, 6, 2, 0);
    const lowkey_quantizer_desc *made = lowkey_quantizer_describe(quantizer);
    struct lowkey_random random = { 3 };
    const int sequence = 1, n_queries = 3;
    struct lowkey_tokens_made tokens[N_LAYERS];
    for (int i = 0; i < N_LAYERS; i++) {
        tokens[i] = lowkey_make_tokens(&random, &made->layers[i], 70);
        lowkey_test_append(cache, sequence, &made->layers[i], &tokens[i], 0, 70);
    }
    for (int i = 0; i < N_LAYERS; i++) {
        float *out = new_out(&made->layers[i], n_queries);
        lowkey_test_attend(cache, &made->layers[i], 1, &sequence, &n_queries, &tokens[i], out, NULL);
        check_sequence(cache, &made->layers[i], sequence, n_queries, &tokens[i], out, NULL);
        free(out);
        lowkey_tokens_made_free(&tokens[i]);
    }
    lowkey_cache_free(cache);
    lowkey_context_free(context);
    lowkey_quantizer_free(quantizer);
}

static void test_position_131072(void **state)
{
    (void)state;
    enum { N = (1 << 17) + 1 };
    struct lowkey_quantizer_choice choice = lowkey_case(0, 4, 8);
    choice.n_sink_tokens = 1;
    lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
    lowkey_context *context = lowkey_test_context(NULL, NULL);
    lowkey_cache *cache = lowkey_test_cache(context, quantizer, N / 64 + 1, 1, 0);
    const lowkey_layer_desc *layer = &lowkey_quantizer_describe(quantizer)->layers[0];
    struct lowkey_random random = { 3 };
    struct lowkey_tokens_made tokens = lowkey_make_tokens(&random, layer, N);
    lowkey_test_append(cache, 0, layer, &tokens, 0, N);
    const int sequence = 0, n_queries = 2;
    float *out = new_out(layer, n_queries), lse[2];
    lowkey_test_attend(cache, layer, 1, &sequence, &n_queries, &tokens, out, lse);
    check_sequence(cache, layer, 0, n_queries, &tokens, out, lse);
    free(out);
    lowkey_tokens_made_free(&tokens);
    lowkey_cache_free(cache);
    lowkey_context_free(context);
    lowkey_quantizer_free(quantizer);
}

/* ---- arguments ---- */

static void test_queries_of_any_type_and_stride(void **state)
{
    (void)state;
    struct batch batch = make_batch(3);
    const lowkey_layer_desc *layer = batch.layer;
    lowkey_context *context = lowkey_test_context(NULL, NULL);
    lowkey_cache *cache = lowkey_test_cache(context, batch.quantizer, 4, 1, 0);
    lowkey_test_append(cache, 0, layer, &batch.tokens[3], 0, 65);
    enum { N = 3, HEADS = 9, DIM = 64, HEAD_STRIDE = 70, TOKEN_STRIDE = HEADS * HEAD_STRIDE + 5 };
    float dense[N * HEADS * DIM], *want = new_out(layer, N), *out = new_out(layer, N);
    uint16_t strided[N * TOKEN_STRIDE];
    memset(strided, 0xff, sizeof strided);
    for (int i = 0; i < N * HEADS * DIM; i++) { /* bf16 numbers: the upper half of an f32 */
        uint32_t bits;
        memcpy(&bits, &batch.tokens[3].queries[i], sizeof bits);
        bits &= 0xffff0000u;
        memcpy(&dense[i], &bits, sizeof bits);
        strided[i / (HEADS * DIM) * TOKEN_STRIDE + i / DIM % HEADS * HEAD_STRIDE + i % DIM] =
            (uint16_t)(bits >> 16);
    }
    const int sequence = 0, n_queries = N;
    lowkey_attend_args args = { .struct_size = sizeof args,
                                .layer = layer->index,
                                .n = 1,
                                .sequences = &sequence,
                                .n_queries = &n_queries,
                                .q = { .data = dense },
                                .out = want };
    args.workspace_bytes = lowkey_attend_workspace_bytes(cache, &args);
    args.workspace = aligned_alloc(64, args.workspace_bytes);
    lowkey_error err;
    assert_ok(lowkey_attend(cache, &args, &err), err);
    args.q = (lowkey_rows) { strided, LOWKEY_BF16, TOKEN_STRIDE, HEAD_STRIDE };
    args.out = out;
    assert_ok(lowkey_attend(cache, &args, &err), err);
    assert_memory_equal(out, want, N * HEADS * DIM * sizeof *out);
    free(args.workspace), free(want), free(out);
    lowkey_cache_free(cache);
    lowkey_context_free(context);
    free_batch(&batch);
}

static void refuse(const lowkey_cache *cache, lowkey_attend_args args, const char *words)
{
    lowkey_error err;
    assert_refused(lowkey_attend(cache, &args, &err), LOWKEY_EINVAL, err, words);
    for (int i = 0; i < 9 * 64 && args.out; i++) assert_true(args.out[i] == 0.5f);
}

static void test_refusals(void **state)
{
    (void)state;
    struct batch batch = make_batch(3);
    lowkey_context *context = lowkey_test_context(NULL, NULL);
    lowkey_cache *cache = lowkey_test_cache(context, batch.quantizer, 4, 2, 0);
    lowkey_error err;
    lowkey_test_append(cache, 0, batch.layer, &batch.tokens[3], 0, 65);
    float q[9 * 64], out[9 * 64];
    for (int i = 0; i < 9 * 64; i++) q[i] = 1, out[i] = 0.5f;
    const int sequence = 0, empty = 1, outside = 2, one = 1, many = 66, negative = -1, none = 0;
    lowkey_attend_args good = {
        .struct_size = sizeof good, .layer = 1, .n = 1, .sequences = &sequence, .q = { .data = q }, .out = out
    };
    good.workspace_bytes = lowkey_attend_workspace_bytes(cache, &good);
    good.workspace = aligned_alloc(64, good.workspace_bytes);
    assert_true(good.workspace_bytes > 0 && good.workspace_bytes % 64 == 0);
    lowkey_attend_args args = good;
#define REFUSED(change, words) (args = good, change, refuse(cache, args, words))
    REFUSED(args.struct_size = 0, "struct_size");
    REFUSED(args.layer = 2, "layer 2");
    REFUSED(args.n = -1, "n >= 0");
    REFUSED(args.sequences = NULL, "n >= 0");
    REFUSED(args.sequences = &outside, "sequence 2");
    REFUSED(args.sequences = &empty, "sequence 1: expected 0 to 0 queries");
    REFUSED(args.n_queries = &many, "sequence 0: expected 0 to 65 queries, one a token, found 66");
    REFUSED(args.n_queries = &negative, "found -1");
    REFUSED(args.q.data = NULL, "queries: data");
    REFUSED(args.q.dtype = (lowkey_dtype)7, "queries: dtype");
    REFUSED(args.out = NULL, "out is NULL");
    REFUSED(args.workspace = NULL, "workspace");
    REFUSED(args.workspace_bytes--, "workspace: expected");
    REFUSED(args.workspace = (char *)args.workspace + 4, "multiple of 64");
    q[3 * 64 + 5] = NAN;
    REFUSED(args.n_queries = &one,
            "queries of layer 1: row 0 head 3 channel 5: expected a finite number, found nan");
#undef REFUSED
    q[3 * 64 + 5] = 1;
    assert_refused(lowkey_attend(cache, NULL, &err), LOWKEY_EINVAL, err, "args is NULL");
    args = good, args.layer = 2;
    assert_int_equal(lowkey_attend_workspace_bytes(cache, &args), 0);
    args = good, args.sequences = &empty, args.n_queries = &none, args.workspace = NULL, args.q.data = NULL,
    args.out = NULL;
    assert_ok(lowkey_attend(cache, &args, &err), err); /* no query: nothing to do */
    assert_ok(lowkey_attend(cache, &good, &err), err);
    assert_true(out[0] != 0.5f);
    free(good.workspace);
    lowkey_cache_free(cache);
    lowkey_context_free(context);
    free_batch(&batch);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        { "attend: every format and shape within the stated bound", test_every_format_and_shape, NULL, NULL,
          NULL },
        { "attend: threads and noise in fresh memory change no bit, and nothing is allocated",
          test_threads_and_noise, NULL, NULL, NULL },
        { "attend: a batch equals single runs, to the bit", test_batch_is_single_runs, NULL, NULL, NULL },
        { "attend: query head h attends KV head h / ratio", test_which_head_attends_which, NULL, NULL, NULL },
        { "attend: layers turn by their own angles", test_layers_turn_by_their_own_angles, NULL, NULL, NULL },
        { "attend: layers of other heads, dims and formats", test_layers_of_other_geometry, NULL, NULL,
          NULL },
        { "attend: positions up to 131,072 within the bound", test_position_131072, NULL, NULL, NULL },
        { "attend: bf16 queries with strides are the same numbers", test_queries_of_any_type_and_stride, NULL,
          NULL, NULL },
        { "attend: refusals write nothing", test_refusals, NULL, NULL, NULL },
    };
    return lowkey_run_tests(tests);
}
