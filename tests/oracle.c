/* oracle.c - softmax(scale * RoPE(q) . RoPE(k)) v, as it is written. */
#include "tests/oracle.h"

#include <math.h>
#include <stdlib.h>

static void pair_of(const lowkey_layer_desc *layer, int i, int *first, int *second)
{
    const int is_half = layer->rope_pairing == LOWKEY_PAIR_HALF;
    *first = is_half ? i : 2 * i;
    *second = is_half ? i + layer->rope_dims / 2 : 2 * i + 1;
}

void lowkey_oracle_rope(const lowkey_layer_desc *layer, double position, double *x)
{
    for (int i = 0; i < layer->rope_dims / 2; i++) {
        int a, b;
        pair_of(layer, i, &a, &b);
        const double angle = position * layer->rope_inv_freq[i], f = layer->rope_attention_factor;
        const double turned = x[a] * f * cos(angle) - x[b] * f * sin(angle);
        x[b] = x[a] * f * sin(angle) + x[b] * f * cos(angle);
        x[a] = turned;
    }
}

/* What a score can be at most: by pairs, since RoPE turns them. */
static double size_of_score(const lowkey_layer_desc *layer, const float *q, const float *k)
{
    double size = 0;
    const double f2 = layer->rope_attention_factor * layer->rope_attention_factor;
    for (int i = 0; i < layer->rope_dims / 2; i++) {
        int a, b;
        pair_of(layer, i, &a, &b);
        const double q2 = (double)q[a] * (double)q[a] + (double)q[b] * (double)q[b];
        const double k2 = (double)k[a] * (double)k[a] + (double)k[b] * (double)k[b];
        size += f2 * sqrt(q2 * k2);
    }
    for (int c = layer->rope_dims; c < layer->key_head_dim; c++) size += fabs((double)q[c] * (double)k[c]);
    return size * layer->logit_scale;
}

static double dot(const double *a, const double *b, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static void attend_row(const lowkey_layer_desc *layer, int n, int h, const double *turned, const float *keys,
                       const float *values, const float *q, double position, double *out, double *lse,
                       double *bound)
{
    const int dk = layer->key_head_dim, dv = layer->value_head_dim, n_heads = layer->n_kv_heads;
    double turned_q[256], *weights = malloc((size_t)n * sizeof *weights), max = -INFINITY, sum = 0, size = 0,
                          largest = 0;
    for (int c = 0; c < dk; c++) turned_q[c] = (double)q[c];
    lowkey_oracle_rope(layer, position, turned_q);
    for (int t = 0; t < n; t++) {
        weights[t] = layer->logit_scale *
                     dot(turned_q, turned + ((size_t)t * (size_t)n_heads + (size_t)h) * (size_t)dk, dk);
        max = fmax(max, weights[t]);
        size = fmax(size, size_of_score(layer, q, keys + (t * n_heads + h) * dk));
    }
    for (int t = 0; t < n; t++) sum += weights[t] = exp(weights[t] - max);
    for (int c = 0; c < dv; c++) out[c] = 0;
    for (int t = 0; t < n; t++)
        for (int c = 0; c < dv; c++) {
            const double v = (double)values[(t * n_heads + h) * dv + c];
            out[c] += weights[t] / sum * v;
            largest = fmax(largest, fabs(v));
        }
    *lse = max + log(sum);
    *bound = (4 * (dk + 8) * 0x1p-24 * size + (3 * fmin(n, 64) + n / 8.0 + 16) * 0x1p-24) * largest + 1e-37;
    free(weights);
}

void lowkey_oracle_attend(const lowkey_layer_desc *layer, int n_tokens, int64_t first_position,
                          const float *keys, const float *values, int n_queries, const float *queries,
                          double *out, double *lse, double *bound)
{
    const int dk = layer->key_head_dim, dv = layer->value_head_dim, n_heads = layer->n_kv_heads,
              n_q = layer->n_q_heads;
    double *turned = malloc(sizeof *turned * (size_t)(n_tokens * n_heads * dk + 1));
    for (int t = 0; t < n_tokens; t++)
        for (int h = 0; h < n_heads; h++) {
            double *row = turned + (t * n_heads + h) * dk;
            for (int c = 0; c < dk; c++) row[c] = (double)keys[(t * n_heads + h) * dk + c];
            lowkey_oracle_rope(layer, (double)(first_position + t), row);
        }
    for (int j = 0; j < n_queries; j++)
        for (int h = 0; h < n_q; h++) {
            const int token = n_tokens - n_queries + j, row = j * n_q + h;
            attend_row(layer, token + 1, h / (n_q / n_heads), turned, keys, values, queries + row * dk,
                       (double)(first_position + token), out + row * dv, lse + row, bound + row);
        }
    free(turned);
}

double lowkey_oracle_worst(int n_rows, int value_head_dim, const float *got, const double *want,
                           const double *bound)
{
    double worst = 0;
    for (int i = 0; i < n_rows * value_head_dim; i++) {
        const double share = fabs((double)got[i] - want[i]) / bound[i / value_head_dim];
        if (!(share <= worst)) worst = share == share ? share : 1e300;
    }
    return worst;
}
