/* fit.c - the loop over layers, keys and values: what each is weighed by, its tables, the feedback, the
 * corrections, and a last pass of packing that says what it costs; then the quantizer file. */
#include "calib/fit.h"

#include <cblas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "calib/attention.h"
#include "calib/feedback.h"
#include "calib/fit_options.h"
#include "calib/side_fit.h"
#include "runtime/error.h"

struct result { /* lowkey_fit_result with what it points to */
    struct lowkey_fit_result public;
    lowkey_quantizer_desc desc;
    struct lowkey_fit_record record;
    lowkey_captures *captures; /* names */
    struct lowkey_pool pool;
};

struct layer_fit { /* one layer while it is fitted */
    const lowkey_captures *captures;
    const struct lowkey_fit_options *options;
    enum lowkey_sensitivity sensitivity;
    const char *out; /* scratch files go beside it */
    int layer;
    struct lowkey_side_fit side[2];
    struct lowkey_grids grids[2];
    struct lowkey_store store[2]; /* weights from attention */
    double *moments; /* of keys, from attention: [H][D][D]; NULL: not wanted */
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
static lowkey_status check_feedback(const lowkey_captures *captures, const struct lowkey_fit_options *options,
                                    lowkey_error *err)
{
    if (options->side[0].feedback && !has(captures, LOWKEY_KEY_GRAD) && !has(captures, LOWKEY_QUERY))
        return lowkey_fail(
            err, LOWKEY_EINVAL,
            "error feedback for keys needs key_grad or query, which the files do not all have");
    if (options->side[1].feedback && !has(captures, LOWKEY_VALUE_GRAD))
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "error feedback for values needs value_grad, which the files do not all have");
    return LOWKEY_OK;
}

/* Does the matrix of keys' feedback come from queries? */
static int feeds_from_queries(const lowkey_captures *captures, const struct lowkey_fit_options *options)
{
    return options->side[0].feedback && !has(captures, LOWKEY_KEY_GRAD);
}

/* Weights, and the matrix of keys, from queries: one run for whatever of them is wanted. */
static lowkey_status attend(struct layer_fit *fit, lowkey_error *err)
{
    const lowkey_layer_desc *desc = &fit->captures->info->layers[fit->layer];
    const int weighs = fit->sensitivity == LOWKEY_SENSITIVITY_ATTENTION;
    const int feeds = feeds_from_queries(fit->captures, fit->options);
    if (!weighs && !feeds) return LOWKEY_OK;
    const int64_t n = fit->captures->n_tokens;
    const size_t H = (size_t)desc->n_kv_heads, D = (size_t)desc->key_head_dim;
    if (weighs) LOWKEY_TRY(lowkey_store_open(fit->out, n, (int)H, (int)D, &fit->store[0], err));
    if (weighs) LOWKEY_TRY(lowkey_store_open(fit->out, n, (int)H, 1, &fit->store[1], err));
    if (feeds) fit->moments = malloc(H * D * D * sizeof *fit->moments);
    if (feeds && !fit->moments)
        return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %zu matrices of %zu channels", H, D);
    const struct lowkey_attention wanted = { weighs ? &fit->store[0] : NULL, weighs ? &fit->store[1] : NULL,
                                             fit->moments };
    LOWKEY_TRY(lowkey_attention_sensitivity(fit->captures, fit->layer, fit->options->n_queries,
                                            fit->options->n_threads, &wanted, err));
    return lowkey_side_fit_passed(&fit->side[0], (double)n, err);
}

static struct lowkey_weights weights_of(const struct layer_fit *fit, int which)
{
    struct lowkey_weights weights = { .captures = fit->captures,
                                      .layer = fit->layer,
                                      .head_dim = fit->side[which].head_dim };
    switch (fit->sensitivity) {
    case LOWKEY_SENSITIVITY_FISHER:
        weights.source = LOWKEY_WEIGHTS_GRADIENT;
        weights.stream = which ? LOWKEY_VALUE_GRAD : LOWKEY_KEY_GRAD;
        break;
    case LOWKEY_SENSITIVITY_WEIGHT:
        weights.source = LOWKEY_WEIGHTS_FILE;
        weights.stream = which ? LOWKEY_VALUE_WEIGHT : LOWKEY_KEY_WEIGHT;
        break;
    case LOWKEY_SENSITIVITY_ATTENTION:
        weights.source = LOWKEY_WEIGHTS_STORE;
        weights.store = &fit->store[which];
        break;
    default: break;
    }
    return weights;
}

static lowkey_status fit_feedback(struct layer_fit *fit, int which, lowkey_error *err)
{
    struct lowkey_side_fit *side = &fit->side[which];
    if (!side->factor) return LOWKEY_OK;
    const size_t H = (size_t)side->n_heads, D = (size_t)side->head_dim;
    double *moments = fit->moments;
    lowkey_status status = LOWKEY_OK;
    if (which || has(fit->captures, LOWKEY_KEY_GRAD)) {
        moments = malloc(H * D * D * sizeof *moments);
        if (!moments)
            return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %zu matrices of %zu channels", H, D);
        status = lowkey_gradient_moments(fit->captures, fit->layer,
                                         which ? LOWKEY_VALUE_GRAD : LOWKEY_KEY_GRAD, fit->options->n_threads,
                                         moments, err);
    }
    for (size_t h = 0; h < H && status == LOWKEY_OK; h++) {
        int is_zero;
        status = lowkey_feedback_factor((int)D, moments + h * D * D, side->order + h * D, fit->options->damp,
                                        side->factor + h * D * D, &is_zero, err);
        side->notes.zero_feedback += is_zero;
    }
    if (moments != fit->moments) free(moments);
    return status;
}

static lowkey_status fit_side(struct layer_fit *fit, int which, struct lowkey_pool *pool, lowkey_error *err)
{
    struct lowkey_side_fit *side = &fit->side[which];
    LOWKEY_TRY(lowkey_side_fit_init(side, pool, err));
    side->weights = weights_of(fit, which);
    if (side->desc.token_scale != LOWKEY_SCALE_NONE) {
        LOWKEY_TRY(lowkey_grids_find(side, &fit->grids[which], err));
        side->grids = &fit->grids[which];
    }
    LOWKEY_TRY(lowkey_columns_fit(side, err));
    lowkey_grids_free(&fit->grids[which]);
    LOWKEY_TRY(lowkey_side_fit_suspect(side, err));
    LOWKEY_TRY(fit_feedback(fit, which, err));
    lowkey_side_fit_store(side);
    return LOWKEY_OK;
}

/* Pack both sides with the tables as they are: for the corrections where correct is set, else for the
 * report. */
static lowkey_status pack_layer(struct layer_fit *fit, lowkey_layer_desc *layer, int correct,
                                lowkey_error *err)
{
    layer->key = fit->side[0].desc;
    layer->value = fit->side[1].desc;
    const lowkey_quantizer_desc desc = { .struct_size = sizeof desc,
                                         .n_layers = 1,
                                         .layers = layer,
                                         .n_sink_tokens = fit->options->n_sinks,
                                         .sink_rule = fit->options->sink_rule };
    lowkey_quantizer *quantizer;
    LOWKEY_TRY(lowkey_quantizer_create(&desc, NULL, &quantizer, err));
    lowkey_status status = LOWKEY_OK;
    for (int which = 0; which < 2 && status == LOWKEY_OK; which++) {
        struct lowkey_side_fit *side = &fit->side[which];
        const int corrects = side->n_table && (side->side->gain || side->side->qnorm);
        if (correct && !corrects) continue;
        struct lowkey_pool pool = { 0 };
        struct lowkey_moments moments;
        status = lowkey_side_fit_pack(side, &lowkey_quantizer_layer_at(quantizer, 0)->side[which], &moments,
                                      &pool, err);
        if (status == LOWKEY_OK && correct) {
            lowkey_side_fit_correct(side, &moments);
            lowkey_side_fit_store(side);
        } else if (status == LOWKEY_OK) {
            lowkey_side_fit_report(side, &moments);
        }
        lowkey_pool_free(&pool);
    }
    lowkey_quantizer_free(quantizer);
    return status;
}

static lowkey_status fit_layer(struct layer_fit *fit, lowkey_layer_desc *layer, struct lowkey_pool *pool,
                               lowkey_error *err)
{
    fit->store[0].fd = fit->store[1].fd = -1;
    lowkey_status status = attend(fit, err);
    for (int which = 0; which < 2 && status == LOWKEY_OK; which++) status = fit_side(fit, which, pool, err);
    if (status == LOWKEY_OK) status = pack_layer(fit, layer, 1, err);
    if (status == LOWKEY_OK) status = pack_layer(fit, layer, 0, err);
    for (int which = 0; which < 2; which++) {
        lowkey_grids_free(&fit->grids[which]);
        lowkey_store_close(&fit->store[which]);
    }
    free(fit->moments);
    return status;
}

/* Passes over the tokens of a layer, for progress: of each side its columns, its scales, its corrections,
 * its report. */
static double passes(const lowkey_captures *captures, const struct lowkey_fit_options *options,
                     enum lowkey_sensitivity sensitivity)
{
    int n = sensitivity == LOWKEY_SENSITIVITY_ATTENTION || feeds_from_queries(captures, options);
    for (int which = 0; which < 2; which++) {
        const struct lowkey_side_options *side = &options->side[which];
        n += 2 + (side->token_scale != LOWKEY_SCALE_NONE) + (side->gain || side->qnorm);
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
    for (int i = 0; i < n_layers && status == LOWKEY_OK; i++) {
        struct layer_fit fit = {
            .captures = captures, .options = options, .sensitivity = sensitivity, .out = out, .layer = i
        };
        for (int which = 0; which < 2; which++)
            fit.side[which] = (struct lowkey_side_fit) { .captures = captures,
                                                         .options = options,
                                                         .layer = i,
                                                         .which = which,
                                                         .side = &options->side[which],
                                                         .progress = &progress,
                                                         .work_done = &work_done };
        layers[i] = captures->info->layers[i];
        status = fit_layer(&fit, &layers[i], &result->pool, err);
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
                         const struct lowkey_fit_options *options, struct lowkey_fit_result **result_out,
                         lowkey_error *err)
{
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
    if (status == LOWKEY_OK) status = check_feedback(result->captures, options, err);
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
