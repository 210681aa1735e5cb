/* layer.c - one layer's work on rows of tokens, forward: norms, projections, bias, QK-norm, SwiGLU. */
#include "experiments/lm/layer.h"

#include <cblas.h>
#include <math.h>
#include <string.h>

#include "experiments/lm/exponential.h"

struct lowkey_layer_widths lowkey_layer_widths(const lowkey_model *model, int l)
{
    const lowkey_layer_desc *layer = &model->geometry[l];
    return (struct lowkey_layer_widths) {
        .hidden = (size_t)model->hidden_size,
        .ffn = (size_t)model->intermediate_size,
        .query = (size_t)layer->n_q_heads * (size_t)layer->key_head_dim,
        .key = (size_t)layer->n_kv_heads * (size_t)layer->key_head_dim,
        .value = (size_t)layer->n_kv_heads * (size_t)layer->value_head_dim,
        .mixed = (size_t)layer->n_q_heads * (size_t)layer->value_head_dim,
    };
}

static float *from(float *rows, size_t first, size_t width)
{
    return rows ? rows + first * width : NULL;
}

struct lowkey_layer_rows lowkey_layer_rows_from(const struct lowkey_layer_rows *rows,
                                                const struct lowkey_layer_widths *widths, size_t first)
{
    return (struct lowkey_layer_rows) {
        .residual = from(rows->residual, first, widths->hidden),
        .normed = from(rows->normed, first, widths->hidden),
        .raw_query = from(rows->raw_query, first, widths->query),
        .raw_key = from(rows->raw_key, first, widths->key),
        .query = from(rows->query, first, widths->query),
        .key = from(rows->key, first, widths->key),
        .value = from(rows->value, first, widths->value),
        .mixed = from(rows->mixed, first, widths->mixed),
        .attended = from(rows->attended, first, widths->hidden),
        .fed = from(rows->fed, first, widths->hidden),
        .middle = from(rows->middle, first, widths->hidden),
        .out = from(rows->out, first, widths->hidden),
        .gate = from(rows->gate, first, widths->ffn),
        .up = from(rows->up, first, widths->ffn),
        .act = from(rows->act, first, widths->ffn),
    };
}

struct lowkey_layer_grads lowkey_layer_grads_from(const struct lowkey_layer_grads *grads,
                                                  const struct lowkey_layer_widths *widths, size_t first)
{
    return (struct lowkey_layer_grads) {
        .residual = from(grads->residual, first, widths->hidden),
        .normed = from(grads->normed, first, widths->hidden),
        .query = from(grads->query, first, widths->query),
        .key = from(grads->key, first, widths->key),
        .value = from(grads->value, first, widths->value),
        .mixed = from(grads->mixed, first, widths->mixed),
        .gate = from(grads->gate, first, widths->ffn),
        .up = from(grads->up, first, widths->ffn),
    };
}

static float rms_scale(const float *x, int n, double epsilon)
{
    double sum = 0;
    for (int c = 0; c < n; c++) sum += (double)x[c] * (double)x[c];
    return (float)(1 / sqrt(sum / n + epsilon));
}

void lowkey_rms_norm(const float *x, const float *weight, int n, double epsilon, float *out)
{
    const float scale = rms_scale(x, n, epsilon);
    for (int c = 0; c < n; c++) out[c] = x[c] * scale * weight[c];
}

/* out += x / rms(x) * weight */
static void rms_norm_add(const float *x, const float *weight, int n, double epsilon, float *out)
{
    const float scale = rms_scale(x, n, epsilon);
    for (int c = 0; c < n; c++) out[c] += x[c] * scale * weight[c];
}

static void norm_rows(const lowkey_model *model, const float *x, const float *weight, int n, float *out)
{
    const size_t width = (size_t)model->hidden_size;
    for (size_t t = 0; t < (size_t)n; t++)
        lowkey_rms_norm(x + t * width, weight, model->hidden_size, model->rms_norm_eps, out + t * width);
}

/* out[n][n_out] = x[n][n_in] W' (+ bias), or added to out. W: [n_out][n_in] */
static void project(const float *x, int n, int n_in, const float *weight, int n_out, const float *bias,
                    int add, float *out)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n, n_out, n_in, 1, x, n_in, weight, n_in, (float)add,
                out, n_out);
    for (int t = 0; bias && t < n; t++)
        for (int c = 0; c < n_out; c++) out[(size_t)t * (size_t)n_out + (size_t)c] += bias[c];
}

void lowkey_layer_before_attention(const lowkey_model *model, int l, const struct lowkey_layer_rows *rows,
                                   int n)
{
    const struct lowkey_model_layer *weights = &model->layers[l];
    const lowkey_layer_desc *layer = &model->geometry[l];
    const int hidden = model->hidden_size, dim = layer->key_head_dim;
    float *query = weights->query_norm ? rows->raw_query : rows->query;
    float *key = weights->query_norm ? rows->raw_key : rows->key;
    norm_rows(model, rows->residual, weights->attention_norm, n, rows->normed);
    project(rows->normed, n, hidden, weights->query_proj, layer->n_q_heads * dim, weights->query_bias, 0,
            query);
    project(rows->normed, n, hidden, weights->key_proj, layer->n_kv_heads * dim, weights->key_bias, 0, key);
    project(rows->normed, n, hidden, weights->value_proj, layer->n_kv_heads * layer->value_head_dim,
            weights->value_bias, 0, rows->value);
    if (!weights->query_norm) return;
    for (size_t r = 0; r < (size_t)n * (size_t)layer->n_q_heads; r++)
        lowkey_rms_norm(query + r * (size_t)dim, weights->query_norm, dim, model->rms_norm_eps,
                        rows->query + r * (size_t)dim);
    for (size_t r = 0; r < (size_t)n * (size_t)layer->n_kv_heads; r++)
        lowkey_rms_norm(key + r * (size_t)dim, weights->key_norm, dim, model->rms_norm_eps,
                        rows->key + r * (size_t)dim);
}

void lowkey_layer_embed(const lowkey_model *model, const int32_t *tokens, int n, float *residual)
{
    const size_t width = (size_t)model->hidden_size;
    for (size_t t = 0; t < (size_t)n; t++)
        memcpy(residual + t * width, model->token_embedding + (size_t)tokens[t] * width,
               width * sizeof(float));
    if (model->embedding_scale != 0 && model->embedding_scale != 1)
        for (size_t i = 0; i < (size_t)n * width; i++) residual[i] *= (float)model->embedding_scale;
}

/* act = activation(gate) * up; act may be gate. */
static void activate(enum lowkey_activation activation, const float *gate, const float *up, size_t n,
                     float *act)
{
    if (act != gate) memcpy(act, gate, n * sizeof *act);
    if (activation == LOWKEY_SILU)
        lowkey_swiglu(act, up, n);
    else
        lowkey_geglu(act, up, n);
}

/* out = residual + x W', through a norm of what is added where weight is not NULL, which needs rows `added`. */
static void add_projection(const lowkey_model *model, const float *x, int n, int n_in, const float *proj,
                           const float *norm, const float *residual, float *added, float *out)
{
    const size_t hidden = (size_t)model->hidden_size, n_residual = (size_t)n * hidden;
    if (out != residual) memcpy(out, residual, n_residual * sizeof *out);
    project(x, n, n_in, proj, model->hidden_size, NULL, !norm, norm ? added : out);
    for (size_t t = 0; norm && t < n_residual; t += hidden)
        rms_norm_add(added + t, norm, model->hidden_size, model->rms_norm_eps, out + t);
}

void lowkey_layer_after_attention(const lowkey_model *model, int l, const struct lowkey_layer_rows *rows,
                                  int n)
{
    const struct lowkey_model_layer *weights = &model->layers[l];
    const lowkey_layer_desc *layer = &model->geometry[l];
    const int hidden = model->hidden_size, ffn = model->intermediate_size;
    add_projection(model, rows->mixed, n, layer->n_q_heads * layer->value_head_dim, weights->output_proj,
                   weights->post_attention_norm, rows->residual, rows->attended, rows->middle);
    norm_rows(model, rows->middle, weights->ffn_norm, n, rows->normed);
    project(rows->normed, n, hidden, weights->gate_proj, ffn, NULL, 0, rows->gate);
    project(rows->normed, n, hidden, weights->up_proj, ffn, NULL, 0, rows->up);
    activate(model->activation, rows->gate, rows->up, (size_t)n * (size_t)ffn, rows->act);
    add_projection(model, rows->act, n, ffn, weights->down_proj, weights->post_ffn_norm, rows->middle,
                   rows->fed, rows->out);
}
