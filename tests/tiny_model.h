/* tiny_model.h - a small random Llama-like or Gemma-like model in memory, and its forward pass in f64, written token by token. */
#ifndef LOWKEY_TINY_MODEL_H
#define LOWKEY_TINY_MODEL_H

#include "formats/model.h"

struct tiny_shape {
    int n_layers, hidden, ffn, vocab, n_q_heads, n_kv_heads, key_dim, value_dim;
    int rope_dims;
    lowkey_pairing pairing;
    double attention_factor, logit_scale; /* 0: the default that lowkey.h names */
    int untied, bias, qk_norm;
};

struct tiny_extras { /* what an extended model has; all 0: as Llama */
    int post_norms, gelu, window; /* window: of layers 0, 2, 4 .. */
    double embedding_scale; /* 0: 1 */
};

/* Both abort where there is no memory. */
lowkey_model *lowkey_tiny_model(const struct tiny_shape *shape, unsigned seed);
lowkey_model *lowkey_tiny_model_with(const struct tiny_shape *shape, const struct tiny_extras *extras,
                                     unsigned seed);
void lowkey_tiny_model_free(lowkey_model *model);

/* What attention sees of token t's key and value at layer l, before RoPE: changed in place. NULL: as they are. */
typedef void tiny_change(void *user, int l, int t, double *key, double *value);

/* Forward of n tokens at positions 0..n-1. hidden: [n][hidden], after the final norm. If query is not NULL: query, key
 * and value of layer l before RoPE, [n][heads][dim]. */
void lowkey_tiny_oracle(const lowkey_model *model, const int32_t *tokens, int n, double *hidden, int l,
                        double *query, double *key, double *value);
/* hidden only, with keys and values changed on their way into attention. */
void lowkey_tiny_oracle_changed(const lowkey_model *model, const int32_t *tokens, int n, double *hidden,
                                tiny_change *change, void *user);

#endif
