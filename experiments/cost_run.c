/* cost_run.c - goes through the layers and samples of a capture, one at a time: reads keys, values and gradients, has every
 * format store them (threads share the formats) and adds up gradient times error. */
#include "experiments/cost_run.h"

#include <stdlib.h>

#include "calib/command.h"
#include "calib/threads.h"
#include "experiments/damage.h"
#include "experiments/packed_store.h"
#include "runtime/error.h"

enum { SIDES = 2 };
static const enum lowkey_stream exact_streams[SIDES] = { LOWKEY_KEY, LOWKEY_VALUE };
static const enum lowkey_stream grad_streams[SIDES] = { LOWKEY_KEY_GRAD, LOWKEY_VALUE_GRAD };

struct sample { /* one layer of one sample */
    const lowkey_layer_desc *layer;
    int n_tokens;
    float *exact[SIDES], *grad[SIDES]; /* [n_tokens][n_kv_heads][head_dim] */
};

struct job { /* what the formats of a sample share */
    struct lowkey_cost_result *result;
    const struct sample *sample;
    int l, s; /* numbers of those measured */
    lowkey_packed_store **stores; /* [n_formats] */
    lowkey_error *errors; /* [n_formats] */
};

static int n_channels(const lowkey_layer_desc *layer, int side)
{
    return lowkey_stream_heads(layer, exact_streams[side]) *
           lowkey_stream_head_dim(layer, exact_streams[side]);
}

static lowkey_status store_sample(const struct job *job, int f, float *const stored[SIDES], lowkey_error *err)
{
    const struct sample *sample = job->sample;
    const struct lowkey_store store = lowkey_packed_store_interface(job->stores[f]);
    const struct lowkey_store_step step = { .layer = sample->layer,
                                            .n_tokens = sample->n_tokens,
                                            .key = sample->exact[0],
                                            .value = sample->exact[1],
                                            .stored_key = stored[0],
                                            .stored_value = stored[1] };
    LOWKEY_TRY(store.reset(store.user, err));
    return store.put(store.user, &step, err);
}

static void measure_format(void *of, int f)
{
    const struct job *job = of;
    const struct sample *sample = job->sample;
    const size_t n_samples = (size_t)job->result->n_samples;
    float *stored[SIDES];
    for (int side = 0; side < SIDES; side++)
        stored[side] = lowkey_take(sample->n_tokens, n_channels(sample->layer, side), 1, sizeof(float));
    job->errors[f].status = stored[0] && stored[1]
                                ? store_sample(job, f, stored, &job->errors[f])
                                : lowkey_fail(&job->errors[f], LOWKEY_ENOMEM,
                                              "no memory for %d stored tokens", sample->n_tokens);
    for (int side = 0; side < SIDES && job->errors[f].status == LOWKEY_OK; side++) {
        const struct lowkey_cost_sums *sums = &job->result->formats[f].layers[job->l][side];
        lowkey_cost_add(sample->n_tokens, n_channels(sample->layer, side), sample->exact[side], stored[side],
                        sample->grad[side], n_samples, sums->sums + job->s, sums->squares);
    }
    free(stored[0]);
    free(stored[1]);
}

static lowkey_status read_sample(struct lowkey_cost_result *result, int place, int s, struct sample *sample,
                                 lowkey_error *err)
{
    const int64_t *offsets = result->measured.info->sample_offsets;
    sample->layer = &result->measured.info->layers[place];
    sample->n_tokens = (int)(offsets[s + 1] - offsets[s]);
    for (int side = 0; side < SIDES; side++) {
        const int channels = n_channels(sample->layer, side);
        sample->exact[side] = lowkey_take(sample->n_tokens, channels, 1, sizeof(float));
        sample->grad[side] = lowkey_take(sample->n_tokens, channels, 1, sizeof(float));
        if (!sample->exact[side] || !sample->grad[side])
            return lowkey_fail(err, LOWKEY_ENOMEM, "layer %d: no memory for a sample of %d tokens",
                               sample->layer->index, sample->n_tokens);
        const int n_heads = sample->layer->n_kv_heads;
        LOWKEY_TRY(lowkey_activations_read(result->activations, place, exact_streams[side], offsets[s],
                                           sample->n_tokens, 0, n_heads, sample->exact[side], err));
        LOWKEY_TRY(lowkey_activations_read(result->activations, place, grad_streams[side], offsets[s],
                                           sample->n_tokens, 0, n_heads, sample->grad[side], err));
    }
    return LOWKEY_OK;
}

static lowkey_status measure_sample(struct job *job, lowkey_error *err)
{
    struct lowkey_cost_result *result = job->result;
    struct sample sample = { 0 };
    lowkey_status status = read_sample(result, result->measured.layers[job->l],
                                       result->measured.first_sample + job->s, &sample, err);
    job->sample = &sample;
    if (status == LOWKEY_OK)
        lowkey_threads_run(&result->options.n_threads, result->n_formats, measure_format, job);
    for (int f = 0; status == LOWKEY_OK && f < result->n_formats; f++)
        if (job->errors[f].status != LOWKEY_OK)
            status = lowkey_fail(err, job->errors[f].status, "%s, sample %d: %s",
                                 result->formats[f].format.path, result->measured.first_sample + job->s,
                                 job->errors[f].message);
    for (int side = 0; side < SIDES; side++) {
        free(sample.exact[side]);
        free(sample.grad[side]);
    }
    return status;
}

static int longest_sample(const struct lowkey_measured *measured)
{
    int64_t longest = 0;
    for (int s = measured->first_sample; s < measured->end_sample; s++) {
        const int64_t n_tokens = measured->info->sample_offsets[s + 1] - measured->info->sample_offsets[s];
        if (longest < n_tokens) longest = n_tokens;
    }
    return (int)longest;
}

static lowkey_status open_store(struct lowkey_cost_result *result, lowkey_quantizer *quantizer,
                                lowkey_packed_store **store, lowkey_error *err)
{
    const int each = result->options.n_threads / result->n_formats;
    return lowkey_packed_store_create(quantizer, longest_sample(&result->measured), each > 1 ? each : 1,
                                      store, err);
}

static lowkey_status measure_layer(struct lowkey_cost_result *result, int l, struct lowkey_progress *progress,
                                   double *done, lowkey_error *err)
{
    const int n = result->n_formats;
    const int64_t *offsets = result->measured.info->sample_offsets + result->measured.first_sample;
    lowkey_quantizer **quantizers = lowkey_take(n, 1, 1, sizeof *quantizers);
    struct job job = { .result = result,
                       .l = l,
                       .stores = lowkey_take(n, 1, 1, sizeof *job.stores),
                       .errors = lowkey_take(n, 1, 1, sizeof *job.errors) };
    const int has_room = quantizers && job.stores && job.errors;
    lowkey_status status = has_room ? LOWKEY_OK
                                    : lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %d formats", n);
    for (int f = 0; status == LOWKEY_OK && f < n; f++) {
        status = lowkey_single_layer(result->formats[f].format.quantizer, l, &quantizers[f], err);
        if (status == LOWKEY_OK) status = open_store(result, quantizers[f], &job.stores[f], err);
    }
    for (job.s = 0; status == LOWKEY_OK && job.s < result->n_samples; job.s++) {
        status = lowkey_interrupted() ? lowkey_fail(err, LOWKEY_ECANCELLED, "interrupted")
                                      : measure_sample(&job, err);
        *done += (double)(offsets[job.s + 1] - offsets[job.s]);
        lowkey_progress_at(progress, *done);
    }
    for (int f = 0; has_room && f < n; f++) {
        lowkey_packed_store_free(job.stores[f]);
        lowkey_quantizer_free(quantizers[f]);
    }
    free(quantizers);
    free(job.stores);
    free(job.errors);
    return status;
}

static lowkey_status open_format(struct lowkey_cost_result *result, int f, lowkey_error *err)
{
    struct lowkey_format_cost *format = &result->formats[f];
    const struct lowkey_measured *measured = &result->measured;
    LOWKEY_TRY(lowkey_format_open(measured, result->options.formats[f], &format->format, err));
    format->layers = lowkey_take(measured->n_layers, 1, 1, sizeof *format->layers);
    for (int l = 0; format->layers && l < measured->n_layers; l++)
        for (int side = 0; side < SIDES; side++) {
            const int channels = n_channels(&measured->info->layers[measured->layers[l]], side);
            struct lowkey_cost_sums *sums = &format->layers[l][side];
            sums->sums = lowkey_take(channels, result->n_samples, 1, sizeof *sums->sums);
            sums->squares = lowkey_take(channels, 1, 1, sizeof *sums->squares);
            if (!sums->sums || !sums->squares) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for sums");
        }
    return format->layers ? LOWKEY_OK : lowkey_fail(err, LOWKEY_ENOMEM, "no memory for sums");
}

static lowkey_status prepare(struct lowkey_cost_result *result, lowkey_error *err)
{
    const struct lowkey_cost_options *options = &result->options;
    LOWKEY_TRY(lowkey_activations_open(options->activations, &result->activations, err));
    const struct lowkey_activations_info *info = lowkey_activations_describe(result->activations);
    for (int side = 0; side < SIDES; side++)
        if (!(info->contents >> grad_streams[side] & 1))
            return lowkey_fail(err, LOWKEY_EINVAL,
                               "%s: holds no %s, and costs need it: lowkey capture --grad",
                               options->activations, lowkey_stream_names[grad_streams[side]]);
    LOWKEY_TRY(lowkey_measured_pick(options->activations, info, options->n_layers, options->layers,
                                    options->first_sample, options->end_sample, &result->measured, err));
    result->n_samples = result->measured.end_sample - result->measured.first_sample;
    result->formats = lowkey_take(options->n_formats, 1, 1, sizeof *result->formats);
    if (!result->formats)
        return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %d formats", options->n_formats);
    result->n_formats = options->n_formats;
    for (int f = 0; f < result->n_formats; f++) LOWKEY_TRY(open_format(result, f, err));
    return LOWKEY_OK;
}

lowkey_status lowkey_cost_run(const struct lowkey_cost_options *options, struct lowkey_cost_result **out,
                              lowkey_error *err)
{
    *out = NULL;
    struct lowkey_cost_result *result = calloc(1, sizeof *result);
    if (!result) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory");
    result->options = *options;
    lowkey_status status = prepare(result, err);
    if (status == LOWKEY_OK) {
        struct lowkey_progress progress;
        double done = 0;
        lowkey_progress_start(&progress, "cost",
                              (double)lowkey_measured_tokens(&result->measured) * result->measured.n_layers);
        for (int l = 0; status == LOWKEY_OK && l < result->measured.n_layers; l++)
            status = measure_layer(result, l, &progress, &done, err);
        lowkey_progress_end(&progress);
    }
    if (status != LOWKEY_OK) {
        lowkey_cost_result_free(result);
        return status;
    }
    *out = result;
    return LOWKEY_OK;
}

void lowkey_cost_result_free(struct lowkey_cost_result *result)
{
    if (!result) return;
    for (int f = 0; f < result->n_formats; f++) {
        struct lowkey_format_cost *format = &result->formats[f];
        for (int l = 0; format->layers && l < result->measured.n_layers; l++)
            for (int side = 0; side < SIDES; side++) {
                free(format->layers[l][side].sums);
                free(format->layers[l][side].squares);
            }
        free(format->layers);
        lowkey_format_close(&format->format);
    }
    free(result->formats);
    free(result->measured.layers);
    lowkey_activations_close(result->activations);
    free(result);
}
