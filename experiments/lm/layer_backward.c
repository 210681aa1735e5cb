/* layer_backward.c - gradients back through one layer's work on rows of tokens: activations only, no weights. */
#include <cblas.h>
#include <math.h>

#include "experiments/lm/exponential.h"
#include "experiments/lm/layer.h"
#include "kernels/element.h"

/* y_c = x_c s w_c with s = (mean(x^2) + epsilon)^-1/2, so ds/dx_c = -s^3 x_c / n. */
void lowkey_rms_norm_back(const float *x, const float *weight, const float *grad, int n, double epsilon,
                          int add, float *out)
{
    double square = 0, dot = 0;
    for (int c = 0; c < n; c++) {
        square += (double)x[c] * (double)x[c];
        dot += (double)grad[c] * (double)weight[c] * (double)x[c];
    }
    const double s = 1 / sqrt(square / n + epsilon);
    const float scale = (float)s, along = (float)(dot * s * s * s / n);
    for (int c = 0; c < n; c++) {
        const float through = grad[c] * weight[c] * scale - along * x[c];
        out[c] = add ? out[c] + through : through;
    }
}

/* grad_in[n][n_in] = grad_out[n][n_out] W, or added to it. W: [n_out][n_in] */
static void project_back(const float *grad_out, int n, int n_out, const float *weight, int n_in, int add,
                         float *grad_in)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n_in, n_out, 1, grad_out, n_out, weight, n_in,
                (float)add, grad_in, n_in);
}

static void norm_rows_back(const lowkey_model *model, const float *x, const float *weight, const float *grad,
                           int n, int add, float *out)
{
    const size_t width = (size_t)model->hidden_size;
    for (size_t t = 0; t < (size_t)n; t++)
        lowkey_rms_norm_back(x + t * width, weight, grad + t * width, model->hidden_size, model->rms_norm_eps,
                             add, out + t * width);
}

/* Both activations are g s with s = 1 / (1 + exp(-z)): z = g for SiLU, z = 2 sqrt(2 / pi) (g + 0.044715 g^3) for GELU. So
 * act = g s u, and s' = s (1 - s) z'. grad_gate: in the gradient of act, out that of gate. */
LOWKEY_CLONES("avx2", "avx512f")
static void silu_back(const float *gate, const float *up, size_t n, float *grad_gate, float *grad_up)
{
    for (size_t i = 0; i < n; i++) {
        const float g = gate[i], grad = grad_gate[i], s = 1 / (1 + lowkey_exp(-g));
        grad_up[i] = grad * g * s;
        grad_gate[i] = grad * up[i] * s * (1 + g * (1 - s));
    }
}

LOWKEY_CLONES("avx2", "avx512f")
static void gelu_back(const float *gate, const float *up, size_t n, float *grad_gate, float *grad_up)
{
    const float twice_root = 1.595769121605731f; /* 2 sqrt(2 / pi) */
    for (size_t i = 0; i < n; i++) {
        const float g = gate[i], grad = grad_gate[i], z = twice_root * (g + 0.044715f * g * g * g);
        const float s = 1 / (1 + lowkey_exp(-z)), slope = twice_root * (1 + 3 * 0.044715f * g * g);
        grad_up[i] = grad * g * s;
        grad_gate[i] = grad * up[i] * s * (1 + g * (1 - s) * slope);
    }
}

/* The gradient of what a layer adds to the residual, given that of the residual: through the norm, where there is one,
 * into scratch. */
static const float *added_back(const lowkey_model *model, const float *added, const float *norm, int n,
                               const float *residual_grad, float *scratch)
{
    if (!norm) return residual_grad;
    norm_rows_back(model, added, norm, residual_grad, n, 0, scratch);
    return scratch;
}

void lowkey_layer_after_attention_back(const lowkey_model *model, int l, const struct lowkey_layer_rows *rows,
                                       const struct lowkey_layer_grads *grads, int n)
{
    const struct lowkey_model_layer *weights = &model->layers[l];
    const lowkey_layer_desc *layer = &model->geometry[l];
    const int hidden = model->hidden_size, ffn = model->intermediate_size;
    project_back(added_back(model, rows->fed, weights->post_ffn_norm, n, grads->residual, grads->normed), n,
                 hidden, weights->down_proj, ffn, 0, grads->gate);
    (model->activation == LOWKEY_SILU ? silu_back : gelu_back)(rows->gate, rows->up, (size_t)n * (size_t)ffn,
                                                               grads->gate, grads->up);
    project_back(grads->gate, n, ffn, weights->gate_proj, hidden, 0, grads->normed);
    project_back(grads->up, n, ffn, weights->up_proj, hidden, 1, grads->normed);
    norm_rows_back(model, rows->middle, weights->ffn_norm, grads->normed, n, 1, grads->residual);
    project_back(
        added_back(model, rows->attended, weights->post_attention_norm, n, grads->residual, grads->normed), n,
        hidden, weights->output_proj, layer->n_q_heads * layer->value_head_dim, 0, grads->mixed);
}

static void head_norms_back(const lowkey_model *model, const float *raw, const float *weight, int dim,
                            size_t n, float *grad)
{
    for (size_t at = 0; at < n * (size_t)dim; at += (size_t)dim)
        lowkey_rms_norm_back(raw + at, weight, grad + at, dim, model->rms_norm_eps, 0, grad + at);
}

void lowkey_layer_before_attention_back(const lowkey_model *model, int l,
                                        const struct lowkey_layer_rows *rows,
                                        const struct lowkey_layer_grads *grads, int n)
{
    const struct lowkey_model_layer *weights = &model->layers[l];
    const lowkey_layer_desc *layer = &model->geometry[l];
    const int hidden = model->hidden_size, dim = layer->key_head_dim;
    if (weights->query_norm) {
        head_norms_back(model, rows->raw_query, weights->query_norm, dim,
                        (size_t)n * (size_t)layer->n_q_heads, grads->query);
        head_norms_back(model, rows->raw_key, weights->key_norm, dim, (size_t)n * (size_t)layer->n_kv_heads,
                        grads->key);
    }
    project_back(grads->query, n, layer->n_q_heads * dim, weights->query_proj, hidden, 0, grads->normed);
    project_back(grads->key, n, layer->n_kv_heads * dim, weights->key_proj, hidden, 1, grads->normed);
    project_back(grads->value, n, layer->n_kv_heads * layer->value_head_dim, weights->value_proj, hidden, 1,
                 grads->normed);
    norm_rows_back(model, rows->residual, weights->attention_norm, grads->normed, n, 1, grads->residual);
}
