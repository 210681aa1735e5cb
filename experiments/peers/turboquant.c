/* turboquant.c - TurboQuant (arXiv 2504.19874). A head's vector is divided by its norm, turned by a random
 * rotation, and each coordinate takes the nearest entry of the Lloyd-Max table for such coordinates; the norm
 * is kept in f16.
 *
 * The MSE variant is that. The inner product variant, for keys, spends one of its bits on the residual r: the
 * signs of S r with S normal, and the norm of r in f16, stand for sqrt(pi / 2) / dim |r| S' sign(S r), whose
 * product with any query is unbiased (QJL, arXiv 2406.03482). */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "experiments/peers/minmax.h"
#include "experiments/peers/peer_parts.h"
#include "experiments/peers/rotation.h"
#include "formats/codes.h"
#include "formats/half.h"
#include "runtime/error.h"

enum { BLOCK = 16 /* vectors that are turned together */, MAX_LEVELS = 256 };

struct turbo {
    float value[MAX_LEVELS], boundary[MAX_LEVELS]; /* of unit vectors times sqrt(dim) */
    float matrix[1]; /* rotation'[dim][dim], rotation, and with a residual S', S: rows are multiplied from the
                        left */
};

static lowkey_status prepare(struct lowkey_peer_side *side, int with_residual, lowkey_error *err)
{
    const int dim = side->head_dim;
    const size_t square = (size_t)dim * (size_t)dim;
    struct turbo *turbo = side->fitted = malloc(sizeof *turbo + 4 * square * sizeof(float));
    if (!turbo) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for a rotation of %d", dim);
    const unsigned long seed = 1 + 4 * (unsigned long)side->layer->index + 2 * (unsigned long)side->which;
    LOWKEY_TRY(lowkey_random_rotation(dim, seed, turbo->matrix + square, err));
    lowkey_transpose(dim, turbo->matrix + square, turbo->matrix);
    if (with_residual) {
        LOWKEY_TRY(lowkey_random_matrix(dim, seed + 1, turbo->matrix + 3 * square, err));
        lowkey_transpose(dim, turbo->matrix + 3 * square, turbo->matrix + 2 * square);
    }
    lowkey_lloyd_max(side->setting.bits - with_residual, dim, turbo->value, turbo->boundary);
    side->bits = side->setting.bits + (1 + with_residual) * 16.0 / dim;
    return LOWKEY_OK;
}

static lowkey_status prepare_mse(struct lowkey_peer_side *side, const struct lowkey_peer_sample *sample,
                                 int n_threads, lowkey_error *err)
{
    (void)sample, (void)n_threads;
    return prepare(side, 0, err);
}

static lowkey_status prepare_product(struct lowkey_peer_side *side, const struct lowkey_peer_sample *sample,
                                     int n_threads, lowkey_error *err)
{
    (void)sample, (void)n_threads;
    return prepare(side, 1, err);
}

static double norm_of(const float *x, int n)
{
    double sum = 0;
    for (int c = 0; c < n; c++) sum += (double)x[c] * (double)x[c];
    return sqrt(sum);
}

static double in_f16(double x)
{
    return (double)lowkey_f16_to_f32(lowkey_f32_to_f16_saturate((float)x, NULL));
}

/* x[n][dim] in place; turned: scratch of the same size. */
static void quantize_block(const struct turbo *turbo, int n_levels, float *x, int n, int dim, float *turned)
{
    const double unit = sqrt(dim);
    double norm[BLOCK];
    lowkey_multiply_rows(x, n, dim, turbo->matrix, turned);
    for (int i = 0; i < n; i++) {
        float *row = turned + (size_t)i * (size_t)dim;
        norm[i] = norm_of(x + (size_t)i * (size_t)dim, dim);
        const float factor = norm[i] > 0 ? (float)(unit / norm[i]) : 0;
        for (int c = 0; c < dim; c++) row[c] *= factor;
    }
    lowkey_nearest_entries(turned, n * dim, turbo->value, turbo->boundary, n_levels);
    for (int i = 0; i < n; i++) {
        const float factor = (float)(in_f16(norm[i]) / unit);
        for (int c = 0; c < dim; c++) turned[(size_t)i * (size_t)dim + (size_t)c] *= factor;
    }
    lowkey_multiply_rows(turned, n, dim, turbo->matrix + (size_t)dim * (size_t)dim, x);
}

static void quantize_mse(const struct lowkey_peer_side *side, float *x, int n_tokens)
{
    const int dim = side->head_dim, n = n_tokens * side->n_heads;
    float turned[BLOCK * LOWKEY_MAX_HEAD_DIM];
    for (int i = 0; i < n; i += BLOCK)
        quantize_block(side->fitted, 1 << side->setting.bits, x + (size_t)i * (size_t)dim,
                       n - i < BLOCK ? n - i : BLOCK, dim, turned);
}

static void quantize_product(const struct lowkey_peer_side *side, float *x, int n_tokens)
{
    const struct turbo *turbo = side->fitted;
    const int dim = side->head_dim, n_all = n_tokens * side->n_heads;
    const float *projection = turbo->matrix + 2 * (size_t)dim * (size_t)dim;
    float turned[BLOCK * LOWKEY_MAX_HEAD_DIM], residual[BLOCK * LOWKEY_MAX_HEAD_DIM];
    for (int first = 0; first < n_all; first += BLOCK) {
        const int n = n_all - first < BLOCK ? n_all - first : BLOCK;
        float *block = x + (size_t)first * (size_t)dim;
        memcpy(residual, block, (size_t)(n * dim) * sizeof *residual);
        quantize_block(turbo, 1 << (side->setting.bits - 1), block, n, dim, turned);
        for (int c = 0; c < n * dim; c++) residual[c] -= block[c];
        lowkey_multiply_rows(residual, n, dim, projection, turned);
        for (int i = 0; i < n; i++) {
            const size_t at = (size_t)i * (size_t)dim;
            const float length = (float)(sqrt(M_PI / 2) / dim * in_f16(norm_of(residual + at, dim)));
            for (int c = 0; c < dim; c++)
                turned[at + (size_t)c] = turned[at + (size_t)c] < 0 ? -length : length;
        }
        lowkey_multiply_rows(turned, n, dim, projection + (size_t)dim * (size_t)dim, residual);
        for (int c = 0; c < n * dim; c++) block[c] += residual[c];
    }
}

const struct lowkey_peer_method lowkey_peer_turboquant = { prepare_mse, NULL, quantize_mse };
const struct lowkey_peer_method lowkey_peer_turboquant_product = { prepare_product, NULL, quantize_product };
