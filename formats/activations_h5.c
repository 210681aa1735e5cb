/* activations_h5.c - activations.h5, read: everything but the rows is checked when it is opened, rows as they
 * are read. One dataset of each stream is kept open, so that memory does not grow with the number of layers
 * either. */
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "formats/activations_parts.h"
#include "formats/file_h5.h"
#include "formats/half.h"
#include "runtime/error.h"

struct lowkey_activations {
    lowkey_h5 *file;
    struct lowkey_activations_info info;
    char *model_name, *text_name; /* these are the memory behind info */
    int *layer_index;
    lowkey_layer_desc *layers;
    int64_t *sample_offsets;
    unsigned char (*sample_sha256)[32];
    struct {
        int layer; /* number of those captured; meaningful where data is not NULL */
        lowkey_h5_floats *data;
    } open[LOWKEY_N_STREAMS];
};

static const char *const objects[] = { "layers", "layer_index", "sample_offsets", "sample_sha256", NULL };
static const char *const attributes[] = { "n_layers",  "model_name", "model_sha256", "contents",
                                          "key_stage", "text_name",  "text_sha256",  NULL };
static const char *const labelled[] = { "n_layers",    "model_name",      "model_sha256",
                                        "contents",    "key_stage",       "text_name",
                                        "text_sha256", "gradient_labels", NULL };
static const char *const drawn[] = { "n_layers",      "model_name", "model_sha256", "contents",
                                     "key_stage",     "text_name",  "text_sha256",  "gradient_labels",
                                     "gradient_seed", NULL };

/* From version 1.1 on gradients say what their loss is of. */
static lowkey_status read_labels(lowkey_activations *a, lowkey_error *err)
{
    static const char *const choices[] = { "text", "model", NULL };
    struct lowkey_activations_info *info = &a->info;
    int major, minor, choice;
    lowkey_h5_version(a->file, &major, &minor);
    if (!(info->contents & LOWKEY_CONTENTS_GRADS) || minor < 1)
        return lowkey_h5_refuse_others(a->file, "/", objects, attributes, err);
    LOWKEY_TRY(lowkey_h5_get_choice(a->file, "/", "gradient_labels", choices, &choice, err));
    info->gradient_labels = choice ? LOWKEY_LABELS_MODEL : LOWKEY_LABELS_TEXT;
    if (!choice) return lowkey_h5_refuse_others(a->file, "/", objects, labelled, err);
    LOWKEY_TRY(lowkey_h5_get_int(a->file, "/", "gradient_seed", 0, INT64_MAX, &info->gradient_seed, err));
    return lowkey_h5_refuse_others(a->file, "/", objects, drawn, err);
}

static lowkey_status read_attributes(lowkey_activations *a, lowkey_error *err)
{
    static const char *const stages[] = { "pre_rope", NULL };
    struct lowkey_activations_info *info = &a->info;
    int stage;
    char *contents;
    LOWKEY_TRY(
        lowkey_h5_read_identity(a->file, &info->n_model_layers, &a->model_name, info->model_sha256, err));
    LOWKEY_TRY(lowkey_h5_get_choice(a->file, "/", "key_stage", stages, &stage, err));
    LOWKEY_TRY(lowkey_h5_get_string(a->file, "/", "text_name", &a->text_name, err));
    LOWKEY_TRY(lowkey_h5_get_sha256(a->file, "/", "text_sha256", info->text_sha256, err));
    LOWKEY_TRY(lowkey_h5_get_string(a->file, "/", "contents", &contents, err));
    const lowkey_status status = lowkey_contents_parse(contents, &info->contents, err);
    free(contents);
    info->model_name = a->model_name;
    info->text_name = a->text_name;
    return status ? lowkey_h5_blame(a->file, status, err) : read_labels(a, err);
}

static lowkey_status read_samples(lowkey_activations *a, lowkey_error *err)
{
    int64_t n_offsets = -1;
    LOWKEY_TRY(lowkey_h5_get_shape(a->file, "/sample_offsets", 1, 1, &n_offsets, err));
    if (n_offsets < 2 || n_offsets > INT_MAX)
        return lowkey_h5_fail(a->file, err, "/sample_offsets: expected 2 to %d offsets, found %" PRId64,
                              INT_MAX, n_offsets);
    const int n = (int)n_offsets - 1;
    const int64_t sha256_dims[2] = { n, 32 };
    int64_t found[2] = { n, 32 };
    LOWKEY_TRY(lowkey_h5_get_shape(a->file, "/sample_sha256", 1, 2, found, err));
    a->sample_offsets = calloc((size_t)n_offsets, sizeof *a->sample_offsets);
    a->sample_sha256 = calloc((size_t)n, sizeof *a->sample_sha256);
    if (!a->sample_offsets || !a->sample_sha256)
        return lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory for %d samples", lowkey_h5_path(a->file), n);
    LOWKEY_TRY(lowkey_h5_read_ints(a->file, "/sample_offsets", 1, &n_offsets, 0, INT64_MAX / 4096,
                                   a->sample_offsets, sizeof *a->sample_offsets, err));
    LOWKEY_TRY(
        lowkey_h5_read_ints(a->file, "/sample_sha256", 2, sha256_dims, 0, 255, a->sample_sha256, 1, err));
    a->info.n_samples = n;
    a->info.sample_offsets = a->sample_offsets;
    a->info.sample_sha256 = (const unsigned char(*)[32])a->sample_sha256;
    return lowkey_h5_blame(
        a->file, lowkey_offsets_check("/sample_offsets", a->sample_offsets, n, a->sample_offsets[n], err),
        err);
}

static lowkey_status open_stream(lowkey_activations *a, int i, enum lowkey_stream stream,
                                 lowkey_h5_floats **out, lowkey_error *err)
{
    const lowkey_layer_desc *layer = &a->layers[i];
    char path[LOWKEY_H5_MAX_PATH];
    const int is_grad = stream == LOWKEY_KEY_GRAD || stream == LOWKEY_VALUE_GRAD;
    lowkey_h5_layer_path(layer->index, lowkey_stream_names[stream], path);
    return lowkey_h5_floats_open(a->file, path,
                                 LOWKEY_DIMS(a->sample_offsets[a->info.n_samples],
                                             lowkey_stream_heads(layer, stream),
                                             lowkey_stream_head_dim(layer, stream)),
                                 LOWKEY_H5_ANY | (is_grad ? LOWKEY_H5_NO_F16 : 0), out, err);
}

static lowkey_status read_layers(lowkey_activations *a, lowkey_error *err)
{
    struct lowkey_activations_info *info = &a->info;
    const char *names[LOWKEY_N_STREAMS + 1] = { NULL };
    for (int s = 0, n = 0; s < LOWKEY_N_STREAMS; s++)
        if (info->contents >> s & 1) names[n++] = lowkey_stream_names[s];
    LOWKEY_TRY(
        lowkey_h5_read_layer_index(a->file, info->n_model_layers, &info->n_layers, &a->layer_index, err));
    a->layers = calloc((size_t)info->n_layers, sizeof *a->layers);
    if (!a->layers)
        return lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory for layers", lowkey_h5_path(a->file));
    info->layers = a->layers;
    for (int i = 0; i < info->n_layers; i++) {
        LOWKEY_TRY(lowkey_h5_read_geometry(a->file, a->layer_index[i], &a->layers[i], err));
        for (int s = 0; s < LOWKEY_N_STREAMS; s++) {
            lowkey_h5_floats *data;
            if (!(info->contents >> s & 1)) continue;
            LOWKEY_TRY(open_stream(a, i, (enum lowkey_stream)s, &data, err));
            lowkey_h5_floats_close(data);
        }
        LOWKEY_TRY(lowkey_h5_refuse_layer_others(a->file, &a->layers[i], names, err));
    }
    return LOWKEY_OK;
}

lowkey_status lowkey_activations_open(const char *path, lowkey_activations **out, lowkey_error *err)
{
    *out = NULL;
    lowkey_activations *a = calloc(1, sizeof *a);
    if (!a) return lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory", path);
    lowkey_status status = lowkey_h5_open(path, "activations", &a->file, err);
    if (!status) status = read_attributes(a, err);
    if (!status) status = read_samples(a, err);
    if (!status) status = read_layers(a, err);
    if (status)
        lowkey_activations_close(a);
    else
        *out = a;
    return status;
}

void lowkey_activations_close(lowkey_activations *a)
{
    if (!a) return;
    for (int s = 0; s < LOWKEY_N_STREAMS; s++) lowkey_h5_floats_close(a->open[s].data);
    lowkey_h5_close(a->file);
    for (int i = 0; a->layers && i < a->info.n_layers; i++)
        free((void *)(uintptr_t)a->layers[i].rope_inv_freq);
    free(a->layers);
    free(a->layer_index);
    free(a->sample_offsets);
    free(a->sample_sha256);
    free(a->model_name);
    free(a->text_name);
    free(a);
}

const struct lowkey_activations_info *lowkey_activations_describe(const lowkey_activations *a)
{
    return &a->info;
}

/* ---- rows ---- */

static lowkey_status get_stream(lowkey_activations *a, int i, enum lowkey_stream stream,
                                lowkey_h5_floats **out, lowkey_error *err)
{
    if (i < 0 || i >= a->info.n_layers || (unsigned)stream >= LOWKEY_N_STREAMS ||
        !(a->info.contents >> stream & 1))
        return lowkey_fail(
            err, LOWKEY_EINVAL, "%s: no stream %s of layer number %d", lowkey_h5_path(a->file),
            (unsigned)stream < LOWKEY_N_STREAMS ? lowkey_stream_names[stream] : "of that number", i);
    if (!a->open[stream].data || a->open[stream].layer != i) {
        lowkey_h5_floats_close(a->open[stream].data);
        a->open[stream].data = NULL;
        LOWKEY_TRY(open_stream(a, i, stream, &a->open[stream].data, err));
        a->open[stream].layer = i;
    }
    *out = a->open[stream].data;
    return LOWKEY_OK;
}

static uint32_t is_bad(float x, int is_weight)
{
    return (lowkey_f32_is_finite(x) == 0) | ((uint32_t)is_weight & (x < 0));
}

/* Refuse what is not finite, and negative weights: where the first is, and how many there are in these
 * rows. */
static lowkey_status check_rows(const lowkey_activations *a, int i, enum lowkey_stream stream, int64_t first,
                                int64_t n_tokens, int first_head, int n_heads, const float *rows,
                                lowkey_error *err)
{
    const int is_weight = stream == LOWKEY_KEY_WEIGHT || stream == LOWKEY_VALUE_WEIGHT;
    const size_t head_dim = (size_t)lowkey_stream_head_dim(&a->layers[i], stream);
    const size_t row = (size_t)n_heads * head_dim, n = (size_t)n_tokens * row;
    size_t n_bad = 0, at = 0;
    for (size_t k = 0; k < n; k++) n_bad += is_bad(rows[k], is_weight);
    if (n_bad == 0) return LOWKEY_OK;
    while (!is_bad(rows[at], is_weight)) at++;
    return lowkey_h5_fail(
        a->file, err,
        "%s of layer %d, head %d, channel %d, token %" PRId64 ": expected a finite number%s, found %g "
        "(%zu such in tokens %" PRId64 "..%" PRId64 ")",
        lowkey_stream_names[stream], a->layers[i].index, first_head + (int)(at % row / head_dim),
        (int)(at % head_dim), first + (int64_t)(at / row), is_weight ? ", 0 or more" : "", (double)rows[at],
        n_bad, first, first + n_tokens - 1);
}

lowkey_status lowkey_activations_type(lowkey_activations *a, int i, enum lowkey_stream stream,
                                      const char **type, lowkey_error *err)
{
    lowkey_h5_floats *data = NULL;
    LOWKEY_TRY(get_stream(a, i, stream, &data, err));
    *type = lowkey_h5_floats_type(data);
    return LOWKEY_OK;
}

lowkey_status lowkey_activations_read(lowkey_activations *a, int i, enum lowkey_stream stream, int64_t first,
                                      int64_t n_tokens, int first_head, int n_heads, float *out,
                                      lowkey_error *err)
{
    lowkey_h5_floats *data = NULL;
    LOWKEY_TRY(get_stream(a, i, stream, &data, err));
    const int64_t start[3] = { first, first_head, 0 };
    const int64_t count[3] = { n_tokens, n_heads, lowkey_stream_head_dim(&a->layers[i], stream) };
    LOWKEY_TRY(lowkey_h5_floats_read(data, start, count, out, err));
    return check_rows(a, i, stream, first, n_tokens, first_head, n_heads, out, err);
}
