/* peer_parts.h - what the formats of this folder have in common: a method that quantizes keys or values of
 * one layer in place, its settings, and the captured tokens that it may be fitted on. peer_table.c puts them
 * together under names. */
#ifndef LOWKEY_PEER_PARTS_H
#define LOWKEY_PEER_PARTS_H

#include "experiments/lm/store.h"
#include "experiments/peers/peers.h"

/* Captured tokens of one layer, at most some 16,384 of them: runs of up to 64 consecutive tokens, spread
 * evenly over the captures, first tokens of samples (sinks) left out. Keys and queries are turned by RoPE
 * where the format stores keys so; gradients never are. */
struct lowkey_peer_sample {
    int n_tokens;
    const int *position; /* [n_tokens], in the sample: consecutive within a run */
    const float *key, *value; /* [n_tokens][n_kv_heads][head_dim] */
    const float *query; /* [n_tokens][n_q_heads][key_head_dim]; NULL: not asked for */
    const float *key_grad, *value_grad; /* as key and value; NULL: not asked for, or the files have none */
};

struct lowkey_peer_setting { /* what a name selects; what a method does not look at is 0 */
    int bits; /* of a code */
    int group; /* elements that share a scale */
    int scope; /* enum lowkey_peer_scope */
    double rate; /* of formats that spend bits unevenly: mean bits of a code; Kitty: share of the boosted
                    channels */
};

enum lowkey_peer_scope { /* what shares an outer scale */
                         LOWKEY_PER_NOTHING, /* there is none: 1 */
                         LOWKEY_PER_TENSOR, /* all of a layer's keys or values, from the largest magnitude
                                               captured */
                         LOWKEY_PER_HEAD, /* a KV head, the same */
                         LOWKEY_PER_PAGE, /* 64 tokens of a KV head, found as they are stored */
                         LOWKEY_PER_TOKEN /* a token's vector over all KV heads, the same */
};

struct lowkey_peer_side { /* keys or values of one layer */
    const struct lowkey_peer_method *method;
    struct lowkey_peer_setting setting;
    enum lowkey_store_side which;
    const lowkey_layer_desc *layer;
    int n_heads, head_dim;
    void *fitted; /* the method's own, one block for free() */
    double bits; /* of an element; prepare says */
};

struct lowkey_peer_method {
    /* Refuse a geometry that does not suit, fit, say the bits. sample: NULL unless the format asks for one.
     */
    lowkey_status (*prepare)(struct lowkey_peer_side *side, const struct lowkey_peer_sample *sample,
                             int n_threads, lowkey_error *err);
    /* Once all n layers are prepared, for keys and for values: what is shared out among layers. NULL: nothing
     * is. */
    lowkey_status (*share)(struct lowkey_peer_side *sides, int n, lowkey_error *err);
    /* In place: x[n_tokens][n_heads][head_dim], consecutive tokens, at most the format's group (64 where it
     * has none). Several threads at once. */
    void (*quantize)(const struct lowkey_peer_side *side, float *x, int n_tokens);
};

extern const struct lowkey_peer_method lowkey_peer_int, lowkey_peer_nf; /* per token: min-max, NormalFloat */
extern const struct lowkey_peer_method
    lowkey_peer_channel_groups; /* KIVI's keys: a channel's tokens share a scale */
extern const struct lowkey_peer_method
    lowkey_peer_token_groups; /* KIVI's values: channels of a token share one */
extern const struct lowkey_peer_method
    lowkey_peer_kitty_keys; /* channel groups, some channels with twice the bits */
extern const struct lowkey_peer_method lowkey_peer_e4m3, lowkey_peer_e5m2, lowkey_peer_nvfp4;
extern const struct lowkey_peer_method lowkey_peer_q8_0, lowkey_peer_q4_0;
extern const struct lowkey_peer_method lowkey_peer_turboquant, lowkey_peer_turboquant_product,
    lowkey_peer_block_gtq;
extern const struct lowkey_peer_method lowkey_peer_coupled;
extern const struct lowkey_peer_method lowkey_peer_oscar;
extern const struct lowkey_peer_method lowkey_peer_squat_keys;
extern const struct lowkey_peer_method lowkey_peer_ratequant;
extern const struct lowkey_peer_method lowkey_peer_watersic;

enum { /* what a format wants captured */
       LOWKEY_PEER_FITS = 1, /* keys and values */
       LOWKEY_PEER_QUERIES = 2, /* queries too */
       LOWKEY_PEER_GRADIENTS = 4 /* gradients where there are some */
};

struct lowkey_peer_format { /* one name */
    const char *name;
    int group_tokens; /* tokens that are quantized together: chunks begin at a multiple of it; 1: each on its
                         own */
    int before_rope; /* keys are stored before RoPE; 0: after */
    unsigned wants; /* LOWKEY_PEER_... */
    int window; /* the last tokens that a query sees as they were, its own included; 0: none, not even its own
                 */
    int window_blocks; /* keys leave the window that many at a time (KIVI); values, and 0: one by one */
    const struct lowkey_peer_method *key, *value;
    struct lowkey_peer_setting key_setting, value_setting;
};

/* NULL: no such name. */
const struct lowkey_peer_format *lowkey_peer_find(const char *name);

/* One layer of captures after the other; refuses captures of another model, and a missing stream by the
 * format's name. */
struct lowkey_peer_reader;
lowkey_status lowkey_peer_reader_open(const struct lowkey_peer_format *format, const lowkey_model *model,
                                      int n_paths, const char *const *paths, struct lowkey_peer_reader **out,
                                      lowkey_error *err);
void lowkey_peer_reader_close(struct lowkey_peer_reader *reader); /* takes NULL */
/* Lives until the next call. l: number of the layer in the model. */
lowkey_status lowkey_peer_reader_layer(struct lowkey_peer_reader *reader, int l,
                                       const struct lowkey_peer_sample **out, lowkey_error *err);

/* Turn the heads of x[n_heads][head_dim] at a position, or back; in place. */
void lowkey_peer_turn(const lowkey_layer_desc *layer, int64_t position, int back, int n_heads, float *x);

/* "peer NAME: layer L, keys: ..." for prepare's refusals. */
lowkey_status lowkey_peer_refuse(const struct lowkey_peer_side *side, lowkey_error *err, const char *format,
                                 ...) __attribute__((format(printf, 3, 4)));

#endif
