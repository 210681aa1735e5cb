/* geometry.c - checks of heads, dims and RoPE, and which channels RoPE pairs. One place for all files and for the
 * descriptions that callers make in memory. */
#include "formats/geometry.h"

#include <math.h>

#include "formats/codes.h"
#include "runtime/error.h"

void lowkey_geometry_fill(lowkey_layer_desc *layer)
{
    if (layer->logit_scale == 0 && layer->key_head_dim > 0)
        layer->logit_scale = 1 / sqrt((double)layer->key_head_dim);
    if (layer->rope_attention_factor == 0) layer->rope_attention_factor = 1;
}

static lowkey_status check_head_dim(int layer, const char *name, int head_dim, int n_kv_heads,
                                    lowkey_error *err)
{
    if (head_dim < 8 || head_dim > LOWKEY_MAX_HEAD_DIM || head_dim % 8)
        return lowkey_fail(err, LOWKEY_EFORMAT,
                           "layer %d: %s: expected a multiple of 8 from 8 to %d, found %d", layer, name,
                           LOWKEY_MAX_HEAD_DIM, head_dim);
    if (n_kv_heads > LOWKEY_MAX_CHANNELS / head_dim)
        return lowkey_fail(err, LOWKEY_EFORMAT,
                           "layer %d: n_kv_heads * %s: expected at most %d, found %d * %d", layer, name,
                           LOWKEY_MAX_CHANNELS, n_kv_heads, head_dim);
    return LOWKEY_OK;
}

static lowkey_status check_rope(const lowkey_layer_desc *layer, lowkey_error *err)
{
    const int l = layer->index, dims = layer->rope_dims;
    if (dims < 0 || dims > layer->key_head_dim || dims % 2)
        return lowkey_fail(err, LOWKEY_EFORMAT,
                           "layer %d: rope_dims: expected an even number from 0 to key_head_dim %d, "
                           "found %d",
                           l, layer->key_head_dim, dims);
    if (!lowkey_pairing_name(layer->rope_pairing))
        return lowkey_fail(err, LOWKEY_EFORMAT,
                           "layer %d: rope_pairing: expected half or interleaved, found number %d", l,
                           (int)layer->rope_pairing);
    if (!(layer->rope_attention_factor > 0 && isfinite(layer->rope_attention_factor)))
        return lowkey_fail(err, LOWKEY_EFORMAT,
                           "layer %d: rope_attention_factor: expected a finite number > 0, found %g", l,
                           layer->rope_attention_factor);
    if (dims > 0 && !layer->rope_inv_freq)
        return lowkey_fail(err, LOWKEY_EFORMAT,
                           "layer %d: rope_inv_freq: expected %d numbers for rope_dims %d, found none", l,
                           dims / 2, dims);
    for (int i = 0; i < dims / 2; i++)
        if (!isfinite(layer->rope_inv_freq[i]))
            return lowkey_fail(err, LOWKEY_EFORMAT,
                               "layer %d: rope_inv_freq pair %d: expected a finite number, found %g", l, i,
                               layer->rope_inv_freq[i]);
    return LOWKEY_OK;
}

lowkey_status lowkey_geometry_check(const lowkey_layer_desc *layer, lowkey_error *err)
{
    const int l = layer->index;
    if (l < 0 || l >= LOWKEY_MAX_LAYERS)
        return lowkey_fail(err, LOWKEY_EFORMAT, "layer %d: expected an index from 0 to %d", l,
                           LOWKEY_MAX_LAYERS - 1);
    if (layer->n_kv_heads < 1)
        return lowkey_fail(err, LOWKEY_EFORMAT, "layer %d: n_kv_heads: expected at least 1, found %d", l,
                           layer->n_kv_heads);
    if (layer->n_q_heads < 1 || layer->n_q_heads > LOWKEY_MAX_Q_HEADS || layer->n_q_heads % layer->n_kv_heads)
        return lowkey_fail(err, LOWKEY_EFORMAT,
                           "layer %d: n_q_heads: expected a multiple of n_kv_heads %d, at most %d, "
                           "found %d",
                           l, layer->n_kv_heads, LOWKEY_MAX_Q_HEADS, layer->n_q_heads);
    LOWKEY_TRY(check_head_dim(l, "key_head_dim", layer->key_head_dim, layer->n_kv_heads, err));
    LOWKEY_TRY(check_head_dim(l, "value_head_dim", layer->value_head_dim, layer->n_kv_heads, err));
    if (!(layer->logit_scale > 0 && isfinite(layer->logit_scale)))
        return lowkey_fail(err, LOWKEY_EFORMAT,
                           "layer %d: logit_scale: expected a finite number > 0, found %g", l,
                           layer->logit_scale);
    return check_rope(layer, err);
}

const lowkey_side_desc *lowkey_side_of(const lowkey_layer_desc *layer, int which)
{
    return which ? &layer->value : &layer->key;
}

int lowkey_side_head_dim(const lowkey_layer_desc *layer, int which)
{
    return which ? layer->value_head_dim : layer->key_head_dim;
}

const char *lowkey_pairing_name(lowkey_pairing pairing)
{
    return pairing == LOWKEY_PAIR_HALF ? "half" : pairing == LOWKEY_PAIR_INTERLEAVED ? "interleaved" : NULL;
}

void lowkey_rope_pair(int rope_dims, lowkey_pairing pairing, int i, int *first, int *second)
{
    *first = pairing == LOWKEY_PAIR_HALF ? i : 2 * i;
    *second = pairing == LOWKEY_PAIR_HALF ? i + rope_dims / 2 : 2 * i + 1;
}
