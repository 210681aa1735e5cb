/* capture.c - activations.h5 from a model and tokens. The decoder attends through one function; capture stands in
 * between, writes what it is handed (keys, queries before RoPE, values) and lets the plain attention do the work. With
 * gradients a backward pass hands the same over layer by layer, from the last to the first. */
#include "experiments/capture.h"

#include <endian.h>
#include <openssl/sha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "calib/command.h"
#include "experiments/lm/decoder.h"
#include "experiments/lm/gradient.h"
#include "experiments/lm/plain_attention.h"
#include "experiments/samples.h"
#include "formats/activations.h"
#include "runtime/error.h"

struct capture {
    const struct lowkey_capture_request *request;
    struct lowkey_attention attention; /* does the work */
    lowkey_activations_writer *writer;
    int64_t row; /* of the file, of the chunk's first token */
};

/* Which of the layers to write a layer of the model is, or -1. */
static int captured_as(const struct lowkey_capture_request *request, int layer)
{
    int i = 0;
    while (i < request->n_layers && request->layers[i] != layer) i++;
    return i < request->n_layers ? i : -1;
}

static lowkey_status write_rows(const struct capture *capture, int i, enum lowkey_stream stream, int n_tokens,
                                const float *rows, lowkey_error *err)
{
    return lowkey_activations_write(capture->writer, i, stream, capture->row, n_tokens, rows, err);
}

static lowkey_status write_and_attend(void *user, const struct lowkey_attention_step *step, lowkey_error *err)
{
    struct capture *capture = user;
    const int i = captured_as(capture->request, step->layer->index);
    if (i >= 0) {
        LOWKEY_TRY(write_rows(capture, i, LOWKEY_KEY, step->n_tokens, step->key, err));
        LOWKEY_TRY(write_rows(capture, i, LOWKEY_VALUE, step->n_tokens, step->value, err));
        if (capture->request->queries)
            LOWKEY_TRY(write_rows(capture, i, LOWKEY_QUERY, step->n_tokens, step->query, err));
    }
    return capture->attention.step(capture->attention.user, step, err);
}

static lowkey_status forget(void *user, lowkey_error *err)
{
    struct capture *capture = user;
    return capture->attention.reset(capture->attention.user, err);
}

static const int32_t *sample_tokens(const struct lowkey_capture_request *request, int64_t i)
{
    return request->tokens->tokens +
           lowkey_samples_start(request->tokens, request->length, request->stride, request->first_sample + i);
}

/* scratch: [n] */
static void hash_tokens(const int32_t *tokens, int n, uint32_t *scratch, unsigned char *hash)
{
    for (int t = 0; t < n; t++) scratch[t] = htole32((uint32_t)tokens[t]);
    SHA256((const unsigned char *)scratch, (size_t)n * sizeof *scratch, hash);
}

static lowkey_status run_samples(struct capture *capture, lowkey_decoder *decoder, lowkey_error *err)
{
    const struct lowkey_capture_request *request = capture->request;
    const int max_chunk = lowkey_decoder_max_chunk(decoder);
    struct lowkey_progress progress;
    lowkey_status status = LOWKEY_OK;
    lowkey_progress_start(&progress, "capture", (double)request->n_samples * request->length);
    for (int64_t i = 0; status == LOWKEY_OK && i < request->n_samples; i++) {
        const int32_t *tokens = sample_tokens(request, i);
        status = lowkey_decoder_reset(decoder, err);
        for (int first = 0; status == LOWKEY_OK && first < request->length; first += max_chunk) {
            const int n = request->length - first < max_chunk ? request->length - first : max_chunk;
            capture->row = i * request->length + first;
            status = lowkey_interrupted()
                         ? lowkey_fail(err, LOWKEY_ECANCELLED, "interrupted; nothing was written")
                         : lowkey_decoder_forward(decoder, tokens + first, n, NULL, err);
            lowkey_progress_at(&progress, (double)(capture->row + n));
        }
    }
    lowkey_progress_end(&progress);
    return status;
}

static lowkey_status write_layer(void *user, const struct lowkey_gradient_layer *layer, lowkey_error *err)
{
    const struct capture *capture = user;
    const int i = captured_as(capture->request, layer->layer->index), n = layer->n_tokens;
    if (lowkey_interrupted()) return lowkey_fail(err, LOWKEY_ECANCELLED, "interrupted; nothing was written");
    if (i < 0) return LOWKEY_OK;
    LOWKEY_TRY(write_rows(capture, i, LOWKEY_KEY, n, layer->key, err));
    LOWKEY_TRY(write_rows(capture, i, LOWKEY_VALUE, n, layer->value, err));
    if (capture->request->queries) LOWKEY_TRY(write_rows(capture, i, LOWKEY_QUERY, n, layer->query, err));
    LOWKEY_TRY(write_rows(capture, i, LOWKEY_KEY_GRAD, n, layer->key_grad, err));
    return write_rows(capture, i, LOWKEY_VALUE_GRAD, n, layer->value_grad, err);
}

/* What a sample draws depends on nothing but the seed and its tokens, so that files may be cut anywhere. */
static uint64_t sample_seed(const struct lowkey_capture_request *request, const unsigned char sha256[32])
{
    uint64_t from_tokens;
    memcpy(&from_tokens, sha256, sizeof from_tokens);
    return le64toh(from_tokens) + (uint64_t)request->seed;
}

static lowkey_status gradient_samples(struct capture *capture, lowkey_gradient *gradient,
                                      const unsigned char (*sha256)[32], lowkey_error *err)
{
    const struct lowkey_capture_request *request = capture->request;
    struct lowkey_progress progress;
    lowkey_status status = LOWKEY_OK;
    lowkey_progress_start(&progress, "capture", (double)request->n_samples);
    for (int64_t i = 0; status == LOWKEY_OK && i < request->n_samples; i++) {
        const struct lowkey_gradient_request sample = {
            .tokens = sample_tokens(request, i),
            .n_tokens = request->length,
            .loss = request->gradients == LOWKEY_LABELS_MODEL ? LOWKEY_LOSS_MODEL : LOWKEY_LOSS_TEXT,
            .seed = sample_seed(request, sha256[i]),
            .on_layer = write_layer,
            .user = capture,
        };
        double loss;
        capture->row = i * request->length;
        status = lowkey_gradient_run(gradient, &sample, &loss, err);
        lowkey_progress_at(&progress, (double)(i + 1));
    }
    lowkey_progress_end(&progress);
    return status;
}

/* Run the model forward and back, which writes through capture->writer. */
static lowkey_status run_gradients(struct capture *capture, const unsigned char (*sha256)[32],
                                   lowkey_error *err)
{
    const struct lowkey_gradient_config config = { .model = capture->request->model,
                                                   .max_tokens = capture->request->length,
                                                   .n_threads = capture->request->n_threads };
    lowkey_gradient *gradient;
    LOWKEY_TRY(lowkey_gradient_create(&config, &gradient, err));
    const lowkey_status status = gradient_samples(capture, gradient, sha256, err);
    lowkey_gradient_free(gradient);
    return status;
}

/* Run the model, which writes through capture->writer. */
static lowkey_status run_model(struct capture *capture, lowkey_error *err)
{
    const struct lowkey_capture_request *request = capture->request;
    /* What comes behind the last layer wanted is not needed. */
    const int n_layers = request->layers[request->n_layers - 1] + 1;
    const struct lowkey_decoder_config config = {
        .model = request->model,
        .attention = { write_and_attend, forget, capture },
        .n_layers = n_layers,
        .n_threads = request->n_threads,
    };
    lowkey_plain_attention *attention = NULL;
    lowkey_decoder *decoder = NULL;
    lowkey_status status = lowkey_plain_attention_create(request->model, n_layers, request->length,
                                                         request->n_threads, NULL, &attention, err);
    if (status == LOWKEY_OK) {
        capture->attention = lowkey_plain_attention_interface(attention);
        status = lowkey_decoder_create(&config, &decoder, err);
    }
    if (status == LOWKEY_OK) status = run_samples(capture, decoder, err);
    lowkey_decoder_free(decoder);
    lowkey_plain_attention_free(attention);
    return status;
}

/* What the file says about itself; sample_offsets, sample_sha256 and layers are allocated. */
static lowkey_status describe(const struct lowkey_capture_request *request,
                              struct lowkey_activations_info *info, lowkey_error *err)
{
    const size_t n = (size_t)request->n_samples;
    int64_t *offsets = malloc((n + 1) * sizeof *offsets);
    unsigned char(*hashes)[32] = malloc(n * sizeof *hashes);
    lowkey_layer_desc *layers = malloc((size_t)request->n_layers * sizeof *layers);
    uint32_t *scratch = malloc((size_t)request->length * sizeof *scratch);
    *info = (struct lowkey_activations_info) {
        .n_model_layers = request->model->n_layers,
        .model_name = request->model->name,
        .n_layers = request->n_layers,
        .layers = layers,
        .contents = 1u << LOWKEY_KEY | 1u << LOWKEY_VALUE | (request->queries ? 1u << LOWKEY_QUERY : 0) |
                    (request->gradients ? 1u << LOWKEY_KEY_GRAD | 1u << LOWKEY_VALUE_GRAD : 0),
        .gradient_labels = request->gradients,
        .gradient_seed = request->seed,
        .n_samples = (int)request->n_samples,
        .sample_offsets = offsets,
        .sample_sha256 = (const unsigned char(*)[32])hashes,
        .text_name = request->tokens->text_name,
    };
    if (!offsets || !hashes || !layers || !scratch)
        return free(scratch), lowkey_fail(err, LOWKEY_ENOMEM, "no memory to describe %zu samples", n);
    memcpy(info->model_sha256, request->model->sha256, 32);
    memcpy(info->text_sha256, request->tokens->text_sha256, 32);
    for (size_t i = 0; i < n; i++) {
        offsets[i] = (int64_t)i * request->length;
        hash_tokens(sample_tokens(request, (int64_t)i), request->length, scratch, hashes[i]);
    }
    free(scratch);
    offsets[n] = (int64_t)n * request->length;
    for (int i = 0; i < request->n_layers; i++) layers[i] = request->model->geometry[request->layers[i]];
    return LOWKEY_OK;
}

static void forget_description(struct lowkey_activations_info *info)
{
    free((void *)info->sample_offsets);
    free((void *)info->sample_sha256);
    free((void *)info->layers);
}

static lowkey_status check(const struct lowkey_capture_request *request, lowkey_error *err)
{
    const int64_t available = lowkey_samples_count(request->tokens, request->length, request->stride);
    if (request->n_samples < 1 || request->n_samples > INT32_MAX || request->first_sample < 0 ||
        request->first_sample > available - request->n_samples)
        return lowkey_fail(err, LOWKEY_EINVAL, "samples %lld:%lld of %d tokens: the text has %lld such",
                           (long long)request->first_sample,
                           (long long)(request->first_sample + request->n_samples), request->length,
                           (long long)available);
    if (request->gradients && request->length < 2)
        return lowkey_fail(err, LOWKEY_EINVAL, "gradients: samples of 1 token predict nothing");
    for (int i = 0; i < request->n_layers; i++)
        if (request->layers[i] < 0 || request->layers[i] >= request->model->n_layers)
            return lowkey_fail(err, LOWKEY_EINVAL, "layer %d: the model has 0 to %d", request->layers[i],
                               request->model->n_layers - 1);
    return LOWKEY_OK;
}

lowkey_status lowkey_capture(const struct lowkey_capture_request *request, const char *path,
                             lowkey_error *err)
{
    LOWKEY_TRY(check(request, err));
    struct capture capture = { .request = request };
    struct lowkey_activations_info info;
    lowkey_status status = describe(request, &info, err);
    if (status == LOWKEY_OK)
        status = lowkey_activations_create(path, &info, request->dtype, &capture.writer, err);
    if (status == LOWKEY_OK) {
        status = request->gradients ? run_gradients(&capture, info.sample_sha256, err)
                                    : run_model(&capture, err);
        if (status == LOWKEY_OK)
            status = lowkey_activations_commit(capture.writer, err);
        else
            lowkey_activations_abandon(capture.writer);
    }
    forget_description(&info);
    return status;
}

/* Does that file hold what this request would write? No file, or another: no. */
static int holds(const char *path, const struct lowkey_activations_info *want)
{
    lowkey_activations *activations;
    lowkey_error ignored;
    if (lowkey_activations_open(path, &activations, &ignored) != LOWKEY_OK) return 0;
    const struct lowkey_activations_info *found = lowkey_activations_describe(activations);
    int same = found->n_layers == want->n_layers && found->contents == want->contents &&
               found->n_samples == want->n_samples && found->gradient_labels == want->gradient_labels &&
               found->gradient_seed == want->gradient_seed &&
               memcmp(found->model_sha256, want->model_sha256, 32) == 0 &&
               memcmp(found->text_sha256, want->text_sha256, 32) == 0 &&
               memcmp(found->sample_sha256, want->sample_sha256, 32 * (size_t)want->n_samples) == 0;
    for (int i = 0; same && i < want->n_layers; i++) same = found->layers[i].index == want->layers[i].index;
    lowkey_activations_close(activations);
    return same;
}

static lowkey_status capture_part(const struct lowkey_capture_request *part, const char *path, int *kept,
                                  lowkey_error *err)
{
    struct lowkey_activations_info info;
    LOWKEY_TRY(check(part, err));
    const lowkey_status status = describe(part, &info, err);
    *kept = status == LOWKEY_OK && holds(path, &info);
    forget_description(&info);
    return status != LOWKEY_OK || *kept ? status : lowkey_capture(part, path, err);
}

lowkey_status lowkey_capture_parts(const struct lowkey_capture_request *request, const char *path,
                                   int64_t per_file, void (*on_file)(const char *path, int kept),
                                   lowkey_error *err)
{
    const size_t length = strlen(path), suffix = length >= 3 && strcmp(path + length - 3, ".h5") == 0 ? 3 : 0;
    char *name = malloc(length + 32);
    if (!name) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for a file's name");
    lowkey_status status = check(request, err);
    for (int64_t first = 0, i = 0; status == LOWKEY_OK && first < request->n_samples;
         first += per_file, i++) {
        struct lowkey_capture_request part = *request;
        int kept;
        part.first_sample += first;
        part.n_samples = request->n_samples - first < per_file ? request->n_samples - first : per_file;
        snprintf(name, length + 32, "%.*s.%03lld%s", (int)(length - suffix), path, (long long)i,
                 path + length - suffix);
        status = capture_part(&part, name, &kept, err);
        if (status == LOWKEY_OK && on_file) on_file(name, kept);
    }
    free(name);
    return status;
}
