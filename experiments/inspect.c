/* inspect.c - what a file holds, as a description: provenance, geometry, sizes, and of quantizers bits and
 * errors by layer. Nothing is judged here beyond what opening a file checks. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "experiments/files.h"
#include "formats/activations.h"
#include "formats/file_h5.h"
#include "formats/geometry.h"
#include "formats/model.h"
#include "formats/quantizer_file.h"
#include "formats/sha256.h"
#include "formats/tokens.h"
#include "runtime/error.h"

static void set(json_t *object, const char *key, json_t *value)
{
    json_object_set_new(object, key, value);
}

static json_t *sha256_text(const unsigned char sha256[32])
{
    char text[65];
    lowkey_sha256_print(sha256, text);
    return json_string(text);
}

/* ---- geometry ---- */

/* The base of inverse frequencies theta^(-i / n), i < n; 0: they are others (scaled, partial of a larger
 * vector). */
static double rope_theta(const lowkey_layer_desc *layer)
{
    const int n = layer->rope_dims / 2;
    const double *f = layer->rope_inv_freq;
    if (n < 2 || !(f[1] > 0)) return 0;
    const double theta = pow(f[1], -n);
    for (int i = 0; i < n; i++)
        if (!(fabs(f[i] * pow(theta, (double)i / n) - 1) < 1e-5)) return 0;
    return theta;
}

json_t *lowkey_describe_geometry(const lowkey_layer_desc *layer)
{
    char rope[64];
    const double theta = rope_theta(layer);
    const char *pairing = lowkey_pairing_name(layer->rope_pairing);
    if (layer->rope_dims == 0)
        snprintf(rope, sizeof rope, "none");
    else if (theta > 0)
        snprintf(rope, sizeof rope, "%d %s, theta %.6g", layer->rope_dims, pairing, theta);
    else
        snprintf(rope, sizeof rope, "%d %s, scaled", layer->rope_dims, pairing);
    return json_pack("{s:i, s:i, s:i, s:i, s:i, s:f, s:s, s:f}", "layer", layer->index, "q_heads",
                     layer->n_q_heads, "kv_heads", layer->n_kv_heads, "key_head_dim", layer->key_head_dim,
                     "value_head_dim", layer->value_head_dim, "logit_scale", layer->logit_scale, "rope", rope,
                     "rope_attention_factor", layer->rope_attention_factor);
}

/* Keys and values of one token over these layers, in 16 bits. */
static json_t *bytes_per_token(const lowkey_layer_desc *layers, int n)
{
    json_int_t bytes = 0;
    for (int i = 0; i < n; i++)
        bytes += 2 * (json_int_t)layers[i].n_kv_heads * (layers[i].key_head_dim + layers[i].value_head_dim);
    return json_integer(bytes);
}

/* ---- by schema ---- */

static lowkey_status describe_model(const char *path, json_t *to, lowkey_error *err)
{
    lowkey_model *model;
    LOWKEY_TRY(lowkey_model_describe(path, 0, &model, err));
    set(to, "model", json_string(model->name));
    set(to, "model_sha256", sha256_text(model->sha256));
    set(to, "source", json_string(model->source));
    set(to, "license", json_string(model->license));
    set(to, "parameters", json_integer(model->n_parameters));
    set(to, "n_layers", json_integer(model->n_layers));
    set(to, "hidden_size", json_integer(model->hidden_size));
    set(to, "intermediate_size", json_integer(model->intermediate_size));
    set(to, "vocab_size", json_integer(model->vocab_size));
    set(to, "rms_norm_eps", json_real(model->rms_norm_eps));
    set(to, "tied_output", json_boolean(model->tied_output));
    set(to, "attention_bias", json_boolean(model->attention_bias));
    set(to, "qk_norm", json_boolean(model->qk_norm));
    set(to, "activation", json_string(model->activation == LOWKEY_SILU ? "silu" : "gelu_tanh"));
    set(to, "post_norms", json_boolean(model->post_norms));
    set(to, "embedding_scale", json_real(model->embedding_scale));
    set(to, "bos_token_id", json_integer(model->bos_token_id));
    set(to, "eos_token_id", json_integer(model->eos_token_id));
    set(to, "cache_bytes_per_token_in_16_bits", bytes_per_token(model->geometry, model->n_layers));
    json_t *layers = json_array();
    for (int l = 0; l < model->n_layers; l++) {
        json_t *layer = lowkey_describe_geometry(&model->geometry[l]);
        set(layer, "window", json_integer(model->layers[l].window));
        json_array_append_new(layers, layer);
    }
    set(to, "layers", layers);
    lowkey_model_free(model);
    return LOWKEY_OK;
}

/* Number, shortest and longest of the runs between offsets. */
static void describe_runs(json_t *to, const char *what, const int64_t *offsets, int n)
{
    char key[40];
    int64_t shortest = INT64_MAX, longest = 0;
    for (int i = 0; i < n; i++) {
        const int64_t length = offsets[i + 1] - offsets[i];
        if (length < shortest) shortest = length;
        if (length > longest) longest = length;
    }
    set(to, "tokens", json_integer(offsets[n]));
    set(to, what, json_integer(n));
    snprintf(key, sizeof key, "shortest_of_%s", what);
    set(to, key, json_integer(shortest));
    snprintf(key, sizeof key, "longest_of_%s", what);
    set(to, key, json_integer(longest));
}

static lowkey_status describe_tokens(const char *path, json_t *to, lowkey_error *err)
{
    lowkey_tokens *tokens;
    LOWKEY_TRY(lowkey_tokens_open(path, &tokens, err));
    set(to, "tokenizer", json_string(tokens->tokenizer));
    set(to, "tokenizer_sha256", sha256_text(tokens->tokenizer_sha256));
    set(to, "vocab_size", json_integer(tokens->vocab_size));
    set(to, "text", json_string(tokens->text_name));
    set(to, "text_sha256", sha256_text(tokens->text_sha256));
    set(to, "begins_with_bos", json_boolean(tokens->add_bos));
    describe_runs(to, "sequences", tokens->sequence_offsets, tokens->n_sequences);
    char first[200] = "";
    for (int64_t i = 0, used = 0; i < tokens->n_tokens && i < 12; i++)
        used += snprintf(first + used, sizeof first - (size_t)used, "%s%d", i ? " " : "", tokens->tokens[i]);
    set(to, "first_tokens", json_string(first));
    lowkey_tokens_free(tokens);
    return LOWKEY_OK;
}

/* "key f16, value f16" */
static lowkey_status stored_as(lowkey_activations *a, int i, char text[160], lowkey_error *err)
{
    const unsigned contents = lowkey_activations_describe(a)->contents;
    size_t used = 0;
    text[0] = 0;
    for (int s = 0; s < LOWKEY_N_STREAMS; s++) {
        const char *type;
        if (!(contents >> s & 1)) continue;
        LOWKEY_TRY(lowkey_activations_type(a, i, (enum lowkey_stream)s, &type, err));
        used += (size_t)snprintf(text + used, 160 - used, "%s%s %s", used ? ", " : "", lowkey_stream_names[s],
                                 type);
    }
    return LOWKEY_OK;
}

static lowkey_status describe_activations(const char *path, json_t *to, lowkey_error *err)
{
    lowkey_activations *a;
    LOWKEY_TRY(lowkey_activations_open(path, &a, err));
    const struct lowkey_activations_info *info = lowkey_activations_describe(a);
    set(to, "model", json_string(info->model_name));
    set(to, "model_sha256", sha256_text(info->model_sha256));
    set(to, "text", json_string(info->text_name));
    set(to, "text_sha256", sha256_text(info->text_sha256));
    if (info->contents & (1u << LOWKEY_KEY_GRAD | 1u << LOWKEY_VALUE_GRAD))
        set(to, "gradient_labels", json_string(lowkey_gradient_labels_names[info->gradient_labels]));
    if (info->gradient_labels == LOWKEY_LABELS_MODEL) set(to, "gradient_seed", json_integer(info->gradient_seed));
    set(to, "layers_of_model", json_integer(info->n_model_layers));
    set(to, "layers_captured", json_integer(info->n_layers));
    describe_runs(to, "samples", info->sample_offsets, info->n_samples);
    json_t *layers = json_array();
    lowkey_status status = LOWKEY_OK;
    for (int i = 0; i < info->n_layers && !status; i++) {
        char stored[160];
        status = stored_as(a, i, stored, err);
        json_t *layer = lowkey_describe_geometry(&info->layers[i]);
        set(layer, "stored", json_string(stored));
        json_array_append_new(layers, layer);
    }
    set(to, "layers", layers);
    lowkey_activations_close(a);
    return status;
}

lowkey_status lowkey_file_describe(const char *path, json_t **out, lowkey_error *err)
{
    static const struct {
        const char *schema;
        lowkey_status (*describe)(const char *path, json_t *to, lowkey_error *err);
    } describers[] = {
        { "model", describe_model },
        { "tokens", describe_tokens },
        { "activations", describe_activations },
        { "quantizer", lowkey_describe_quantizer },
    };
    lowkey_h5 *file;
    struct stat status;
    char version[32], *created_by;
    int major, minor;
    size_t i = 0;
    *out = NULL;
    LOWKEY_TRY(lowkey_h5_open(path, NULL, &file, err));
    while (strcmp(describers[i].schema, lowkey_h5_schema(file)) != 0)
        i++; /* lowkey_h5_open knows these four */
    lowkey_h5_version(file, &major, &minor);
    snprintf(version, sizeof version, "%d.%d", major, minor);
    const lowkey_status read = lowkey_h5_get_string(file, "/", "created_by", &created_by, err);
    lowkey_h5_close(file);
    LOWKEY_TRY(read);
    json_t *to = json_object();
    set(to, "file", lowkey_json_text(path));
    set(to, "bytes", json_integer(stat(path, &status) == 0 ? (json_int_t)status.st_size : 0));
    set(to, "schema", json_string(describers[i].schema));
    set(to, "schema_version", json_string(version));
    set(to, "created_by", json_string(created_by));
    free(created_by);
    const lowkey_status described = describers[i].describe(path, to, err);
    if (described)
        json_decref(to);
    else
        *out = to;
    return described;
}
