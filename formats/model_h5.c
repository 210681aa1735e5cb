/* model_h5.c - model.h5: a decoder's weights, f32 in memory whatever the file holds. One table names all
 * tensors, in the order in which the model's SHA-256 takes them; reading and hashing walk it alike. */
#include <inttypes.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/file_h5.h"
#include "formats/geometry.h"
#include "formats/model.h"
#include "formats/sha256.h"
#include "runtime/error.h"

static const char *const attributes[] = { "n_layers",     "model_name",
                                          "model_sha256", "architecture",
                                          "hidden_size",  "intermediate_size",
                                          "vocab_size",   "rms_norm_eps",
                                          "tied_output",  "attention_bias",
                                          "qk_norm",      "bos_token_id",
                                          "eos_token_id", "source",
                                          "license",      NULL };
/* Of an extended model only, behind the others. */
static const char *const extended_attributes[] = { "activation", "post_norms", "embedding_scale" };
enum {
    N_ATTRIBUTES = sizeof attributes / sizeof *attributes - 1,
    N_EXTENDED = sizeof extended_attributes / sizeof *extended_attributes
};

enum size { NONE, HIDDEN, INTERMEDIATE, QUERY, KEY, VALUE, ATTENDED, HEAD };
enum condition { ALWAYS, WITH_BIAS, WITH_QK_NORM, WITH_POST_NORMS };

static const struct layer_tensor {
    const char *name;
    size_t member;              /* of struct lowkey_model_layer */
    enum size rows, columns;    /* columns NONE: a vector */
    enum condition condition;
} layer_tensors[] = {
#define TENSOR(name, ...) { #name, offsetof(struct lowkey_model_layer, name), __VA_ARGS__ }
    TENSOR(attention_norm, HIDDEN, NONE, ALWAYS),
    TENSOR(query_proj, QUERY, HIDDEN, ALWAYS),
    TENSOR(key_proj, KEY, HIDDEN, ALWAYS),
    TENSOR(value_proj, VALUE, HIDDEN, ALWAYS),
    TENSOR(query_bias, QUERY, NONE, WITH_BIAS),
    TENSOR(key_bias, KEY, NONE, WITH_BIAS),
    TENSOR(value_bias, VALUE, NONE, WITH_BIAS),
    TENSOR(query_norm, HEAD, NONE, WITH_QK_NORM),
    TENSOR(key_norm, HEAD, NONE, WITH_QK_NORM),
    TENSOR(output_proj, HIDDEN, ATTENDED, ALWAYS),
    TENSOR(post_attention_norm, HIDDEN, NONE, WITH_POST_NORMS),
    TENSOR(ffn_norm, HIDDEN, NONE, ALWAYS),
    TENSOR(gate_proj, INTERMEDIATE, HIDDEN, ALWAYS),
    TENSOR(up_proj, INTERMEDIATE, HIDDEN, ALWAYS),
    TENSOR(down_proj, HIDDEN, INTERMEDIATE, ALWAYS),
    TENSOR(post_ffn_norm, HIDDEN, NONE, WITH_POST_NORMS),
#undef TENSOR
};
enum { N_LAYER_TENSORS = sizeof layer_tensors / sizeof layer_tensors[0] };

static int is_there(const lowkey_model *model, const struct layer_tensor *tensor)
{
    switch (tensor->condition) {
    case WITH_BIAS: return model->attention_bias;
    case WITH_QK_NORM: return model->qk_norm;
    case WITH_POST_NORMS: return model->post_norms;
    default: return 1;
    }
}

static int64_t size_of(const lowkey_model *model, const lowkey_layer_desc *layer, enum size size)
{
    switch (size) {
    case HIDDEN: return model->hidden_size;
    case INTERMEDIATE: return model->intermediate_size;
    case QUERY: return (int64_t)layer->n_q_heads * layer->key_head_dim;
    case KEY: return (int64_t)layer->n_kv_heads * layer->key_head_dim;
    case VALUE: return (int64_t)layer->n_kv_heads * layer->value_head_dim;
    case ATTENDED: return (int64_t)layer->n_q_heads * layer->value_head_dim;
    case HEAD: return layer->key_head_dim;
    default: return 0;
    }
}

typedef lowkey_status visit_fn(void *arg, const char *path, int rank, const int64_t *dims, float **values,
                               lowkey_error *err);

static lowkey_status for_each_tensor(lowkey_model *model, visit_fn *visit, void *arg, lowkey_error *err)
{
    const int64_t embedding[2] = { model->vocab_size, model->hidden_size };
    LOWKEY_TRY(visit(arg, "/token_embedding", 2, embedding, &model->token_embedding, err));
    for (int l = 0; l < model->n_layers; l++) {
        for (int i = 0; i < N_LAYER_TENSORS; i++) {
            const struct layer_tensor *tensor = &layer_tensors[i];
            char path[LOWKEY_H5_MAX_PATH];
            if (!is_there(model, tensor)) continue;
            const int64_t dims[2] = { size_of(model, &model->geometry[l], tensor->rows),
                                      size_of(model, &model->geometry[l], tensor->columns) };
            lowkey_h5_layer_path(l, tensor->name, path);
            LOWKEY_TRY(visit(arg, path, tensor->columns == NONE ? 1 : 2, dims,
                             (float **)((char *)&model->layers[l] + tensor->member), err));
        }
    }
    LOWKEY_TRY(visit(arg, "/final_norm", 1, &embedding[1], &model->final_norm, err));
    return model->tied_output ? LOWKEY_OK : visit(arg, "/output", 2, embedding, &model->output, err);
}

/* ---- reading ---- */

enum { LLAMA, EXTENDED };

static lowkey_status read_extended(lowkey_h5 *file, lowkey_model *model, lowkey_error *err)
{
    static const char *const activations[] = {
        [LOWKEY_SILU] = "silu", [LOWKEY_GELU_TANH] = "gelu_tanh", NULL
    };
    int activation;
    LOWKEY_TRY(lowkey_h5_get_choice(file, "/", "activation", activations, &activation, err));
    model->activation = (enum lowkey_activation)activation;
    LOWKEY_TRY(lowkey_h5_get_small(file, "/", "post_norms", 0, 1, &model->post_norms, err));
    LOWKEY_TRY(lowkey_h5_get_double(file, "/", "embedding_scale", &model->embedding_scale, err));
    if (model->embedding_scale > 0) return LOWKEY_OK;
    return lowkey_h5_fail(file, err, "/: attribute embedding_scale: expected a number > 0, found %g",
                          model->embedding_scale);
}

static lowkey_status read_attributes(lowkey_h5 *file, lowkey_model *model, int *architecture,
                                     lowkey_error *err)
{
    static const char *const architectures[] = { [LLAMA] = "llama", [EXTENDED] = "extended", NULL };
    LOWKEY_TRY(lowkey_h5_get_choice(file, "/", "architecture", architectures, architecture, err));
    LOWKEY_TRY(lowkey_h5_read_identity(file, &model->n_layers, &model->name, model->sha256, err));
    LOWKEY_TRY(lowkey_h5_get_small(file, "/", "hidden_size", 1, INT_MAX, &model->hidden_size, err));
    LOWKEY_TRY(
        lowkey_h5_get_small(file, "/", "intermediate_size", 1, INT_MAX, &model->intermediate_size, err));
    LOWKEY_TRY(lowkey_h5_get_small(file, "/", "vocab_size", 1, INT_MAX, &model->vocab_size, err));
    LOWKEY_TRY(lowkey_h5_get_double(file, "/", "rms_norm_eps", &model->rms_norm_eps, err));
    LOWKEY_TRY(lowkey_h5_get_small(file, "/", "tied_output", 0, 1, &model->tied_output, err));
    LOWKEY_TRY(lowkey_h5_get_small(file, "/", "attention_bias", 0, 1, &model->attention_bias, err));
    LOWKEY_TRY(lowkey_h5_get_small(file, "/", "qk_norm", 0, 1, &model->qk_norm, err));
    LOWKEY_TRY(
        lowkey_h5_get_small(file, "/", "bos_token_id", -1, model->vocab_size - 1, &model->bos_token_id, err));
    LOWKEY_TRY(
        lowkey_h5_get_small(file, "/", "eos_token_id", -1, model->vocab_size - 1, &model->eos_token_id, err));
    LOWKEY_TRY(lowkey_h5_get_string(file, "/", "source", &model->source, err));
    LOWKEY_TRY(lowkey_h5_get_string(file, "/", "license", &model->license, err));
    if (model->rms_norm_eps < 0)
        return lowkey_h5_fail(file, err, "/: attribute rms_norm_eps: expected at least 0, found %g",
                              model->rms_norm_eps);
    model->embedding_scale = 1;
    return *architecture == EXTENDED ? read_extended(file, model, err) : LOWKEY_OK;
}

static lowkey_status refuse_others(lowkey_h5 *file, const lowkey_model *model, int architecture,
                                   lowkey_error *err)
{
    const char *objects[6] = { "layers", "token_embedding", "final_norm" };
    const char *names[N_ATTRIBUTES + N_EXTENDED + 1] = { NULL };
    int n = 3;
    if (!model->tied_output) objects[n++] = "output";
    if (architecture == EXTENDED) objects[n++] = "window";
    memcpy(names, attributes, N_ATTRIBUTES * sizeof *names);
    if (architecture == EXTENDED)
        memcpy(names + N_ATTRIBUTES, extended_attributes, N_EXTENDED * sizeof *names);
    return lowkey_h5_refuse_others(file, "/", objects, names, err);
}

static lowkey_status read_windows(lowkey_h5 *file, lowkey_model *model, lowkey_error *err)
{
    const int64_t n_layers = model->n_layers;
    int *windows = calloc((size_t)n_layers, sizeof *windows);
    if (!windows) return lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory", lowkey_h5_path(file));
    const lowkey_status status =
        lowkey_h5_read_ints(file, "/window", 1, &n_layers, 0, INT_MAX, windows, sizeof *windows, err);
    for (int l = 0; l < model->n_layers && !status; l++) model->layers[l].window = windows[l];
    free(windows);
    return status;
}

/* The groups of all layers, their geometry, and nothing in them or in the root that does not belong there. */
static lowkey_status read_geometries(lowkey_h5 *file, lowkey_model *model, int architecture,
                                     lowkey_error *err)
{
    const char *names[N_LAYER_TENSORS + 1] = { NULL };
    for (int i = 0, n = 0; i < N_LAYER_TENSORS; i++)
        if (is_there(model, &layer_tensors[i])) names[n++] = layer_tensors[i].name;
    LOWKEY_TRY(refuse_others(file, model, architecture, err));
    LOWKEY_TRY(lowkey_h5_check_layer_groups(file, model->n_layers, NULL, err));
    model->geometry = calloc((size_t)model->n_layers, sizeof *model->geometry);
    model->layers = calloc((size_t)model->n_layers, sizeof *model->layers);
    if (!model->geometry || !model->layers)
        return lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory for %d layers", lowkey_h5_path(file),
                           model->n_layers);
    for (int l = 0; l < model->n_layers; l++) {
        LOWKEY_TRY(lowkey_h5_read_geometry(file, l, &model->geometry[l], err));
        LOWKEY_TRY(lowkey_h5_refuse_layer_others(file, &model->geometry[l], names, err));
    }
    return architecture == EXTENDED ? read_windows(file, model, err) : LOWKEY_OK;
}

static lowkey_status read_tensor(void *file, const char *path, int rank, const int64_t *dims, float **values,
                                 lowkey_error *err)
{
    return lowkey_h5_read_new_f32(file, path, rank, dims, 0, values, err);
}

static lowkey_status check_tensor(void *file, const char *path, int rank, const int64_t *dims, float **values,
                                  lowkey_error *err)
{
    int64_t found[2] = { dims[0], dims[rank - 1] };
    (void)values;
    return lowkey_h5_get_shape(file, path, 0, rank, found, err);
}

static void add_to_hash(lowkey_sha256 *sha256, const char *path, int rank, const int64_t *dims,
                        const float *values)
{
    char head[LOWKEY_H5_MAX_PATH + 64];
    const int n = rank == 1
                      ? snprintf(head, sizeof head, "%s\n%" PRId64 "\n", path, dims[0])
                      : snprintf(head, sizeof head, "%s\n%" PRId64 ",%" PRId64 "\n", path, dims[0], dims[1]);
    lowkey_sha256_add(sha256, head, (size_t)n);
    lowkey_sha256_add(sha256, values, (size_t)dims[0] * (size_t)(rank == 1 ? 1 : dims[1]) * sizeof *values);
}

static lowkey_status hash_tensor(void *sha256, const char *path, int rank, const int64_t *dims,
                                 float **values, lowkey_error *err)
{
    (void)err;
    add_to_hash(sha256, path, rank, dims, *values);
    return LOWKEY_OK;
}

struct hashing {
    lowkey_h5 *file;
    lowkey_sha256 *sha256;
};

static lowkey_status read_and_hash_tensor(void *arg, const char *path, int rank, const int64_t *dims,
                                          float **values, lowkey_error *err)
{
    const struct hashing *hashing = arg;
    float *tensor;
    (void)values;
    LOWKEY_TRY(lowkey_h5_read_new_f32(hashing->file, path, rank, dims, 0, &tensor, err));
    add_to_hash(hashing->sha256, path, rank, dims, tensor);
    free(tensor);
    return LOWKEY_OK;
}

/* Ends the hash and compares. */
static lowkey_status compare_hash(const char *path, const lowkey_model *model, lowkey_sha256 *sha256,
                                  lowkey_error *err)
{
    unsigned char digest[32];
    char expected[65], found[65];
    LOWKEY_TRY(lowkey_sha256_end(sha256, digest, err));
    if (memcmp(digest, model->sha256, sizeof digest) == 0) return LOWKEY_OK;
    lowkey_sha256_print(model->sha256, expected);
    lowkey_sha256_print(digest, found);
    return lowkey_fail(
        err, LOWKEY_EFORMAT,
        "%s: /: attribute model_sha256: expected %s, which is the hash of its tensors, found %s", path, found,
        expected);
}

/* Of tensors that are known to be in the file: numbers that are not could overflow the sum. */
static lowkey_status count_tensor(void *n, const char *path, int rank, const int64_t *dims, float **values,
                                  lowkey_error *err)
{
    (void)path, (void)values, (void)err;
    *(int64_t *)n += dims[0] * (rank == 1 ? 1 : dims[1]);
    return LOWKEY_OK;
}

/* Opens a file and reads all but the weights. */
static lowkey_status begin(const char *path, lowkey_h5 **file, lowkey_model **model, lowkey_error *err)
{
    *model = NULL;
    LOWKEY_TRY(lowkey_h5_open(path, "model", file, err));
    *model = calloc(1, sizeof **model);
    lowkey_status status = *model ? LOWKEY_OK : lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory", path);
    int architecture;
    if (!status) status = read_attributes(*file, *model, &architecture, err);
    if (!status) status = read_geometries(*file, *model, architecture, err);
    if (!status) return LOWKEY_OK;
    lowkey_h5_close(*file);
    lowkey_model_free(*model);
    *model = NULL;
    return status;
}

lowkey_status lowkey_model_open(const char *path, int verify, lowkey_model **out, lowkey_error *err)
{
    lowkey_h5 *file;
    LOWKEY_TRY(begin(path, &file, out, err));
    lowkey_model *model = *out;
    lowkey_status status = for_each_tensor(model, read_tensor, file, err);
    lowkey_h5_close(file);
    if (!status) status = for_each_tensor(model, count_tensor, &model->n_parameters, err);
    if (!status && model->tied_output) model->output = model->token_embedding;
    if (!status && verify) {
        lowkey_sha256 *sha256 = lowkey_sha256_begin();
        if (sha256) for_each_tensor(model, hash_tensor, sha256, err);
        status = compare_hash(path, model, sha256, err);
    }
    if (!status) return LOWKEY_OK;
    lowkey_model_free(model);
    *out = NULL;
    return status;
}

lowkey_status lowkey_model_describe(const char *path, int verify, lowkey_model **out, lowkey_error *err)
{
    lowkey_h5 *file;
    LOWKEY_TRY(begin(path, &file, out, err));
    lowkey_status status = for_each_tensor(*out, check_tensor, file, err);
    if (!status) status = for_each_tensor(*out, count_tensor, &(*out)->n_parameters, err);
    if (!status && verify) {
        struct hashing hashing = { file, lowkey_sha256_begin() };
        if (hashing.sha256) status = for_each_tensor(*out, read_and_hash_tensor, &hashing, err);
        if (!status) status = compare_hash(path, *out, hashing.sha256, err);
        else lowkey_sha256_end(hashing.sha256, NULL, NULL);
    }
    lowkey_h5_close(file);
    if (!status) return LOWKEY_OK;
    lowkey_model_free(*out);
    *out = NULL;
    return status;
}

static lowkey_status free_tensor(void *arg, const char *path, int rank, const int64_t *dims, float **values,
                                 lowkey_error *err)
{
    (void)arg, (void)path, (void)rank, (void)dims, (void)err;
    free(*values);
    return LOWKEY_OK;
}

void lowkey_model_free(lowkey_model *model)
{
    if (!model) return;
    if (!model->geometry || !model->layers) model->n_layers = 0;
    for_each_tensor(model, free_tensor, NULL, NULL);
    for (int l = 0; l < model->n_layers; l++) free((void *)(uintptr_t)model->geometry[l].rope_inv_freq);
    free(model->geometry);
    free(model->layers);
    free(model->name);
    free(model->source);
    free(model->license);
    free(model);
}
