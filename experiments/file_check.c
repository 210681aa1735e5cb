/* file_check.c - validates any of our files by reading all of it, block by block. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "calib/command.h"
#include "experiments/files.h"
#include "formats/activations.h"
#include "formats/file_h5.h"
#include "formats/model.h"
#include "formats/quantizer_file.h"
#include "formats/tokens.h"
#include "runtime/error.h"

static lowkey_status check_model(const char *path, char *summary, lowkey_error *err)
{
    lowkey_model *model;
    LOWKEY_TRY(lowkey_model_describe(path, 1, &model, err));
    snprintf(summary, LOWKEY_SUMMARY_SIZE, "model %.100s, %d layers, all weights finite, hash right",
             model->name, model->n_layers);
    lowkey_model_free(model);
    return LOWKEY_OK;
}

static lowkey_status check_tokens(const char *path, char *summary, lowkey_error *err)
{
    lowkey_tokens *tokens;
    LOWKEY_TRY(lowkey_tokens_open(path, &tokens, err));
    snprintf(summary, LOWKEY_SUMMARY_SIZE, "tokens of %.100s, %" PRId64 " in %d sequence%s",
             tokens->text_name, tokens->n_tokens, tokens->n_sequences, tokens->n_sequences == 1 ? "" : "s");
    lowkey_tokens_free(tokens);
    return LOWKEY_OK;
}

enum { BLOCK = 1 << 22 }; /* floats, or a token's row */

static lowkey_status check_stream(lowkey_activations *a, int i, enum lowkey_stream stream, float *block,
                                  struct lowkey_progress *progress, double *done, lowkey_error *err)
{
    const struct lowkey_activations_info *info = lowkey_activations_describe(a);
    const int n_heads = lowkey_stream_heads(&info->layers[i], stream);
    const int64_t row = (int64_t)n_heads * lowkey_stream_head_dim(&info->layers[i], stream);
    const int64_t n_tokens = info->sample_offsets[info->n_samples], step = row < BLOCK ? BLOCK / row : 1;
    for (int64_t first = 0, n; first < n_tokens; first += n) {
        if (lowkey_interrupted()) return lowkey_fail(err, LOWKEY_ECANCELLED, "interrupted");
        n = n_tokens - first < step ? n_tokens - first : step;
        LOWKEY_TRY(lowkey_activations_read(a, i, stream, first, n, 0, n_heads, block, err));
        *done += (double)n * (double)row;
        lowkey_progress_at(progress, *done);
    }
    return LOWKEY_OK;
}

static lowkey_status check_all_rows(lowkey_activations *a, lowkey_error *err)
{
    const struct lowkey_activations_info *info = lowkey_activations_describe(a);
    double total = 0, done = 0, largest = BLOCK;
    for (int i = 0; i < info->n_layers; i++) {
        for (int s = 0; s < LOWKEY_N_STREAMS; s++) {
            const double row = (double)lowkey_stream_heads(&info->layers[i], (enum lowkey_stream)s) *
                               lowkey_stream_head_dim(&info->layers[i], (enum lowkey_stream)s);
            if (info->contents >> s & 1) total += row * (double)info->sample_offsets[info->n_samples];
            if (row > largest) largest = row;
        }
    }
    float *block = malloc((size_t)largest * sizeof *block);
    if (!block) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for a block of rows");
    struct lowkey_progress progress;
    lowkey_progress_start(&progress, "check", total);
    lowkey_status status = LOWKEY_OK;
    for (int i = 0; i < info->n_layers; i++)
        for (int s = 0; s < LOWKEY_N_STREAMS && !status; s++)
            if (info->contents >> s & 1)
                status = check_stream(a, i, (enum lowkey_stream)s, block, &progress, &done, err);
    lowkey_progress_end(&progress);
    free(block);
    return status;
}

static lowkey_status check_activations(const char *path, char *summary, lowkey_error *err)
{
    lowkey_activations *a;
    LOWKEY_TRY(lowkey_activations_open(path, &a, err));
    const struct lowkey_activations_info *info = lowkey_activations_describe(a);
    const lowkey_status status = check_all_rows(a, err);
    snprintf(summary, LOWKEY_SUMMARY_SIZE,
             "activations of %.60s, %d of %d layers, %" PRId64 " tokens in %d sample%s, all finite",
             info->model_name, info->n_layers, info->n_model_layers, info->sample_offsets[info->n_samples],
             info->n_samples, info->n_samples == 1 ? "" : "s");
    lowkey_activations_close(a);
    return status;
}

static lowkey_status check_quantizer(const char *path, char *summary, lowkey_error *err)
{
    lowkey_quantizer *quantizer;
    struct lowkey_fit_record *record;
    LOWKEY_TRY(lowkey_quantizer_read(path, &quantizer, &record, err));
    const lowkey_quantizer_desc *desc = lowkey_quantizer_describe(quantizer);
    snprintf(summary, LOWKEY_SUMMARY_SIZE,
             "quantizer of %.60s, %d of %d layers, fitted on %" PRId64 " tokens of %.60s", desc->model_name,
             desc->n_layers, record->n_model_layers, record->n_tokens, record->text_name);
    lowkey_fit_record_free(record);
    lowkey_quantizer_free(quantizer);
    return LOWKEY_OK;
}

lowkey_status lowkey_file_check(const char *path, char summary[LOWKEY_SUMMARY_SIZE], lowkey_error *err)
{
    static const struct {
        const char *schema;
        lowkey_status (*check)(const char *path, char *summary, lowkey_error *err);
    } checks[] = {
        { "model", check_model },
        { "tokens", check_tokens },
        { "activations", check_activations },
        { "quantizer", check_quantizer },
    };
    lowkey_h5 *file;
    size_t i = 0;
    LOWKEY_TRY(lowkey_h5_open(path, NULL, &file, err));
    while (strcmp(checks[i].schema, lowkey_h5_schema(file)) != 0) i++; /* lowkey_h5_open knows these four */
    lowkey_h5_close(file);
    return checks[i].check(path, summary, err);
}
