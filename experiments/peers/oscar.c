/* oscar.c - OSCAR (arXiv 2605.17757): a rotation of each layer's keys and of its values, 2 bits per token in
 * groups of up to 128 channels of a head after clipping. The rotation is R = U H P: U the eigenvectors of the
 * covariance that attention consumes, H Hadamard's, P a permutation by bit reversal of the eigenvalues'
 * order, which spreads the strong directions over groups. For keys (after RoPE) the covariance is that of the
 * queries; for values theirs, each token weighted by k' C k, C the covariance of its head's queries, weights
 * of mean 1. All KV heads of a layer share the mean covariance. A token's vector is clipped, head by head, to
 * the magnitude at rank floor(ratio * dim) of its own, ratio 0.96 for keys and 0.92 for values. Sinks (64)
 * are the evaluation's, the recent 256 tokens the window's. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "experiments/peers/minmax.h"
#include "experiments/peers/peer_parts.h"
#include "experiments/peers/rotation.h"
#include "formats/codes.h"
#include "runtime/error.h"

struct oscar {
    int group, n_above; /* magnitudes that are clipped, the threshold's own included */
    float matrix[1]; /* R[dim][dim], R' */
};

/* out: the second moment of head h's values, tokens weighing k' C k over its mean. */
static lowkey_status weighted_values(const struct lowkey_peer_side *side,
                                     const struct lowkey_peer_sample *sample, int h, const double *covariance,
                                     double *out, lowkey_error *err)
{
    const lowkey_layer_desc *layer = side->layer;
    const size_t K = (size_t)layer->key_head_dim, V = (size_t)layer->value_head_dim,
                 H = (size_t)layer->n_kv_heads;
    const size_t n = (size_t)sample->n_tokens;
    float *c = malloc(K * K * sizeof *c), *rows = malloc(n * V * sizeof *rows),
          *turned = malloc(K * sizeof *turned);
    double *weight = malloc(n * sizeof *weight), total = 0;
    lowkey_status status = LOWKEY_OK;
    if (!c || !rows || !turned || !weight)
        status = lowkey_fail(err, LOWKEY_ENOMEM, "no memory for weighted values");
    for (size_t i = 0; status == LOWKEY_OK && i < K * K; i++) c[i] = (float)covariance[i];
    for (size_t t = 0; status == LOWKEY_OK && t < n; t++) {
        const float *key = sample->key + (t * H + (size_t)h) * K;
        lowkey_multiply_rows(key, 1, layer->key_head_dim, c, turned);
        weight[t] = 0;
        for (size_t i = 0; i < K; i++) weight[t] += (double)turned[i] * (double)key[i];
        weight[t] = fmax(weight[t], 0); /* rounding */
        total += weight[t];
    }
    for (size_t t = 0; status == LOWKEY_OK && t < n; t++) {
        const float *value = sample->value + (t * H + (size_t)h) * V;
        const float root = total > 0 ? (float)sqrt(weight[t] / total * (double)n) : 1;
        for (size_t i = 0; i < V; i++) rows[t * V + i] = root * value[i];
    }
    if (status == LOWKEY_OK) status = lowkey_second_moment(rows, sample->n_tokens, 1, 0, 1, (int)V, out, err);
    free(c);
    free(rows);
    free(turned);
    free(weight);
    return status;
}

/* covariance[dim][dim]: the mean over KV heads. scratch: three times as large as the larger head. */
static lowkey_status fit_covariance(const struct lowkey_peer_side *side,
                                    const struct lowkey_peer_sample *sample, double *covariance,
                                    double *scratch, lowkey_error *err)
{
    const lowkey_layer_desc *layer = side->layer;
    const size_t K = (size_t)layer->key_head_dim, D = (size_t)side->head_dim;
    const int H = layer->n_kv_heads, per_head = layer->n_q_heads / H;
    for (size_t i = 0; i < D * D; i++) covariance[i] = 0;
    for (int h = 0; h < H; h++) {
        double *own = scratch + K * K;
        LOWKEY_TRY(lowkey_second_moment(sample->query, sample->n_tokens, layer->n_q_heads, h * per_head,
                                        per_head, layer->key_head_dim, scratch, err));
        if (side->which == LOWKEY_STORE_KEY)
            own = scratch;
        else
            LOWKEY_TRY(weighted_values(side, sample, h, scratch, own, err));
        for (size_t i = 0; i < D * D; i++) covariance[i] += own[i] / H;
    }
    return LOWKEY_OK;
}

static int reversed(int i, int n)
{
    int out = 0;
    for (int bit = 1; bit < n; bit *= 2) out = 2 * out + ((i & bit) != 0);
    return out;
}

/* R = U H P; vectors[dim][dim] has the eigenvectors in columns, eigenvalues falling: column r of P takes U
 * H's there. */
static void compose(int dim, const double *vectors, double *hadamard, float *rotation)
{
    const size_t D = (size_t)dim;
    lowkey_hadamard(dim, hadamard);
    for (size_t i = 0; i < D; i++)
        for (size_t r = 0; r < D; r++) {
            double sum = 0;
            for (size_t j = 0; j < D; j++) sum += vectors[i * D + j] * hadamard[j * D + r];
            rotation[i * D + (size_t)reversed((int)r, dim)] = (float)sum;
        }
}

static lowkey_status prepare(struct lowkey_peer_side *side, const struct lowkey_peer_sample *sample,
                             int n_threads, lowkey_error *err)
{
    (void)n_threads;
    const int dim = side->head_dim;
    if (dim & (dim - 1))
        return lowkey_peer_refuse(side, err, "Hadamard's rotation needs heads of a power of 2, not %d", dim);
    const size_t square = (size_t)dim * (size_t)dim;
    const size_t most = square > (size_t)side->layer->key_head_dim * (size_t)side->layer->key_head_dim
                            ? square
                            : (size_t)side->layer->key_head_dim * (size_t)side->layer->key_head_dim;
    struct oscar *oscar = side->fitted = malloc(sizeof *oscar + 2 * square * sizeof(float));
    double *work = malloc(4 * most * sizeof *work), *values = malloc((size_t)dim * sizeof *values);
    lowkey_status status = LOWKEY_OK;
    if (!oscar || !work || !values)
        status = lowkey_fail(err, LOWKEY_ENOMEM, "no memory for a rotation of %d", dim);
    if (status == LOWKEY_OK) status = fit_covariance(side, sample, work, work + most, err);
    if (status == LOWKEY_OK) status = lowkey_eigenvectors(dim, work, values, work + most, err);
    if (status == LOWKEY_OK) {
        compose(dim, work + most, work, oscar->matrix);
        lowkey_transpose(dim, oscar->matrix, oscar->matrix + square);
        oscar->group = dim < side->setting.group ? dim : side->setting.group;
        oscar->n_above = dim - (int)(side->setting.rate * dim);
        side->bits = side->setting.bits + 32.0 / oscar->group;
    }
    free(work);
    free(values);
    return status;
}

/* To the n-th largest magnitude of x[dim]. */
static void clip(float *x, int dim, int n)
{
    float top[LOWKEY_MAX_HEAD_DIM]; /* falling */
    int found = 0;
    for (int c = 0; c < dim; c++) {
        const float magnitude = fabsf(x[c]);
        if (found == n && !(magnitude > top[n - 1])) continue;
        int at = found < n ? found++ : n - 1;
        for (; at > 0 && top[at - 1] < magnitude; at--) top[at] = top[at - 1];
        top[at] = magnitude;
    }
    const float limit = top[n - 1];
    for (int c = 0; c < dim; c++) x[c] = x[c] > limit ? limit : x[c] < -limit ? -limit : x[c];
}

static void quantize(const struct lowkey_peer_side *side, float *x, int n_tokens)
{
    const struct oscar *oscar = side->fitted;
    const int dim = side->head_dim, n = n_tokens * side->n_heads;
    const size_t D = (size_t)dim;
    for (size_t i = 0; i < (size_t)n; i++) {
        float turned[LOWKEY_MAX_HEAD_DIM];
        lowkey_multiply_rows(x + i * D, 1, dim, oscar->matrix, turned);
        clip(turned, dim, oscar->n_above);
        for (int c = 0; c < dim; c += oscar->group)
            lowkey_minmax_row(turned + c, oscar->group, side->setting.bits);
        lowkey_multiply_rows(turned, 1, dim, oscar->matrix + D * D, x + i * D);
    }
}

const struct lowkey_peer_method lowkey_peer_oscar = { prepare, NULL, quantize };
