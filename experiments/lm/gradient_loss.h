/* gradient_loss.h - the losses of gradient.h and their gradient with respect to final hidden states. */
#ifndef LOWKEY_GRADIENT_LOSS_H
#define LOWKEY_GRADIENT_LOSS_H

#include "experiments/lm/gradient.h"

struct lowkey_loss_work {
    const lowkey_model *model;
    const float *hidden; /* [n_rows][hidden_size], after the final norm */
    int n_rows;
    enum lowkey_loss loss;
    const int32_t *labels; /* [n_rows], of LOSS_TEXT */
    uint64_t seed; /* of LOSS_MODEL */
    const float *reference; /* as hidden, of LOSS_KL */
    int n_threads; /* results do not depend on it */
    float *scratch; /* lowkey_loss_scratch floats */
    double *row_loss; /* [n_rows], out, nats */
    float *hidden_grad; /* [n_rows][hidden_size], out; NULL: not wanted */
};

size_t lowkey_loss_scratch(const lowkey_model *model, int n_threads); /* 0: too much */
void lowkey_loss_run(struct lowkey_loss_work *work);

/* The token that LOSS_MODEL draws at row t: weights are those of a softmax before the division by their sum. */
int32_t lowkey_loss_draw(const float *weights, int n, double sum, uint64_t seed, int t);

#endif
