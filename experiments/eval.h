/* eval.h - what formats do to a model's predictions: windows of a text, each read on its own, once with keys and values in
 * f32 (the reference) and once over each format. */
#ifndef LOWKEY_EVAL_H
#define LOWKEY_EVAL_H

#include "experiments/eval_format.h"
#include "formats/tokens.h"

struct lowkey_eval_result { /* sums over the window - 1 tokens that a window predicts */
    int n_predicted;
    double nll, kl; /* nats; prediction.h */
    int n_top1; /* tokens where reference and format agree on the likeliest */
    struct lowkey_eval_bits bits; /* of what was stored */
    double seconds, cpu_seconds; /* this format's pass, and its share of making and comparing logits */
};

struct lowkey_eval_request {
    const lowkey_model *model;
    const lowkey_tokens *tokens;
    int window; /* tokens, >= 2 */
    int n_windows;
    const int64_t *windows; /* [n_windows] numbers of the pieces that experiments/samples.h cuts */
    int n_formats;
    struct lowkey_eval_format *formats; /* [n_formats] */
    int n_threads; /* results do not depend on it */
    const char *references; /* a folder that keeps the reference's states for later runs (reference_states.h); NULL: none */
    /* Is the result of a format (-1: of the reference) at windows[i] still to be made? NULL: all are. */
    int (*is_wanted)(void *user, int format, int i);
    /* Called with each result as its window ends: the reference's first, with a KL of 0 and all tokens agreed. */
    lowkey_status (*on_result)(void *user, int format, int i, const struct lowkey_eval_result *result,
                               lowkey_error *err);
    void *user;
};

/* Shows progress on stderr; LOWKEY_ECANCELLED when interrupted, between chunks. Logits that are not finite are refused by
 * window and format. Memory: final hidden states of a window for up to 8 formats at a time, keys and values of one
 * format, logits of 256 tokens twice. */
lowkey_status lowkey_eval(const struct lowkey_eval_request *request, lowkey_error *err);

#endif
