/* attention.h - sensitivity from captured queries, without a backward pass (METHOD, "Sensitivity without a
 * backward pass"). */
#ifndef LOWKEY_ATTENTION_H
#define LOWKEY_ATTENTION_H

#include "calib/captures.h"
#include "calib/weights.h"

struct lowkey_attention { /* what is wanted; what is not is NULL */
    const struct lowkey_store *key; /* per kept token and head [key_head_dim]: the diagonal of its H */
    const struct lowkey_store *value; /* per kept token and head [1]: sum of p^2 */
    double *moments; /* [n_kv_heads][D][D]: the sum over kept tokens of their H of keys */
};

/* With query m of a head at weight p_mt on key t, and u = R(m - t) q_m:
 *     H_t = sum over m >= t of p_mt^2 |v_t - o_m|^2 u u' logit_scale^2 rope_attention_factor^4,
 * over the KV head's query heads and n_queries queries of each sample, evenly spaced, the last one always
 * (all, where the sample is no longer). Queries see every token, sinks too. Pairs below 2^-20 of a query's
 * largest are left out of moments. */
lowkey_status lowkey_attention_sensitivity(const lowkey_captures *captures, int layer, int n_queries,
                                           int n_threads, const struct lowkey_attention *out,
                                           lowkey_error *err);

#endif
