/* tune_write.c - the quantizer of the best state, and what its file says of how it came about: the windows tuned on join the
 * samples it was fitted on, and the report is made anew by packing those windows, since the captures of the fit are not at
 * hand here. */
#include <endian.h>
#include <stdlib.h>
#include <string.h>

#include "calib/command.h"
#include "experiments/samples.h"
#include "experiments/tune.h"
#include "experiments/tune_entries.h"
#include "experiments/tune_pass.h"
#include "formats/pool.h"
#include "formats/sha256.h"
#include "runtime/error.h"

static int n_tuned_on(const struct lowkey_tune_request *request)
{
    const int n = request->end_window - request->first_window;
    return request->steps < n ? request->steps : n;
}

static const int32_t *tokens_of(const struct lowkey_tune_request *request, int window)
{
    return request->tokens->tokens +
           lowkey_samples_start(request->tokens, request->length, request->length, window);
}

/* ---- samples ---- */

static int compare_hashes(const void *a, const void *b)
{
    return memcmp(a, b, 32);
}

static lowkey_status hash_window(const struct lowkey_tune_request *request, int window,
                                 unsigned char hash[32], lowkey_error *err)
{
    const int32_t *tokens = tokens_of(request, window);
    lowkey_sha256 *sha256 = lowkey_sha256_begin();
    for (int t = 0; sha256 && t < request->length; t++) {
        const uint32_t little = htole32((uint32_t)tokens[t]);
        lowkey_sha256_add(sha256, &little, sizeof little);
    }
    return lowkey_sha256_end(sha256, hash, err);
}

/* from;text, or from where it is of that text already */
static lowkey_status join_text(struct lowkey_pool *pool, const char *from, const char *text, const char **out,
                               lowkey_error *err)
{
    char *joined;
    LOWKEY_TRY(lowkey_pool_take(pool, strlen(from) + strlen(text) + 2, 1, &joined, err));
    strcpy(joined, from);
    strcat(strcat(joined, ";"), text);
    *out = joined;
    return LOWKEY_OK;
}

static lowkey_status join_samples(const struct lowkey_tune_request *request, struct lowkey_pool *pool,
                                  struct lowkey_fit_record *record, lowkey_error *err)
{
    const int n_more = n_tuned_on(request);
    const size_t n = (size_t)record->n_samples;
    unsigned char(*hashes)[32];
    char text[65];
    LOWKEY_TRY(lowkey_pool_take(pool, n + (size_t)n_more, sizeof *hashes, &hashes, err));
    memcpy(hashes, record->sample_sha256, n * sizeof *hashes);
    for (int i = 0; i < n_more; i++) {
        const int window = lowkey_tune_window(request, i);
        if (window < 0) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for the order of windows");
        LOWKEY_TRY(hash_window(request, window, hashes[n + (size_t)i], err));
    }
    qsort(hashes, n + (size_t)n_more, sizeof *hashes, compare_hashes);
    record->sample_sha256 = (const unsigned char(*)[32])hashes;
    record->n_samples += n_more;
    record->n_tokens += (int64_t)n_more *
                        (request->length - lowkey_quantizer_describe(request->quantizer)->n_sink_tokens);
    lowkey_sha256_print(request->tokens->text_sha256, text);
    if (strstr(record->text_sha256, text)) return LOWKEY_OK;
    LOWKEY_TRY(join_text(pool, record->text_name, request->tokens->text_name, &record->text_name, err));
    return join_text(pool, record->text_sha256, text, &record->text_sha256, err);
}

/* ---- reports ---- */

/* Zeros for all that is measured. */
static lowkey_status empty_report(struct lowkey_pool *pool, const struct lowkey_tuned_side *side,
                                  struct lowkey_side_report *report, lowkey_error *err)
{
    const size_t C = side->n_channels;
    const uint8_t *flags = report->flags;
    LOWKEY_TRY(lowkey_pool_take(pool, C, sizeof *report->mean, &report->mean, err));
    LOWKEY_TRY(lowkey_pool_take(pool, C, sizeof *report->variance, &report->variance, err));
    LOWKEY_TRY(lowkey_pool_take(pool, C, sizeof *report->mse, &report->mse, err));
    LOWKEY_TRY(lowkey_pool_take(pool, C, sizeof *report->weighted_mse, &report->weighted_mse, err));
    LOWKEY_TRY(lowkey_pool_take(pool, C * side->n_table, sizeof *report->histogram, &report->histogram, err));
    LOWKEY_TRY(lowkey_pool_take(pool, C, sizeof *report->flags, &report->flags, err));
    memcpy(report->flags, flags, C);
    report->n_tokens = report->n_outliers = report->n_clamped = report->n_saturated = 0;
    return LOWKEY_OK;
}

static void end_report(const struct lowkey_tuned_side *side, struct lowkey_side_report *report)
{
    lowkey_entry_report_end(report, side->n_channels);
    for (size_t c = 0; c < side->n_channels; c++) {
        report->flags[c] &= (uint8_t)~LOWKEY_FLAG_UNUSED_CODES;
        for (size_t k = 0; k < (size_t)1 << (side->desc->bits[c] + (side->desc->trellis != 0)); k++)
            if (report->histogram[c * side->n_table + k] == 0) report->flags[c] |= LOWKEY_FLAG_UNUSED_CODES;
    }
}

static lowkey_status pack_windows(const struct lowkey_tune_request *request,
                                  const lowkey_quantizer *quantizer, struct lowkey_side_report (*reports)[2],
                                  lowkey_error *err)
{
    lowkey_tune_pass *pass;
    LOWKEY_TRY(lowkey_tune_pass_create(request->model, request->length, request->n_threads, &pass, err));
    struct lowkey_progress progress;
    lowkey_progress_start(&progress, "report", n_tuned_on(request));
    lowkey_status status = LOWKEY_OK;
    for (int i = 0; status == LOWKEY_OK && i < n_tuned_on(request); i++) {
        double loss;
        const int window = lowkey_tune_window(request, i);
        if (window < 0) {
            status = lowkey_fail(err, LOWKEY_ENOMEM, "no memory for the order of windows");
            break;
        }
        const struct lowkey_tune_measure measure = { .quantizer = quantizer,
                                                     .tokens = tokens_of(request, window),
                                                     .reports = reports };
        status = lowkey_tune_kl(pass, &measure, &loss, err);
        lowkey_progress_at(&progress, i + 1);
        if (status == LOWKEY_OK && lowkey_interrupted())
            status = lowkey_fail(err, LOWKEY_ECANCELLED, "interrupted");
    }
    lowkey_progress_end(&progress);
    lowkey_tune_pass_free(pass);
    return status;
}

static lowkey_status make_reports(const struct lowkey_tune_request *request,
                                  const struct lowkey_tuned_tables *tables, const lowkey_quantizer *quantizer,
                                  struct lowkey_pool *pool, struct lowkey_fit_record *record,
                                  lowkey_error *err)
{
    const size_t n_layers = (size_t)tables->desc->n_layers;
    struct lowkey_side_report(*reports)[2];
    LOWKEY_TRY(lowkey_pool_take(pool, n_layers, sizeof *reports, &reports, err));
    memcpy(reports, record->reports, n_layers * sizeof *reports);
    for (size_t i = 0; i < 2 * n_layers; i++)
        LOWKEY_TRY(empty_report(pool, &tables->sides[i], &reports[i / 2][i % 2], err));
    LOWKEY_TRY(pack_windows(request, quantizer, reports, err));
    for (size_t i = 0; i < 2 * n_layers; i++) end_report(&tables->sides[i], &reports[i / 2][i % 2]);
    record->reports = reports;
    return LOWKEY_OK;
}

/* ---- the file ---- */

static lowkey_status write_tuned(const struct lowkey_tune_request *request,
                                 const struct lowkey_tune_state *state, const lowkey_quantizer *quantizer,
                                 struct lowkey_pool *pool, const char *path, lowkey_error *err)
{
    struct lowkey_fit_record record = *request->record;
    if (state->best_step > 0) {
        record.tuned_steps += state->best_step;
        LOWKEY_TRY(join_samples(request, pool, &record, err));
        LOWKEY_TRY(make_reports(request, state->tables, quantizer, pool, &record, err));
    }
    return lowkey_quantizer_write(path, lowkey_quantizer_describe(quantizer), &record, err);
}

lowkey_status lowkey_tune_write(const struct lowkey_tune_request *request,
                                const struct lowkey_tune_state *state, const char *path, lowkey_error *err)
{
    struct lowkey_pool pool = { 0 };
    lowkey_quantizer *quantizer;
    LOWKEY_TRY(lowkey_tuned_tables_quantizer(state->tables, state->tables->best, &quantizer, err));
    const lowkey_status status = write_tuned(request, state, quantizer, &pool, path, err);
    lowkey_pool_free(&pool);
    lowkey_quantizer_free(quantizer);
    return status;
}
