/* tune_pass.h - one window of tokens through a model: with keys and values in f32 for what is to be matched, then through a
 * packed cache, and back to the entries of its tables. */
#ifndef LOWKEY_TUNE_PASS_H
#define LOWKEY_TUNE_PASS_H

#include "formats/model.h"
#include "formats/quantizer_file.h"

typedef struct lowkey_tune_pass lowkey_tune_pass;

/* Room for windows of length tokens, 2 or more. Results do not depend on n_threads. The model is borrowed. */
lowkey_status lowkey_tune_pass_create(const lowkey_model *model, int length, int n_threads,
                                      lowkey_tune_pass **out, lowkey_error *err);
void lowkey_tune_pass_free(lowkey_tune_pass *pass); /* takes NULL */

/* hidden: [length][hidden_size], the final hidden states with keys and values in f32. */
lowkey_status lowkey_tune_reference(lowkey_tune_pass *pass, const int32_t *tokens, float *hidden,
                                    lowkey_error *err);

struct lowkey_tune_measure {
    const lowkey_quantizer *quantizer; /* of the model, all layers */
    const int32_t *tokens; /* [length] */
    const float *reference; /* as lowkey_tune_reference gives it; NULL: kl is 0, no gradients */
    /* [n_layers][key, value], each [n_kv_heads][head_dim][table_entries]: gets added the gradient of the KL with respect to
     * each entry (tune_entries.h). Elements are passed straight through to what made them: d stored / d x is taken to be
     * 1. NULL: not wanted. */
    double *(*gradients)[2];
    struct lowkey_side_report (
        *reports)[2]; /* [n_layers][key, value], as lowkey_entry_reports adds to them; NULL: not wanted */
};

/* kl: of reference from quantized predictions, the mean of length - 1 tokens, nats. */
lowkey_status lowkey_tune_kl(lowkey_tune_pass *pass, const struct lowkey_tune_measure *measure, double *kl,
                             lowkey_error *err);

#endif
