/* identity.h - whether two files are of the same model: its hash, its layers, their heads, dims and RoPE. What fits
 * together by shape alone but is of another model, another theta or other samples is refused with both values. */
#ifndef LOWKEY_IDENTITY_H
#define LOWKEY_IDENTITY_H

#include "formats/activations.h"
#include "formats/model.h"
#include "runtime/lowkey.h"

struct lowkey_identity {               /* all borrowed */
    const char *name;                  /* what messages call it: a path */
    const char *model_name;            /* for messages: the hash decides */
    const unsigned char *model_sha256; /* [32] */
    int n_model_layers;                /* of the whole model; 0: not known */
    int n_layers;
    const lowkey_layer_desc *layers;   /* [n_layers], rising index; key and value are not looked at */
    int n_samples;
    const unsigned char (*sample_sha256)[32]; /* [n_samples]; NULL: not known */
};

struct lowkey_identity lowkey_identity_of_model(const char *name, const lowkey_model *model);
struct lowkey_identity lowkey_identity_of_activations(const char *name, const struct lowkey_activations_info *info);
struct lowkey_identity lowkey_identity_of_quantizer(const char *name, const lowkey_quantizer_desc *desc);

enum {
    LOWKEY_SAME_LAYERS = 1, /* both have the same layers; else each layer of b must be in a */
    LOWKEY_SAME_SAMPLES = 2 /* both know their samples, and they are the same in the same order */
};

/* Numbers of RoPE and scale may differ by 2^-19 of their size: frameworks compute them in f32 in different ways, which
 * moves them by up to 2^-20; another theta moves the last pair by far more. */
lowkey_status lowkey_identity_check(const struct lowkey_identity *a, const struct lowkey_identity *b, unsigned flags,
                                    lowkey_error *err);

#endif
