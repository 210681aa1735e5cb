/* decoder.c - one chunk of tokens through all layers. Everything but attention works on tokens one by one, so threads
 * take blocks of tokens whose size is fixed: the same sums whatever the number of threads. */
#include "experiments/lm/decoder.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "calib/threads.h"
#include "experiments/lm/exponential.h"
#include "runtime/error.h"

enum { DEFAULT_CHUNK = 1024, TOKEN_BLOCK = 256, VOCABULARY_BLOCK = 4096 };

struct lowkey_decoder {
    struct lowkey_decoder_config config;
    /* [max_chunk][..]: the residual stream, its norm, what attention takes and gives, what the feed-forward takes */
    float *residual, *normed, *query, *key, *value, *mixed, *gate, *up;
};

static float *new_rows(int n_rows, size_t width)
{
    size_t n;
    if (__builtin_mul_overflow((size_t)n_rows, width, &n)) return NULL;
    return calloc(n, sizeof(float));
}

static int allocate(lowkey_decoder *decoder)
{
    const lowkey_model *model = decoder->config.model;
    const int rows = decoder->config.max_chunk;
    size_t query = 0, key = 0, value = 0, mixed = 0;
    for (int l = 0; l < decoder->config.n_layers; l++) {
        const lowkey_layer_desc *layer = &model->geometry[l];
        const size_t q_heads = (size_t)layer->n_q_heads, kv_heads = (size_t)layer->n_kv_heads;
        if (query < q_heads * (size_t)layer->key_head_dim) query = q_heads * (size_t)layer->key_head_dim;
        if (mixed < q_heads * (size_t)layer->value_head_dim) mixed = q_heads * (size_t)layer->value_head_dim;
        if (key < kv_heads * (size_t)layer->key_head_dim) key = kv_heads * (size_t)layer->key_head_dim;
        if (value < kv_heads * (size_t)layer->value_head_dim)
            value = kv_heads * (size_t)layer->value_head_dim;
    }
    decoder->residual = new_rows(rows, (size_t)model->hidden_size);
    decoder->normed = new_rows(rows, (size_t)model->hidden_size);
    decoder->query = new_rows(rows, query);
    decoder->key = new_rows(rows, key);
    decoder->value = new_rows(rows, value);
    decoder->mixed = new_rows(rows, mixed);
    decoder->gate = new_rows(rows, (size_t)model->intermediate_size);
    decoder->up = new_rows(rows, (size_t)model->intermediate_size);
    return decoder->residual && decoder->normed && decoder->query && decoder->key && decoder->value &&
           decoder->mixed && decoder->gate && decoder->up;
}

lowkey_status lowkey_decoder_create(const struct lowkey_decoder_config *config, lowkey_decoder **out,
                                    lowkey_error *err)
{
    *out = NULL;
    const lowkey_model *model = config->model;
    if (config->n_layers < 0 || config->n_layers > model->n_layers || config->max_chunk < 0 ||
        config->n_threads < 0)
        return lowkey_fail(err, LOWKEY_EINVAL, "decoder: %d layers of %d, chunks of %d, %d threads",
                           config->n_layers, model->n_layers, config->max_chunk, config->n_threads);
    lowkey_decoder *decoder = calloc(1, sizeof *decoder);
    if (decoder) {
        decoder->config = *config;
        if (!config->n_layers) decoder->config.n_layers = model->n_layers;
        if (!config->max_chunk) decoder->config.max_chunk = DEFAULT_CHUNK;
        if (!config->n_threads) decoder->config.n_threads = 1;
    }
    if (!decoder || !allocate(decoder)) {
        lowkey_decoder_free(decoder);
        return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for a decoder of hidden size %d",
                           model->hidden_size);
    }
    openblas_set_num_threads(1); /* the threads are ours: BLAS is called from several at once */
    *out = decoder;
    return LOWKEY_OK;
}

void lowkey_decoder_free(lowkey_decoder *decoder)
{
    if (!decoder) return;
    free(decoder->residual);
    free(decoder->normed);
    free(decoder->query);
    free(decoder->key);
    free(decoder->value);
    free(decoder->mixed);
    free(decoder->gate);
    free(decoder->up);
    free(decoder);
}

int lowkey_decoder_max_chunk(const lowkey_decoder *decoder)
{
    return decoder->config.max_chunk;
}

const lowkey_model *lowkey_decoder_model(const lowkey_decoder *decoder)
{
    return decoder->config.model;
}

lowkey_status lowkey_decoder_reset(lowkey_decoder *decoder, lowkey_error *err)
{
    return decoder->config.attention.reset(decoder->config.attention.user, err);
}

/* out = x / rms(x) * weight; out may be x. */
static void rms_norm(const float *x, const float *weight, int n, double epsilon, float *out)
{
    double sum = 0;
    for (int c = 0; c < n; c++) sum += (double)x[c] * (double)x[c];
    const float scale = (float)(1 / sqrt(sum / n + epsilon));
    for (int c = 0; c < n; c++) out[c] = x[c] * scale * weight[c];
}

/* out[n_rows][n_out] = x[n_rows][n_in] W' (+ bias), or added to out. W: [n_out][n_in] */
static void project(const float *x, int n_rows, int n_in, const float *weight, int n_out, const float *bias,
                    int add, float *out)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n_rows, n_out, n_in, 1, x, n_in, weight, n_in,
                (float)add, out, n_out);
    for (int t = 0; bias && t < n_rows; t++)
        for (int c = 0; c < n_out; c++) out[(size_t)t * (size_t)n_out + (size_t)c] += bias[c];
}

struct chunk { /* what the blocks of one layer need */
    lowkey_decoder *decoder;
    int l, n_tokens;
};

static int block_rows(const struct chunk *chunk, int first)
{
    return chunk->n_tokens - first < TOKEN_BLOCK ? chunk->n_tokens - first : TOKEN_BLOCK;
}

static void norm_rows(const lowkey_decoder *decoder, const float *weight, int first, int n_rows)
{
    const lowkey_model *model = decoder->config.model;
    for (int t = first; t < first + n_rows; t++) {
        const size_t row = (size_t)t * (size_t)model->hidden_size;
        rms_norm(decoder->residual + row, weight, model->hidden_size, model->rms_norm_eps,
                 decoder->normed + row);
    }
}

/* The residual += norm(add); add is overwritten. */
static void add_rows(const lowkey_model *model, const float *weight, int n_rows, float *add, float *residual)
{
    const size_t hidden = (size_t)model->hidden_size;
    for (size_t t = 0; t < (size_t)n_rows; t++) {
        float *row = add + t * hidden;
        rms_norm(row, weight, model->hidden_size, model->rms_norm_eps, row);
        for (size_t c = 0; c < hidden; c++) residual[t * hidden + c] += row[c];
    }
}

/* gate = activation(gate) * up, n numbers. */
static void activate(enum lowkey_activation activation, float *gate, const float *up, size_t n)
{
    if (activation == LOWKEY_SILU)
        lowkey_swiglu(gate, up, n);
    else
        lowkey_geglu(gate, up, n);
}

/* Queries, keys, values of a block of tokens: norm, projection, bias, QK-norm. */
static void before_attention(void *arg, int i)
{
    const struct chunk *chunk = arg;
    lowkey_decoder *decoder = chunk->decoder;
    const lowkey_model *model = decoder->config.model;
    const struct lowkey_model_layer *weights = &model->layers[chunk->l];
    const lowkey_layer_desc *layer = &model->geometry[chunk->l];
    const int first = i * TOKEN_BLOCK, n_rows = block_rows(chunk, first), hidden = model->hidden_size;
    const int n_query = layer->n_q_heads * layer->key_head_dim;
    const int n_key = layer->n_kv_heads * layer->key_head_dim;
    const int n_value = layer->n_kv_heads * layer->value_head_dim;
    const float *normed = decoder->normed + (size_t)first * (size_t)hidden;
    float *query = decoder->query + (size_t)first * (size_t)n_query;
    float *key = decoder->key + (size_t)first * (size_t)n_key;

    norm_rows(decoder, weights->attention_norm, first, n_rows);
    project(normed, n_rows, hidden, weights->query_proj, n_query, weights->query_bias, 0, query);
    project(normed, n_rows, hidden, weights->key_proj, n_key, weights->key_bias, 0, key);
    project(normed, n_rows, hidden, weights->value_proj, n_value, weights->value_bias, 0,
            decoder->value + (size_t)first * (size_t)n_value);
    if (!weights->query_norm) return;
    const int dim = layer->key_head_dim;
    for (int r = 0; r < n_rows * layer->n_q_heads; r++)
        rms_norm(query + (size_t)r * (size_t)dim, weights->query_norm, dim, model->rms_norm_eps,
                 query + (size_t)r * (size_t)dim);
    for (int r = 0; r < n_rows * layer->n_kv_heads; r++)
        rms_norm(key + (size_t)r * (size_t)dim, weights->key_norm, dim, model->rms_norm_eps,
                 key + (size_t)r * (size_t)dim);
}

/* Output projection and feed-forward of a block of tokens, down(activation(gate x) * up x), both added to the residual;
 * where the model has norms behind them, through the rows of `normed`. */
static void after_attention(void *arg, int i)
{
    const struct chunk *chunk = arg;
    lowkey_decoder *decoder = chunk->decoder;
    const lowkey_model *model = decoder->config.model;
    const struct lowkey_model_layer *weights = &model->layers[chunk->l];
    const lowkey_layer_desc *layer = &model->geometry[chunk->l];
    const int first = i * TOKEN_BLOCK, n_rows = block_rows(chunk, first);
    const int hidden = model->hidden_size, ffn = model->intermediate_size;
    const int n_mixed = layer->n_q_heads * layer->value_head_dim;
    float *normed = decoder->normed + (size_t)first * (size_t)hidden;
    float *residual = decoder->residual + (size_t)first * (size_t)hidden;
    float *gate = decoder->gate + (size_t)first * (size_t)ffn;
    float *up = decoder->up + (size_t)first * (size_t)ffn;

    const int post = model->post_norms;
    project(decoder->mixed + (size_t)first * (size_t)n_mixed, n_rows, n_mixed, weights->output_proj, hidden,
            NULL, !post, post ? normed : residual);
    if (post) add_rows(model, weights->post_attention_norm, n_rows, normed, residual);
    norm_rows(decoder, weights->ffn_norm, first, n_rows);
    project(normed, n_rows, hidden, weights->gate_proj, ffn, NULL, 0, gate);
    project(normed, n_rows, hidden, weights->up_proj, ffn, NULL, 0, up);
    activate(model->activation, gate, up, (size_t)n_rows * (size_t)ffn);
    project(gate, n_rows, ffn, weights->down_proj, hidden, NULL, !post, post ? normed : residual);
    if (post) add_rows(model, weights->post_ffn_norm, n_rows, normed, residual);
}

static lowkey_status run_layer(lowkey_decoder *decoder, int l, int n_tokens, lowkey_error *err)
{
    struct chunk chunk = { .decoder = decoder, .l = l, .n_tokens = n_tokens };
    const int n_blocks = (n_tokens + TOKEN_BLOCK - 1) / TOKEN_BLOCK;
    const struct lowkey_attention *attention = &decoder->config.attention;
    lowkey_threads_run(&decoder->config.n_threads, n_blocks, before_attention, &chunk);
    const struct lowkey_attention_step step = {
        .layer = &decoder->config.model->geometry[l],
        .n_tokens = n_tokens,
        .window = decoder->config.model->layers[l].window,
        .query = decoder->query,
        .key = decoder->key,
        .value = decoder->value,
        .out = decoder->mixed,
    };
    LOWKEY_TRY(attention->step(attention->user, &step, err));
    lowkey_threads_run(&decoder->config.n_threads, n_blocks, after_attention, &chunk);
    return LOWKEY_OK;
}

lowkey_status lowkey_decoder_forward(lowkey_decoder *decoder, const int32_t *tokens, int n_tokens,
                                     float *hidden, lowkey_error *err)
{
    const lowkey_model *model = decoder->config.model;
    const size_t width = (size_t)model->hidden_size;
    if (n_tokens < 1 || n_tokens > decoder->config.max_chunk)
        return lowkey_fail(err, LOWKEY_EINVAL, "decoder: %d tokens, expected 1 to %d", n_tokens,
                           decoder->config.max_chunk);
    for (int t = 0; t < n_tokens; t++) {
        if (tokens[t] < 0 || tokens[t] >= model->vocab_size)
            return lowkey_fail(err, LOWKEY_EINVAL, "decoder: token %d is %d, expected 0 to %d", t, tokens[t],
                               model->vocab_size - 1);
        memcpy(decoder->residual + (size_t)t * width, model->token_embedding + (size_t)tokens[t] * width,
               width * sizeof(float));
    }
    if (model->embedding_scale != 0 && model->embedding_scale != 1)
        for (size_t i = 0; i < (size_t)n_tokens * width; i++)
            decoder->residual[i] *= (float)model->embedding_scale;
    for (int l = 0; l < decoder->config.n_layers; l++) LOWKEY_TRY(run_layer(decoder, l, n_tokens, err));
    if (!hidden) return LOWKEY_OK;
    norm_rows(decoder, model->final_norm, 0, n_tokens);
    memcpy(hidden, decoder->normed, (size_t)n_tokens * width * sizeof(float));
    return LOWKEY_OK;
}

struct logits {
    const lowkey_model *model;
    const float *hidden;
    int n_rows;
    float *out;
};

static void logits_block(void *arg, int i)
{
    const struct logits *work = arg;
    const int hidden = work->model->hidden_size, n = work->model->vocab_size, first = i * VOCABULARY_BLOCK;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, work->n_rows,
                n - first < VOCABULARY_BLOCK ? n - first : VOCABULARY_BLOCK, hidden, 1, work->hidden, hidden,
                work->model->output + (size_t)first * (size_t)hidden, hidden, 0, work->out + first, n);
}

void lowkey_decoder_logits(const lowkey_decoder *decoder, const float *hidden, int n_rows, float *logits)
{
    struct logits work = {
        .model = decoder->config.model, .hidden = hidden, .n_rows = n_rows, .out = logits
    };
    const int n_blocks = (work.model->vocab_size + VOCABULARY_BLOCK - 1) / VOCABULARY_BLOCK;
    int n_threads = decoder->config.n_threads;
    lowkey_threads_run(&n_threads, n_blocks, logits_block, &work);
}
