/* measured.c - picks layers and samples of a capture, opens formats and checks them against it. */
#include "experiments/measured.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "experiments/damage.h"
#include "formats/identity.h"
#include "formats/quantizer_file.h"
#include "runtime/error.h"

static int layer_place(const struct lowkey_activations_info *info, int index)
{
    for (int i = 0; i < info->n_layers; i++)
        if (info->layers[i].index == index) return i;
    return -1;
}

static lowkey_status pick_layers(struct lowkey_measured *measured, int n_layers, const int *layers,
                                 lowkey_error *err)
{
    measured->n_layers = n_layers ? n_layers : measured->info->n_layers;
    measured->layers = lowkey_take(measured->n_layers, 1, 1, sizeof *measured->layers);
    if (!measured->layers)
        return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %d layers", measured->n_layers);
    for (int i = 0; i < measured->n_layers; i++) {
        measured->layers[i] = n_layers ? layer_place(measured->info, layers[i]) : i;
        if (measured->layers[i] < 0)
            return lowkey_fail(err, LOWKEY_EINVAL, "%s: layer %d was not captured", measured->activations,
                               layers[i]);
    }
    return LOWKEY_OK;
}

static lowkey_status check_samples(const struct lowkey_measured *measured, lowkey_error *err)
{
    const int n_samples = measured->info->n_samples;
    if (measured->first_sample >= measured->end_sample || measured->end_sample > n_samples)
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: samples %d:%d, but it holds %d", measured->activations,
                           measured->first_sample, measured->end_sample, n_samples);
    for (int s = measured->first_sample; s < measured->end_sample; s++) {
        const int64_t n_tokens = measured->info->sample_offsets[s + 1] - measured->info->sample_offsets[s];
        if (n_tokens > INT_MAX / 2)
            return lowkey_fail(err, LOWKEY_EUNSUPPORTED, "%s: sample %d has %lld tokens, the limit is %d",
                               measured->activations, s, (long long)n_tokens, INT_MAX / 2);
    }
    return LOWKEY_OK;
}

lowkey_status lowkey_measured_pick(const char *activations, const struct lowkey_activations_info *info,
                                   int n_layers, const int *layers, int first_sample, int end_sample,
                                   struct lowkey_measured *measured, lowkey_error *err)
{
    *measured = (struct lowkey_measured) { .activations = activations,
                                           .info = info,
                                           .first_sample = first_sample,
                                           .end_sample = end_sample ? end_sample : info->n_samples };
    lowkey_status status = pick_layers(measured, n_layers, layers, err);
    if (status == LOWKEY_OK) status = check_samples(measured, err);
    if (status != LOWKEY_OK) {
        free(measured->layers);
        measured->layers = NULL;
    }
    return status;
}

int64_t lowkey_measured_tokens(const struct lowkey_measured *measured)
{
    const int64_t *offsets = measured->info->sample_offsets;
    return offsets[measured->end_sample] - offsets[measured->first_sample];
}

/* The layers measured, out of a quantizer that may hold others too. */
static lowkey_status select_layers(const struct lowkey_measured *measured, const char *path,
                                   const lowkey_quantizer *from, lowkey_quantizer **out, lowkey_error *err)
{
    lowkey_quantizer_desc desc = *lowkey_quantizer_describe(from);
    lowkey_layer_desc *layers = lowkey_take(measured->n_layers, 1, 1, sizeof *layers);
    if (!layers) return lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory for its layers", path);
    lowkey_status status = LOWKEY_OK;
    for (int i = 0; status == LOWKEY_OK && i < measured->n_layers; i++) {
        const int index = measured->info->layers[measured->layers[i]].index;
        int place = 0;
        while (place < desc.n_layers && desc.layers[place].index != index) place++;
        if (place == desc.n_layers)
            status = lowkey_fail(err, LOWKEY_EINVAL, "%s: has no layer %d; --layers picks those to measure",
                                 path, index);
        else
            layers[i] = desc.layers[place];
    }
    desc.n_layers = measured->n_layers;
    desc.layers = layers;
    if (status == LOWKEY_OK) status = lowkey_quantizer_create(&desc, NULL, out, err);
    free(layers);
    return status;
}

static lowkey_status open_16bit(const struct lowkey_measured *measured, lowkey_rule rule,
                                struct lowkey_format *format, lowkey_error *err)
{
    const struct lowkey_activations_info *info = measured->info;
    lowkey_quantizer_desc desc = { .struct_size = sizeof desc,
                                   .n_layers = info->n_layers,
                                   .layers = info->layers,
                                   .model_name = info->model_name };
    memcpy(desc.model_sha256, info->model_sha256, sizeof desc.model_sha256);
    lowkey_quantizer *whole;
    LOWKEY_TRY(lowkey_quantizer_create_16bit(&desc, rule, NULL, &whole, err));
    const lowkey_status status = select_layers(measured, format->path, whole, &format->quantizer, err);
    lowkey_quantizer_free(whole);
    return status;
}

static int count_overlap(const struct lowkey_measured *measured, const struct lowkey_fit_record *record)
{
    int n = 0;
    for (int s = measured->first_sample; s < measured->end_sample; s++) {
        int i = 0; /* a sample may be in a fit twice */
        while (i < record->n_samples &&
               memcmp(record->sample_sha256[i], measured->info->sample_sha256[s], 32) != 0)
            i++;
        n += i < record->n_samples;
    }
    return n;
}

static lowkey_status open_file(const struct lowkey_measured *measured, struct lowkey_format *format,
                               lowkey_error *err)
{
    lowkey_quantizer *whole;
    struct lowkey_fit_record *record;
    LOWKEY_TRY(lowkey_quantizer_read(format->path, &whole, &record, err));
    format->n_fit_samples = record->n_samples;
    format->fit_overlap = count_overlap(measured, record);
    lowkey_status status = select_layers(measured, format->path, whole, &format->quantizer, err);
    if (status == LOWKEY_OK) {
        const struct lowkey_identity captured = lowkey_identity_of_activations(measured->activations,
                                                                               measured->info);
        struct lowkey_identity fitted = lowkey_identity_of_quantizer(
            format->path, lowkey_quantizer_describe(format->quantizer));
        fitted.n_model_layers = record->n_model_layers;
        status = lowkey_identity_check(&captured, &fitted, 0, err);
    }
    lowkey_fit_record_free(record);
    lowkey_quantizer_free(whole);
    return status;
}

/* LABEL=PATH, or the file's name without its ending */
static void name_format(const char *text, struct lowkey_format *format)
{
    static const char ending[] = ".quantizer.h5";
    const char *equals = strchr(text, '='), *slash = strrchr(text, '/');
    const char *name = equals ? text : slash ? slash + 1 : text;
    size_t length = equals ? (size_t)(equals - text) : strlen(name);
    if (!equals && length > sizeof ending - 1 && strcmp(name + length - (sizeof ending - 1), ending) == 0)
        length -= sizeof ending - 1;
    format->path = equals ? equals + 1 : text;
    format->label = strndup(name, length);
}

lowkey_status lowkey_format_open(const struct lowkey_measured *measured, const char *text,
                                 struct lowkey_format *format, lowkey_error *err)
{
    *format = (struct lowkey_format) { 0 };
    name_format(text, format);
    if (!format->label) return lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory", text);
    if (strcmp(format->path, "f16") == 0) return open_16bit(measured, LOWKEY_RULE_F16, format, err);
    if (strcmp(format->path, "bf16") == 0) return open_16bit(measured, LOWKEY_RULE_BF16, format, err);
    return open_file(measured, format, err);
}

void lowkey_format_close(struct lowkey_format *format)
{
    free(format->label);
    lowkey_quantizer_free(format->quantizer);
    *format = (struct lowkey_format) { 0 };
}

lowkey_status lowkey_single_layer(const lowkey_quantizer *from, int l, lowkey_quantizer **out,
                                  lowkey_error *err)
{
    lowkey_quantizer_desc desc = *lowkey_quantizer_describe(from);
    desc.layers += l;
    desc.n_layers = 1;
    return lowkey_quantizer_create(&desc, NULL, out, err);
}
