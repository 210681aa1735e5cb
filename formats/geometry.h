/* geometry.h - what attention of a layer looks like: heads, dims, RoPE. The part of lowkey_layer_desc that model.h5,
 * activations.h5 and quantizer.h5 share (its key and value are not looked at). */
#ifndef LOWKEY_GEOMETRY_H
#define LOWKEY_GEOMETRY_H

#include "runtime/lowkey.h"

enum {
    LOWKEY_MAX_CHANNELS = 65536, /* n_kv_heads * head_dim of a side: an outlier entry names one in 16 bits */
    LOWKEY_MAX_Q_HEADS = 65536,
    LOWKEY_MAX_LAYERS = 65536
};

/* Put in what zero stands for: logit_scale 1 / sqrt(key_head_dim), rope_attention_factor 1. */
void lowkey_geometry_fill(lowkey_layer_desc *layer);

/* Every MUST of formats/README.md, "Geometry", on a filled layer. Messages begin "layer N: ". */
lowkey_status lowkey_geometry_check(const lowkey_layer_desc *layer, lowkey_error *err);

/* What of a layer is keys' or values', for code that serves both: which is 0 for keys, 1 for values. */
const lowkey_side_desc *lowkey_side_of(const lowkey_layer_desc *layer, int which);
int lowkey_side_head_dim(const lowkey_layer_desc *layer, int which);

/* "half", "interleaved" */
const char *lowkey_pairing_name(lowkey_pairing pairing);

/* Channels of RoPE pair i, i < rope_dims / 2: the first and the second. */
void lowkey_rope_pair(int rope_dims, lowkey_pairing pairing, int i, int *first, int *second);

#endif
