/* gradient.c - a sample forward with a tape, its loss, and back to the keys and values of every layer. The tape holds
 * what a layer's way back looks at, but the softmax, which is made again: at 2,048 tokens and SmolLM2-135M 1.4 GB. */
#include "experiments/lm/gradient.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "calib/threads.h"
#include "experiments/lm/attention_block.h"
#include "experiments/lm/gradient_loss.h"
#include "experiments/lm/gradient_parts.h"
#include "runtime/error.h"

/* [n_rows][width] into *to; 0: no memory */
static int take(float **to, size_t n_rows, size_t width)
{
    size_t n;
    *to = __builtin_mul_overflow(n_rows, width, &n) ? NULL : calloc(n ? n : 1, sizeof **to);
    return *to != NULL;
}

static int take_tape(lowkey_gradient *gradient, int l)
{
    const lowkey_model *model = gradient->config.model;
    const struct lowkey_layer_widths widths = lowkey_layer_widths(model, l);
    const size_t n = (size_t)gradient->config.max_tokens;
    struct lowkey_tape *tape = &gradient->tape[l];
    struct lowkey_layer_rows *rows = &tape->rows;
    int good = take(&rows->residual, n, widths.hidden) && take(&rows->middle, n, widths.hidden) &&
               take(&rows->query, n, widths.query) && take(&rows->key, n, widths.key) &&
               take(&rows->value, n, widths.value) && take(&rows->mixed, n, widths.mixed) &&
               take(&rows->gate, n, widths.ffn) && take(&rows->up, n, widths.ffn) &&
               take(&tape->lse, n, (size_t)model->geometry[l].n_q_heads);
    if (good && model->layers[l].query_norm)
        good = take(&rows->raw_query, n, widths.query) && take(&rows->raw_key, n, widths.key);
    if (good && model->layers[l].post_attention_norm)
        good = take(&rows->attended, n, widths.hidden) && take(&rows->fed, n, widths.hidden);
    tape->stored_key = rows->key;
    tape->stored_value = rows->value;
    if (good && gradient->config.store)
        good = take(&tape->stored_key, n, widths.key) && take(&tape->stored_value, n, widths.value);
    return good;
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* What the layers use one after the other. */
static int take_work(lowkey_gradient *gradient)
{
    const lowkey_model *model = gradient->config.model;
    const size_t n = (size_t)gradient->config.max_tokens, n_threads = (size_t)gradient->config.n_threads;
    size_t query = 0, key = 0, value = 0, mixed = 0, dim = 0;
    for (int l = 0; l < model->n_layers; l++) {
        const struct lowkey_layer_widths widths = lowkey_layer_widths(model, l);
        query = larger(query, widths.query);
        key = larger(key, widths.key);
        value = larger(value, widths.value);
        mixed = larger(mixed, widths.mixed);
        dim = larger(dim, (size_t)model->geometry[l].key_head_dim);
    }
    struct lowkey_layer_grads *grads = &gradient->grads;
    const size_t hidden = (size_t)model->hidden_size, ffn = (size_t)model->intermediate_size;
    gradient->lane_floats = LOWKEY_QUERY_BLOCK * (2 * dim + larger(n, 2 * LOWKEY_KEY_TILE));
    const size_t n_logits = lowkey_loss_scratch(model, gradient->config.n_threads);
    gradient->row_loss = calloc(n, sizeof *gradient->row_loss);
    return gradient->row_loss && n_logits && take(&gradient->final_residual, n, hidden) &&
           take(&gradient->hidden, n, hidden) && take(&grads->residual, n, hidden) &&
           take(&grads->normed, n, hidden) && take(&grads->query, n, query) && take(&grads->key, n, key) &&
           take(&grads->value, n, value) && take(&grads->mixed, n, mixed) && take(&grads->gate, n, ffn) &&
           take(&grads->up, n, ffn) && take(&gradient->turned_key, n, key) &&
           take(&gradient->head_key_grad, n, query) && take(&gradient->head_value_grad, n, mixed) &&
           lowkey_rope_table_init(&gradient->rope, gradient->config.max_tokens) &&
           take(&gradient->lanes, n_threads, gradient->lane_floats) && take(&gradient->logits, 1, n_logits);
}

/* The rows that a layer shares with others. */
static void link_layers(lowkey_gradient *gradient)
{
    const int n_layers = gradient->config.model->n_layers;
    for (int l = 0; l < n_layers; l++) {
        struct lowkey_layer_rows *rows = &gradient->tape[l].rows;
        rows->out = l + 1 < n_layers ? gradient->tape[l + 1].rows.residual : gradient->final_residual;
        rows->normed = gradient->grads.normed; /* scratch, as is act */
        rows->act = gradient->grads.gate;
    }
}

lowkey_status lowkey_gradient_create(const struct lowkey_gradient_config *config, lowkey_gradient **out,
                                     lowkey_error *err)
{
    *out = NULL;
    if (config->max_tokens < 2 || config->n_threads < 1)
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "gradient: at most %d tokens, %d threads: expected 2 and 1 or more",
                           config->max_tokens, config->n_threads);
    if (config->store && config->store->exact_from)
        return lowkey_fail(
            err, LOWKEY_EUNSUPPORTED,
            "gradient: the store has a window of exact tokens (exact_from), which the backward pass "
            "does not carry");
    lowkey_gradient *gradient = calloc(1, sizeof *gradient);
    int good = gradient != NULL;
    if (good) {
        gradient->config = *config;
        gradient->tape = calloc((size_t)config->model->n_layers, sizeof *gradient->tape);
        good = gradient->tape && take_work(gradient);
    }
    for (int l = 0; good && l < config->model->n_layers; l++) good = take_tape(gradient, l);
    if (!good) {
        lowkey_gradient_free(gradient);
        return lowkey_fail(err, LOWKEY_ENOMEM, "gradient: no memory for the tape of %d tokens in %d layers",
                           config->max_tokens, config->model->n_layers);
    }
    link_layers(gradient);
    openblas_set_num_threads(1); /* the threads are ours: BLAS is called from several at once */
    *out = gradient;
    return LOWKEY_OK;
}

static void free_all(float *const *all, size_t n)
{
    for (size_t i = 0; i < n; i++) free(all[i]);
}

void lowkey_gradient_free(lowkey_gradient *gradient)
{
    if (!gradient) return;
    for (int l = 0; gradient->tape && l < gradient->config.model->n_layers; l++) {
        const struct lowkey_tape *tape = &gradient->tape[l];
        const struct lowkey_layer_rows *rows = &tape->rows;
        if (tape->stored_key != rows->key) free(tape->stored_key);
        if (tape->stored_value != rows->value) free(tape->stored_value);
        float *const own[] = { rows->residual, rows->middle, rows->raw_query, rows->raw_key, rows->query,
                               rows->key,      rows->value,  rows->mixed,     rows->gate,    rows->up,
                               rows->attended, rows->fed,    tape->lse };
        free_all(own, sizeof own / sizeof *own);
    }
    const struct lowkey_layer_grads *grads = &gradient->grads;
    float *const work[] = {
        gradient->final_residual,
        gradient->hidden,
        grads->residual,
        grads->normed,
        grads->query,
        grads->key,
        grads->value,
        grads->mixed,
        grads->gate,
        grads->up,
        gradient->turned_key,
        gradient->head_key_grad,
        gradient->head_value_grad,

        gradient->lanes,
        gradient->logits,
    };
    free_all(work, sizeof work / sizeof *work);
    lowkey_rope_table_free(&gradient->rope);
    free(gradient->row_loss);
    free(gradient->tape);
    free(gradient);
}

/* ---- token by token ---- */

typedef void block_fn(const lowkey_model *model, int l, const struct lowkey_layer_rows *rows,
                      const struct lowkey_layer_grads *grads, int n);

static void before(const lowkey_model *model, int l, const struct lowkey_layer_rows *rows,
                   const struct lowkey_layer_grads *grads, int n)
{
    (void)grads;
    lowkey_layer_before_attention(model, l, rows, n);
}

static void after(const lowkey_model *model, int l, const struct lowkey_layer_rows *rows,
                  const struct lowkey_layer_grads *grads, int n)
{
    (void)grads;
    lowkey_layer_after_attention(model, l, rows, n);
}

struct blocks {
    const lowkey_gradient *gradient;
    int l;
    block_fn *body;
};

static void run_block(void *arg, int i)
{
    const struct blocks *blocks = arg;
    const lowkey_gradient *gradient = blocks->gradient;
    const lowkey_model *model = gradient->config.model;
    const struct lowkey_layer_widths widths = lowkey_layer_widths(model, blocks->l);
    const int first = i * LOWKEY_TOKEN_BLOCK, left = gradient->n_tokens - first;
    const struct lowkey_layer_rows rows = lowkey_layer_rows_from(&gradient->tape[blocks->l].rows, &widths,
                                                                 (size_t)first);
    const struct lowkey_layer_grads grads = lowkey_layer_grads_from(&gradient->grads, &widths, (size_t)first);
    blocks->body(model, blocks->l, &rows, &grads, left < LOWKEY_TOKEN_BLOCK ? left : LOWKEY_TOKEN_BLOCK);
}

static void run_blocks(lowkey_gradient *gradient, int l, block_fn *body)
{
    struct blocks blocks = { .gradient = gradient, .l = l, .body = body };
    lowkey_threads_run(&gradient->config.n_threads,
                       (gradient->n_tokens + LOWKEY_TOKEN_BLOCK - 1) / LOWKEY_TOKEN_BLOCK, run_block,
                       &blocks);
}

/* ---- the sample ---- */

static lowkey_status store_layer(lowkey_gradient *gradient, int l, lowkey_error *err)
{
    const struct lowkey_store *store = gradient->config.store;
    struct lowkey_tape *tape = &gradient->tape[l];
    if (!store) return LOWKEY_OK;
    const struct lowkey_store_step step = {
        .layer = &gradient->config.model->geometry[l],
        .n_tokens = gradient->n_tokens,
        .key = tape->rows.key,
        .value = tape->rows.value,
        .query = tape->rows.query,
        .stored_key = tape->stored_key,
        .stored_value = tape->stored_value,
    };
    return store->put(store->user, &step, err);
}

static lowkey_status forward(lowkey_gradient *gradient, const int32_t *tokens, lowkey_error *err)
{
    const lowkey_model *model = gradient->config.model;
    const size_t width = (size_t)model->hidden_size;
    const struct lowkey_store *store = gradient->config.store;
    if (store) LOWKEY_TRY(store->reset(store->user, err));
    lowkey_layer_embed(model, tokens, gradient->n_tokens, gradient->tape[0].rows.residual);
    for (int l = 0; l < model->n_layers; l++) {
        run_blocks(gradient, l, before);
        LOWKEY_TRY(store_layer(gradient, l, err));
        lowkey_gradient_attend(gradient, l);
        run_blocks(gradient, l, after);
    }
    for (size_t t = 0; t < (size_t)gradient->n_tokens; t++)
        lowkey_rms_norm(gradient->final_residual + t * width, model->final_norm, model->hidden_size,
                        model->rms_norm_eps, gradient->hidden + t * width);
    return LOWKEY_OK;
}

/* The summed loss; where the way back follows, grads.residual is the gradient of the last layer's output. */
static lowkey_status run_loss(lowkey_gradient *gradient, const struct lowkey_gradient_request *request,
                              double *loss, lowkey_error *err)
{
    const lowkey_model *model = gradient->config.model;
    const size_t width = (size_t)model->hidden_size;
    float *hidden_grad = request->on_layer ? gradient->grads.normed : NULL;
    struct lowkey_loss_work work = {
        .model = model,
        .hidden = gradient->hidden,
        .n_rows = gradient->n_tokens - 1,
        .loss = request->loss,
        .labels = request->tokens + 1,
        .seed = request->seed,
        .reference = request->reference,
        .n_threads = gradient->config.n_threads,
        .scratch = gradient->logits,
        .row_loss = gradient->row_loss,
        .hidden_grad = hidden_grad,
    };
    lowkey_loss_run(&work);
    *loss = 0;
    for (int t = 0; t < work.n_rows; t++) *loss += gradient->row_loss[t];
    if (!isfinite(*loss))
        return lowkey_fail(err, LOWKEY_EINVAL, "gradient: the loss is %g: the model's logits are not finite",
                           *loss);
    if (!hidden_grad) return LOWKEY_OK;
    for (size_t t = 0; t < (size_t)work.n_rows; t++)
        lowkey_rms_norm_back(gradient->final_residual + t * width, model->final_norm, hidden_grad + t * width,
                             model->hidden_size, model->rms_norm_eps, 0,
                             gradient->grads.residual + t * width);
    memset(gradient->grads.residual + (size_t)work.n_rows * width, 0,
           width * sizeof(float)); /* predicts nothing */
    return LOWKEY_OK;
}

static lowkey_status backward(lowkey_gradient *gradient, const struct lowkey_gradient_request *request,
                              lowkey_error *err)
{
    const lowkey_model *model = gradient->config.model;
    for (int l = model->n_layers - 1; l >= 0; l--) {
        const struct lowkey_tape *tape = &gradient->tape[l];
        run_blocks(gradient, l, lowkey_layer_after_attention_back);
        lowkey_gradient_attend_back(gradient, l);
        const struct lowkey_gradient_layer layer = {
            .layer = &model->geometry[l],
            .n_tokens = gradient->n_tokens,
            .key = tape->rows.key,
            .value = tape->rows.value,
            .stored_key = tape->stored_key,
            .stored_value = tape->stored_value,
            .query = tape->rows.query,
            .key_grad = gradient->grads.key,
            .value_grad = gradient->grads.value,
        };
        LOWKEY_TRY(request->on_layer(request->user, &layer, err));
        if (l) run_blocks(gradient, l, lowkey_layer_before_attention_back);
    }
    return LOWKEY_OK;
}

static lowkey_status check(const lowkey_gradient *gradient, const struct lowkey_gradient_request *request,
                           lowkey_error *err)
{
    const int vocab_size = gradient->config.model->vocab_size;
    if (request->n_tokens < 2 || request->n_tokens > gradient->config.max_tokens)
        return lowkey_fail(err, LOWKEY_EINVAL, "gradient: %d tokens, expected 2 to %d", request->n_tokens,
                           gradient->config.max_tokens);
    for (int t = 0; t < request->n_tokens; t++)
        if (request->tokens[t] < 0 || request->tokens[t] >= vocab_size)
            return lowkey_fail(err, LOWKEY_EINVAL, "gradient: token %d is %d, expected 0 to %d", t,
                               request->tokens[t], vocab_size - 1);
    if ((unsigned)request->loss > LOWKEY_LOSS_NONE)
        return lowkey_fail(err, LOWKEY_EINVAL, "gradient: there is no loss %d", (int)request->loss);
    if (request->loss == LOWKEY_LOSS_NONE && request->on_layer)
        return lowkey_fail(err, LOWKEY_EINVAL, "gradient: on_layer goes with a loss");
    if ((request->loss == LOWKEY_LOSS_KL) != (request->reference != NULL))
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "gradient: a reference goes with the loss KL, and only with it");
    return LOWKEY_OK;
}

lowkey_status lowkey_gradient_run(lowkey_gradient *gradient, const struct lowkey_gradient_request *request,
                                  double *loss, lowkey_error *err)
{
    LOWKEY_TRY(check(gradient, request, err));
    gradient->n_tokens = request->n_tokens;
    LOWKEY_TRY(forward(gradient, request->tokens, err));
    if (request->hidden)
        memcpy(request->hidden, gradient->hidden,
               (size_t)request->n_tokens * (size_t)gradient->config.model->hidden_size * sizeof(float));
    *loss = 0;
    if (request->loss == LOWKEY_LOSS_NONE) return LOWKEY_OK;
    LOWKEY_TRY(run_loss(gradient, request, loss, err));
    return request->on_layer ? backward(gradient, request, err) : LOWKEY_OK;
}
