/* squat.c - SQuat (arXiv 2503.24358) for keys, on KIVI's groups: channels are quantized in two halves, and
 * the second half is first moved so that the error of the whole is as orthogonal as can be to the subspace
 * that queries span. With e the error, the cost is e' (I + lambda Q' Q) e, Q the queries' first r singular
 * directions times their singular values; given the first half's error f, the best error of the second is
 * -A22^-1 A21 f.
 *
 * Authors' settings: lambda 0.001, r 60 and halves of 64 at head_dim 128 (here in proportion), keys after
 * RoPE. They take the queries of the prompt; here, as in their offline variant, captured ones, scaled to a
 * prompt of 2,048 tokens. */
#include <stdlib.h>
#include <string.h>

#include <gsl/gsl_linalg.h>

#include "experiments/peers/minmax.h"
#include "experiments/peers/peer_parts.h"
#include "experiments/peers/rotation.h"
#include "formats/codes.h"
#include "runtime/error.h"

enum { PROMPT = 2048 };

static const double lambda = 0.001;

struct squat {
    float move[1]; /* [n_heads][half][dim - half]: row c is what the second half moves by for an error of 1 in
                      channel c */
};

static int half_of(const struct lowkey_peer_side *side)
{
    return side->head_dim / 2;
}

/* a[D][D] = I + lambda Q' Q of one KV head; scratch: 2 D^2 + D. */
static lowkey_status query_cost(const struct lowkey_peer_side *side, const struct lowkey_peer_sample *sample,
                                int h, double *a, double *scratch, lowkey_error *err)
{
    const lowkey_layer_desc *layer = side->layer;
    const size_t D = (size_t)side->head_dim;
    const int per_head = layer->n_q_heads / layer->n_kv_heads, rank = side->head_dim * 60 / 128;
    double *moment = scratch, *vectors = scratch + D * D, *values = scratch + 2 * D * D;
    LOWKEY_TRY(lowkey_second_moment(sample->query, sample->n_tokens, layer->n_q_heads, h * per_head, per_head,
                                    side->head_dim, moment, err));
    LOWKEY_TRY(lowkey_eigenvectors(side->head_dim, moment, values, vectors, err));
    for (size_t i = 0; i < D; i++)
        for (size_t j = 0; j < D; j++) {
            double sum = i == j;
            for (size_t r = 0; r < (size_t)rank; r++)
                sum += lambda * PROMPT * per_head * values[r] * vectors[i * D + r] * vectors[j * D + r];
            a[i * D + j] = sum;
        }
    return LOWKEY_OK;
}

static lowkey_status fit_head(const struct lowkey_peer_side *side, const struct lowkey_peer_sample *sample,
                              int h, double *work, lowkey_error *err)
{
    const size_t D = (size_t)side->head_dim, first = (size_t)half_of(side), second = D - first;
    struct squat *squat = side->fitted;
    double *a = work;
    LOWKEY_TRY(query_cost(side, sample, h, a, work + D * D, err));
    double *a22 = work + D * D, *column = a22 + second * second;
    for (size_t i = 0; i < second; i++)
        for (size_t j = 0; j < second; j++) a22[i * second + j] = a[(first + i) * D + first + j];
    gsl_matrix_view matrix = gsl_matrix_view_array(a22, second, second);
    if (gsl_linalg_cholesky_decomp1(&matrix.matrix))
        return lowkey_fail(err, LOWKEY_EINVAL, "layer %d: queries of head %d are not usable",
                           side->layer->index, h);
    for (size_t c = 0; c < first; c++) {
        for (size_t i = 0; i < second; i++) column[i] = a[(first + i) * D + c];
        gsl_vector_view vector = gsl_vector_view_array(column, second);
        gsl_linalg_cholesky_svx(&matrix.matrix, &vector.vector);
        for (size_t i = 0; i < second; i++)
            squat->move[((size_t)h * first + c) * second + i] = (float)-column[i];
    }
    return LOWKEY_OK;
}

static lowkey_status prepare(struct lowkey_peer_side *side, const struct lowkey_peer_sample *sample,
                             int n_threads, lowkey_error *err)
{
    (void)n_threads;
    const size_t D = (size_t)side->head_dim;
    side->fitted = malloc(sizeof(struct squat) + (size_t)side->n_heads * D * D * sizeof(float));
    double *work = malloc((3 * D * D + 2 * D) * sizeof *work);
    lowkey_status status = LOWKEY_OK;
    if (!side->fitted || !work)
        status = lowkey_fail(err, LOWKEY_ENOMEM, "no memory for subspaces of %d", (int)D);
    for (int h = 0; h < side->n_heads && status == LOWKEY_OK; h++)
        status = fit_head(side, sample, h, work, err);
    free(work);
    side->bits = side->setting.bits + 32.0 / side->setting.group;
    return status;
}

static void quantize(const struct lowkey_peer_side *side, float *x, int n_tokens)
{
    enum { GROUP = 32 };
    const struct squat *squat = side->fitted;
    const size_t D = (size_t)side->head_dim, first = (size_t)half_of(side), second = D - first;
    const size_t row = (size_t)side->n_heads * D;
    float error[GROUP * LOWKEY_MAX_HEAD_DIM];
    for (size_t h = 0; h < (size_t)side->n_heads; h++) {
        float *head = x + h * D;
        for (size_t t = 0; t < (size_t)n_tokens; t++)
            memcpy(error + t * first, head + t * row, first * sizeof *error);
        lowkey_minmax_columns(head, n_tokens, row, (int)first, NULL, side->setting.bits);
        for (size_t t = 0; t < (size_t)n_tokens; t++)
            for (size_t c = 0; c < first; c++) {
                const float e = head[t * row + c] - error[t * first + c];
                const float *move = squat->move + (h * first + c) * second;
                for (size_t i = 0; i < second; i++) head[t * row + first + i] += e * move[i];
            }
        lowkey_minmax_columns(head + first, n_tokens, row, (int)second, NULL, side->setting.bits);
    }
}

const struct lowkey_peer_method lowkey_peer_squat_keys = { prepare, NULL, quantize };
