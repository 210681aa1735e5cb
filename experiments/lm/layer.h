/* layer.h - what a layer of the decoder does with tokens one by one, before and after attention, and the way back of
 * gradients through it. Shared by decoder.c and gradient.c; threads take blocks of tokens, of a size that does not depend
 * on their number. Matrices of the model are [outputs][inputs]. */
#ifndef LOWKEY_LAYER_H
#define LOWKEY_LAYER_H

#include "formats/model.h"

enum { LOWKEY_TOKEN_BLOCK = 256 };

/* Floats of a token, in each of the rows below. */
struct lowkey_layer_widths {
    size_t hidden, ffn, query, key, value, mixed;
};
struct lowkey_layer_widths lowkey_layer_widths(const lowkey_model *model, int l);

/* Rows of consecutive tokens, [n_tokens][width]. The three residuals may be one, as may act and gate, raw_ and not,
 * normed and attended and fed. */
struct lowkey_layer_rows {
    float *residual; /* what the layer takes */
    float *normed; /* scratch */
    float *raw_query, *raw_key; /* before QK-norm; not used by a model that has none */
    float *query, *key, *value; /* before RoPE, after bias and QK-norm */
    float *mixed; /* what attention gives */
    float *attended,
        *fed; /* hidden wide, what attention and feed-forward add, before the norms of a model with post_norms */
    float *middle, *out; /* residual after attention and after the feed-forward */
    float *gate, *up, *act; /* act = activation(gate) * up */
};

/* The same rows from token first on; NULL stays NULL. */
struct lowkey_layer_rows lowkey_layer_rows_from(const struct lowkey_layer_rows *rows,
                                                const struct lowkey_layer_widths *widths, size_t first);

/* The first layer's residual. */
void lowkey_layer_embed(const lowkey_model *model, const int32_t *tokens, int n, float *residual);

/* residual -> query, key, value; then mixed, residual -> middle, out. Of n rows. */
void lowkey_layer_before_attention(const lowkey_model *model, int l, const struct lowkey_layer_rows *rows,
                                   int n);
void lowkey_layer_after_attention(const lowkey_model *model, int l, const struct lowkey_layer_rows *rows,
                                  int n);

/* Gradients of a loss with respect to rows of the same names. */
struct lowkey_layer_grads {
    float *residual; /* of the layer's output; then of middle; then of the layer's input */
    float *normed; /* scratch */
    float *query, *key, *value; /* of query, key, value; after the call of those before QK-norm */
    float *mixed;
    float *gate, *up; /* scratch */
};
struct lowkey_layer_grads lowkey_layer_grads_from(const struct lowkey_layer_grads *grads,
                                                  const struct lowkey_layer_widths *widths, size_t first);

/* The way back: residual (of out) -> residual (of middle), mixed; then query, key, value are added to residual. rows: as
 * the forward calls left them, with residuals, raw_, attended, fed and act apart; act and normed are not looked at. */
void lowkey_layer_after_attention_back(const lowkey_model *model, int l, const struct lowkey_layer_rows *rows,
                                       const struct lowkey_layer_grads *grads, int n);
void lowkey_layer_before_attention_back(const lowkey_model *model, int l,
                                        const struct lowkey_layer_rows *rows,
                                        const struct lowkey_layer_grads *grads, int n);

/* out = x / rms(x) * weight; out may be x. */
void lowkey_rms_norm(const float *x, const float *weight, int n, double epsilon, float *out);
/* out = add * out + the gradient with respect to x, from that of the norm; out may be grad where add is 0. */
void lowkey_rms_norm_back(const float *x, const float *weight, const float *grad, int n, double epsilon,
                          int add, float *out);

#endif
