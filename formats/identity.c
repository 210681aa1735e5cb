/* identity.c - compares what two files say of their model, from the hash down to single RoPE frequencies. */
#include "formats/identity.h"

#include <math.h>
#include <string.h>

#include "formats/geometry.h"
#include "runtime/error.h"

struct lowkey_identity lowkey_identity_of_model(const char *name, const lowkey_model *model)
{
    return (struct lowkey_identity) { .name = name,
                                      .model_name = model->name,
                                      .model_sha256 = model->sha256,
                                      .n_model_layers = model->n_layers,
                                      .n_layers = model->n_layers,
                                      .layers = model->geometry };
}

struct lowkey_identity lowkey_identity_of_activations(const char *name,
                                                      const struct lowkey_activations_info *info)
{
    return (struct lowkey_identity) { .name = name,
                                      .model_name = info->model_name,
                                      .model_sha256 = info->model_sha256,
                                      .n_model_layers = info->n_model_layers,
                                      .n_layers = info->n_layers,
                                      .layers = info->layers,
                                      .n_samples = info->n_samples,
                                      .sample_sha256 = info->sample_sha256 };
}

struct lowkey_identity lowkey_identity_of_quantizer(const char *name, const lowkey_quantizer_desc *desc)
{
    return (struct lowkey_identity) { .name = name,
                                      .model_name = desc->model_name,
                                      .model_sha256 = desc->model_sha256,
                                      .n_layers = desc->n_layers,
                                      .layers = desc->layers };
}

/* Two identities under comparison: where complaints go, and what they begin with. */
struct pair {
    const struct lowkey_identity *a, *b;
    lowkey_error *err;
};

static void hex(const unsigned char sha256[32], char out[65])
{
    for (int i = 0; i < 32; i++) {
        out[2 * i] = "0123456789abcdef"[sha256[i] >> 4];
        out[2 * i + 1] = "0123456789abcdef"[sha256[i] & 15];
    }
    out[64] = 0;
}

static lowkey_status check_model(const struct pair *p)
{
    const struct lowkey_identity *a = p->a, *b = p->b;
    if (memcmp(a->model_sha256, b->model_sha256, 32) != 0) {
        char hex_a[65], hex_b[65];
        hex(a->model_sha256, hex_a);
        hex(b->model_sha256, hex_b);
        return lowkey_fail(p->err, LOWKEY_EFORMAT,
                           "model_sha256: %.80s is of model %.40s, %s; %.80s is of model %.40s, %s", a->name,
                           a->model_name, hex_a, b->name, b->model_name, hex_b);
    }
    if (a->n_model_layers && b->n_model_layers && a->n_model_layers != b->n_model_layers)
        return lowkey_fail(p->err, LOWKEY_EFORMAT, "n_layers: %.200s has %d, %.200s has %d", a->name,
                           a->n_model_layers, b->name, b->n_model_layers);
    return LOWKEY_OK;
}

static lowkey_status same_int(const struct pair *p, int layer, const char *what, int a, int b)
{
    if (a == b) return LOWKEY_OK;
    return lowkey_fail(p->err, LOWKEY_EFORMAT, "layer %d: %s: %.200s has %d, %.200s has %d", layer, what,
                       p->a->name, a, p->b->name, b);
}

static int close_to(double a, double b)
{
    return fabs(a - b) <= ldexp(fmax(fabs(a), fabs(b)), -19);
}

static lowkey_status same_number(const struct pair *p, int layer, const char *what, double a, double b)
{
    if (close_to(a, b)) return LOWKEY_OK;
    return lowkey_fail(p->err, LOWKEY_EFORMAT, "layer %d: %s: %.200s has %.9g, %.200s has %.9g", layer, what,
                       p->a->name, a, p->b->name, b);
}

static lowkey_status same_geometry(const struct pair *p, const lowkey_layer_desc *a,
                                   const lowkey_layer_desc *b)
{
    const int l = a->index;
    LOWKEY_TRY(same_int(p, l, "n_q_heads", a->n_q_heads, b->n_q_heads));
    LOWKEY_TRY(same_int(p, l, "n_kv_heads", a->n_kv_heads, b->n_kv_heads));
    LOWKEY_TRY(same_int(p, l, "key_head_dim", a->key_head_dim, b->key_head_dim));
    LOWKEY_TRY(same_int(p, l, "value_head_dim", a->value_head_dim, b->value_head_dim));
    LOWKEY_TRY(same_number(p, l, "logit_scale", a->logit_scale, b->logit_scale));
    LOWKEY_TRY(same_int(p, l, "rope_dims", a->rope_dims, b->rope_dims));
    if (a->rope_dims == 0) return LOWKEY_OK;
    if (a->rope_pairing != b->rope_pairing)
        return lowkey_fail(p->err, LOWKEY_EFORMAT, "layer %d: rope_pairing: %.200s has %s, %.200s has %s", l,
                           p->a->name, lowkey_pairing_name(a->rope_pairing), p->b->name,
                           lowkey_pairing_name(b->rope_pairing));
    LOWKEY_TRY(
        same_number(p, l, "rope_attention_factor", a->rope_attention_factor, b->rope_attention_factor));
    for (int i = 0; i < a->rope_dims / 2; i++)
        if (!close_to(a->rope_inv_freq[i], b->rope_inv_freq[i]))
            return lowkey_fail(
                p->err, LOWKEY_EFORMAT,
                "layer %d: rope_inv_freq pair %d (another theta?): %.160s has %.9g, %.160s has %.9g", l, i,
                p->a->name, a->rope_inv_freq[i], p->b->name, b->rope_inv_freq[i]);
    return LOWKEY_OK;
}

/* Both rise, so one walk finds each layer of b in a. */
static lowkey_status check_layers(const struct pair *p, unsigned flags)
{
    const struct lowkey_identity *a = p->a, *b = p->b;
    int i = 0;
    for (int j = 0; j < b->n_layers; j++, i++) {
        const int wanted = b->layers[j].index, first = i;
        while (i < a->n_layers && a->layers[i].index < wanted) i++;
        if (i > first && flags & LOWKEY_SAME_LAYERS)
            return lowkey_fail(p->err, LOWKEY_EFORMAT, "layer %d: %.200s has it, %.200s has not",
                               a->layers[first].index, a->name, b->name);
        if (i == a->n_layers || a->layers[i].index != wanted)
            return lowkey_fail(p->err, LOWKEY_EFORMAT, "layer %d: %.200s has it, %.200s has not", wanted,
                               b->name, a->name);
        LOWKEY_TRY(same_geometry(p, &a->layers[i], &b->layers[j]));
    }
    if (i < a->n_layers && flags & LOWKEY_SAME_LAYERS)
        return lowkey_fail(p->err, LOWKEY_EFORMAT, "layer %d: %.200s has it, %.200s has not",
                           a->layers[i].index, a->name, b->name);
    return LOWKEY_OK;
}

static lowkey_status check_samples(const struct pair *p)
{
    const struct lowkey_identity *a = p->a, *b = p->b;
    if (!a->sample_sha256 || !b->sample_sha256)
        return lowkey_fail(p->err, LOWKEY_EINVAL, "sample_sha256: %.200s does not say its samples",
                           a->sample_sha256 ? b->name : a->name);
    if (a->n_samples != b->n_samples)
        return lowkey_fail(p->err, LOWKEY_EFORMAT, "sample_sha256: %.200s has %d samples, %.200s has %d",
                           a->name, a->n_samples, b->name, b->n_samples);
    for (int i = 0; i < a->n_samples; i++) {
        char hex_a[65], hex_b[65];
        if (memcmp(a->sample_sha256[i], b->sample_sha256[i], 32) == 0) continue;
        hex(a->sample_sha256[i], hex_a);
        hex(b->sample_sha256[i], hex_b);
        return lowkey_fail(p->err, LOWKEY_EFORMAT, "sample_sha256 sample %d: %.120s has %s, %.120s has %s", i,
                           a->name, hex_a, b->name, hex_b);
    }
    return LOWKEY_OK;
}

lowkey_status lowkey_identity_check(const struct lowkey_identity *a, const struct lowkey_identity *b,
                                    unsigned flags, lowkey_error *err)
{
    const struct pair pair = { a, b, err };
    LOWKEY_TRY(check_model(&pair));
    LOWKEY_TRY(check_layers(&pair, flags));
    return flags & LOWKEY_SAME_SAMPLES ? check_samples(&pair) : LOWKEY_OK;
}
