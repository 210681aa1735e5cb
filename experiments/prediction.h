/* prediction.h - what two models say of the next token: every figure once. a are the reference's logits, b a format's.
 *
 *   negative log-likelihood   log sum_i exp(b_i) - b_target, nats
 *   KL                        sum_i p_i (log p_i - log q_i), p = softmax(a), q = softmax(b), nats, the whole vocabulary
 *   top-1 agreement           whether the largest of a and of b stand at the same place; the first of equal ones counts
 *
 * Exponentials are f32 (lm/exponential.h, within 1.1e-7), differences a_i - b_i f32, sums f64: a log-likelihood is within
 * 1.2e-7 of exact, a KL within 2.4e-7 + 1.2e-7 sum_i p_i |a_i - b_i|; it may be below 0 by so much. */
#ifndef LOWKEY_PREDICTION_H
#define LOWKEY_PREDICTION_H

struct lowkey_logits { /* of one token */
    const float *x; /* [n] */
    int n, top; /* top: place of the largest */
    float max;
    double log_sum; /* of exp(x_i - max) */
};

struct lowkey_logits lowkey_logits_of(const float *x, int n);
double lowkey_token_nll(const struct lowkey_logits *logits, int target);
double lowkey_token_kl(const struct lowkey_logits *reference, const struct lowkey_logits *logits);

#endif
