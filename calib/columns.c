/* columns.c - fits the channels of one side of a layer: all of a channel's values are loaded, a block of
 * channels at a time, as memory allows, and fitted by column.c on many threads. Where channels share a
 * codebook, what each has summed is added channel after channel, and solved when the group is complete. */
#include <stdlib.h>
#include <string.h>

#include "calib/column.h"
#include "calib/threads.h"
#include "runtime/error.h"

enum {
    ROWS = 512, /* tokens read at once */
    SHARED_AT_ONCE = 16, /* channels with bins of their own at one time */
};
static const int64_t usual_bytes = INT64_C(320) << 20, jobs_bytes = INT64_C(384) << 20;

/* What a pass over the columns of a side holds. */
struct pass {
    struct lowkey_side_fit *fit;
    size_t first, last; /* the block of channels that is loaded */
    float *x, *w; /* [last - first][n_tokens] */
    float *rows; /* [ROWS][heads of the block][head_dim] */
    struct lowkey_shared *total; /* of the group of channels at hand; NULL without shared codebooks */
    struct lowkey_shared *parts; /* [SHARED_AT_ONCE] */
    uint8_t *is_dead; /* [C] of a group whose weights are all zero: fitted again without them */
    int n_dead;
};

/* Load the block's channels of one stream into columns. */
static lowkey_status load_columns(struct pass *pass, int is_weights, float *columns, lowkey_error *err)
{
    struct lowkey_side_fit *fit = pass->fit;
    const lowkey_captures *captures = fit->captures;
    const size_t D = (size_t)fit->head_dim, n_tokens = (size_t)captures->n_tokens;
    const int first_head = (int)(pass->first / D), n_heads = (int)((pass->last - 1) / D) - first_head + 1;
    const size_t row = (size_t)n_heads * D, skip = pass->first - (size_t)first_head * D;
    const enum lowkey_stream stream = fit->which ? LOWKEY_VALUE : LOWKEY_KEY;
    for (int s = 0; s < captures->n_samples; s++) {
        const struct lowkey_sample *sample = &captures->samples[s];
        for (int64_t first = sample->n_sinks; first < sample->n_tokens; first += ROWS) {
            const int64_t n = sample->n_tokens - first < ROWS ? sample->n_tokens - first : ROWS;
            if (is_weights && fit->weights.source == LOWKEY_WEIGHTS_NONE)
                for (size_t i = 0; i < (size_t)n * row; i++) pass->rows[i] = 1;
            else if (is_weights)
                LOWKEY_TRY(
                    lowkey_weights_read(&fit->weights, s, first, n, first_head, n_heads, pass->rows, err));
            else
                LOWKEY_TRY(lowkey_captures_read(captures, fit->layer, stream, s, first, n, first_head,
                                                n_heads, pass->rows, err));
            const size_t start = (size_t)(sample->start + first - sample->n_sinks);
            for (size_t c = pass->first; c < pass->last; c++)
                for (size_t t = 0; t < (size_t)n; t++)
                    columns[(c - pass->first) * n_tokens + start + t] =
                        pass->rows[t * row + skip + c - pass->first];
        }
        LOWKEY_TRY(lowkey_side_fit_passed(fit, 0, err));
    }
    return LOWKEY_OK;
}

/* Add what channels first..first+n-1 shared, in their order; a group that is complete is solved. */
static lowkey_status gather(struct pass *pass, size_t first, size_t n, lowkey_error *err)
{
    struct lowkey_side_fit *fit = pass->fit;
    const size_t D = fit->side->scope == LOWKEY_SCOPE_HEAD ? (size_t)fit->head_dim : fit->n_channels;
    for (size_t c = first; c < first + n; c++) {
        if (c % D == 0) memset(pass->total, 0, sizeof *pass->total);
        const struct lowkey_shared *part = &pass->parts[c - first];
        if (fit->bits[c] <= 5 && fit->scale[c] > 0) {
            for (int b = 0; b < LOWKEY_SHARED_BINS; b++) {
                pass->total->bins[b].weight += part->bins[b].weight;
                pass->total->bins[b].moment += part->bins[b].moment;
            }
            pass->total->square += part->square;
        }
        if ((c + 1) % D != 0) continue;
        if (!lowkey_any_shares(fit, c + 1 - D, c + 1)) continue;
        if (lowkey_shared_is_empty(pass->total))
            pass->n_dead += (int)D, memset(pass->is_dead + c + 1 - D, 1, D);
        else
            LOWKEY_TRY(lowkey_shared_solve(fit, c + 1 - D, c + 1, pass->total, err));
    }
    return LOWKEY_OK;
}

/* Fit the block's channels, as many at a time as threads, and memory for them, allow. */
static lowkey_status fit_block(struct pass *pass, lowkey_error *err)
{
    struct lowkey_side_fit *fit = pass->fit;
    const int64_t n_tokens = fit->captures->n_tokens;
    const int64_t copies = fit->costs ? 8 * n_tokens : 0; /* in the order of tokens */
    const int64_t job_bytes = copies +
                              (n_tokens <= LOWKEY_SORTED ? 40 * n_tokens : (INT64_C(12) << 20) + 2 * n_tokens);
    int threads = fit->options->n_threads;
    while (threads > 1 && threads * job_bytes > jobs_bytes) threads--;
    struct lowkey_column columns[SHARED_AT_ONCE * 16];
    const size_t most = pass->total ? SHARED_AT_ONCE : sizeof columns / sizeof columns[0];
    for (size_t first = pass->first; first < pass->last; first += most) {
        const size_t n = pass->last - first < most ? pass->last - first : most;
        for (size_t i = 0; i < n; i++) {
            const size_t at = (first - pass->first + i) * (size_t)n_tokens;
            columns[i] = (struct lowkey_column) { .fit = fit,
                                                  .channel = first + i,
                                                  .n = n_tokens,
                                                  .x = pass->x + at,
                                                  .w = pass->w && !pass->is_dead[first + i] ? pass->w + at
                                                                                            : NULL,
                                                  .shared = pass->parts ? &pass->parts[i] : NULL };
            fit->mantissa_bits |= lowkey_column_look_over(&columns[i]);
        }
        lowkey_threads_run(&threads, (int)n, lowkey_column_fit, columns);
        for (size_t i = 0; i < n; i++)
            if (columns[i].status != LOWKEY_OK)
                return lowkey_fail(err, columns[i].status, "layer %d %s channel %zu: %s",
                                   fit->captures->info->layers[fit->layer].index,
                                   fit->which ? "value" : "key", first + i, columns[i].err.message);
        if (pass->total) LOWKEY_TRY(gather(pass, first, n, err));
        LOWKEY_TRY(lowkey_side_fit_passed(fit, (double)n_tokens * (double)n / (double)fit->n_channels, err));
    }
    return LOWKEY_OK;
}

static lowkey_status run_pass(struct pass *pass, lowkey_error *err)
{
    struct lowkey_side_fit *fit = pass->fit;
    const int64_t n_tokens = fit->captures->n_tokens;
    /* on normalised values even equal weights differ: by the square of the token's scale */
    const int has_weights = fit->weights.source != LOWKEY_WEIGHTS_NONE ||
                            (fit->grids && !fit->options->normalised_units);
    const int64_t block_bytes = fit->options->column_bytes ? fit->options->column_bytes : usual_bytes;
    const int64_t fitting = block_bytes / (n_tokens * 4 * (1 + has_weights));
    const size_t at_once = fitting < 1                          ? 1
                           : fitting < (int64_t)fit->n_channels ? (size_t)fitting
                                                                : fit->n_channels;
    pass->x = malloc(at_once * (size_t)n_tokens * sizeof(float));
    pass->w = has_weights ? malloc(at_once * (size_t)n_tokens * sizeof(float)) : NULL;
    pass->rows = malloc(ROWS * (at_once + 2 * (size_t)fit->head_dim) * sizeof(float));
    if (!lowkey_has_own_codebook(fit)) {
        pass->total = malloc(sizeof *pass->total);
        pass->parts = malloc(SHARED_AT_ONCE * sizeof *pass->parts);
    }
    if (!pass->x || (has_weights && !pass->w) || !pass->rows ||
        (!lowkey_has_own_codebook(fit) && (!pass->total || !pass->parts)))
        return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %zu channels of %lld tokens", at_once,
                           (long long)n_tokens);
    for (pass->first = 0; pass->first < fit->n_channels; pass->first = pass->last) {
        pass->last = fit->n_channels - pass->first < at_once ? fit->n_channels : pass->first + at_once;
        LOWKEY_TRY(load_columns(pass, 0, pass->x, err));
        if (pass->w) LOWKEY_TRY(load_columns(pass, 1, pass->w, err));
        LOWKEY_TRY(fit_block(pass, err));
    }
    return LOWKEY_OK;
}

lowkey_status lowkey_columns_fit(struct lowkey_side_fit *fit, lowkey_error *err)
{
    uint8_t *is_dead = calloc(fit->n_channels, 1);
    if (!is_dead) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %zu channels", fit->n_channels);
    lowkey_status status = LOWKEY_OK;
    for (int attempt = 0, again = 1; again && status == LOWKEY_OK; attempt++) {
        struct pass pass = { .fit = fit, .is_dead = is_dead };
        status = run_pass(&pass, err);
        again = pass.n_dead > 0 && attempt == 0;
        for (size_t c = 0; c < fit->n_channels; c++) /* no channel of its group has any weight: 1 is taken */
            if (is_dead[c]) fit->flags[c] |= LOWKEY_FLAG_ZERO_WEIGHTS;
        free(pass.x);
        free(pass.w);
        free(pass.rows);
        free(pass.total);
        free(pass.parts);
    }
    free(is_dead);
    return status;
}
