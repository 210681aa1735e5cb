/* eval_format.c - formats by name. Everything is opened and checked before any text is read; a cache is made for each pass
 * and freed after it, so that memory does not grow with the number of formats. */
#include "experiments/eval_format.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/identity.h"
#include "formats/quantizer_file.h"
#include "formats/sha256.h"
#include "runtime/error.h"

static lowkey_status name_format(const char *text, struct lowkey_eval_format *format, lowkey_error *err)
{
    static const char ending[] = ".quantizer.h5";
    const char *equals = strchr(text, '=');
    format->name = equals ? equals + 1 : text;
    const char *slash = strrchr(text, '/'), *label = equals ? text : slash ? slash + 1 : text;
    size_t length = equals ? (size_t)(equals - text) : strlen(label);
    if (!equals && length > sizeof ending - 1 && strcmp(label + length - (sizeof ending - 1), ending) == 0)
        length -= sizeof ending - 1;
    if (!length || strcspn(label, ",\"\n\r") < length)
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: a label must not be empty nor hold ',' or '\"'", text);
    format->label = strndup(label, length);
    return format->label ? LOWKEY_OK : lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory", text);
}

static lowkey_status hash_file(const char *path, char text[65], lowkey_error *err)
{
    enum { PIECE = 1 << 16 };
    unsigned char digest[32], *piece = malloc(PIECE);
    FILE *file = fopen(path, "rb");
    lowkey_sha256 *sha256 = lowkey_sha256_begin();
    size_t n = 0;
    while (file && piece && sha256 && (n = fread(piece, 1, PIECE, file)) > 0)
        lowkey_sha256_add(sha256, piece, n);
    const int failed = !file || ferror(file), number = errno;
    if (file) fclose(file);
    free(piece);
    LOWKEY_TRY(lowkey_sha256_end(sha256, digest, err));
    if (failed) return lowkey_fail(err, LOWKEY_EIO, "%s: cannot read: %s", path, strerror(number));
    lowkey_sha256_print(digest, text);
    return LOWKEY_OK;
}

static lowkey_status open_16bit(const struct lowkey_eval_format_options *options, lowkey_rule rule,
                                struct lowkey_eval_format *format, lowkey_error *err)
{
    const lowkey_model *model = options->model;
    lowkey_quantizer_desc desc = { .struct_size = sizeof desc,
                                   .n_layers = model->n_layers,
                                   .layers = model->geometry,
                                   .model_name = model->name };
    memcpy(desc.model_sha256, model->sha256, sizeof desc.model_sha256);
    return lowkey_quantizer_create_16bit(&desc, rule, NULL, &format->quantizer, err);
}

static lowkey_status open_file(const struct lowkey_eval_format_options *options,
                               struct lowkey_eval_format *format, lowkey_error *err)
{
    struct lowkey_fit_record *record;
    LOWKEY_TRY(lowkey_quantizer_read(format->name, &format->quantizer, &record, err));
    const lowkey_quantizer_desc *desc = lowkey_quantizer_describe(format->quantizer);
    const struct lowkey_identity of_model = lowkey_identity_of_model(options->model_path, options->model);
    struct lowkey_identity fitted = lowkey_identity_of_quantizer(format->name, desc);
    fitted.n_model_layers = record->n_model_layers;
    lowkey_status status = lowkey_identity_check(&of_model, &fitted, LOWKEY_SAME_LAYERS, err);
    if (status == LOWKEY_OK && record->n_samples) {
        const size_t bytes = (size_t)record->n_samples * sizeof *format->fit_samples;
        format->n_fit_samples = record->n_samples;
        format->fit_samples = malloc(bytes);
        if (format->fit_samples)
            memcpy(format->fit_samples, record->sample_sha256, bytes);
        else
            status = lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory", format->name);
    }
    lowkey_fit_record_free(record);
    format->n_sinks = desc->n_sink_tokens;
    return status == LOWKEY_OK ? hash_file(format->name, format->file_sha256, err) : status;
}

/* The samples that peers calibrate on, in the order of the files. */
static lowkey_status hash_samples(const struct lowkey_eval_format_options *options, char text[65],
                                  lowkey_error *err)
{
    unsigned char digest[32];
    lowkey_status status = LOWKEY_OK;
    lowkey_sha256 *sha256 = lowkey_sha256_begin();
    for (int i = 0; sha256 && status == LOWKEY_OK && i < options->n_activations; i++) {
        lowkey_activations *activations;
        status = lowkey_activations_open(options->activations[i], &activations, err);
        if (status != LOWKEY_OK) break;
        const struct lowkey_activations_info *info = lowkey_activations_describe(activations);
        lowkey_sha256_add(sha256, info->sample_sha256, 32 * (size_t)info->n_samples);
        lowkey_activations_close(activations);
    }
    const lowkey_status ended = lowkey_sha256_end(sha256, digest, status == LOWKEY_OK ? err : NULL);
    lowkey_sha256_print(digest, text);
    return status == LOWKEY_OK ? ended : status;
}

/* One that needs no activations is opened without, so that giving some for others does not change what it is. */
static lowkey_status open_peer(const struct lowkey_eval_format_options *options,
                               struct lowkey_eval_format *format, lowkey_error *err)
{
    format->is_simulated = 1;
    format->n_sinks = options->n_sinks;
    const lowkey_status status = lowkey_peer_open(format->name, options->model, 0, NULL, options->n_threads,
                                                  &format->peer, err);
    if (status == LOWKEY_OK || !options->n_activations) return status;
    LOWKEY_TRY(hash_samples(options, format->calibration, err));
    return lowkey_peer_open(format->name, options->model, options->n_activations, options->activations,
                            options->n_threads, &format->peer, err);
}

static lowkey_status state_held(struct lowkey_eval_format *format, lowkey_error *err)
{
    const lowkey_cache_config config = { .struct_size = sizeof config,
                                         .max_sequences = 1,
                                         .n_pages = LOWKEY_EVAL_STATED_TOKENS / LOWKEY_PAGE_TOKENS };
    lowkey_cache_usage usage = { .struct_size = sizeof usage };
    LOWKEY_TRY(lowkey_cache_estimate(format->quantizer, &config, 1, LOWKEY_EVAL_STATED_TOKENS, &usage, err));
    format->bits_held = usage.bits_held;
    return LOWKEY_OK;
}

static double key_share(const lowkey_model *model)
{
    double keys = 0, values = 0;
    for (int l = 0; l < model->n_layers; l++) {
        const lowkey_layer_desc *layer = &model->geometry[l];
        keys += (double)layer->n_kv_heads * layer->key_head_dim;
        values += (double)layer->n_kv_heads * layer->value_head_dim;
    }
    return keys / (keys + values);
}

lowkey_status lowkey_eval_format_open(const char *text, const struct lowkey_eval_format_options *options,
                                      struct lowkey_eval_format *format, lowkey_error *err)
{
    *format = (struct lowkey_eval_format) { .bits_held = (double)NAN };
    LOWKEY_TRY(name_format(text, format, err));
    format->key_share = key_share(options->model);
    if (lowkey_peer_known(format->name)) return open_peer(options, format, err);
    if (strcmp(format->name, "f16") == 0)
        LOWKEY_TRY(open_16bit(options, LOWKEY_RULE_F16, format, err));
    else if (strcmp(format->name, "bf16") == 0)
        LOWKEY_TRY(open_16bit(options, LOWKEY_RULE_BF16, format, err));
    else
        LOWKEY_TRY(open_file(options, format, err));
    return state_held(format, err);
}

void lowkey_eval_format_close(struct lowkey_eval_format *format)
{
    lowkey_eval_format_stop(format);
    lowkey_quantizer_free(format->quantizer);
    lowkey_peer_close(format->peer);
    free(format->fit_samples);
    free(format->label);
    *format = (struct lowkey_eval_format) { 0 };
}

lowkey_status lowkey_eval_format_start(struct lowkey_eval_format *format, int max_tokens, int n_threads,
                                       struct lowkey_store *store, lowkey_error *err)
{
    if (format->quantizer) {
        LOWKEY_TRY(
            lowkey_packed_store_create(format->quantizer, max_tokens, n_threads, &format->packed, err));
        *store = lowkey_packed_store_interface(format->packed);
        return LOWKEY_OK;
    }
    format->sinks = (struct lowkey_sink_store) { lowkey_peer_store(format->peer), format->n_sinks };
    *store = lowkey_sink_store_interface(&format->sinks);
    return LOWKEY_OK;
}

/* Of the elements that are no sinks. */
static double packed_bits(uint64_t payload_bits, uint64_t elements, int length, int n_sinks)
{
    const double sinks = (double)elements / length * (n_sinks < length ? n_sinks : length);
    return ((double)payload_bits - 16 * sinks) / ((double)elements - sinks);
}

lowkey_status lowkey_eval_format_measure(const struct lowkey_eval_format *format,
                                         struct lowkey_eval_bits *bits, lowkey_error *err)
{
    if (format->peer) {
        const struct lowkey_peer_bits of_peer = lowkey_peer_bits(format->peer);
        *bits = (struct lowkey_eval_bits) { of_peer.key, of_peer.value };
        return LOWKEY_OK;
    }
    const lowkey_cache *cache = lowkey_packed_store_cache(format->packed);
    const int length = lowkey_cache_length(cache, 0,
                                           lowkey_quantizer_describe(format->quantizer)->layers[0].index);
    lowkey_cache_usage usage = { .struct_size = sizeof usage };
    LOWKEY_TRY(lowkey_cache_measure(cache, &usage, err));
    bits->key = packed_bits(usage.key_payload_bits, usage.key_elements, length, format->n_sinks);
    bits->value = packed_bits(usage.value_payload_bits, usage.value_elements, length, format->n_sinks);
    return LOWKEY_OK;
}

void lowkey_eval_format_stop(struct lowkey_eval_format *format)
{
    lowkey_packed_store_free(format->packed);
    format->packed = NULL;
}

double lowkey_eval_stated_bits(const struct lowkey_eval_format *format, enum lowkey_store_side side,
                               double bits)
{
    const int n = LOWKEY_EVAL_STATED_TOKENS;
    int n_exact = format->n_sinks;
    if (format->peer) {
        const struct lowkey_store store = lowkey_peer_store(format->peer);
        if (store.exact_from) n_exact += n - store.exact_from(store.user, side, n - 1);
    }
    if (n_exact > n) n_exact = n;
    return (16.0 * n_exact + bits * (n - n_exact)) / n;
}
