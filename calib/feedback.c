/* feedback.c - the factor of error feedback (METHOD, "Error feedback when packing"). */
#include "calib/feedback.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "calib/command.h"
#include "calib/threads.h"
#include "formats/half.h"
#include "runtime/error.h"

enum { RUN = 512 }; /* tokens of a sample taken together: so the sums are the same however files are cut */

struct moments { /* of one run of tokens */
    int64_t n_tokens;
    int n_heads, head_dim;
    const float *rows; /* [n_tokens][n_heads][head_dim] */
    double *scratch; /* [n_heads][RUN][head_dim] */
    double *out; /* [n_heads][head_dim][head_dim], lower triangle */
};

static void add_head(void *arg, int h)
{
    const struct moments *m = arg;
    const size_t D = (size_t)m->head_dim, n = (size_t)m->n_tokens;
    double *rows = m->scratch + (size_t)h * RUN * D;
    for (size_t t = 0; t < n; t++)
        for (size_t c = 0; c < D; c++)
            rows[t * D + c] = (double)m->rows[(t * (size_t)m->n_heads + (size_t)h) * D + c];
    cblas_dsyrk(CblasRowMajor, CblasLower, CblasTrans, (int)D, (int)n, 1, rows, (int)D, 1,
                m->out + (size_t)h * D * D, (int)D);
}

lowkey_status lowkey_gradient_moments(const lowkey_captures *captures, int layer, enum lowkey_stream stream,
                                      int n_threads, double *out, lowkey_error *err)
{
    const lowkey_layer_desc *desc = &captures->info->layers[layer];
    const int H = lowkey_stream_heads(desc, stream), D = lowkey_stream_head_dim(desc, stream);
    const size_t row = (size_t)H * (size_t)D;
    float *rows = malloc(RUN * row * sizeof *rows);
    double *scratch = malloc(RUN * row * sizeof *scratch);
    lowkey_status status = LOWKEY_OK;
    if (!rows || !scratch) status = lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %d gradient rows", RUN);
    memset(out, 0, row * (size_t)D * sizeof *out);
    for (int s = 0; s < captures->n_samples && status == LOWKEY_OK; s++) {
        const struct lowkey_sample *sample = &captures->samples[s];
        for (int64_t first = sample->n_sinks; first < sample->n_tokens && status == LOWKEY_OK; first += RUN) {
            const int64_t n = sample->n_tokens - first < RUN ? sample->n_tokens - first : RUN;
            status = lowkey_captures_read(captures, layer, stream, s, first, n, 0, H, rows, err);
            struct moments moments = { n, H, D, rows, scratch, out };
            if (status == LOWKEY_OK) lowkey_threads_run(&n_threads, H, add_head, &moments);
            if (status == LOWKEY_OK && lowkey_interrupted())
                status = lowkey_fail(err, LOWKEY_ECANCELLED, "interrupted");
        }
    }
    for (size_t h = 0; h < (size_t)H; h++)
        for (size_t i = 0; i < (size_t)D; i++)
            for (size_t j = i + 1; j < (size_t)D; j++)
                out[(h * (size_t)D + i) * (size_t)D + j] = out[(h * (size_t)D + j) * (size_t)D + i];
    free(rows);
    free(scratch);
    return status;
}

/* Append first..last-1 of the plain order, n_together side by side, those of the greatest width first. */
static int order_by_width(const uint16_t *plain, int first, int last, int n_together, const uint8_t *bits,
                          int n, uint16_t *order)
{
    for (int width = 16; width > 0; width--)
        for (int r = first; r < last; r += n_together) {
            int widest = 0;
            for (int i = 0; i < n_together; i++)
                widest = bits[plain[r + i]] > widest ? bits[plain[r + i]] : widest;
            for (int i = 0; i < n_together && widest == width; i++) order[n++] = plain[r + i];
        }
    return n;
}

void lowkey_row_order(int head_dim, int rope_dims, lowkey_pairing pairing, const uint8_t *bits,
                      uint16_t *order)
{
    uint16_t plain[LOWKEY_MAX_HEAD_DIM];
    lowkey_default_order(head_dim, rope_dims, pairing, plain); /* pairs, then the rest */
    const int n = order_by_width(plain, 0, rope_dims, 2, bits, 0, order);
    order_by_width(plain, rope_dims, head_dim, 1, bits, n, order);
}

/* A = l D l' with l unit lower triangular, in place below the diagonal; D takes the diagonal. l_ij is what
 * Cholesky's L_ij / L_jj is. 0: not positive definite. */
static int factor_in_place(size_t n, double *A)
{
    for (size_t j = 0; j < n; j++) {
        for (size_t k = 0; k < j; k++) A[j * n + j] -= A[k * n + k] * A[j * n + k] * A[j * n + k];
        if (!(A[j * n + j] > 0)) return 0;
        for (size_t i = j + 1; i < n; i++) {
            for (size_t k = 0; k < j; k++) A[i * n + j] -= A[k * n + k] * A[i * n + k] * A[j * n + k];
            A[i * n + j] /= A[j * n + j];
        }
    }
    return 1;
}

/* The damped matrix, rows in the given order and its mean diagonal 1 + damp, factored: *l is to be freed, NULL where
 * H = 0. before: [D] its diagonal; NULL: not wanted. */
static lowkey_status factor_matrix(int head_dim, const double *H, const uint16_t *order, double damp, double **l,
                                   double *before, lowkey_error *err)
{
    const size_t D = (size_t)head_dim;
    double mean = 0;
    *l = NULL;
    for (size_t c = 0; c < D; c++) mean += H[c * D + c] / (double)D;
    if (mean == 0) return LOWKEY_OK;
    double *A = *l = malloc(D * D * sizeof *A);
    if (!A) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for a factor of %d channels", head_dim);
    for (size_t i = 0; i < D; i++)
        for (size_t j = 0; j < D; j++) A[i * D + j] = H[order[i] * D + order[j]] / mean + (i == j ? damp : 0);
    for (size_t j = 0; j < D && before; j++) before[j] = A[j * D + j];
    if (factor_in_place(D, A)) return LOWKEY_OK;
    free(A);
    *l = NULL;
    return lowkey_fail(err, LOWKEY_EINVAL,
                       "feedback: the matrix of %d channels cannot be factored with damp %g; raise it",
                       head_dim, damp);
}

float lowkey_metric_weight(double weight, double largest)
{
    if (!(largest > 0)) return 1;
    return (float)fmin(fmax(weight / largest, 0x1p-40), 1); /* fmin: of an infinite weight */
}

lowkey_status lowkey_feedback_factor(int head_dim, const double *H, const uint16_t *order, double damp,
                                     float *factor, float *metric_weight, int *is_zero, lowkey_error *err)
{
    const size_t D = (size_t)head_dim;
    double *l, largest = 0;
    memset(factor, 0, D * D * sizeof *factor);
    LOWKEY_TRY(factor_matrix(head_dim, H, order, damp, &l, NULL, err));
    *is_zero = !l;
    for (size_t i = 0; i < D && l; i++)
        for (size_t j = 0; j < i; j++)
            factor[i * D + j] = lowkey_f16_to_f32(lowkey_f32_to_f16_saturate((float)l[i * D + j], NULL));
    for (size_t j = 0; j < D && l; j++) largest = fmax(largest, l[j * D + j]);
    for (size_t j = 0; j < D && metric_weight; j++)
        metric_weight[order[j]] = lowkey_metric_weight(l ? l[j * D + j] : 1, largest);
    free(l);
    return LOWKEY_OK;
}

lowkey_status lowkey_feedback_left(int head_dim, const double *H, const uint16_t *order, double damp,
                                   double *left, lowkey_error *err)
{
    const size_t D = (size_t)head_dim;
    double before[LOWKEY_MAX_HEAD_DIM], *l;
    LOWKEY_TRY(factor_matrix(head_dim, H, order, damp, &l, before, err));
    for (size_t j = 0; j < D; j++) left[order[j]] = l ? l[j * D + j] / before[j] : 1;
    free(l);
    return LOWKEY_OK;
}
