/* damage_run.h - attention damage of several formats over the layers and samples of a capture: what lowkey
 * error does. */
#ifndef LOWKEY_DAMAGE_RUN_H
#define LOWKEY_DAMAGE_RUN_H

#include "experiments/damage.h"
#include "formats/activations.h"

/* The length and number of sequences at which bits are stated. */
enum { LOWKEY_STATED_TOKENS = 131072, LOWKEY_STATED_SEQUENCES = 1 };

struct lowkey_damage_options {
    const char *activations;       /* path */
    int first_sample, end_sample;  /* samples first..end-1; end 0: all from the first on */
    int n_queries;                 /* of a sample, evenly spaced to its last token; fewer if it is shorter */
    int n_layers;                  /* 0: all captured */
    const int *layers;             /* their numbers in the model, rising */
    int n_formats;
    const char *const *formats;    /* path of a quantizer.h5, f16 or bf16; LABEL=PATH names it */
    int n_threads;
};

struct lowkey_format_damage {
    char *label;
    const char *path;              /* "f16", "bf16" of built-in ones */
    int n_fit_samples;             /* it was fitted on */
    int fit_overlap;               /* of the samples measured, how many it was fitted on */
    lowkey_quantizer *quantizer;   /* of the layers measured */
    lowkey_cache_usage stated;     /* of a cache of these layers; payload without outliers */
    lowkey_cache_usage *layer_stated; /* [n_layers] of a cache of one layer */
    struct lowkey_layer_damage *layers; /* [n_layers] */
};

struct lowkey_damage_result {
    struct lowkey_damage_options options; /* as asked, defaults filled in */
    lowkey_activations *activations;
    const struct lowkey_activations_info *info;
    int n_layers;
    int *layers;                   /* [n_layers] measured, their place in info->layers */
    int n_formats;
    struct lowkey_format_damage *formats; /* in the order asked */
    lowkey_context *context;       /* names the level of the library's kernels */
    const char *isa;               /* that level */
    double seconds;
};

/* Everything is opened and checked against each other before anything is measured: a quantizer of another
 * model, one that lacks a layer, a capture without queries are refused. Between layers and samples an
 * interrupt is seen (LOWKEY_ECANCELLED). Memory: one sample of one layer, its exact scores
 * ([queries][n_q_heads][tokens] f64), and a cache of it a thread. */
lowkey_status lowkey_damage_run(const struct lowkey_damage_options *options,
                                struct lowkey_damage_result **out, lowkey_error *err);
void lowkey_damage_result_free(struct lowkey_damage_result *result);

#endif
