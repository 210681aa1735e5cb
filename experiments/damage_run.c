/* damage_run.c - goes through the layers and samples of a capture, one at a time: reads them, has the exact
 * side made once (threads share its KV heads), then every format measured (threads share the formats). HDF5
 * stays on the calling thread; a format's sums are added by one thread, in the order of samples, whatever the
 * number of threads. */
#include "experiments/damage_run.h"

#include <cblas.h>
#include <stdlib.h>
#include <string.h>

#include "calib/command.h"
#include "calib/threads.h"
#include "experiments/measured.h"
#include "runtime/error.h"

/* ---- formats ---- */

static lowkey_status open_format(const struct lowkey_damage_result *result,
                                 const struct lowkey_measured *measured, const char *text,
                                 struct lowkey_format_damage *format, lowkey_error *err)
{
    struct lowkey_format opened;
    const lowkey_status status = lowkey_format_open(measured, text, &opened, err);
    format->label = opened.label;
    format->path = opened.path;
    format->n_fit_samples = opened.n_fit_samples;
    format->fit_overlap = opened.fit_overlap;
    format->quantizer = opened.quantizer;
    if (status != LOWKEY_OK) return status;
    format->layers = lowkey_take(result->n_layers, 1, 1, sizeof *format->layers);
    format->layer_stated = lowkey_take(result->n_layers, 1, 1, sizeof *format->layer_stated);
    if (!format->layers || !format->layer_stated)
        return lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory", text);
    for (int i = 0; i < result->n_layers; i++) {
        const lowkey_layer_desc *layer = &result->info->layers[result->layers[i]];
        struct lowkey_layer_damage *damage = &format->layers[i];
        damage->heads = lowkey_take(layer->n_q_heads, 1, 1, sizeof *damage->heads);
        damage->key = lowkey_take(layer->n_kv_heads, 1, 1, sizeof *damage->key);
        damage->value = lowkey_take(layer->n_kv_heads, 1, 1, sizeof *damage->value);
        if (!damage->heads || !damage->key || !damage->value)
            return lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory", text);
    }
    return LOWKEY_OK;
}

/* ---- one layer of one sample ---- */

struct sample { /* owns what the capture borrows */
    struct lowkey_capture capture;
    int *positions;
    float *key, *value, *query;
};

static void free_sample(struct sample *sample)
{
    free(sample->positions);
    free(sample->key);
    free(sample->value);
    free(sample->query);
}

/* The queries are few, but lie anywhere: read a run of tokens, keep its queries. */
static lowkey_status read_queries(const struct lowkey_damage_result *result, int place, int64_t first_token,
                                  struct sample *sample, lowkey_error *err)
{
    enum { RUN = 256 };
    const lowkey_layer_desc *layer = sample->capture.layer;
    const size_t row = (size_t)layer->n_q_heads * (size_t)layer->key_head_dim;
    float *run = lowkey_take(RUN, (int64_t)row, 1, sizeof *run);
    lowkey_status status = run ? LOWKEY_OK
                               : lowkey_fail(err, LOWKEY_ENOMEM, "layer %d: no memory", layer->index);
    for (int t = 0, j = 0; status == LOWKEY_OK && t < sample->capture.n_tokens; t += RUN) {
        const int n = sample->capture.n_tokens - t < RUN ? sample->capture.n_tokens - t : RUN;
        if (sample->positions[j] >= t + n) continue;
        status = lowkey_activations_read(result->activations, place, LOWKEY_QUERY, first_token + t, n, 0,
                                         layer->n_q_heads, run, err);
        for (; status == LOWKEY_OK && j < sample->capture.n_queries && sample->positions[j] < t + n; j++)
            memcpy(sample->query + (size_t)j * row, run + (size_t)(sample->positions[j] - t) * row,
                   row * sizeof *run);
    }
    free(run);
    return status;
}

static lowkey_status read_sample(const struct lowkey_damage_result *result, int place, int s,
                                 struct sample *sample, lowkey_error *err)
{
    const lowkey_layer_desc *layer = &result->info->layers[place];
    const int64_t first = result->info->sample_offsets[s];
    const int n_tokens = (int)(result->info->sample_offsets[s + 1] - first);
    const int n_queries = result->options.n_queries < n_tokens ? result->options.n_queries : n_tokens;
    sample->positions = lowkey_take(n_queries, 1, 1, sizeof *sample->positions);
    sample->key = lowkey_take(n_tokens, layer->n_kv_heads, layer->key_head_dim, sizeof *sample->key);
    sample->value = lowkey_take(n_tokens, layer->n_kv_heads, layer->value_head_dim, sizeof *sample->value);
    sample->query = lowkey_take(n_queries, layer->n_q_heads, layer->key_head_dim, sizeof *sample->query);
    if (!sample->positions || !sample->key || !sample->value || !sample->query)
        return lowkey_fail(err, LOWKEY_ENOMEM, "layer %d: no memory for a sample of %d tokens", layer->index,
                           n_tokens);
    for (int j = 0; j < n_queries; j++)
        sample->positions[j] = (int)((int64_t)(j + 1) * n_tokens / n_queries - 1);
    sample->capture = (struct lowkey_capture) {
        .layer = layer,
        .n_tokens = n_tokens,
        .n_queries = n_queries,
        .positions = sample->positions,
        .key = sample->key,
        .value = sample->value,
        .query = sample->query,
    };
    LOWKEY_TRY(lowkey_activations_read(result->activations, place, LOWKEY_KEY, first, n_tokens, 0,
                                       layer->n_kv_heads, sample->key, err));
    LOWKEY_TRY(lowkey_activations_read(result->activations, place, LOWKEY_VALUE, first, n_tokens, 0,
                                       layer->n_kv_heads, sample->value, err));
    return read_queries(result, place, first, sample, err);
}

struct format_job {
    struct lowkey_damage_result *result;
    const struct lowkey_exact *exact;
    int l;
    int n_threads_each;
    lowkey_quantizer *const *quantizers; /* [n_formats] of this layer alone */
    lowkey_error *errors; /* [n_formats] */
};

static void measure_format(void *of, int f)
{
    const struct format_job *job = of;
    lowkey_damage_measure(job->exact, job->quantizers[f], job->n_threads_each,
                          &job->result->formats[f].layers[job->l], &job->errors[f]);
}

static lowkey_status measure_sample(struct lowkey_damage_result *result, int l, int s,
                                    lowkey_quantizer *const *quantizers, lowkey_error *err)
{
    const int n_threads = result->options.n_threads, n_formats = result->n_formats;
    struct sample sample = { 0 };
    struct lowkey_exact *exact = NULL;
    lowkey_error *errors = lowkey_take(n_formats, 1, 1, sizeof *errors);
    lowkey_status status = errors ? LOWKEY_OK : lowkey_fail(err, LOWKEY_ENOMEM, "no memory");
    if (status == LOWKEY_OK) status = read_sample(result, result->layers[l], s, &sample, err);
    if (status == LOWKEY_OK) status = lowkey_exact_create(&sample.capture, n_threads, &exact, err);
    if (status == LOWKEY_OK) {
        struct format_job job = { result,     exact, l, n_threads > n_formats ? n_threads / n_formats : 1,
                                  quantizers, errors };
        lowkey_threads_run((void *)&n_threads, n_formats, measure_format, &job);
    }
    for (int f = 0; status == LOWKEY_OK && f < n_formats; f++)
        if (errors[f].status != LOWKEY_OK)
            status = lowkey_fail(err, errors[f].status, "%s, sample %d: %s", result->formats[f].path, s,
                                 errors[f].message);
    lowkey_exact_free(exact);
    free_sample(&sample);
    free(errors);
    return status;
}

/* ---- the whole ---- */

static lowkey_status state_bits(const lowkey_quantizer *quantizer, lowkey_cache_usage *usage,
                                lowkey_error *err)
{
    const lowkey_cache_config config = { .struct_size = sizeof config,
                                         .max_sequences = LOWKEY_STATED_SEQUENCES,
                                         .n_pages = LOWKEY_STATED_SEQUENCES * LOWKEY_STATED_TOKENS /
                                                    LOWKEY_PAGE_TOKENS };
    usage->struct_size = sizeof *usage;
    return lowkey_cache_estimate(quantizer, &config, LOWKEY_STATED_SEQUENCES, LOWKEY_STATED_TOKENS, usage,
                                 err);
}

static lowkey_status measure_layer(struct lowkey_damage_result *result, int l,
                                   struct lowkey_progress *progress, double *done, lowkey_error *err)
{
    lowkey_quantizer **quantizers = lowkey_take(result->n_formats, 1, 1, sizeof *quantizers);
    lowkey_status status = quantizers ? LOWKEY_OK : lowkey_fail(err, LOWKEY_ENOMEM, "no memory");
    for (int f = 0; status == LOWKEY_OK && f < result->n_formats; f++) {
        status = lowkey_single_layer(result->formats[f].quantizer, l, &quantizers[f], err);
        if (status == LOWKEY_OK) status = state_bits(quantizers[f], &result->formats[f].layer_stated[l], err);
    }
    for (int s = result->options.first_sample; status == LOWKEY_OK && s < result->options.end_sample; s++) {
        if (lowkey_interrupted()) {
            status = lowkey_fail(err, LOWKEY_ECANCELLED, "interrupted");
            break;
        }
        status = measure_sample(result, l, s, quantizers, err);
        *done += (double)(result->info->sample_offsets[s + 1] - result->info->sample_offsets[s]);
        lowkey_progress_at(progress, *done);
    }
    for (int f = 0; quantizers && f < result->n_formats; f++) lowkey_quantizer_free(quantizers[f]);
    free(quantizers);
    return status;
}

static lowkey_status prepare(struct lowkey_damage_result *result, lowkey_error *err)
{
    const struct lowkey_damage_options *options = &result->options;
    LOWKEY_TRY(lowkey_activations_open(options->activations, &result->activations, err));
    result->info = lowkey_activations_describe(result->activations);
    if (!(result->info->contents & 1u << LOWKEY_QUERY))
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: holds no queries, and attention damage needs them",
                           options->activations);
    struct lowkey_measured measured;
    LOWKEY_TRY(lowkey_measured_pick(options->activations, result->info, options->n_layers, options->layers,
                                    options->first_sample, options->end_sample, &measured, err));
    result->n_layers = measured.n_layers;
    result->layers = measured.layers;
    result->options.end_sample = measured.end_sample;
    LOWKEY_TRY(lowkey_context_create(
        &(lowkey_context_config) { .struct_size = sizeof(lowkey_context_config) }, &result->context, err));
    result->isa = lowkey_context_isa(result->context);
    result->n_formats = options->n_formats;
    result->formats = lowkey_take(result->n_formats, 1, 1, sizeof *result->formats);
    if (!result->formats)
        return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %d formats", result->n_formats);
    for (int f = 0; f < result->n_formats; f++) {
        struct lowkey_format_damage *format = &result->formats[f];
        LOWKEY_TRY(open_format(result, &measured, options->formats[f], format, err));
        LOWKEY_TRY(state_bits(format->quantizer, &format->stated, err));
    }
    return LOWKEY_OK;
}

lowkey_status lowkey_damage_run(const struct lowkey_damage_options *options,
                                struct lowkey_damage_result **out, lowkey_error *err)
{
    *out = NULL;
    const double start = lowkey_seconds();
    struct lowkey_damage_result *result = calloc(1, sizeof *result);
    if (!result) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory");
    result->options = *options;
    openblas_set_num_threads(
        1); /* threads are ours: one product each, the same bits for any number of them */
    lowkey_status status = prepare(result, err);
    if (status == LOWKEY_OK) {
        const int64_t *offsets = result->info->sample_offsets;
        const int64_t n_tokens = offsets[result->options.end_sample] - offsets[result->options.first_sample];
        struct lowkey_progress progress;
        double done = 0;
        lowkey_progress_start(&progress, "error", (double)n_tokens * result->n_layers);
        for (int l = 0; status == LOWKEY_OK && l < result->n_layers; l++)
            status = measure_layer(result, l, &progress, &done, err);
        lowkey_progress_end(&progress);
    }
    if (status != LOWKEY_OK) {
        lowkey_damage_result_free(result);
        return status;
    }
    result->seconds = lowkey_seconds() - start;
    *out = result;
    return LOWKEY_OK;
}

void lowkey_damage_result_free(struct lowkey_damage_result *result)
{
    if (!result) return;
    for (int f = 0; result->formats && f < result->n_formats; f++) {
        struct lowkey_format_damage *format = &result->formats[f];
        for (int l = 0; format->layers && l < result->n_layers; l++) {
            free(format->layers[l].heads);
            free(format->layers[l].key);
            free(format->layers[l].value);
        }
        free(format->layers);
        free(format->layer_stated);
        free(format->label);
        lowkey_quantizer_free(format->quantizer);
    }
    free(result->formats);
    free(result->layers);
    lowkey_activations_close(result->activations);
    lowkey_context_free(result->context);
    free(result);
}
