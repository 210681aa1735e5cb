/* tiny_model.c - the oracle of the decoder: plain loops in double, nothing shared with experiments/lm. */
#include "tests/tiny_model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void *take(size_t n, size_t size)
{
    void *block = calloc(n, size);
    if (!block) abort();
    return block;
}

static double uniform(uint64_t *state) /* -1..1 */
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(*state >> 11) / 4503599627370496.0 - 1;
}

static float *random_floats(uint64_t *state, int n, double center, double spread)
{
    float *x = take((size_t)n, sizeof *x);
    for (int i = 0; i < n; i++) x[i] = (float)(center + spread * uniform(state));
    return x;
}

static void fill_layer(lowkey_model *model, int l, const struct tiny_shape *s, int window, uint64_t *state)
{
    struct lowkey_model_layer *w = &model->layers[l];
    lowkey_layer_desc *layer = &model->geometry[l];
    const int queries = s->n_q_heads * s->key_dim, keys = s->n_kv_heads * s->key_dim,
              values = s->n_kv_heads * s->value_dim;
    const double in = 1.7 / sqrt(s->hidden);
    double *frequencies = take((size_t)s->rope_dims / 2 + 1, sizeof *frequencies);
    for (int i = 0; i < s->rope_dims / 2; i++) frequencies[i] = pow(100, -2.0 * i / s->rope_dims);
    *layer = (lowkey_layer_desc) {
        .struct_size = sizeof *layer,
        .index = l,
        .n_q_heads = s->n_q_heads,
        .n_kv_heads = s->n_kv_heads,
        .key_head_dim = s->key_dim,
        .value_head_dim = s->value_dim,
        .logit_scale = s->logit_scale,
        .rope_dims = s->rope_dims,
        .rope_pairing = s->pairing,
        .rope_attention_factor = s->attention_factor,
        .rope_inv_freq = frequencies,
    };
    w->attention_norm = random_floats(state, s->hidden, 1, 0.5);
    w->ffn_norm = random_floats(state, s->hidden, 1, 0.5);
    w->query_proj = random_floats(state, queries * s->hidden, 0, 3 * in);
    w->key_proj = random_floats(state, keys * s->hidden, 0, 3 * in);
    w->value_proj = random_floats(state, values * s->hidden, 0, in);
    w->output_proj = random_floats(state, s->hidden * s->n_q_heads * s->value_dim, 0, in);
    w->gate_proj = random_floats(state, s->ffn * s->hidden, 0, in);
    w->up_proj = random_floats(state, s->ffn * s->hidden, 0, in);
    w->down_proj = random_floats(state, s->hidden * s->ffn, 0, in);
    if (s->bias) {
        w->query_bias = random_floats(state, queries, 0, 1);
        w->key_bias = random_floats(state, keys, 0, 1);
        w->value_bias = random_floats(state, values, 0, 1);
    }
    if (model->post_norms) {
        w->post_attention_norm = random_floats(state, s->hidden, 1, 0.5);
        w->post_ffn_norm = random_floats(state, s->hidden, 1, 0.5);
    }
    w->window = l % 2 ? 0 : window;
    if (s->qk_norm) {
        w->query_norm = random_floats(state, s->key_dim, 1, 0.5);
        w->key_norm = random_floats(state, s->key_dim, 1, 0.5);
    }
}

lowkey_model *lowkey_tiny_model(const struct tiny_shape *s, unsigned seed)
{
    return lowkey_tiny_model_with(s, &(struct tiny_extras) { 0 }, seed);
}

lowkey_model *lowkey_tiny_model_with(const struct tiny_shape *s, const struct tiny_extras *extras,
                                     unsigned seed)
{
    uint64_t state = seed;
    lowkey_model *model = take(1, sizeof *model);
    model->n_layers = s->n_layers;
    model->hidden_size = s->hidden;
    model->intermediate_size = s->ffn;
    model->vocab_size = s->vocab;
    model->rms_norm_eps = 1e-2; /* large, so that it shows */
    model->tied_output = !s->untied;
    model->attention_bias = s->bias;
    model->qk_norm = s->qk_norm;
    model->post_norms = extras->post_norms;
    model->activation = extras->gelu ? LOWKEY_GELU_TANH : LOWKEY_SILU;
    model->embedding_scale = extras->embedding_scale;
    model->token_embedding = random_floats(&state, s->vocab * s->hidden, 0, 1);
    model->final_norm = random_floats(&state, s->hidden, 1, 0.5);
    model->output = s->untied ? random_floats(&state, s->vocab * s->hidden, 0, 1) : model->token_embedding;
    model->geometry = take((size_t)s->n_layers, sizeof *model->geometry);
    model->layers = take((size_t)s->n_layers, sizeof *model->layers);
    for (int l = 0; l < s->n_layers; l++) fill_layer(model, l, s, extras->window, &state);
    return model;
}

void lowkey_tiny_model_free(lowkey_model *model)
{
    for (int l = 0; l < model->n_layers; l++) {
        struct lowkey_model_layer *w = &model->layers[l];
        float *const all[] = { w->attention_norm, w->query_proj, w->key_proj,   w->value_proj, w->query_bias,
                               w->key_bias,       w->value_bias, w->query_norm, w->key_norm,   w->output_proj,
                               w->ffn_norm,       w->gate_proj,  w->up_proj,    w->down_proj,
                               w->post_attention_norm, w->post_ffn_norm };
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
        free((void *)model->geometry[l].rope_inv_freq);
    }
    if (!model->tied_output) free(model->output);
    free(model->token_embedding);
    free(model->final_norm);
    free(model->geometry);
    free(model->layers);
    free(model);
}

static void oracle_norm(const double *x, const float *weight, int n, double epsilon, double *out)
{
    double square = 0;
    for (int i = 0; i < n; i++) square += x[i] * x[i] / n;
    for (int i = 0; i < n; i++) out[i] = x[i] / sqrt(square + epsilon) * (double)weight[i];
}

static void oracle_matrix(const float *weight, const float *bias, const double *x, int n_out, int n_in,
                          double *out)
{
    for (int r = 0; r < n_out; r++) {
        out[r] = bias ? (double)bias[r] : 0;
        for (int c = 0; c < n_in; c++) out[r] += (double)weight[r * n_in + c] * x[c];
    }
}

/* RoPE as rotation of a complex number, pair by pair. */
static void oracle_rope(const lowkey_layer_desc *g, int position, double *x)
{
    const double factor = g->rope_attention_factor == 0 ? 1 : g->rope_attention_factor;
    for (int i = 0; i < g->rope_dims / 2; i++) {
        const int a = g->rope_pairing == LOWKEY_PAIR_INTERLEAVED ? 2 * i : i;
        const int b = g->rope_pairing == LOWKEY_PAIR_INTERLEAVED ? 2 * i + 1 : i + g->rope_dims / 2;
        const double radius = hypot(x[a], x[b]) * factor,
                     angle = atan2(x[b], x[a]) + position * g->rope_inv_freq[i];
        x[a] = radius * cos(angle);
        x[b] = radius * sin(angle);
    }
}

/* One token's attention over the window before it, or all of tokens 0..t; q: [n_q_heads][key_dim] and keys are rotated already. */
static void oracle_attend(const lowkey_layer_desc *g, const double *q, const double *keys,
                          const double *values, int t, int window, double *out)
{
    const int kd = g->key_head_dim, vd = g->value_head_dim, ratio = g->n_q_heads / g->n_kv_heads;
    const double scale = g->logit_scale == 0 ? 1 / sqrt(kd) : g->logit_scale;
    for (int h = 0; h < g->n_q_heads; h++) {
        double sum = 0;
        for (int c = 0; c < vd; c++) out[h * vd + c] = 0;
        for (int s = 0; s <= t; s++) {
            if (window && t - s >= window) continue;
            double score = 0;
            for (int c = 0; c < kd; c++)
                score += scale * q[h * kd + c] * keys[(s * g->n_kv_heads + h / ratio) * kd + c];
            sum += exp(score);
            for (int c = 0; c < vd; c++)
                out[h * vd + c] += exp(score) * values[(s * g->n_kv_heads + h / ratio) * vd + c];
        }
        for (int c = 0; c < vd; c++) out[h * vd + c] /= sum;
    }
}

static double oracle_activation(enum lowkey_activation activation, double x)
{
    if (activation == LOWKEY_SILU) return x / (1 + exp(-x));
    return x / 2 * (1 + tanh(sqrt(2 / acos(-1)) * (x + 0.044715 * pow(x, 3))));
}

static void norm_heads(double *x, const float *weight, int n_heads, int dim, double epsilon)
{
    for (int h = 0; weight && h < n_heads; h++) oracle_norm(x + h * dim, weight, dim, epsilon, x + h * dim);
}

static void oracle_layer(const lowkey_model *m, int l, int n, double *x, double *query, double *key,
                         double *value, tiny_change *change, void *user)
{
    const lowkey_layer_desc *g = &m->geometry[l];
    const struct lowkey_model_layer *w = &m->layers[l];
    const int d = m->hidden_size, nq = g->n_q_heads * g->key_head_dim, nk = g->n_kv_heads * g->key_head_dim;
    const int nv = g->n_kv_heads * g->value_head_dim, no = g->n_q_heads * g->value_head_dim,
              ffn = m->intermediate_size;
    double *normed = take((size_t)d, sizeof *normed), *q = take((size_t)nq, sizeof *q),
           *mixed = take((size_t)no, sizeof *mixed);
    double *keys = take((size_t)(n * nk), sizeof *keys), *values = take((size_t)(n * nv), sizeof *values);
    double *gate = take((size_t)ffn, sizeof *gate), *up = take((size_t)ffn, sizeof *up),
           *add = take((size_t)d, sizeof *add);
    for (int t = 0; t < n; t++) {
        oracle_norm(x + t * d, w->attention_norm, d, m->rms_norm_eps, normed);
        oracle_matrix(w->query_proj, w->query_bias, normed, nq, d, q);
        oracle_matrix(w->key_proj, w->key_bias, normed, nk, d, keys + t * nk);
        oracle_matrix(w->value_proj, w->value_bias, normed, nv, d, values + t * nv);
        norm_heads(q, w->query_norm, g->n_q_heads, g->key_head_dim, m->rms_norm_eps);
        norm_heads(keys + t * nk, w->key_norm, g->n_kv_heads, g->key_head_dim, m->rms_norm_eps);
        if (query) memcpy(query + t * nq, q, (size_t)nq * sizeof *q);
        if (query) memcpy(key + t * nk, keys + t * nk, (size_t)nk * sizeof *q);
        if (query) memcpy(value + t * nv, values + t * nv, (size_t)nv * sizeof *q);
        if (change) change(user, l, t, keys + t * nk, values + t * nv);
        for (int h = 0; h < g->n_q_heads; h++) oracle_rope(g, t, q + h * g->key_head_dim);
        for (int h = 0; h < g->n_kv_heads; h++) oracle_rope(g, t, keys + t * nk + h * g->key_head_dim);
        oracle_attend(g, q, keys, values, t, w->window, mixed);
        oracle_matrix(w->output_proj, NULL, mixed, d, no, add);
        norm_heads(add, w->post_attention_norm, 1, d, m->rms_norm_eps);
        for (int c = 0; c < d; c++) x[t * d + c] += add[c];
        oracle_norm(x + t * d, w->ffn_norm, d, m->rms_norm_eps, normed);
        oracle_matrix(w->gate_proj, NULL, normed, ffn, d, gate);
        oracle_matrix(w->up_proj, NULL, normed, ffn, d, up);
        for (int c = 0; c < ffn; c++) gate[c] = oracle_activation(m->activation, gate[c]) * up[c];
        oracle_matrix(w->down_proj, NULL, gate, d, ffn, add);
        norm_heads(add, w->post_ffn_norm, 1, d, m->rms_norm_eps);
        for (int c = 0; c < d; c++) x[t * d + c] += add[c];
    }
    double *const all[] = { normed, q, mixed, keys, values, gate, up, add };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static void oracle(const lowkey_model *model, const int32_t *tokens, int n, double *hidden, int l,
                   double *query, double *key, double *value, tiny_change *change, void *user)
{
    const int d = model->hidden_size;
    const double scale = model->embedding_scale == 0 ? 1 : model->embedding_scale;
    for (int t = 0; t < n; t++)
        for (int c = 0; c < d; c++) hidden[t * d + c] = (double)model->token_embedding[tokens[t] * d + c] * scale;
    for (int i = 0; i < model->n_layers; i++)
        oracle_layer(model, i, n, hidden, i == l ? query : NULL, key, value, change, user);
    for (int t = 0; t < n; t++)
        oracle_norm(hidden + t * d, model->final_norm, d, model->rms_norm_eps, hidden + t * d);
}

void lowkey_tiny_oracle(const lowkey_model *model, const int32_t *tokens, int n, double *hidden, int l,
                        double *query, double *key, double *value)
{
    oracle(model, tokens, n, hidden, l, query, key, value, NULL, NULL);
}

void lowkey_tiny_oracle_changed(const lowkey_model *model, const int32_t *tokens, int n, double *hidden,
                                tiny_change *change, void *user)
{
    oracle(model, tokens, n, hidden, -1, NULL, NULL, NULL, change, user);
}
