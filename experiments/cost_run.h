/* cost_run.h - what formats cost by the gradients of a capture: what lowkey cost does. */
#ifndef LOWKEY_COST_RUN_H
#define LOWKEY_COST_RUN_H

#include "experiments/cost.h"
#include "experiments/measured.h"

struct lowkey_cost_options {
    const char *activations; /* path */
    int first_sample, end_sample; /* samples first..end-1; end 0: all from the first on */
    int n_layers; /* 0: all captured */
    const int *layers; /* their numbers in the model, rising */
    int n_formats;
    const char *const *formats; /* as lowkey_format_open takes them */
    int n_threads;
};

struct lowkey_cost_sums { /* of keys or of values of a layer: C = n_kv_heads * head_dim channels */
    double *sums; /* [C][samples] */
    double *squares; /* [C] */
};

struct lowkey_format_cost {
    struct lowkey_format format;
    struct lowkey_cost_sums (*layers)[2]; /* [n_layers]; 0 keys, 1 values */
};

struct lowkey_cost_result {
    struct lowkey_cost_options options; /* as asked */
    lowkey_activations *activations;
    struct lowkey_measured measured;
    int n_samples; /* measured */
    int n_formats;
    struct lowkey_format_cost *formats; /* in the order asked */
};

/* Each sample is appended to a cache of the format and what the cache holds read back; its difference from the captured
 * keys and values meets the captured gradients. A capture without gradients is refused; between layers and samples an
 * interrupt is seen (LOWKEY_ECANCELLED). Memory: one sample of one layer, and of each format. Results do not depend on
 * the number of threads. */
lowkey_status lowkey_cost_run(const struct lowkey_cost_options *options, struct lowkey_cost_result **out,
                              lowkey_error *err);
void lowkey_cost_result_free(struct lowkey_cost_result *result);

#endif
