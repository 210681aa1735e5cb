/* attention_block.h - causal attention of some queries of one head over f32 keys and values, with BLAS, and the way back
 * of gradients through it. Blocks are of a fixed size, so that results do not depend on how threads share them. */
#ifndef LOWKEY_ATTENTION_BLOCK_H
#define LOWKEY_ATTENTION_BLOCK_H

#include "runtime/lowkey.h"

enum { LOWKEY_QUERY_BLOCK = 64 }; /* queries of one head that share a matrix product */

/* The keys and values that a query head sees: token t's at + t * stride. */
struct lowkey_attention_head {
    int key_dim, value_dim;
    float scale; /* of scores; lowkey_attention_scale */
    const float *keys; /* after RoPE */
    const float *values;
    int key_stride, value_stride;
};

/* The first token that the query at a position sees. */
int lowkey_attention_start(int window, int position);
/* Softmax over scores first..end-1 of n, the rest 0; returns the log-sum-exp. */
float lowkey_softmax(float *scores, int first, int end, int n);
float lowkey_attention_scale(const lowkey_layer_desc *layer);

/* Query j of n_rows sits at position first + j and sees the last window tokens up to its own, or all (0). Row j of mixed is at + j * mixed_stride. */
struct lowkey_attention_queries {
    int first, window, n_rows; /* n_rows <= LOWKEY_QUERY_BLOCK */
    const float *queries; /* [n_rows][key_dim], after RoPE */
    int mixed_stride, lse_stride;
};

/* mixed: out; lse: [n_rows] log-sum-exp of the scores, or NULL. scores: scratch [n_rows][first + n_rows]. */
void lowkey_attention_block(const struct lowkey_attention_head *head,
                            const struct lowkey_attention_queries *queries, float *scores, float *mixed,
                            float *lse);

/* Gradients: mixed_grad as mixed lies. query_grad [n_rows][key_dim] is written; key_grad [tokens][key_dim] and
 * value_grad [tokens][value_dim], dense, are added to. mixed, lse: from the way forward. scratch: two times
 * [LOWKEY_QUERY_BLOCK][LOWKEY_KEY_TILE]. */
enum { LOWKEY_KEY_TILE = 512 };
void lowkey_attention_block_back(const struct lowkey_attention_head *head,
                                 const struct lowkey_attention_queries *queries, const float *mixed,
                                 const float *lse, const float *mixed_grad, float *scratch, float *query_grad,
                                 float *key_grad, float *value_grad);

#endif
