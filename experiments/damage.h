/* damage.h - attention damage at one layer of one captured sample: the exact side once, then any number of
 * formats. */
#ifndef LOWKEY_DAMAGE_H
#define LOWKEY_DAMAGE_H

#include "experiments/measure.h"
#include "runtime/lowkey.h"

/* A sample as captured, before RoPE. Query j stands at positions[j] and sees tokens 0..positions[j]. */
struct lowkey_capture {
    const lowkey_layer_desc *layer; /* geometry */
    int n_tokens, n_queries;
    const int *positions;           /* [n_queries] rising, the last n_tokens - 1 */
    const float *key, *value;       /* [n_tokens][n_kv_heads][head_dim] */
    const float *query;             /* [n_queries][n_q_heads][key_head_dim] */
};

/* What attention gives with the captured values, in f64. A row is query j of query head g of a KV head's
 * group, number j * q_per_kv + g. All borrowed from the capture or owned by this. */
struct lowkey_exact {
    struct lowkey_capture capture;
    double *cosine, *sine;          /* [n_tokens][rope_dims/2], times the attention factor */
    double *query;                  /* [n_kv_heads][rows][key_head_dim], after RoPE, times logit_scale */
    double *scores;                 /* [n_kv_heads][rows][n_tokens]; what a row does not see is not set */
    double *out;                    /* [n_kv_heads][rows][value_head_dim] */
};

lowkey_status lowkey_exact_create(const struct lowkey_capture *capture, int n_threads,
                                  struct lowkey_exact **out, lowkey_error *err);
void lowkey_exact_free(struct lowkey_exact *exact);

/* What a format did at one layer, summed over samples. */
struct lowkey_layer_damage {
    struct lowkey_damage *heads;            /* [n_q_heads] */
    struct lowkey_distortion *key, *value;  /* [n_kv_heads] */
    lowkey_cache_usage payload;             /* elements, payload bytes, counts of the caches; the rest is 0 */
};

/* Add elements, payload bytes and counts; no other field. */
void lowkey_payload_add(lowkey_cache_usage *into, const lowkey_cache_usage *from);

/* Append the sample to a cache of liblowkey, attend with its queries, read back what was stored, and add the
 * damage. The quantizer holds the capture's layer. Sums come in the same order for any number of threads. */
lowkey_status lowkey_damage_measure(const struct lowkey_exact *exact, const lowkey_quantizer *quantizer,
                                    int n_threads, struct lowkey_layer_damage *damage, lowkey_error *err);

/* Room for a * b * c elements of that size, each factor >= 0; NULL where there is none or the product
 * overflows. */
void *lowkey_take(int64_t a, int64_t b, int64_t c, size_t size);

#endif
