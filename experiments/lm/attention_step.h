/* attention_step.h - the one place where the decoder attends: whoever implements it holds the keys and values.
 * plain_attention.h keeps them as they are or as a store gives them back; capture looks on. */
#ifndef LOWKEY_ATTENTION_STEP_H
#define LOWKEY_ATTENTION_STEP_H

#include "runtime/lowkey.h"

/* n_tokens consecutive tokens of the sequence at one layer, all before RoPE, after bias and QK-norm. They follow the
 * tokens that were given before; the first ever is at position 0. */
struct lowkey_attention_step {
    const lowkey_layer_desc *layer; /* layer->index: its number in the model */
    int n_tokens;
    int window; /* a query sees the last so many tokens, its own included; 0: all */
    const float *query; /* [n_tokens][n_q_heads][key_head_dim] */
    const float *key; /* [n_tokens][n_kv_heads][key_head_dim] */
    const float *value; /* [n_tokens][n_kv_heads][value_head_dim] */
    float *out; /* [n_tokens][n_q_heads][value_head_dim] */
};

struct lowkey_attention {
    /* Add the tokens, and attend: each query sees the tokens up to its own, all or a window of them. */
    lowkey_status (*step)(void *user, const struct lowkey_attention_step *step, lowkey_error *err);
    lowkey_status (*reset)(void *user, lowkey_error *err); /* forget all tokens: another sequence begins */
    void *user;
};

#endif
