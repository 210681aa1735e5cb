/* caches.c - the calls of the public interface that every test of it makes. */
#include "tests/caches.h"

#include <stdlib.h>

#include "calib/threads.h"
#include "tests/check.h"
#include "tests/packed.h"

static void *counted_alloc(void *user, size_t bytes, size_t alignment)
{
    struct lowkey_counter *counter = user;
    if (counter->n_calls++ == counter->fail_at || (counter->most_bytes && bytes > counter->most_bytes))
        return NULL;
    assert_int_equal(alignment & (alignment - 1), 0);
    void *block = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    assert_non_null(block);
    memset(block, counter->fill, bytes);
    counter->n_live++;
    counter->live_bytes += bytes;
    return block;
}

static void counted_free(void *user, void *block, size_t bytes)
{
    struct lowkey_counter *counter = user;
    assert_non_null(block);
    counter->n_live--;
    counter->live_bytes -= bytes;
    free(block);
}

lowkey_allocator lowkey_counting_allocator(struct lowkey_counter *counter)
{
    return (lowkey_allocator) { counted_alloc, counted_free, counter };
}

lowkey_context *lowkey_test_context(const lowkey_allocator *allocator, int *n_threads)
{
    lowkey_context_config config = { .struct_size = sizeof config };
    lowkey_context *context;
    lowkey_error err;
    if (allocator) config.allocator = *allocator;
    if (n_threads) config.parallel_for = lowkey_threads_run, config.parallel_user = n_threads;
    assert_ok(lowkey_context_create(&config, &context, &err), err);
    return context;
}

lowkey_cache *lowkey_test_cache(lowkey_context *context, const lowkey_quantizer *quantizer, int n_pages,
                                int max_sequences, int max_tokens)
{
    const lowkey_cache_config config = { .struct_size = sizeof config,
                                         .n_pages = n_pages,
                                         .max_sequences = max_sequences,
                                         .max_tokens = max_tokens };
    lowkey_cache *cache;
    lowkey_error err;
    assert_ok(lowkey_cache_create(context, quantizer, &config, &cache, &err), err);
    return cache;
}

struct lowkey_tokens_made lowkey_make_tokens(struct lowkey_random *random, const lowkey_layer_desc *layer,
                                             int n)
{
    const size_t n_key = (size_t)(layer->n_kv_heads * layer->key_head_dim);
    const size_t n_value = (size_t)(layer->n_kv_heads * layer->value_head_dim);
    const size_t n_query = (size_t)(layer->n_q_heads * layer->key_head_dim), rows = (size_t)n;
    struct lowkey_tokens_made made = { n, malloc(rows * n_key * sizeof(float) + 1),
                                       malloc(rows * n_value * sizeof(float) + 1),
                                       malloc(rows * n_query * sizeof(float) + 1) };
    lowkey_make_rows(random, layer, 0, LOWKEY_NORMAL, n, made.keys);
    lowkey_make_rows(random, layer, 1, LOWKEY_NORMAL, n, made.values);
    lowkey_random_fill(random, LOWKEY_NORMAL, made.queries, rows * n_query);
    return made;
}

void lowkey_tokens_made_free(struct lowkey_tokens_made *tokens)
{
    free(tokens->keys), free(tokens->values), free(tokens->queries);
}

void lowkey_test_append(lowkey_cache *cache, int sequence, const lowkey_layer_desc *layer,
                        const struct lowkey_tokens_made *tokens, int first, int n)
{
    const int n_key = layer->n_kv_heads * layer->key_head_dim,
              n_value = layer->n_kv_heads * layer->value_head_dim;
    const lowkey_rows keys = { .data = tokens->keys + first * n_key };
    const lowkey_rows values = { .data = tokens->values + first * n_value };
    lowkey_error err;
    assert_in_range(first + n, 0, tokens->n);
    assert_ok(lowkey_cache_reserve(cache, sequence, n, &err), err);
    assert_ok(lowkey_cache_append(cache, layer->index, 1, &sequence, &n, keys, values, &err), err);
}

void lowkey_test_attend(const lowkey_cache *cache, const lowkey_layer_desc *layer, int n,
                        const int *sequences, const int *n_queries, const struct lowkey_tokens_made *tokens,
                        float *out, float *lse)
{
    const size_t row = (size_t)(layer->n_q_heads * layer->key_head_dim);
    size_t total = 0;
    for (int i = 0; i < n; i++) total += (size_t)n_queries[i];
    float *q = malloc(total * row * sizeof *q + 1), *at = q;
    for (int i = 0; i < n; i++) {
        const int length = lowkey_cache_length(cache, sequences[i], layer->index);
        memcpy(at, tokens[i].queries + (size_t)(length - n_queries[i]) * row,
               (size_t)n_queries[i] * row * sizeof *q);
        at += (size_t)n_queries[i] * row;
    }
    lowkey_attend_args args = { .struct_size = sizeof args,
                                .layer = layer->index,
                                .n = n,
                                .sequences = sequences,
                                .n_queries = n_queries,
                                .q = { .data = q },
                                .out = out,
                                .lse = lse };
    args.workspace_bytes = lowkey_attend_workspace_bytes(cache, &args);
    args.workspace = lowkey_guarded_new(args.workspace_bytes, 0xff);
    lowkey_error err;
    assert_ok(lowkey_attend(cache, &args, &err), err);
    lowkey_guarded_free(args.workspace);
    free(q);
}
