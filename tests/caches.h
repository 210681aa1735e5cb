/* caches.h - contexts, caches and their content for tests of the runtime. */
#ifndef LOWKEY_TEST_CACHES_H
#define LOWKEY_TEST_CACHES_H

#include "tests/make_quantizer.h"

/* An allocator that counts, that fails at call number fail_at (from 0; < 0: never), and that fills what it gives. */
struct lowkey_counter {
    long n_calls, n_live, fail_at;
    size_t live_bytes, most_bytes; /* most_bytes: a larger request fails; 0: none does */
    unsigned char fill;
};
lowkey_allocator lowkey_counting_allocator(struct lowkey_counter *counter);

lowkey_context *lowkey_test_context(const lowkey_allocator *allocator,
                                    int *n_threads); /* either may be NULL */
lowkey_cache *lowkey_test_cache(lowkey_context *context, const lowkey_quantizer *quantizer, int n_pages,
                                int max_sequences, int max_tokens);

/* Random rows of one layer: keys and values [n][channels], queries [n][q heads * key_head_dim]; free with free. */
struct lowkey_tokens_made {
    int n;
    float *keys, *values, *queries;
};
struct lowkey_tokens_made lowkey_make_tokens(struct lowkey_random *random, const lowkey_layer_desc *layer,
                                             int n);
void lowkey_tokens_made_free(struct lowkey_tokens_made *tokens);

/* Reserve, and append tokens first..first+n-1 at one layer; fails the test where it is refused. */
void lowkey_test_append(lowkey_cache *cache, int sequence, const lowkey_layer_desc *layer,
                        const struct lowkey_tokens_made *tokens, int first, int n);

/* Attend the last n_queries tokens of sequences with the queries of their tokens, into out and lse (may be NULL), with a
 * workspace of exactly the size asked for. tokens[i] belong to sequences[i], from their position 0 on. */
void lowkey_test_attend(const lowkey_cache *cache, const lowkey_layer_desc *layer, int n,
                        const int *sequences, const int *n_queries, const struct lowkey_tokens_made *tokens,
                        float *out, float *lse);

#endif
