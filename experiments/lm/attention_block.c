/* attention_block.c - attention of a block of queries of one head. Forward keeps all scores of the block; the way back
 * makes them again, a tile of keys at a time, from the log-sum-exp. */
#include "experiments/lm/attention_block.h"

#include <cblas.h>
#include <math.h>
#include <string.h>

#include "experiments/lm/exponential.h"

float lowkey_attention_scale(const lowkey_layer_desc *layer)
{
    return (float)(layer->logit_scale != 0 ? layer->logit_scale : 1 / sqrt(layer->key_head_dim));
}

int lowkey_attention_start(int window, int position)
{
    return window > 0 && position >= window ? position - window + 1 : 0;
}

float lowkey_softmax(float *scores, int first, int end, int n)
{
    const float max = lowkey_largest(scores + first, end - first, NULL);
    const double sum = lowkey_exp_row(scores + first, end - first, max);
    const float scale = (float)(1 / sum);
    for (int t = first; t < end; t++) scores[t] *= scale;
    memset(scores, 0, (size_t)first * sizeof *scores);
    memset(scores + end, 0, (size_t)(n - end) * sizeof *scores);
    return (float)((double)max + log(sum));
}

void lowkey_attention_block(const struct lowkey_attention_head *head,
                            const struct lowkey_attention_queries *queries, float *scores, float *mixed,
                            float *lse)
{
    const int n_rows = queries->n_rows, start = lowkey_attention_start(queries->window, queries->first);
    const int n = queries->first + n_rows - start; /* tokens that any of them sees */
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n_rows, n, head->key_dim, head->scale,
                queries->queries, head->key_dim, head->keys + (size_t)start * (size_t)head->key_stride,
                head->key_stride, 0, scores, n);
    for (int j = 0; j < n_rows; j++) {
        const int position = queries->first + j, first = lowkey_attention_start(queries->window, position);
        const float sum = lowkey_softmax(scores + (size_t)j * (size_t)n, first - start, position + 1 - start,
                                         n);
        if (lse) lse[(size_t)j * (size_t)queries->lse_stride] = sum;
    }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n_rows, head->value_dim, n, 1, scores, n,
                head->values + (size_t)start * (size_t)head->value_stride, head->value_stride, 0, mixed,
                queries->mixed_stride);
}

static int within(int x, int n) /* 0..n */
{
    return x < 0 ? 0 : x < n ? x : n;
}

/* With p the softmax, d = mixed_grad . v_t its gradient and m = sum p d = mixed_grad . mixed: that of a score before
 * scale is p (d - m) scale. Of queries j, tokens first_token..first_token+n-1. probability: in scores, out p; grad: in d. */
static void softmax_back(const struct lowkey_attention_queries *queries, int first_token, int n, float scale,
                         const float *lse, const double *mean, float *probability, float *grad)
{
    for (int j = 0; j < queries->n_rows; j++) {
        float *p = probability + (size_t)j * (size_t)n, *d = grad + (size_t)j * (size_t)n;
        const int position = queries->first + j;
        const int begin = within(lowkey_attention_start(queries->window, position) - first_token, n),
                  end = within(position + 1 - first_token, n);
        const float m = (float)mean[j];
        lowkey_exp_row(p + begin, end - begin, lse[(size_t)j * (size_t)queries->lse_stride]);
        for (int t = begin; t < end; t++) d[t] = p[t] * (d[t] - m) * scale;
        memset(p, 0, (size_t)begin * sizeof *p);
        memset(d, 0, (size_t)begin * sizeof *d);
        memset(p + end, 0, (size_t)(n - end) * sizeof *p);
        memset(d + end, 0, (size_t)(n - end) * sizeof *d);
    }
}

void lowkey_attention_block_back(const struct lowkey_attention_head *head,
                                 const struct lowkey_attention_queries *queries, const float *mixed,
                                 const float *lse, const float *mixed_grad, float *scratch, float *query_grad,
                                 float *key_grad, float *value_grad)
{
    const int n_rows = queries->n_rows, n_tokens = queries->first + n_rows, stride = queries->mixed_stride;
    const int key_dim = head->key_dim, value_dim = head->value_dim;
    const int start = lowkey_attention_start(queries->window, queries->first);
    float *probability = scratch, *grad = scratch + LOWKEY_QUERY_BLOCK * LOWKEY_KEY_TILE;
    double mean[LOWKEY_QUERY_BLOCK] = { 0 };
    for (int j = 0; j < n_rows; j++) {
        const size_t row = (size_t)j * (size_t)stride;
        for (int c = 0; c < value_dim; c++)
            mean[j] += (double)mixed[row + (size_t)c] * (double)mixed_grad[row + (size_t)c];
    }
    for (int t = start; t < n_tokens; t += LOWKEY_KEY_TILE) {
        const int n = n_tokens - t < LOWKEY_KEY_TILE ? n_tokens - t : LOWKEY_KEY_TILE;
        const float *keys = head->keys + (size_t)t * (size_t)head->key_stride;
        const float *values = head->values + (size_t)t * (size_t)head->value_stride;
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n_rows, n, key_dim, head->scale,
                    queries->queries, key_dim, keys, head->key_stride, 0, probability, n);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n_rows, n, value_dim, 1, mixed_grad, stride,
                    values, head->value_stride, 0, grad, n);
        softmax_back(queries, t, n, head->scale, lse, mean, probability, grad);
        cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, n, value_dim, n_rows, 1, probability, n,
                    mixed_grad, stride, 1, value_grad + (size_t)t * (size_t)value_dim, value_dim);
        cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, n, key_dim, n_rows, 1, grad, n, queries->queries,
                    key_dim, 1, key_grad + (size_t)t * (size_t)key_dim, key_dim);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n_rows, key_dim, n, 1, grad, n, keys,
                    head->key_stride, t > start, query_grad, key_dim);
    }
}
