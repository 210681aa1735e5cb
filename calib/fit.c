/* fit.c - from captures and options to the quantizer file: bits per channel where there is a budget, then the loop over
 * layers (layer_fit.c), and the record of how it was done. */
#include "calib/fit.h"

#include <cblas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "calib/fit_options.h"
#include "calib/layer_fit.h"
#include "calib/widths.h"
#include "runtime/error.h"

struct result { /* lowkey_fit_result with what it points to */
    struct lowkey_fit_result public;
    lowkey_quantizer_desc desc;
    struct lowkey_fit_record record;
    lowkey_captures *captures; /* names */
    struct lowkey_pool pool;
};

static int has(const lowkey_captures *captures, enum lowkey_stream stream)
{
    return (int)(captures->contents >> stream & 1);
}

/* A channel's values are in memory together, and the scales of all tokens. */
static lowkey_status check_size(const lowkey_captures *captures, const char *path, lowkey_error *err)
{
    const int64_t most = INT64_C(1) << 26;
    if (captures->n_tokens <= most) return LOWKEY_OK;
    return lowkey_fail(err, LOWKEY_EUNSUPPORTED, "%s%s: expected at most %lld tokens, found %lld", path,
                       captures->n_files > 1 ? " and others" : "", (long long)most,
                       (long long)captures->n_tokens);
}

/* Feedback takes its matrix from gradients, or for keys from queries. */
static lowkey_status settle_feedback(const lowkey_captures *captures, struct lowkey_fit_options *options,
                                     lowkey_error *err)
{
    const int can[2] = { has(captures, LOWKEY_KEY_GRAD) || has(captures, LOWKEY_QUERY),
                         has(captures, LOWKEY_VALUE_GRAD) };
    for (int which = 0; which < 2; which++)
        if (options->side[which].feedback == LOWKEY_FEEDBACK_IF_POSSIBLE)
            options->side[which].feedback = can[which];
    if (options->side[0].feedback && !can[0])
        return lowkey_fail(
            err, LOWKEY_EINVAL,
            "error feedback for keys needs key_grad or query, which the files do not all have");
    if (options->side[1].feedback && !can[1])
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "error feedback for values needs value_grad, which the files do not all have");
    return LOWKEY_OK;
}

/* Tables may be refitted where they are fitted, static and of each channel's own, and hold all values. */
static void settle_refit(enum lowkey_sensitivity sensitivity, struct lowkey_fit_options *options)
{
    for (int which = 0; which < 2; which++) {
        struct lowkey_side_options *side = &options->side[which];
        if (side->refit == LOWKEY_REFIT_AUTO)
            side->refit = side->trellis                                                               ? 3
                          : sensitivity == LOWKEY_SENSITIVITY_FISHER && lowkey_has_plain_tables(side) ? 2
                                                                                                      : 0;
        if (!side->feedback && !side->trellis) side->refit = 0; /* the values are quantized as they are */
    }
}

static void settle_widths(enum lowkey_sensitivity sensitivity, struct lowkey_fit_options *options)
{
    const int by_gradient = sensitivity == LOWKEY_SENSITIVITY_FISHER;
    if (options->low_width != 0 || options->high_width != 0) return;
    options->low_width = by_gradient || options->budget < 2 ? 1 : 2;
    options->high_width = by_gradient || options->budget > 4 ? 5 : 4;
}

/* Passes over the tokens of a layer, for progress: of each side its columns, its scales, its corrections,
 * its report; before, of a budget, what widths cost. */
static double passes(const lowkey_captures *captures, const struct lowkey_fit_options *options,
                     enum lowkey_sensitivity sensitivity)
{
    const int attends = sensitivity == LOWKEY_SENSITIVITY_ATTENTION ||
                        lowkey_feeds_from_queries(captures, options);
    int n = attends + (options->budget > 0 ? attends + 2 : 0);
    for (int which = 0; which < 2; which++) {
        const struct lowkey_side_options *side = &options->side[which];
        n += 2 + side->refit + (side->token_scale != LOWKEY_SCALE_NONE) + (side->gain || side->qnorm);
    }
    return n;
}

static lowkey_status fit_layers(struct result *result, const struct lowkey_fit_options *options,
                                const char *out, enum lowkey_sensitivity sensitivity, lowkey_error *err)
{
    const lowkey_captures *captures = result->captures;
    const int n_layers = captures->info->n_layers;
    lowkey_layer_desc *layers;
    LOWKEY_TRY(lowkey_pool_take(&result->pool, (size_t)n_layers, sizeof *layers, &layers, err));
    LOWKEY_TRY(lowkey_pool_take(&result->pool, (size_t)n_layers, sizeof *result->record.reports,
                                &result->record.reports, err));
    LOWKEY_TRY(lowkey_pool_take(&result->pool, (size_t)n_layers, sizeof *result->public.notes,
                                &result->public.notes, err));
    struct lowkey_progress progress;
    double work_done = 0;
    lowkey_progress_start(&progress, "fit",
                          passes(captures, options, sensitivity) * n_layers * (double)captures->n_tokens);
    lowkey_status status = LOWKEY_OK;
    struct lowkey_widths widths = { 0 };
    if (options->budget > 0)
        status = lowkey_widths_find(captures, options, sensitivity, out, &progress, &work_done, &result->pool,
                                    &widths, err);
    result->record.budget = options->budget;
    result->record.predicted_cost_key = widths.predicted[0];
    result->record.predicted_cost_value = widths.predicted[1];
    for (int i = 0; i < n_layers && status == LOWKEY_OK; i++) {
        struct lowkey_layer_fit fit = {
            .captures = captures, .options = options, .sensitivity = sensitivity, .out = out, .layer = i
        };
        for (int which = 0; which < 2; which++)
            lowkey_layer_fit_side(&fit, which, widths.bits ? widths.bits[i][which] : NULL, &progress,
                                  &work_done);
        layers[i] = captures->info->layers[i];
        status = lowkey_layer_fit_run(&fit, &layers[i], &result->pool, err);
        for (int which = 0; which < 2; which++) {
            result->record.reports[i][which] = fit.side[which].report;
            result->public.notes[i][which] = fit.side[which].notes;
        }
    }
    lowkey_progress_end(&progress);
    result->desc = (lowkey_quantizer_desc) { .struct_size = sizeof result->desc,
                                             .n_layers = n_layers,
                                             .layers = layers,
                                             .n_sink_tokens = options->n_sinks,
                                             .sink_rule = options->sink_rule,
                                             .model_name = captures->info->model_name };
    memcpy(result->desc.model_sha256, captures->info->model_sha256, 32);
    return status;
}

static lowkey_status fill_record(struct result *result, const struct lowkey_fit_options *options,
                                 enum lowkey_sensitivity sensitivity, lowkey_error *err)
{
    static const char *const names[] = {
        [LOWKEY_SENSITIVITY_NONE] = "none",
        [LOWKEY_SENSITIVITY_WEIGHT] = "weight",
        [LOWKEY_SENSITIVITY_FISHER] = "fisher",
        [LOWKEY_SENSITIVITY_ATTENTION] = "attention",
    };
    const lowkey_captures *captures = result->captures;
    unsigned char(*sha256)[32];
    LOWKEY_TRY(lowkey_pool_take(&result->pool, (size_t)captures->n_samples, sizeof *sha256, &sha256, err));
    for (int s = 0; s < captures->n_samples; s++) memcpy(sha256[s], captures->samples[s].sha256, 32);
    struct lowkey_fit_record *record = &result->record;
    record->n_model_layers = captures->info->n_model_layers;
    record->sensitivity = names[sensitivity];
    record->outlier_fraction_key = options->side[0].outlier_fraction;
    record->outlier_fraction_value = options->side[1].outlier_fraction;
    record->damp = options->damp;
    record->n_tokens = captures->n_tokens;
    record->text_name = captures->text_name;
    record->text_sha256 = captures->text_sha256;
    record->n_samples = captures->n_samples;
    record->sample_sha256 = (const unsigned char(*)[32])sha256;
    return LOWKEY_OK;
}

lowkey_status lowkey_fit(int n_paths, const char *const *paths, const char *out,
                         const struct lowkey_fit_options *asked, struct lowkey_fit_result **result_out,
                         lowkey_error *err)
{
    struct lowkey_fit_options settled = *asked, *options = &settled;
    if (result_out) *result_out = NULL;
    LOWKEY_TRY(lowkey_fit_options_check(options, err));
    struct result *result = calloc(1, sizeof *result);
    if (!result) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory");
    const double start = lowkey_seconds();
    enum lowkey_sensitivity sensitivity = LOWKEY_SENSITIVITY_NONE;
    openblas_set_num_threads(1); /* threads are ours: sums in one order */
    lowkey_status status = lowkey_captures_open(n_paths, paths, options->first_sample, options->end_sample,
                                                options->n_sinks, &result->captures, err);
    if (status == LOWKEY_OK) status = check_size(result->captures, paths[0], err);
    if (status == LOWKEY_OK)
        status = lowkey_choose_sensitivity(options->sensitivity, result->captures->contents,
                                           result->captures->some_contents, &sensitivity, err);
    if (status == LOWKEY_OK) status = settle_feedback(result->captures, options, err);
    if (status == LOWKEY_OK) settle_refit(sensitivity, options);
    if (status == LOWKEY_OK) settle_widths(sensitivity, options);
    if (status == LOWKEY_OK) status = fit_layers(result, options, out, sensitivity, err);
    if (status == LOWKEY_OK) status = fill_record(result, options, sensitivity, err);
    if (status == LOWKEY_OK) status = lowkey_quantizer_write(out, &result->desc, &result->record, err);
    result->public.desc = &result->desc;
    result->public.record = &result->record;
    result->public.seconds = lowkey_seconds() - start;
    if (status == LOWKEY_OK && result_out)
        *result_out = &result->public;
    else
        lowkey_fit_result_free(&result->public);
    return status;
}

void lowkey_fit_result_free(struct lowkey_fit_result *result)
{
    if (!result) return;
    struct result *whole = (struct result *)result; /* its first member */
    lowkey_captures_close(whole->captures);
    lowkey_pool_free(&whole->pool);
    free(whole);
}
