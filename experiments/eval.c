/* eval.c - for each window: the reference's pass, then a pass over each format that is still wanted; all leave their final
 * hidden states, and their logits are made and compared a block of tokens at a time. The reference's logits of a block
 * serve several formats. */
#include "experiments/eval.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "calib/command.h"
#include "calib/threads.h"
#include "experiments/lm/decoder.h"
#include "experiments/lm/plain_attention.h"
#include "experiments/prediction.h"
#include "experiments/reference_states.h"
#include "experiments/samples.h"
#include "runtime/error.h"

enum {
    LOGIT_ROWS = 256, /* tokens whose logits are in memory */
    MAX_CHUNK = 2048, /* tokens that go through a layer at once */
    MAX_TOGETHER = 8, /* formats that share the reference's logits */
    REFERENCE = -1
};

struct stopwatch {
    double seconds, cpu_seconds;
};

struct scored { /* a format's share of a window */
    int format; /* REFERENCE: the reference */
    float *hidden; /* [window][hidden_size] */
    struct lowkey_eval_result result;
};

struct eval {
    const struct lowkey_eval_request *request;
    int n_together; /* formats at most */
    float *hidden; /* [1 + n_together][window][hidden_size]; the reference's first */
    float *reference_logits, *logits; /* [LOGIT_ROWS][vocab_size] */
    lowkey_decoder *for_logits; /* runs no layer */
    struct lowkey_progress progress;
    double done; /* passes */
};

static double cpu_seconds(void)
{
    return (double)clock() / CLOCKS_PER_SEC;
}

static struct stopwatch start_watch(void)
{
    return (struct stopwatch) { lowkey_seconds(), cpu_seconds() };
}

static void add_time(struct lowkey_eval_result *result, struct stopwatch since)
{
    result->seconds += lowkey_seconds() - since.seconds;
    result->cpu_seconds += cpu_seconds() - since.cpu_seconds;
}

/* ---- passes ---- */

static lowkey_status read_window(struct eval *eval, lowkey_decoder *decoder, int i, float *hidden,
                                 lowkey_error *err)
{
    const struct lowkey_eval_request *request = eval->request;
    const int max_chunk = lowkey_decoder_max_chunk(decoder);
    const int32_t *tokens = request->tokens->tokens + lowkey_samples_start(request->tokens, request->window,
                                                                           request->window,
                                                                           request->windows[i]);
    LOWKEY_TRY(lowkey_decoder_reset(decoder, err));
    for (int first = 0, n; first < request->window; first += n) {
        if (lowkey_interrupted()) return lowkey_fail(err, LOWKEY_ECANCELLED, "interrupted");
        n = request->window - first < max_chunk ? request->window - first : max_chunk;
        LOWKEY_TRY(lowkey_decoder_forward(decoder, tokens + first, n,
                                          hidden + (size_t)first * (size_t)request->model->hidden_size, err));
        lowkey_progress_at(&eval->progress, eval->done + (first + n) / (double)request->window);
    }
    return LOWKEY_OK;
}

/* Window windows[i] over a store (NULL: the reference). */
static lowkey_status pass_over(struct eval *eval, const struct lowkey_store *store, int i, float *hidden,
                               lowkey_error *err)
{
    const struct lowkey_eval_request *request = eval->request;
    struct lowkey_decoder_config config = { .model = request->model,
                                            .max_chunk = request->window < MAX_CHUNK ? request->window
                                                                                     : MAX_CHUNK,
                                            .n_threads = request->n_threads };
    lowkey_plain_attention *attention = NULL;
    lowkey_decoder *decoder = NULL;
    lowkey_status status = lowkey_plain_attention_create(request->model, request->model->n_layers,
                                                         request->window, request->n_threads, store,
                                                         &attention, err);
    if (status == LOWKEY_OK) {
        config.attention = lowkey_plain_attention_interface(attention);
        status = lowkey_decoder_create(&config, &decoder, err);
    }
    if (status == LOWKEY_OK) status = read_window(eval, decoder, i, hidden, err);
    lowkey_decoder_free(decoder);
    lowkey_plain_attention_free(attention);
    return status;
}

/* Where the states are kept, from there. */
static lowkey_status reference_pass(struct eval *eval, int i, float *hidden, lowkey_error *err)
{
    const struct lowkey_eval_request *request = eval->request;
    if (!request->references) return pass_over(eval, NULL, i, hidden, err);
    const struct lowkey_reference_window of = { request->references, request->model, request->tokens,
                                                request->window, request->windows[i] };
    int found;
    LOWKEY_TRY(lowkey_reference_read(&of, hidden, &found, err));
    if (found) return LOWKEY_OK;
    LOWKEY_TRY(pass_over(eval, NULL, i, hidden, err));
    return lowkey_reference_write(&of, hidden, err);
}

static lowkey_status pass(struct eval *eval, int i, struct scored *scored, lowkey_error *err)
{
    const struct lowkey_eval_request *request = eval->request;
    const struct stopwatch watch = start_watch();
    lowkey_status status;
    if (scored->format == REFERENCE) {
        scored->result.bits = (struct lowkey_eval_bits) { 32, 32 };
        status = reference_pass(eval, i, scored->hidden, err);
    } else {
        struct lowkey_eval_format *format = &request->formats[scored->format];
        struct lowkey_store store;
        status = lowkey_eval_format_start(format, request->window, request->n_threads, &store, err);
        if (status == LOWKEY_OK) status = pass_over(eval, &store, i, scored->hidden, err);
        if (status == LOWKEY_OK) status = lowkey_eval_format_measure(format, &scored->result.bits, err);
        lowkey_eval_format_stop(format);
    }
    eval->done++;
    add_time(&scored->result, watch);
    return status;
}

/* ---- scoring ---- */

struct block { /* tokens whose logits are in memory, and what they predict */
    const struct eval *eval;
    const int32_t *targets;
    struct lowkey_logits reference[LOGIT_ROWS];
    double nll[LOGIT_ROWS], kl[LOGIT_ROWS];
    int agrees[LOGIT_ROWS];
};

static const float *row_of(const struct block *block, const float *logits, int t)
{
    return logits + (size_t)t * (size_t)block->eval->request->model->vocab_size;
}

static void score_reference_row(void *arg, int t)
{
    struct block *block = arg;
    block->reference[t] = lowkey_logits_of(row_of(block, block->eval->reference_logits, t),
                                           block->eval->request->model->vocab_size);
    block->nll[t] = lowkey_token_nll(&block->reference[t], block->targets[t]);
    block->kl[t] = 0;
    block->agrees[t] = 1;
}

static void score_row(void *arg, int t)
{
    struct block *block = arg;
    const struct lowkey_logits logits = lowkey_logits_of(row_of(block, block->eval->logits, t),
                                                         block->eval->request->model->vocab_size);
    block->nll[t] = lowkey_token_nll(&logits, block->targets[t]);
    block->kl[t] = lowkey_token_kl(&block->reference[t], &logits);
    block->agrees[t] = logits.top == block->reference[t].top;
}

/* Tokens first.. of the window, n of them, of one format. */
static void score_block(struct block *block, struct scored *scored, int first, int n)
{
    const struct eval *eval = block->eval;
    const struct stopwatch watch = start_watch();
    const int is_reference = scored->format == REFERENCE;
    int n_threads = eval->request->n_threads;
    lowkey_decoder_logits(eval->for_logits,
                          scored->hidden + (size_t)first * (size_t)eval->request->model->hidden_size, n,
                          is_reference ? eval->reference_logits : eval->logits);
    lowkey_threads_run(&n_threads, n, is_reference ? score_reference_row : score_row, block);
    for (int t = 0; t < n; t++) {
        scored->result.nll += block->nll[t];
        scored->result.kl += block->kl[t];
        scored->result.n_top1 += block->agrees[t];
    }
    scored->result.n_predicted += n;
    add_time(&scored->result, watch);
}

/* scored[0] is the reference. */
static lowkey_status score_window(struct eval *eval, int i, struct scored *scored, int n_scored,
                                  lowkey_error *err)
{
    const struct lowkey_eval_request *request = eval->request;
    const int32_t *tokens = request->tokens->tokens + lowkey_samples_start(request->tokens, request->window,
                                                                           request->window,
                                                                           request->windows[i]);
    struct block *block = malloc(sizeof *block);
    if (!block) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory");
    block->eval = eval;
    for (int first = 0, n; first < request->window - 1; first += n) {
        n = request->window - 1 - first < LOGIT_ROWS ? request->window - 1 - first : LOGIT_ROWS;
        block->targets = tokens + first + 1;
        for (int f = 0; f < n_scored; f++) score_block(block, &scored[f], first, n);
    }
    free(block);
    for (int f = 0; f < n_scored; f++)
        if (!isfinite(scored[f].result.nll) || !isfinite(scored[f].result.kl))
            return lowkey_fail(err, LOWKEY_EINVAL, "window %lld, %s: the logits are not finite",
                               (long long)request->windows[i],
                               f ? request->formats[scored[f].format].label : "f32");
    return LOWKEY_OK;
}

/* ---- the whole ---- */

static int is_wanted(const struct lowkey_eval_request *request, int format, int i)
{
    return !request->is_wanted || request->is_wanted(request->user, format, i);
}

/* Formats formats[0..n-1] of a window whose reference has been read; its result goes out with the first of them. */
static lowkey_status eval_together(struct eval *eval, int i, struct scored reference, const int *formats,
                                   int n, int with_reference, lowkey_error *err)
{
    const struct lowkey_eval_request *request = eval->request;
    struct scored scored[1 + MAX_TOGETHER] = { reference };
    for (int f = 0; f < n; f++) {
        scored[1 + f] = (struct scored) { .format = formats[f],
                                          .hidden = reference.hidden +
                                                    (size_t)(1 + f) * (size_t)request->window *
                                                        (size_t)request->model->hidden_size };
        LOWKEY_TRY(pass(eval, i, &scored[1 + f], err));
    }
    LOWKEY_TRY(score_window(eval, i, scored, 1 + n, err));
    for (int f = with_reference ? 0 : 1; f < 1 + n; f++)
        LOWKEY_TRY(request->on_result(request->user, scored[f].format, i, &scored[f].result, err));
    return LOWKEY_OK;
}

static lowkey_status eval_window(struct eval *eval, int i, lowkey_error *err)
{
    const struct lowkey_eval_request *request = eval->request;
    int formats[MAX_TOGETHER], n = 0, with_reference = is_wanted(request, REFERENCE, i), is_read = 0;
    struct scored reference = { .format = REFERENCE, .hidden = eval->hidden };
    for (int f = 0; f <= request->n_formats; f++) {
        const int is_end = f == request->n_formats;
        if (!is_end && is_wanted(request, f, i)) formats[n++] = f;
        if (n < eval->n_together && !(is_end && (n || with_reference))) continue;
        if (!is_read) LOWKEY_TRY(pass(eval, i, &reference, err));
        is_read = 1;
        LOWKEY_TRY(eval_together(eval, i, reference, formats, n, with_reference, err));
        with_reference = n = 0;
    }
    return LOWKEY_OK;
}

static double count_passes(const struct lowkey_eval_request *request)
{
    double n = 0;
    for (int i = 0; i < request->n_windows; i++) {
        int here = 0, reference = is_wanted(request, REFERENCE, i);
        for (int f = 0; f < request->n_formats; f++) here += is_wanted(request, f, i);
        n += here + (here || reference);
    }
    return n;
}

static lowkey_status no_attention(void *user, const struct lowkey_attention_step *step, lowkey_error *err)
{
    (void)user, (void)step;
    return lowkey_fail(err, LOWKEY_EINVAL, "a decoder that is for logits alone was run");
}

static lowkey_status no_reset(void *user, lowkey_error *err)
{
    return no_attention(user, NULL, err);
}

static lowkey_status allocate(struct eval *eval, lowkey_error *err)
{
    const struct lowkey_eval_request *request = eval->request;
    const size_t states = (size_t)request->window * (size_t)request->model->hidden_size,
                 logits = LOGIT_ROWS * (size_t)request->model->vocab_size;
    const size_t room = ((size_t)256 << 20) / sizeof(float) / states;
    eval->n_together = room < 1 ? 1 : room > MAX_TOGETHER ? MAX_TOGETHER : (int)room;
    if (eval->n_together > request->n_formats) eval->n_together = request->n_formats ? request->n_formats : 1;
    eval->hidden = calloc((size_t)(1 + eval->n_together), states * sizeof(float));
    eval->reference_logits = malloc(logits * sizeof(float));
    eval->logits = malloc(logits * sizeof(float));
    if (!eval->hidden || !eval->reference_logits || !eval->logits)
        return lowkey_fail(err, LOWKEY_ENOMEM,
                           "no memory for hidden states of %d tokens and %d rows of logits", request->window,
                           LOGIT_ROWS);
    const struct lowkey_decoder_config config = { .model = request->model,
                                                  .attention = { no_attention, no_reset, NULL },
                                                  .max_chunk = 1,
                                                  .n_threads = request->n_threads };
    return lowkey_decoder_create(&config, &eval->for_logits, err);
}

lowkey_status lowkey_eval(const struct lowkey_eval_request *request, lowkey_error *err)
{
    const int64_t available = lowkey_samples_count(request->tokens, request->window, request->window);
    for (int i = 0; i < request->n_windows; i++)
        if (request->window < 2 || request->windows[i] < 0 || request->windows[i] >= available)
            return lowkey_fail(err, LOWKEY_EINVAL, "window %lld of %d tokens: the text has %lld such",
                               (long long)request->windows[i], request->window, (long long)available);
    struct eval eval = { .request = request };
    lowkey_status status = allocate(&eval, err);
    lowkey_progress_start(&eval.progress, "eval", count_passes(request));
    for (int i = 0; status == LOWKEY_OK && i < request->n_windows; i++) status = eval_window(&eval, i, err);
    lowkey_progress_end(&eval.progress);
    lowkey_decoder_free(eval.for_logits);
    free(eval.hidden);
    free(eval.reference_logits);
    free(eval.logits);
    return status;
}
