/* gradient_parts.h - what gradient.c and gradient_attention.c share: the tape, and work rows of all layers. */
#ifndef LOWKEY_GRADIENT_PARTS_H
#define LOWKEY_GRADIENT_PARTS_H

#include <stdatomic.h>

#include "experiments/lm/gradient.h"
#include "experiments/lm/layer.h"
#include "experiments/lm/rope.h"

struct lowkey_tape { /* a layer's, [max_tokens][..]; rows.normed, rows.act and rows.out are not its own */
    struct lowkey_layer_rows rows;
    float *stored_key, *stored_value; /* rows.key and rows.value where there is no store */
    float *lse; /* [max_tokens][n_q_heads] */
};

struct lowkey_gradient {
    struct lowkey_gradient_config config;
    struct lowkey_tape *tape; /* [n_layers] */
    float *final_residual; /* [max_tokens][hidden_size] */
    float *hidden; /* the same, after the final norm */
    struct lowkey_layer_grads grads; /* [max_tokens][..] of one layer at a time */
    float *turned_key; /* [max_tokens][n_kv_heads * key_head_dim], after RoPE, of one layer at a time */
    float *head_key_grad,
        *head_value_grad; /* [n_q_heads][max_tokens][head_dim]: each query head's part, after RoPE */
    struct lowkey_rope_table rope;
    size_t lane_floats; /* of a thread's scratch in attention */
    float *lanes; /* [n_threads][lane_floats] */
    float *logits;
    double *row_loss;
    int n_tokens; /* of the sample at hand */
};

/* Attention of a layer: from rows.query and what is stored to rows.mixed and lse. */
void lowkey_gradient_attend(lowkey_gradient *gradient, int l);
/* The way back: grads.mixed -> grads.query, grads.key, grads.value, before RoPE. */
void lowkey_gradient_attend_back(lowkey_gradient *gradient, int l);

#endif
