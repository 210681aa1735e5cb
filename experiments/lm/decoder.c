/* decoder.c - one chunk of tokens through all layers. Everything but attention works on tokens one by one, so threads
 * take blocks of tokens whose size is fixed: the same sums whatever the number of threads. */
#include "experiments/lm/decoder.h"

#include <cblas.h>
#include <stdlib.h>

#include "calib/threads.h"
#include "experiments/lm/layer.h"
#include "runtime/error.h"

enum { DEFAULT_CHUNK = 1024, VOCABULARY_BLOCK = 4096 };

struct lowkey_decoder {
    struct lowkey_decoder_config config;
    struct lowkey_layer_rows rows; /* [max_chunk][..]; one residual stream, and SwiGLU in place */
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
    struct lowkey_layer_widths widest = { 0 };
    for (int l = 0; l < decoder->config.n_layers; l++) {
        const struct lowkey_layer_widths widths = lowkey_layer_widths(model, l);
        if (widest.query < widths.query) widest.query = widths.query;
        if (widest.key < widths.key) widest.key = widths.key;
        if (widest.value < widths.value) widest.value = widths.value;
        if (widest.mixed < widths.mixed) widest.mixed = widths.mixed;
    }
    struct lowkey_layer_rows *to = &decoder->rows;
    to->residual = to->middle = to->out = new_rows(rows, (size_t)model->hidden_size);
    to->normed = to->attended = to->fed = new_rows(rows, (size_t)model->hidden_size);
    to->query = to->raw_query = new_rows(rows, widest.query);
    to->key = to->raw_key = new_rows(rows, widest.key);
    to->value = new_rows(rows, widest.value);
    to->mixed = new_rows(rows, widest.mixed);
    to->gate = to->act = new_rows(rows, (size_t)model->intermediate_size);
    to->up = new_rows(rows, (size_t)model->intermediate_size);
    return to->residual && to->normed && to->query && to->key && to->value && to->mixed && to->gate && to->up;
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
    float *const all[] = { decoder->rows.residual, decoder->rows.normed, decoder->rows.query,
                           decoder->rows.key,      decoder->rows.value,  decoder->rows.mixed,
                           decoder->rows.gate,     decoder->rows.up };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
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

struct chunk { /* what the blocks of one layer need */
    lowkey_decoder *decoder;
    int l, n_tokens;
};

/* Rows of block i of the chunk's tokens; returns how many. */
static int block_of(const struct chunk *chunk, int i, struct lowkey_layer_rows *rows)
{
    const lowkey_decoder *decoder = chunk->decoder;
    const struct lowkey_layer_widths widths = lowkey_layer_widths(decoder->config.model, chunk->l);
    const int first = i * LOWKEY_TOKEN_BLOCK, left = chunk->n_tokens - first;
    *rows = lowkey_layer_rows_from(&decoder->rows, &widths, (size_t)first);
    return left < LOWKEY_TOKEN_BLOCK ? left : LOWKEY_TOKEN_BLOCK;
}

static void before_attention(void *arg, int i)
{
    const struct chunk *chunk = arg;
    struct lowkey_layer_rows rows;
    const int n = block_of(chunk, i, &rows);
    lowkey_layer_before_attention(chunk->decoder->config.model, chunk->l, &rows, n);
}

static void after_attention(void *arg, int i)
{
    const struct chunk *chunk = arg;
    struct lowkey_layer_rows rows;
    const int n = block_of(chunk, i, &rows);
    lowkey_layer_after_attention(chunk->decoder->config.model, chunk->l, &rows, n);
}

static lowkey_status run_layer(lowkey_decoder *decoder, int l, int n_tokens, lowkey_error *err)
{
    struct chunk chunk = { .decoder = decoder, .l = l, .n_tokens = n_tokens };
    const int n_blocks = (n_tokens + LOWKEY_TOKEN_BLOCK - 1) / LOWKEY_TOKEN_BLOCK;
    const struct lowkey_attention *attention = &decoder->config.attention;
    lowkey_threads_run(&decoder->config.n_threads, n_blocks, before_attention, &chunk);
    const struct lowkey_attention_step step = {
        .layer = &decoder->config.model->geometry[l],
        .n_tokens = n_tokens,
        .window = decoder->config.model->layers[l].window,
        .query = decoder->rows.query,
        .key = decoder->rows.key,
        .value = decoder->rows.value,
        .out = decoder->rows.mixed,
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
    }
    lowkey_layer_embed(model, tokens, n_tokens, decoder->rows.residual);
    for (int l = 0; l < decoder->config.n_layers; l++) LOWKEY_TRY(run_layer(decoder, l, n_tokens, err));
    if (!hidden) return LOWKEY_OK;
    for (size_t t = 0; t < (size_t)n_tokens; t++)
        lowkey_rms_norm(decoder->rows.residual + t * width, model->final_norm, model->hidden_size,
                        model->rms_norm_eps, hidden + t * width);
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
