/* captures.c - several activation files as one body of samples. */
#include "calib/captures.h"

#include <stdlib.h>
#include <string.h>

#include "formats/identity.h"
#include "formats/sha256.h"
#include "runtime/error.h"

static int compare_samples(const void *a, const void *b)
{
    const struct lowkey_sample *x = a, *y = b;
    const int by_hash = memcmp(x->sha256, y->sha256, 32);
    if (by_hash) return by_hash;
    if (x->file != y->file) return x->file < y->file ? -1 : 1;
    return (x->offset > y->offset) - (x->offset < y->offset);
}

static lowkey_status open_files(lowkey_captures *captures, int n_paths, const char *const *paths,
                                int first_sample, int end_sample, lowkey_error *err)
{
    for (int f = 0; f < n_paths; f++) {
        LOWKEY_TRY(lowkey_activations_open(paths[f], &captures->files[f], err));
        captures->n_files = f + 1;
        const struct lowkey_activations_info *info = lowkey_activations_describe(captures->files[f]);
        if (f == 0) captures->info = info;
        const int end = end_sample ? end_sample : info->n_samples;
        if (first_sample < 0 || first_sample >= end || end > info->n_samples)
            return lowkey_fail(err, LOWKEY_EINVAL, "%s: samples %d:%d, but it holds %d", paths[f],
                               first_sample, end, info->n_samples);
        captures->n_samples += end - first_sample;
        captures->contents = f == 0 ? info->contents : captures->contents & info->contents;
        captures->some_contents |= info->contents;
        if (f == 0) continue;
        const struct lowkey_identity first = lowkey_identity_of_activations(paths[0], captures->info);
        const struct lowkey_identity here = lowkey_identity_of_activations(paths[f], info);
        LOWKEY_TRY(lowkey_identity_check(&first, &here, LOWKEY_SAME_LAYERS, err));
        const unsigned grads = 1u << LOWKEY_KEY_GRAD | 1u << LOWKEY_VALUE_GRAD;
        if (info->contents & grads && captures->info->contents & grads &&
            info->gradient_labels != captures->info->gradient_labels)
            return lowkey_fail(err, LOWKEY_EFORMAT, "gradient_labels: %s has '%s', %s has '%s'", paths[0],
                               lowkey_gradient_labels_names[captures->info->gradient_labels], paths[f],
                               lowkey_gradient_labels_names[info->gradient_labels]);
    }
    return LOWKEY_OK;
}

static lowkey_status sort_samples(lowkey_captures *captures, const char *const *paths, int first_sample,
                                  int end_sample, lowkey_error *err)
{
    int n = 0;
    for (int f = 0; f < captures->n_files; f++) {
        const struct lowkey_activations_info *info = lowkey_activations_describe(captures->files[f]);
        for (int s = first_sample; s < (end_sample ? end_sample : info->n_samples); s++) {
            const int64_t n_tokens = info->sample_offsets[s + 1] - info->sample_offsets[s];
            captures->samples[n++] = (struct lowkey_sample) {
                .file = f,
                .offset = info->sample_offsets[s],
                .n_tokens = n_tokens,
                .n_sinks = n_tokens < captures->n_sinks ? n_tokens : captures->n_sinks,
                .sha256 = info->sample_sha256[s],
            };
        }
    }
    qsort(captures->samples, (size_t)n, sizeof *captures->samples, compare_samples);
    for (int s = 0; s < n; s++) {
        struct lowkey_sample *sample = &captures->samples[s];
        sample->start = captures->n_tokens;
        captures->n_tokens += sample->n_tokens - sample->n_sinks;
        if (s == 0 || memcmp(sample->sha256, sample[-1].sha256, 32) != 0 || sample->file == sample[-1].file)
            continue;
        char hex[65];
        lowkey_sha256_print(sample->sha256, hex);
        return lowkey_fail(err, LOWKEY_EINVAL, "%s and %s: both hold sample %.16s...; it would count twice",
                           paths[sample[-1].file], paths[sample->file], hex);
    }
    if (captures->n_tokens > 0) return LOWKEY_OK;
    return lowkey_fail(err, LOWKEY_EINVAL, "%s: no token is left: %d samples, none longer than the %d sinks",
                       paths[0], captures->n_samples, captures->n_sinks);
}

struct text {
    const char *name;
    char sha256[65];
};

static int compare_texts(const void *a, const void *b)
{
    const struct text *x = a, *y = b;
    const int by_name = strcmp(x->name, y->name);
    return by_name ? by_name : strcmp(x->sha256, y->sha256);
}

static lowkey_status join_texts(lowkey_captures *captures, lowkey_error *err)
{
    const size_t n = (size_t)captures->n_files;
    struct text *texts = malloc(n * sizeof *texts);
    size_t bytes = 1;
    for (size_t f = 0; texts && f < n; f++) {
        const struct lowkey_activations_info *info = lowkey_activations_describe(captures->files[f]);
        texts[f].name = info->text_name;
        lowkey_sha256_print(info->text_sha256, texts[f].sha256);
        bytes += strlen(info->text_name) + 1;
    }
    captures->text_name = calloc(bytes, 1);
    captures->text_sha256 = calloc(65 * n + 1, 1);
    const int good = texts && captures->text_name && captures->text_sha256;
    if (good) qsort(texts, n, sizeof *texts, compare_texts);
    for (size_t f = 0; good && f < n; f++) {
        if (f && compare_texts(&texts[f - 1], &texts[f]) == 0) continue;
        if (f) strcat(captures->text_name, ";"), strcat(captures->text_sha256, ";");
        strcat(captures->text_name, texts[f].name);
        strcat(captures->text_sha256, texts[f].sha256);
    }
    free(texts);
    return good ? LOWKEY_OK : lowkey_fail(err, LOWKEY_ENOMEM, "no memory for the names of %zu texts", n);
}

lowkey_status lowkey_captures_open(int n_paths, const char *const *paths, int first_sample, int end_sample,
                                   int n_sinks, lowkey_captures **out, lowkey_error *err)
{
    *out = NULL;
    lowkey_captures *captures = calloc(1, sizeof *captures);
    if (captures) captures->files = calloc((size_t)n_paths, sizeof *captures->files);
    lowkey_status status = LOWKEY_OK;
    if (!captures || !captures->files)
        status = lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %d files", n_paths);
    if (status == LOWKEY_OK) {
        captures->n_sinks = n_sinks;
        status = open_files(captures, n_paths, paths, first_sample, end_sample, err);
    }
    if (status == LOWKEY_OK) {
        captures->samples = calloc((size_t)captures->n_samples, sizeof *captures->samples);
        status = captures->samples
                     ? sort_samples(captures, paths, first_sample, end_sample, err)
                     : lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %d samples", captures->n_samples);
    }
    if (status == LOWKEY_OK) status = join_texts(captures, err);
    if (status == LOWKEY_OK)
        *out = captures;
    else
        lowkey_captures_close(captures);
    return status;
}

void lowkey_captures_close(lowkey_captures *captures)
{
    if (!captures) return;
    for (int f = 0; captures->files && f < captures->n_files; f++)
        lowkey_activations_close(captures->files[f]);
    free(captures->files);
    free(captures->samples);
    free(captures->text_name);
    free(captures->text_sha256);
    free(captures);
}

lowkey_status lowkey_captures_read(const lowkey_captures *captures, int layer, enum lowkey_stream stream,
                                   int sample, int64_t first, int64_t n_tokens, int first_head, int n_heads,
                                   float *out, lowkey_error *err)
{
    const struct lowkey_sample *s = &captures->samples[sample];
    return lowkey_activations_read(captures->files[s->file], layer, stream, s->offset + first, n_tokens,
                                   first_head, n_heads, out, err);
}
