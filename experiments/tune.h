/* tune.h - tables of a quantizer tuned by gradient on the KL divergence of next tokens, with keys and values in the packed
 * cache. */
#ifndef LOWKEY_TUNE_H
#define LOWKEY_TUNE_H

#include "experiments/tune_tables.h"
#include "formats/model.h"
#include "formats/tokens.h"

struct lowkey_tune_request {
    const lowkey_model *model;
    const lowkey_tokens *tokens;
    const lowkey_quantizer *quantizer; /* of this model, all layers */
    const struct lowkey_fit_record *record; /* as the quantizer was read */
    int length; /* tokens of a window (experiments/samples.h) */
    int first_window, end_window; /* to tune on */
    int first_validation, end_validation; /* none of them tuned on */
    int steps, validate_every;
    double rate; /* of the first step, in rms errors of a channel; it falls to 0 as a cosine does */
    int64_t seed; /* of the order of windows */
    int n_threads; /* results do not depend on it */
    const char *checkpoint; /* written after each step, and gone on from where it is there; NULL: none */
    /* Called with each validation as it comes, also with those that a checkpoint holds. */
    void (*on_validation)(void *user, int step, double kl, int is_best);
    void *user;
};

struct lowkey_tune_step { /* a row of the log: the state after so many steps */
    double kl; /* of the window that the step after it reads, nats per token; NAN where none has */
    double validation; /* KL on all validation windows; NAN where it was not measured */
};

/* What stays of a run, and all that a checkpoint holds. */
struct lowkey_tune_state {
    struct lowkey_tuned_tables *tables;
    struct lowkey_tune_step *log; /* [steps + 1] */
    int steps, done; /* steps in all, and those made */
    int best_step; /* -1: nothing validated */
    double best_kl; /* of tables->best */
};

/* Checks the request, and reads the checkpoint where there is one. */
lowkey_status lowkey_tune_begin(const struct lowkey_tune_request *request, struct lowkey_tune_state *state,
                                lowkey_error *err);
void lowkey_tune_state_free(struct lowkey_tune_state *state); /* takes one all zero too */

/* The number of the window that a step reads: in a random order, and in another one each time all have been read. -1: no
 * memory. */
int lowkey_tune_window(const struct lowkey_tune_request *request, int step);

/* From the state on to the last step. The best of the validated states, of equal ones the first, is tables->best; the
 * tables as they were are one of them. Shows progress on stderr. Interrupted (LOWKEY_ECANCELLED), the state and the
 * checkpoint are what they were before the step. */
lowkey_status lowkey_tune(const struct lowkey_tune_request *request, struct lowkey_tune_state *state,
                          lowkey_error *err);

/* Write the quantizer of the best state. Its report is of the windows tuned on (formats/README.md, "report"). */
lowkey_status lowkey_tune_write(const struct lowkey_tune_request *request,
                                const struct lowkey_tune_state *state, const char *path, lowkey_error *err);

#endif
