/* watersic.c - WaterSIC (arXiv 2603.04956) for KV caches, by its rate: codes are integers without limit, to
 * be entropy coded, so that a cache of it cannot be attended in place. With H the second moment of a KV
 * head's queries (after RoPE; the identity for values) and H = L L', channels are quantized from the last to
 * the first with steps c / L_jj, each taking in the errors of those behind it, and shrunk by the factor that
 * loses least. c is such that the codes' entropy, channel by channel on captured tokens, is the rate; that
 * entropy is what bits says. */
#include <math.h>
#include <stdlib.h>

#include "calib/threads.h"
#include "experiments/peers/peer_parts.h"
#include "experiments/peers/rotation.h"
#include "formats/codes.h"
#include "runtime/error.h"

enum { MAX_TOKENS = 2048 /* that the entropy is measured on */, N_HALVINGS = 20, CODES = 4096 };

static const double damp = 0.01; /* of H's mean diagonal */

struct channel {
    float step, shrink;
};

struct watersic { /* per head: channels[dim], rows[dim][dim] of l_ji, i < j, the error of j taken in by i */
    size_t head_size; /* in floats */
    float data[1];
};

struct fit {
    struct lowkey_peer_side *side;
    const struct lowkey_peer_sample *sample;
    double *rates; /* [n_heads]; NaN: no memory */
};

static struct channel *channels_of(const struct lowkey_peer_side *side, int h)
{
    struct watersic *fitted = side->fitted;
    return (struct channel *)(fitted->data + (size_t)h * fitted->head_size);
}

static float *rows_of(const struct lowkey_peer_side *side, int h)
{
    return (float *)(channels_of(side, h) + side->head_dim);
}

static float code_of(float x, float step)
{
    return floorf(x / step + 0.5f);
}

static double entropy(const int *count, int n)
{
    double bits = 0;
    for (int k = 0; k < CODES; k++)
        if (count[k]) bits -= count[k] * log2((double)count[k] / n) / n;
    return bits;
}

/* Quantize x[dim][n], a channel's tokens side by side, with steps c / diagonal; channels get step and shrink.
 * target[dim][n] is scratch. Returns the mean entropy of a code. */
static double run(int dim, int n, const float *x, float *target, const double *diagonal, double c,
                  const float *rows, struct channel *channels)
{
    double total = 0;
    for (size_t i = 0; i < (size_t)dim * (size_t)n; i++) target[i] = x[i];
    for (int j = dim - 1; j >= 0; j--) {
        float *own = target + (size_t)j * (size_t)n;
        const float step = (float)(c / diagonal[j]);
        int count[CODES] = { 0 };
        double product = 0, square = 0;
        for (int t = 0; t < n; t++) {
            const float code = code_of(own[t], step);
            product += (double)own[t] * (double)(step * code);
            square += (double)(step * code) * (double)(step * code);
            count[code < -CODES / 2 ? 0 : code >= CODES / 2 ? CODES - 1 : (int)code + CODES / 2]++;
        }
        const float shrink = square > 0 ? (float)(product / square) : 1;
        channels[j] = (struct channel) { step, shrink };
        for (int t = 0; t < n; t++)
            own[t] = shrink * step * code_of(own[t], step) - x[(size_t)j * (size_t)n + (size_t)t];
        for (int i = 0; i < j; i++) {
            const float l = rows[(size_t)j * (size_t)dim + (size_t)i];
            float *other = target + (size_t)i * (size_t)n;
            for (int t = 0; t < n; t++) other[t] -= l * own[t];
        }
        total += entropy(count, n);
    }
    return total / dim;
}

/* In place: a = L L', the diagonal of L to diagonal[dim], L_ji / L_ii to rows[j][i], i < j. a is positive
 * definite. */
static void factor(int dim, double *a, double *diagonal, float *rows)
{
    const size_t D = (size_t)dim;
    for (size_t j = 0; j < D; j++)
        for (size_t i = 0; i <= j; i++) {
            double sum = a[j * D + i];
            for (size_t k = 0; k < i; k++) sum -= a[j * D + k] * a[i * D + k];
            a[j * D + i] = i == j ? sqrt(sum) : sum / a[i * D + i];
        }
    for (size_t j = 0; j < D; j++) {
        diagonal[j] = a[j * D + j];
        for (size_t i = 0; i < D; i++) rows[j * D + i] = i < j ? (float)(a[j * D + i] / a[i * D + i]) : 0;
    }
}

static lowkey_status weigh(const struct fit *fit, int h, double *a)
{
    const struct lowkey_peer_side *side = fit->side;
    const lowkey_layer_desc *layer = side->layer;
    const size_t D = (size_t)side->head_dim;
    const int per_head = layer->n_q_heads / layer->n_kv_heads;
    if (side->which == LOWKEY_STORE_VALUE) {
        for (size_t i = 0; i < D * D; i++) a[i] = i % (D + 1) == 0;
        return LOWKEY_OK;
    }
    LOWKEY_TRY(lowkey_second_moment(fit->sample->query, fit->sample->n_tokens, layer->n_q_heads, h * per_head,
                                    per_head, side->head_dim, a, NULL));
    double mean = 0;
    for (size_t i = 0; i < D; i++) mean += a[i * (D + 1)] / (double)D;
    for (size_t i = 0; i < D; i++) a[i * (D + 1)] += mean > 0 ? damp * mean : 1;
    return LOWKEY_OK;
}

static void fit_head(void *arg, int h)
{
    const struct fit *fit = arg;
    const struct lowkey_peer_side *side = fit->side;
    const struct lowkey_peer_sample *sample = fit->sample;
    const int dim = side->head_dim, stride = (sample->n_tokens + MAX_TOKENS - 1) / MAX_TOKENS;
    const int n = (sample->n_tokens + stride - 1) / stride;
    const size_t D = (size_t)dim, row = D * (size_t)side->n_heads;
    const float *from = (side->which == LOWKEY_STORE_KEY ? sample->key : sample->value) + (size_t)h * D;
    float *x = malloc(2 * D * (size_t)n * sizeof *x);
    double *a = malloc((D * D + D) * sizeof *a), *diagonal = a ? a + D * D : NULL;
    fit->rates[h] = NAN;
    if (x && a && weigh(fit, h, a) == LOWKEY_OK) {
        float *target = x + D * (size_t)n;
        double low = -8, high = 8, square = 0; /* log2 of c over the data's size: some 10 bits to none */
        factor(dim, a, diagonal, rows_of(side, h));
        for (size_t j = 0; j < D; j++)
            for (size_t t = 0; t < (size_t)n; t++) {
                x[j * (size_t)n + t] = from[t * (size_t)stride * row + j];
                square += pow((double)x[j * (size_t)n + t] * diagonal[j], 2) / (double)D / n;
            }
        const double unit = square > 0 ? sqrt(square) : 1;
        for (int i = 0; i < N_HALVINGS; i++) {
            const double middle = (low + high) / 2;
            fit->rates[h] = run(dim, n, x, target, diagonal, unit * exp2(middle), rows_of(side, h),
                                channels_of(side, h));
            if (fit->rates[h] > side->setting.rate)
                low = middle;
            else
                high = middle;
        }
        fit->rates[h] = run(dim, n, x, target, diagonal, unit * exp2(high), rows_of(side, h),
                            channels_of(side, h));
    }
    free(x);
    free(a);
}

static lowkey_status prepare(struct lowkey_peer_side *side, const struct lowkey_peer_sample *sample,
                             int n_threads, lowkey_error *err)
{
    const size_t D = (size_t)side->head_dim, H = (size_t)side->n_heads, head_size = 2 * D + D * D;
    struct watersic *fitted = side->fitted = calloc(1, sizeof *fitted + H * head_size * sizeof(float));
    double *rates = calloc(H, sizeof *rates);
    if (fitted && rates) {
        fitted->head_size = head_size;
        struct fit fit = { side, sample, rates };
        lowkey_threads_run(&n_threads, side->n_heads, fit_head, &fit);
        for (size_t h = 0; h < H; h++) side->bits += rates[h] / (double)H;
    }
    free(rates);
    if (!fitted || !rates || isnan(side->bits))
        return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for channels");
    return LOWKEY_OK;
}

static void quantize(const struct lowkey_peer_side *side, float *x, int n_tokens)
{
    const int dim = side->head_dim, H = side->n_heads;
    for (int i = 0; i < n_tokens * H; i++) {
        const struct channel *channels = channels_of(side, i % H);
        const float *rows = rows_of(side, i % H);
        float *vector = x + (size_t)i * (size_t)dim, target[LOWKEY_MAX_HEAD_DIM];
        for (int c = 0; c < dim; c++) target[c] = vector[c];
        for (int j = dim - 1; j >= 0; j--) {
            const float step = channels[j].step,
                        stored = channels[j].shrink * step * code_of(target[j], step);
            const float error = stored - vector[j], *row = rows + (size_t)j * (size_t)dim;
            for (int c = 0; c < j; c++) target[c] -= row[c] * error;
            vector[j] = stored;
        }
    }
}

const struct lowkey_peer_method lowkey_peer_watersic = { prepare, NULL, quantize };
