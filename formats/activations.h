/* activations.h - captured keys, values, queries (activations.h5): what calibration and attention damage read.
 * Streams: memory does not grow with the file. One thread at a time (HDF5). */
#ifndef LOWKEY_ACTIVATIONS_H
#define LOWKEY_ACTIVATIONS_H

#include <stdint.h>

#include "runtime/lowkey.h"

enum lowkey_stream {
    LOWKEY_KEY, LOWKEY_VALUE, LOWKEY_QUERY,   /* before RoPE */
    LOWKEY_KEY_GRAD, LOWKEY_VALUE_GRAD,       /* signed, of the sample's summed loss in nats */
    LOWKEY_KEY_WEIGHT, LOWKEY_VALUE_WEIGHT,   /* >= 0 */
    LOWKEY_N_STREAMS
};
extern const char *const lowkey_stream_names[LOWKEY_N_STREAMS]; /* "key", "value", ... as in the file */

/* Which next tokens the loss of the gradients is of. */
enum lowkey_gradient_labels {
    LOWKEY_LABELS_NOT_SAID,  /* no gradients, or a file of version 1.0 */
    LOWKEY_LABELS_TEXT,      /* the text's own: the empirical Fisher information */
    LOWKEY_LABELS_MODEL,     /* drawn from the model's own distribution: the Fisher information */
    LOWKEY_N_LABELS
};
extern const char *const lowkey_gradient_labels_names[LOWKEY_N_LABELS]; /* "not said", "text", "model" */

struct lowkey_activations_info {
    int n_model_layers;
    const char *model_name;
    unsigned char model_sha256[32];
    int n_layers;                         /* captured */
    const lowkey_layer_desc *layers;      /* [n_layers] geometry; key and value are empty */
    unsigned contents;                    /* bit s set: stream s is there */
    int n_samples;
    const int64_t *sample_offsets;        /* [n_samples + 1], tokens */
    const unsigned char (*sample_sha256)[32]; /* [n_samples] */
    const char *text_name;
    unsigned char text_sha256[32];
    enum lowkey_gradient_labels gradient_labels;
    int64_t gradient_seed;                /* of what was drawn, >= 0; 0 but for LABELS_MODEL */
};

/* Heads and channels of a stream at a layer. */
int lowkey_stream_heads(const lowkey_layer_desc *layer, enum lowkey_stream stream);
int lowkey_stream_head_dim(const lowkey_layer_desc *layer, enum lowkey_stream stream);

typedef struct lowkey_activations lowkey_activations;

lowkey_status lowkey_activations_open(const char *path, lowkey_activations **out, lowkey_error *err);
void lowkey_activations_close(lowkey_activations *activations);
const struct lowkey_activations_info *lowkey_activations_describe(const lowkey_activations *activations);

/* Read tokens first..first+n_tokens-1, heads first_head..+n_heads, of layer number i of those captured:
 * out[n_tokens][n_heads][head_dim]. NaN and infinities are refused, naming layer, head, channel, token and how many;
 * negative weights too. */
lowkey_status lowkey_activations_read(lowkey_activations *activations, int i, enum lowkey_stream stream, int64_t first,
                                      int64_t n_tokens, int first_head, int n_heads, float *out, lowkey_error *err);

/* The type of a stream of layer number i in the file: "f16", "bf16", "f32" or "f64". */
lowkey_status lowkey_activations_type(lowkey_activations *activations, int i, enum lowkey_stream stream, const char **type,
                                      lowkey_error *err);

/* Writer: the description is complete from the start; rows are written in any order of layers and streams.
 * dtype: of key, value, query (gradients and weights are f32). Values that f16 cannot hold are refused. commit
 * verifies that every row was written and renames the file into place; abandon removes what there is. */
typedef struct lowkey_activations_writer lowkey_activations_writer;

lowkey_status lowkey_activations_create(const char *path, const struct lowkey_activations_info *info, lowkey_dtype dtype,
                                        lowkey_activations_writer **out, lowkey_error *err);
lowkey_status lowkey_activations_write(lowkey_activations_writer *writer, int i, enum lowkey_stream stream, int64_t first,
                                       int64_t n_tokens, const float *rows, lowkey_error *err);
lowkey_status lowkey_activations_commit(lowkey_activations_writer *writer, lowkey_error *err); /* frees the writer */
void lowkey_activations_abandon(lowkey_activations_writer *writer);                            /* frees it; takes NULL */

#endif
