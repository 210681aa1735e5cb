/* oracle.h - textbook attention in double over unpacked arrays, one number after the other. It shares nothing with
 * kernels/ or runtime/. */
#ifndef LOWKEY_TEST_ORACLE_H
#define LOWKEY_TEST_ORACLE_H

#include "runtime/lowkey.h"

/* x[0..head_dim-1] turned to a position, in place; cos and sin times the layer's attention factor. */
void lowkey_oracle_rope(const lowkey_layer_desc *layer, double position, double *x);

/* keys[n_tokens][n_kv_heads][key_head_dim] before RoPE and values at positions first_position..; queries[n_queries]
 * [n_q_heads][key_head_dim] before RoPE, of the last n_queries tokens. out[n_queries][n_q_heads][value_head_dim], lse
 * and bound [n_queries][n_q_heads]: how far the library's out may be from out, as lowkey_attend's comment has it. */
void lowkey_oracle_attend(const lowkey_layer_desc *layer, int n_tokens, int64_t first_position,
                          const float *keys, const float *values, int n_queries, const float *queries,
                          double *out, double *lse, double *bound);

/* The largest share of its bound that any element of got takes, and 1e300 for a NaN. */
double lowkey_oracle_worst(int n_rows, int value_head_dim, const float *got, const double *want,
                           const double *bound);

#endif
