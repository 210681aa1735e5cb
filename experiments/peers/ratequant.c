/* ratequant.c - RateQuant (arXiv 2605.06675) over KIVI: every KV head of every layer has its own number of
 * bits, keys and values apart, such that their mean is the rate asked for. The quantizer's distortion over
 * bits is fitted on captured tokens as alpha beta^-b; reverse water-filling then gives head i  b +
 * log_beta(w_i / geometric mean of w)  bits. w is the mean squared gradient of the head where the captures
 * have gradients, else its mean square (the paper's other sensitivity). Bits are rounded to 1..8, and those
 * whose rounding cost most are set right until the mean is kept. */
#include <math.h>
#include <stdlib.h>

#include "experiments/peers/minmax.h"
#include "experiments/peers/peer_parts.h"
#include "formats/codes.h"
#include "runtime/error.h"

enum { LOW = 2, HIGH = 4, MIN_BITS = 1, MAX_BITS = 8 /* the curve is fitted from LOW to HIGH bits */ };

struct rate {
    double distortion[HIGH + 1]; /* of all heads at so many bits, relative */
    struct head {
        double weight;
        int bits;
    } head[1]; /* [n_heads] */
};

static void quantize_head(const struct lowkey_peer_side *side, float *head, int n_tokens, int bits)
{
    const size_t row = (size_t)side->n_heads * (size_t)side->head_dim;
    if (side->which == LOWKEY_STORE_KEY) {
        lowkey_minmax_columns(head, n_tokens, row, side->head_dim, NULL, bits);
        return;
    }
    for (int t = 0; t < n_tokens; t++)
        for (int c = 0; c < side->head_dim; c += side->setting.group)
            lowkey_minmax_row(head + (size_t)t * row + c, side->setting.group, bits);
}

/* Squared error over square of all heads, tokens in groups of up to 32 that follow each other. */
static double distortion(const struct lowkey_peer_side *side, const struct lowkey_peer_sample *sample,
                         const float *x, int bits, float *scratch)
{
    const size_t row = (size_t)side->n_heads * (size_t)side->head_dim;
    double error = 0, square = 0;
    for (int t = 0, n; t < sample->n_tokens; t += n) {
        for (n = 1; n < side->setting.group && t + n < sample->n_tokens; n++)
            if (sample->position[t + n] != sample->position[t] + n) break;
        const float *from = x + (size_t)t * row;
        for (size_t i = 0; i < (size_t)n * row; i++) scratch[i] = from[i];
        for (int h = 0; h < side->n_heads; h++)
            quantize_head(side, scratch + (size_t)h * (size_t)side->head_dim, n, bits);
        for (size_t i = 0; i < (size_t)n * row; i++) {
            const double e = (double)scratch[i] - (double)from[i];
            error += e * e;
            square += (double)from[i] * (double)from[i];
        }
    }
    return square > 0 ? error / square : 0;
}

static lowkey_status prepare(struct lowkey_peer_side *side, const struct lowkey_peer_sample *sample,
                             int n_threads, lowkey_error *err)
{
    (void)n_threads;
    const int is_key = side->which == LOWKEY_STORE_KEY;
    const size_t D = (size_t)side->head_dim, row = (size_t)side->n_heads * D;
    if (!is_key && side->head_dim % side->setting.group != 0)
        return lowkey_peer_refuse(side, err, "groups of %d channels do not divide a head of %d",
                                  side->setting.group, side->head_dim);
    struct rate *rate = side->fitted = calloc(1, sizeof *rate + (size_t)side->n_heads * sizeof *rate->head);
    float *scratch = malloc((size_t)side->setting.group * row * sizeof *scratch);
    if (!rate || !scratch) {
        free(scratch);
        return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for rates");
    }
    const float *x = is_key ? sample->key : sample->value,
                *gradient = is_key ? sample->key_grad : sample->value_grad;
    for (int bits = LOW; bits <= HIGH; bits++)
        rate->distortion[bits] = distortion(side, sample, x, bits, scratch);
    free(scratch);
    for (size_t h = 0; h < (size_t)side->n_heads; h++)
        for (size_t t = 0; t < (size_t)sample->n_tokens; t++)
            for (size_t c = 0; c < D; c++) {
                const double s = (double)(gradient ? gradient : x)[t * row + h * D + c];
                rate->head[h].weight += s * s / ((double)sample->n_tokens * (double)D);
            }
    return LOWKEY_OK;
}

/* beta of the curve through the layers' mean distortions. */
static double fit_beta(const struct lowkey_peer_side *sides, int n)
{
    double b_mean = 0, d_mean = 0, log_d[HIGH + 1], bb = 0, bd = 0;
    const int points = HIGH - LOW + 1;
    for (int bits = LOW; bits <= HIGH; bits++) {
        double sum = 0;
        for (int l = 0; l < n; l++) sum += ((const struct rate *)sides[l].fitted)->distortion[bits];
        log_d[bits] = log(fmax(sum, 1e-300));
        b_mean += (double)bits / points;
        d_mean += log_d[bits] / points;
    }
    for (int bits = LOW; bits <= HIGH; bits++) {
        bb += (bits - b_mean) * (bits - b_mean);
        bd += (bits - b_mean) * (log_d[bits] - d_mean);
    }
    return fmax(exp(-bd / bb), 1.01);
}

/* Round wanted[n] to MIN_BITS..MAX_BITS so that they sum to total, which lies between. */
static void round_bits(const double *wanted, int n, int total, int *bits)
{
    int sum = 0;
    for (int i = 0; i < n; i++) {
        const double rounded = floor(wanted[i] + 0.5);
        bits[i] = rounded < MIN_BITS ? MIN_BITS : rounded > MAX_BITS ? MAX_BITS : (int)rounded;
        sum += bits[i];
    }
    while (sum != total) {
        const int step = sum < total ? 1 : -1;
        int best = -1;
        for (int i = 0; i < n; i++) {
            if (bits[i] + step < MIN_BITS || bits[i] + step > MAX_BITS) continue;
            if (best < 0 || step * (wanted[i] - bits[i]) > step * (wanted[best] - bits[best])) best = i;
        }
        bits[best] += step;
        sum += step;
    }
}

static lowkey_status share(struct lowkey_peer_side *sides, int n, lowkey_error *err)
{
    int n_heads = 0;
    for (int l = 0; l < n; l++) n_heads += sides[l].n_heads;
    double *wanted = malloc((size_t)n_heads * sizeof *wanted);
    int *bits = malloc((size_t)n_heads * sizeof *bits);
    if (!wanted || !bits) {
        free(wanted);
        free(bits);
        return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for rates");
    }
    const double log_beta = log(fit_beta(sides, n)), rate = sides->setting.rate;
    double log_mean = 0;
    for (int l = 0, i = 0; l < n; l++)
        for (int h = 0; h < sides[l].n_heads; h++, i++) {
            wanted[i] = log(fmax(((const struct rate *)sides[l].fitted)->head[h].weight, 1e-300));
            log_mean += wanted[i] / n_heads;
        }
    for (int i = 0; i < n_heads; i++) wanted[i] = rate + (wanted[i] - log_mean) / log_beta;
    round_bits(wanted, n_heads, (int)floor(rate * n_heads + 0.5), bits);
    for (int l = 0, i = 0; l < n; l++) {
        struct rate *own = sides[l].fitted;
        sides[l].bits = 32.0 / sides[l].setting.group;
        for (int h = 0; h < sides[l].n_heads; h++, i++) {
            own->head[h].bits = bits[i];
            sides[l].bits += (double)bits[i] / sides[l].n_heads;
        }
    }
    free(wanted);
    free(bits);
    return LOWKEY_OK;
}

static void quantize(const struct lowkey_peer_side *side, float *x, int n_tokens)
{
    const struct rate *rate = side->fitted;
    for (int h = 0; h < side->n_heads; h++)
        quantize_head(side, x + (size_t)h * (size_t)side->head_dim, n_tokens, rate->head[h].bits);
}

const struct lowkey_peer_method lowkey_peer_ratequant = { prepare, share, quantize };
