/* gradient.h - the backward pass of the decoder to the keys and values of every layer: what sensitivity (Fisher) and the
 * tuning of tables are made of. Gradients are of the sample's summed loss in nats. */
#ifndef LOWKEY_GRADIENT_H
#define LOWKEY_GRADIENT_H

#include "experiments/lm/store.h"
#include "formats/model.h"

typedef struct lowkey_gradient lowkey_gradient;

struct lowkey_gradient_config {
    const lowkey_model *model; /* borrowed, as the store is */
    const struct lowkey_store
        *store; /* attend over what it gives; NULL: over the keys and values themselves */
    int max_tokens; /* of a sample */
    int n_threads; /* results do not depend on it */
};

enum lowkey_loss {
    LOWKEY_LOSS_TEXT, /* negative log-likelihood of the text's next token: the empirical Fisher information */
    LOWKEY_LOSS_MODEL, /* of a token drawn from the model's own distribution, by seed: the Fisher information itself */
    LOWKEY_LOSS_KL, /* KL(reference || this) of next tokens; the reference by its final hidden states */
    LOWKEY_LOSS_NONE /* 0: a pass for the sake of hidden states, or of what the store sees; no way back */
};

struct lowkey_gradient_layer {
    const lowkey_layer_desc *layer;
    int n_tokens;
    const float *key, *value, *stored_key, *stored_value, *query;
    const float *key_grad, *value_grad;
};

struct lowkey_gradient_request {
    const int32_t *tokens; /* [n_tokens]; the last predicts nothing */
    int n_tokens;
    enum lowkey_loss loss;
    uint64_t seed; /* of LOSS_MODEL */
    const float *reference; /* of LOSS_KL: [n_tokens][hidden_size], after the final norm */
    /* NULL: the loss only. Called once a layer, last layer first: keys and values as computed and as stored, and the loss's gradient with
     * respect to the stored ones, [n_tokens][n_kv_heads][head_dim], keys before RoPE. What the layers below get is the
     * same gradient, passed through the store unchanged ("straight through"). */
    lowkey_status (*on_layer)(void *user, const struct lowkey_gradient_layer *layer, lowkey_error *err);
    void *user;
    float *hidden; /* [n_tokens][hidden_size], after the final norm; NULL: not wanted */
};

lowkey_status lowkey_gradient_create(const struct lowkey_gradient_config *config, lowkey_gradient **out,
                                     lowkey_error *err);
void lowkey_gradient_free(lowkey_gradient *gradient); /* takes NULL */
/* loss: summed over the n_tokens - 1 predictions, nats. */
lowkey_status lowkey_gradient_run(lowkey_gradient *gradient, const struct lowkey_gradient_request *request,
                                  double *loss, lowkey_error *err);

#endif
