/* store.h - what a cache keeps of keys and values: the attention of the decoder hands tokens in and attends over what it
 * gets back. A packed cache of liblowkey is one (append, then read each page once for all queries); formats that the
 * packed cache does not carry are others (quantize, dequantize: simulated). No store: keys and values as they are, in f32. */
#ifndef LOWKEY_STORE_H
#define LOWKEY_STORE_H

#include "runtime/lowkey.h"

enum lowkey_store_side { LOWKEY_STORE_KEY, LOWKEY_STORE_VALUE };

/* Tokens first..first+n_tokens-1 of the sequence at one layer; they follow the ones given before. All before RoPE, after
 * bias and QK-norm: a format that quantizes after RoPE turns, quantizes and turns back (lm/rope.h). */
struct lowkey_store_step {
    const lowkey_layer_desc *layer; /* layer->index: its number in the model */
    int first, n_tokens;
    const float *key; /* [n_tokens][n_kv_heads][key_head_dim] */
    const float *value; /* [n_tokens][n_kv_heads][value_head_dim] */
    const float *query; /* [n_tokens][n_q_heads][key_head_dim], for formats that look at queries */
    float *stored_key, *stored_value; /* as key and value: what attention sees in their place */
};

struct lowkey_store {
    lowkey_status (*put)(void *user, const struct lowkey_store_step *step, lowkey_error *err);
    lowkey_status (*reset)(void *user, lowkey_error *err); /* forget all tokens: another sequence begins */
    /* The first token that the query at a position still sees as it was (a recent window in 16 bits); NULL: none, each
     * token is seen as stored at once, its own query's too. */
    int (*exact_from)(void *user, enum lowkey_store_side side, int position);
    void *user;
};

#endif
