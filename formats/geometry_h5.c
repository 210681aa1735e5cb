/* geometry_h5.c - how attention looks, in a layer group: model.h5, activations.h5 and quantizer.h5 alike. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/file_h5.h"
#include "formats/geometry.h"
#include "formats/parts_h5.h"
#include "runtime/error.h"

static const char *const attributes[] = {
    "n_q_heads",   "n_kv_heads", "key_head_dim", "value_head_dim",
    "logit_scale", "rope_dims",  "rope_pairing", "rope_attention_factor",
    NULL
};
static const char *const pairings[] = {
    [LOWKEY_PAIR_HALF] = "half", [LOWKEY_PAIR_INTERLEAVED] = "interleaved", NULL
};

void lowkey_h5_layer_path(int layer, const char *suffix, char path[LOWKEY_H5_MAX_PATH])
{
    snprintf(path, LOWKEY_H5_MAX_PATH, "/layers/%03d%s%s", layer, suffix ? "/" : "", suffix ? suffix : "");
}

static lowkey_status read_attributes(lowkey_h5 *file, const char *group, lowkey_layer_desc *layer,
                                     lowkey_error *err)
{
    int pairing;
    LOWKEY_TRY(lowkey_h5_get_small(file, group, "n_q_heads", 1, LOWKEY_MAX_Q_HEADS, &layer->n_q_heads, err));
    LOWKEY_TRY(
        lowkey_h5_get_small(file, group, "n_kv_heads", 1, LOWKEY_MAX_Q_HEADS, &layer->n_kv_heads, err));
    LOWKEY_TRY(lowkey_h5_get_small(file, group, "key_head_dim", 8, 256, &layer->key_head_dim, err));
    LOWKEY_TRY(lowkey_h5_get_small(file, group, "value_head_dim", 8, 256, &layer->value_head_dim, err));
    LOWKEY_TRY(lowkey_h5_get_double(file, group, "logit_scale", &layer->logit_scale, err));
    LOWKEY_TRY(lowkey_h5_get_small(file, group, "rope_dims", 0, layer->key_head_dim, &layer->rope_dims, err));
    LOWKEY_TRY(lowkey_h5_get_choice(file, group, "rope_pairing", pairings, &pairing, err));
    LOWKEY_TRY(
        lowkey_h5_get_double(file, group, "rope_attention_factor", &layer->rope_attention_factor, err));
    layer->rope_pairing = (lowkey_pairing)pairing;
    return LOWKEY_OK;
}

lowkey_status lowkey_h5_read_geometry(lowkey_h5 *file, int layer_index, lowkey_layer_desc *layer,
                                      lowkey_error *err)
{
    char path[LOWKEY_H5_MAX_PATH];
    *layer = (lowkey_layer_desc) { .struct_size = sizeof *layer, .index = layer_index };
    lowkey_h5_layer_path(layer_index, NULL, path);
    LOWKEY_TRY(read_attributes(file, path, layer, err));
    double *inv_freq = NULL;
    lowkey_status status = LOWKEY_OK;
    if (layer->rope_dims > 1) { /* an odd number is refused below */
        const int64_t n = layer->rope_dims / 2;
        inv_freq = calloc((size_t)n, sizeof *inv_freq);
        if (!inv_freq) return lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory", lowkey_h5_path(file));
        lowkey_h5_layer_path(layer_index, "rope_inv_freq", path);
        status = lowkey_h5_read_f64(file, path, 1, &n, inv_freq, err);
    }
    layer->rope_inv_freq = inv_freq;
    if (!status) status = lowkey_h5_blame(file, lowkey_geometry_check(layer, err), err);
    if (status) free(inv_freq), layer->rope_inv_freq = NULL;
    return status;
}

lowkey_status lowkey_h5_write_geometry(lowkey_h5 *file, const lowkey_layer_desc *layer, lowkey_error *err)
{
    char group[LOWKEY_H5_MAX_PATH], path[LOWKEY_H5_MAX_PATH];
    lowkey_h5_layer_path(layer->index, NULL, group);
    lowkey_h5_layer_path(layer->index, "rope_inv_freq", path);
    lowkey_layer_desc filled = *layer;
    lowkey_geometry_fill(&filled);
    LOWKEY_TRY(lowkey_h5_blame(file, lowkey_geometry_check(&filled, err), err));
    LOWKEY_TRY(lowkey_h5_put_int(file, group, "n_q_heads", filled.n_q_heads, err));
    LOWKEY_TRY(lowkey_h5_put_int(file, group, "n_kv_heads", filled.n_kv_heads, err));
    LOWKEY_TRY(lowkey_h5_put_int(file, group, "key_head_dim", filled.key_head_dim, err));
    LOWKEY_TRY(lowkey_h5_put_int(file, group, "value_head_dim", filled.value_head_dim, err));
    LOWKEY_TRY(lowkey_h5_put_double(file, group, "logit_scale", filled.logit_scale, err));
    LOWKEY_TRY(lowkey_h5_put_int(file, group, "rope_dims", filled.rope_dims, err));
    LOWKEY_TRY(lowkey_h5_put_string(file, group, "rope_pairing", pairings[filled.rope_pairing], err));
    LOWKEY_TRY(lowkey_h5_put_double(file, group, "rope_attention_factor", filled.rope_attention_factor, err));
    if (filled.rope_dims == 0) return LOWKEY_OK;
    return lowkey_h5_write_f64(file, path, LOWKEY_DIMS(filled.rope_dims / 2), filled.rope_inv_freq, err);
}

lowkey_status lowkey_h5_refuse_layer_others(lowkey_h5 *file, const lowkey_layer_desc *layer,
                                            const char *const *objects, lowkey_error *err)
{
    char path[LOWKEY_H5_MAX_PATH];
    const char *all[32];
    int n = 0;
    for (; objects[n] && n < 30; n++) all[n] = objects[n];
    if (layer->rope_dims > 0) all[n++] = "rope_inv_freq";
    all[n] = NULL;
    lowkey_h5_layer_path(layer->index, NULL, path);
    return lowkey_h5_refuse_others(file, path, all, attributes, err);
}

lowkey_status lowkey_h5_read_identity(lowkey_h5 *file, int *n_layers, char **model_name,
                                      unsigned char model_sha256[32], lowkey_error *err)
{
    LOWKEY_TRY(lowkey_h5_get_small(file, "/", "n_layers", 1, LOWKEY_MAX_LAYERS, n_layers, err));
    LOWKEY_TRY(lowkey_h5_get_sha256(file, "/", "model_sha256", model_sha256, err));
    return lowkey_h5_get_string(file, "/", "model_name", model_name, err);
}

lowkey_status lowkey_h5_write_identity(lowkey_h5 *file, int n_layers, const char *model_name,
                                       const unsigned char model_sha256[32], lowkey_error *err)
{
    LOWKEY_TRY(lowkey_h5_put_int(file, "/", "n_layers", n_layers, err));
    LOWKEY_TRY(lowkey_h5_put_string(file, "/", "model_name", model_name, err));
    return lowkey_h5_put_sha256(file, "/", "model_sha256", model_sha256, err);
}

lowkey_status lowkey_offsets_check(const char *name, const int64_t *offsets, int n, int64_t total,
                                   lowkey_error *err)
{
    if (offsets[0] != 0 || offsets[n] != total)
        return lowkey_fail(err, LOWKEY_EFORMAT,
                           "%s: expected from 0 to %" PRId64 ", found from %" PRId64 " to %" PRId64, name,
                           total, offsets[0], offsets[n]);
    for (int i = 1; i <= n; i++)
        if (offsets[i] <= offsets[i - 1])
            return lowkey_fail(err, LOWKEY_EFORMAT,
                               "%s[%d]: expected more than %" PRId64 " before it, found %" PRId64, name, i,
                               offsets[i - 1], offsets[i]);
    return LOWKEY_OK;
}

/* ---- which layers ---- */

lowkey_status lowkey_h5_read_layer_index(lowkey_h5 *file, int n_model_layers, int *n, int **out,
                                         lowkey_error *err)
{
    int64_t count = -1;
    *out = NULL;
    LOWKEY_TRY(lowkey_h5_get_shape(file, "/layer_index", 1, 1, &count, err));
    if (count > n_model_layers)
        return lowkey_h5_fail(file, err, "/layer_index: expected at most n_layers = %d layers, found %lld",
                              n_model_layers, (long long)count);
    int *layers = calloc((size_t)count, sizeof *layers);
    if (!layers) return lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory", lowkey_h5_path(file));
    lowkey_status status = lowkey_h5_read_ints(file, "/layer_index", 1, &count, 0, n_model_layers - 1, layers,
                                               sizeof *layers, err);
    for (int i = 1; i < count && !status; i++)
        if (layers[i] <= layers[i - 1])
            status = lowkey_h5_fail(file, err, "/layer_index[%d]: expected more than %d before it, found %d",
                                    i, layers[i - 1], layers[i]);
    if (!status) status = lowkey_h5_check_layer_groups(file, (int)count, layers, err);
    if (status) {
        free(layers);
        return status;
    }
    *n = (int)count;
    *out = layers;
    return LOWKEY_OK;
}

struct layer_groups {
    lowkey_h5 *file;
    int n;
    const int *layers;
    int n_found;
};

static int holds(const struct layer_groups *groups, int layer)
{
    if (!groups->layers) return layer < groups->n;
    for (int i = 0; i < groups->n; i++)
        if (groups->layers[i] == layer) return 1;
    return 0;
}

static lowkey_status check_group(void *arg, const char *name, lowkey_error *err)
{
    struct layer_groups *groups = arg;
    char path[LOWKEY_H5_MAX_PATH];
    char *end;
    const long layer = strtol(name, &end, 10);
    if (*name >= '0' && *name <= '9' && !*end && layer <= INT32_MAX && holds(groups, (int)layer)) {
        lowkey_h5_layer_path((int)layer, NULL, path);
        if (strcmp(path + strlen("/layers/"), name) == 0) return groups->n_found++, LOWKEY_OK;
    }
    if (groups->file->ignores_unknown) return LOWKEY_OK;
    return lowkey_h5_fail(groups->file, err,
                          "/layers: unknown object %.60s; expected %s, with at least three digits", name,
                          groups->layers ? "the layers of /layer_index" : "layers below n_layers");
}

lowkey_status lowkey_h5_check_layer_groups(lowkey_h5 *file, int n, const int *layers, lowkey_error *err)
{
    static const char *const none[] = { NULL };
    struct layer_groups groups = { file, n, layers, 0 };
    char path[LOWKEY_H5_MAX_PATH];
    LOWKEY_TRY(lowkey_h5_refuse_others(file, "/layers", NULL, none, err));
    LOWKEY_TRY(lowkey_h5_for_each(file, "/layers", check_group, &groups, err));
    for (int i = 0; i < n && groups.n_found < n; i++) { /* one is missing: which? */
        LOWKEY_QUIET;
        LOWKEY_CLOSED hid_t id = -1;
        lowkey_h5_layer_path(layers ? layers[i] : i, NULL, path);
        LOWKEY_TRY(lowkey_h5_find(file, path, H5I_GROUP, "a group", &id, err));
    }
    return LOWKEY_OK;
}
