/* model.h - weights and geometry of a decoder (model.h5), f32 in memory. */
#ifndef LOWKEY_MODEL_H
#define LOWKEY_MODEL_H

#include <stdint.h>

#include "runtime/lowkey.h"

struct lowkey_model_layer {       /* matrices are [outputs][inputs]; NULL: the model has none */
    float *attention_norm, *query_proj, *key_proj, *value_proj, *query_bias, *key_bias, *value_bias;
    float *query_norm, *key_norm, *output_proj, *ffn_norm, *gate_proj, *up_proj, *down_proj;
    float *post_attention_norm, *post_ffn_norm; /* with post_norms: of what is added to the residual */
    int window;                   /* a query sees the last so many tokens, its own included; 0: all */
};

enum lowkey_activation { LOWKEY_SILU, LOWKEY_GELU_TANH }; /* of the feed-forward's gate */

typedef struct lowkey_model {
    int n_layers, hidden_size, intermediate_size, vocab_size;
    int64_t n_parameters;                         /* elements of all tensors, tied ones once */
    double rms_norm_eps;
    int tied_output, attention_bias, qk_norm, bos_token_id, eos_token_id;
    int post_norms;
    enum lowkey_activation activation;
    double embedding_scale;                       /* multiplies embeddings on their way in; 0: 1 */
    char *name, *source, *license;
    unsigned char sha256[32];
    float *token_embedding, *final_norm, *output; /* output == token_embedding where tied */
    lowkey_layer_desc *geometry;                  /* [n_layers]; key and value are empty */
    struct lowkey_model_layer *layers;            /* [n_layers] */
} lowkey_model;

/* verify != 0: also recompute the SHA-256 over the tensors and refuse a file whose attribute differs. */
lowkey_status lowkey_model_open(const char *path, int verify, lowkey_model **out, lowkey_error *err);
/* All but the weights, which are NULL; their types and shapes are checked. verify != 0: also reads them, one
 * by one, refuses what is not finite, and compares the SHA-256. */
lowkey_status lowkey_model_describe(const char *path, int verify, lowkey_model **out, lowkey_error *err);
void lowkey_model_free(lowkey_model *model);

#endif
