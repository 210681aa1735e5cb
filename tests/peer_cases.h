/* peer_cases.h - a model that is geometry alone, tokens for it, and a format run over them: for tests of
 * experiments/peers. */
#ifndef LOWKEY_TEST_PEER_CASES_H
#define LOWKEY_TEST_PEER_CASES_H

#include "experiments/peers/peers.h"
#include "tests/captured.h"

/* |got - want| <= tolerance, as doubles. */
#define assert_about(got, want, tolerance)                                                                   \
    do {                                                                                                     \
        const double got_about_ = (double)(got), want_about_ = (double)(want);                               \
        if (!(got_about_ - want_about_ <= (tolerance) && want_about_ - got_about_ <= (tolerance)))           \
            fail_msg("%s is %.9g, expected %.9g", #got, got_about_, want_about_);                            \
    } while (0)

struct peer_shape {
    int n_q_heads, n_kv_heads, key_head_dim, value_head_dim, rope_dims;
    lowkey_pairing pairing;
    double attention_factor;
};

enum { PEER_LAYERS = 2 };

struct peer_model { /* not to be moved: model points into it */
    lowkey_model model;
    lowkey_layer_desc layers[PEER_LAYERS];
    double inv_freq[128];
};

void peer_model_make(struct peer_model *model, const struct peer_shape *shape);

struct peer_tokens {
    int n;
    size_t key_row, value_row, query_row;
    float *key, *value, *query, *stored_key, *stored_value;
};

/* Normal numbers, channels of different spread and mean. */
void peer_tokens_make(struct peer_tokens *tokens, const struct peer_shape *shape, int n, unsigned seed);
void peer_tokens_free(struct peer_tokens *tokens);

/* All tokens into one layer, chunk at a time (0: at once), after a reset. */
lowkey_status peer_run(lowkey_peer *peer, const struct peer_model *model, int layer,
                       struct peer_tokens *tokens, int chunk, lowkey_error *err);

/* What captures, or tokens, hold: x[n_tokens][heads][head_dim] of a stream of a layer. */
typedef void peer_fill(const struct peer_shape *shape, int layer, enum lowkey_stream stream, float *x,
                       int n_tokens);

/* Captures of both layers of the model, for formats that calibrate; the path is to be unlinked. fill NULL:
 * normal numbers of that seed, as peer_tokens_make has them. */
void peer_captures_fill(const struct peer_model *model, const struct peer_shape *shape, int n_samples,
                        int length, unsigned contents, unsigned seed, peer_fill *fill, char path[64]);
void peer_captures_make(const struct peer_model *model, int n_samples, int length, unsigned contents,
                        unsigned seed, char path[64]);

/* Mean squared difference over mean squared x. */
double peer_relative_error(const float *x, const float *stored, size_t n);

/* Turn a head by RoPE in f64, or back. */
void peer_oracle_turn(const lowkey_layer_desc *layer, int position, int back, double *head);

#endif
