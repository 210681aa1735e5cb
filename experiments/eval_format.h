/* eval_format.h - a format to evaluate, by its name on the command line: the packed cache of a quantizer.h5 or of 16 bits,
 * or a simulated one of peers/. */
#ifndef LOWKEY_EVAL_FORMAT_H
#define LOWKEY_EVAL_FORMAT_H

#include "experiments/packed_store.h"
#include "experiments/peers/peers.h"
#include "experiments/sink_store.h"
#include "formats/model.h"

/* The length of the one sequence at which bits are stated, as lowkey error does. */
enum { LOWKEY_EVAL_STATED_TOKENS = 131072 };

struct lowkey_eval_bits { /* payload of an element that is neither sink nor in a window: codes, scales, outliers */
    double key, value;
};

struct lowkey_eval_format {
    char *label; /* LABEL of LABEL=FORMAT, else the format's name or the file's without its ending */
    const char *name; /* as given: a path, "f16", "bf16", a peer's name */
    int is_simulated;
    int n_sinks;
    char file_sha256[65]; /* of quantizer.h5; "" where there is none */
    char calibration[65]; /* SHA-256 over the samples' hashes that a peer calibrated on; "" */
    double bits_held; /* everything, an element, at the stated length; NaN for simulated ones */
    double key_share; /* of all elements of keys and values of the model */
    lowkey_quantizer *quantizer; /* of the packed cache */
    int n_fit_samples;
    unsigned char (*fit_samples)[32]; /* [n_fit_samples] hashes of what the quantizer was fitted on */
    lowkey_peer *peer;
    /* while running */
    lowkey_packed_store *packed;
    struct lowkey_sink_store sinks;
};

struct lowkey_eval_format_options {
    const lowkey_model *model;
    const char *model_path; /* for messages */
    int n_sinks; /* of simulated formats */
    int n_activations;
    const char *const *activations; /* for peers that calibrate */
    int n_threads;
};

lowkey_status lowkey_eval_format_open(const char *text, const struct lowkey_eval_format_options *options,
                                      struct lowkey_eval_format *format, lowkey_error *err);
void lowkey_eval_format_close(struct lowkey_eval_format *format); /* all zero is fine */

/* A store for one sequence of up to max_tokens, until stop. */
lowkey_status lowkey_eval_format_start(struct lowkey_eval_format *format, int max_tokens, int n_threads,
                                       struct lowkey_store *store, lowkey_error *err);
/* bits: of what the store holds now. */
lowkey_status lowkey_eval_format_measure(const struct lowkey_eval_format *format, struct lowkey_eval_bits *bits,
                                         lowkey_error *err);
void lowkey_eval_format_stop(struct lowkey_eval_format *format);

/* Payload of a side at the stated length, sinks and the recent window in 16 bits with it. */
double lowkey_eval_stated_bits(const struct lowkey_eval_format *format, enum lowkey_store_side side, double bits);

#endif
