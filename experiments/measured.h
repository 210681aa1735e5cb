/* measured.h - what is measured on a capture: its layers and samples that were picked, and formats that fit them. Shared
 * by lowkey error and lowkey cost. */
#ifndef LOWKEY_MEASURED_H
#define LOWKEY_MEASURED_H

#include "formats/activations.h"

struct lowkey_measured {
    const char *activations; /* path */
    const struct lowkey_activations_info *info;
    int n_layers;
    int *layers; /* [n_layers] their place in info->layers; owned by whom it was picked for */
    int first_sample, end_sample; /* samples first..end-1 */
};

/* layers: numbers in the model, n_layers of them, 0: all captured. end_sample 0: to the capture's end. layers is NULL
 * after a failure. */
lowkey_status lowkey_measured_pick(const char *activations, const struct lowkey_activations_info *info, int n_layers,
                                   const int *layers, int first_sample, int end_sample,
                                   struct lowkey_measured *measured, lowkey_error *err);
int64_t lowkey_measured_tokens(const struct lowkey_measured *measured);

struct lowkey_format {
    char *label; /* owned */
    const char *path; /* "f16", "bf16" of built-in ones; within the text it was opened by */
    int n_fit_samples; /* it was fitted on */
    int fit_overlap; /* of the samples measured, how many it was fitted on */
    lowkey_quantizer *quantizer; /* of the layers measured */
};

/* text: path of a quantizer.h5, f16 or bf16; LABEL=PATH names it. A quantizer of another model, or one that lacks a
 * layer, is refused. After a failure close it, too. */
lowkey_status lowkey_format_open(const struct lowkey_measured *measured, const char *text,
                                 struct lowkey_format *format, lowkey_error *err);
void lowkey_format_close(struct lowkey_format *format);

/* A quantizer of layer number l of those it has: a cache holds every layer of its quantizer. */
lowkey_status lowkey_single_layer(const lowkey_quantizer *from, int l, lowkey_quantizer **out, lowkey_error *err);

#endif
