/* perplexity.h - how well a decoder predicts a text: each window on its own, its first token not predicted. */
#ifndef LOWKEY_PERPLEXITY_H
#define LOWKEY_PERPLEXITY_H

#include "experiments/lm/decoder.h"
#include "formats/tokens.h"

struct lowkey_perplexity_request {
    lowkey_decoder *decoder;
    const lowkey_tokens *tokens;
    int window, n_windows; /* the first n_windows pieces of window tokens, as experiments/samples.h cuts */
    int n_threads; /* the result does not depend on it */
    /* Called after each window with its summed negative log-likelihood, nats, over window - 1 predicted tokens. */
    void (*on_window)(void *user, int i, double nll);
    void *user;
};

/* Shows progress on stderr; LOWKEY_ECANCELLED when interrupted. A model whose logits are not finite is refused. */
lowkey_status lowkey_perplexity(const struct lowkey_perplexity_request *request, lowkey_error *err);

/* -log softmax(logits)[target], nats, summed in f64. */
double lowkey_token_nll(const float *logits, int n, int target);

#endif
