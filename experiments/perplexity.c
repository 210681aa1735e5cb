/* perplexity.c - negative log-likelihood of windows of a text. Logits are made for a few rows at a time: a row of a
 * vocabulary of 49,152 is 192 KiB. */
#include "experiments/perplexity.h"

#include <math.h>
#include <stdlib.h>

#include "calib/command.h"
#include "calib/threads.h"
#include "experiments/samples.h"
#include "runtime/error.h"

enum { LOGIT_ROWS = 128 };

struct scratch {
    float *hidden; /* [max_chunk][hidden_size] */
    float *logits; /* [LOGIT_ROWS][vocab_size] */
};

double lowkey_token_nll(const float *logits, int n, int target)
{
    float max = logits[0];
    for (int i = 1; i < n; i++) max = logits[i] > max ? logits[i] : max;
    double sum = 0;
    for (int i = 0; i < n; i++) sum += exp((double)logits[i] - (double)max);
    return log(sum) + ((double)max - (double)logits[target]);
}

struct rows {
    const float *logits;
    const int32_t *targets;
    int vocab_size;
    double nll[LOGIT_ROWS];
};

static void nll_row(void *arg, int t)
{
    struct rows *rows = arg;
    rows->nll[t] = lowkey_token_nll(rows->logits + (size_t)t * (size_t)rows->vocab_size, rows->vocab_size,
                                    rows->targets[t]);
}

/* Rows of hidden predict targets: the summed negative log-likelihood of n_rows of them. */
static double chunk_nll(const struct lowkey_perplexity_request *request, const struct scratch *scratch,
                        int n_rows, const int32_t *targets)
{
    const lowkey_model *model = lowkey_decoder_model(request->decoder);
    int n_threads = request->n_threads;
    double nll = 0;
    for (int first = 0; first < n_rows; first += LOGIT_ROWS) {
        const int n = n_rows - first < LOGIT_ROWS ? n_rows - first : LOGIT_ROWS;
        struct rows rows = { .logits = scratch->logits,
                             .targets = targets + first,
                             .vocab_size = model->vocab_size };
        lowkey_decoder_logits(request->decoder, scratch->hidden + (size_t)first * (size_t)model->hidden_size,
                              n, scratch->logits);
        lowkey_threads_run(&n_threads, n, nll_row, &rows);
        for (int t = 0; t < n; t++) nll += rows.nll[t];
    }
    return nll;
}

static lowkey_status window_nll(const struct lowkey_perplexity_request *request,
                                const struct scratch *scratch, const int32_t *tokens,
                                struct lowkey_progress *progress, double done, double *nll, lowkey_error *err)
{
    const int max_chunk = lowkey_decoder_max_chunk(request->decoder);
    LOWKEY_TRY(lowkey_decoder_reset(request->decoder, err));
    *nll = 0;
    for (int first = 0; first < request->window; first += max_chunk) {
        if (lowkey_interrupted()) return lowkey_fail(err, LOWKEY_ECANCELLED, "interrupted");
        const int n = request->window - first < max_chunk ? request->window - first : max_chunk;
        const int is_last = first + n == request->window; /* whose last token predicts none of the window */
        LOWKEY_TRY(lowkey_decoder_forward(request->decoder, tokens + first, n, scratch->hidden, err));
        *nll += chunk_nll(request, scratch, n - is_last, tokens + first + 1);
        lowkey_progress_at(progress, done + first + n);
    }
    return LOWKEY_OK;
}

static lowkey_status all_windows(const struct lowkey_perplexity_request *request,
                                 const struct scratch *scratch, struct lowkey_progress *progress,
                                 lowkey_error *err)
{
    for (int i = 0; i < request->n_windows; i++) {
        const int64_t start = lowkey_samples_start(request->tokens, request->window, request->window, i);
        double nll;
        LOWKEY_TRY(window_nll(request, scratch, request->tokens->tokens + start, progress,
                              (double)i * request->window, &nll, err));
        if (!isfinite(nll))
            return lowkey_fail(err, LOWKEY_EINVAL, "window %d: the model's logits are not finite", i);
        request->on_window(request->user, i, nll);
    }
    return LOWKEY_OK;
}

lowkey_status lowkey_perplexity(const struct lowkey_perplexity_request *request, lowkey_error *err)
{
    const lowkey_model *model = lowkey_decoder_model(request->decoder);
    const int64_t available = lowkey_samples_count(request->tokens, request->window, request->window);
    if (request->window < 2 || request->n_windows < 1 || request->n_windows > available)
        return lowkey_fail(err, LOWKEY_EINVAL, "%d windows of %d tokens: the text has %lld such",
                           request->n_windows, request->window, (long long)available);
    struct scratch scratch = {
        .hidden = calloc((size_t)lowkey_decoder_max_chunk(request->decoder) * (size_t)model->hidden_size,
                         sizeof(float)),
        .logits = calloc(LOGIT_ROWS * (size_t)model->vocab_size, sizeof(float)),
    };
    lowkey_status status;
    if (!scratch.hidden || !scratch.logits) {
        status = lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %d rows of logits", LOGIT_ROWS);
    } else {
        struct lowkey_progress progress;
        lowkey_progress_start(&progress, "eval", (double)request->n_windows * request->window);
        status = all_windows(request, &scratch, &progress, err);
        lowkey_progress_end(&progress);
    }
    free(scratch.hidden);
    free(scratch.logits);
    return status;
}
