/* quantizer.c - the quantizer object: a checked copy of a description with every default filled in, and beside it the
 * layout by rows that kernels walk. Two blocks of memory, whatever the number of layers. */
#include <stdalign.h>
#include <stdio.h>
#include <string.h>

#include "formats/caller.h"
#include "formats/geometry.h"
#include "formats/quantizer_parts.h"
#include "runtime/error.h"

struct lowkey_quantizer {
    lowkey_quantizer_desc desc;
    const struct lowkey_layer *layers; /* [desc.n_layers] */
    lowkey_allocator allocator;
    struct lowkey_block copies, rows; /* this object and what desc points to; layers and what they point to */
};

/* ---- structs as the caller compiled them ---- */

/* Layer number i, defaults of its geometry filled. A caller's layers are as far apart as its struct is long, and its
 * value begins where its key ends. with_sides == 0: key and value are left empty. */
static lowkey_status read_layer(const lowkey_quantizer_desc *desc, int i, int with_sides,
                                lowkey_layer_desc *layer, lowkey_error *err)
{
    const size_t size = desc->layers[0].struct_size, key_at = offsetof(lowkey_layer_desc, key);
    const char *given = (const char *)desc->layers + (size_t)i * size;
    size_t own_size, key_size = 0, value_size = 0, room = size > key_at ? size - key_at : 0;
    memcpy(&own_size, given, sizeof own_size);
    if (own_size == 0 || own_size != size || size % alignof(lowkey_layer_desc))
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "layers[%d]: struct_size: expected the struct's size, %zu in this version and the "
                           "same in all, found %zu",
                           i, sizeof *layer, own_size);
    char what[32];
    snprintf(what, sizeof what, "layers %d", i);
    LOWKEY_TRY(lowkey_struct_read(layer, key_at, given, size < key_at ? size : key_at, what, err));
    layer->struct_size = sizeof *layer;
    layer->key = layer->value = (lowkey_side_desc) { 0 };
    lowkey_geometry_fill(layer);
    if (!with_sides) return LOWKEY_OK;

    if (room >= sizeof key_size) memcpy(&key_size, given + key_at, sizeof key_size);
    room = room > key_size ? room - key_size : 0;
    if (room >= sizeof value_size) memcpy(&value_size, given + key_at + key_size, sizeof value_size);
    if (key_size == 0 || key_size % alignof(lowkey_side_desc) || value_size == 0 || value_size > room)
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "layers[%d]: struct_size of key and value: expected each struct's size, %zu in "
                           "this version, found %zu and %zu",
                           i, sizeof layer->key, key_size, value_size);
    const size_t end = key_at + key_size + value_size;
    snprintf(what, sizeof what, "key of layers %d", i);
    LOWKEY_TRY(lowkey_struct_read(&layer->key, sizeof layer->key, given + key_at, key_size, what, err));
    snprintf(what, sizeof what, "value of layers %d", i);
    LOWKEY_TRY(lowkey_struct_read(&layer->value, sizeof layer->value, given + key_at + key_size, value_size,
                                  what, err));
    size_t rest = 0; /* fields behind value, of a later version */
    for (size_t at = end; at < size; at++) rest += given[at] != 0;
    if (rest)
        return lowkey_fail(err, LOWKEY_EUNSUPPORTED,
                           "layers[%d]: fields behind value are set, which lowkey %s does not know", i,
                           lowkey_version());
    return LOWKEY_OK;
}

/* ---- copies ---- */

/* A copy of from in the block; where from is NULL, room that the caller fills. */
static void *copy(struct lowkey_block *block, const void *from, size_t count, size_t bytes_each)
{
    void *to = lowkey_block_take(block, count, bytes_each);
    if (to && from) memcpy(to, from, count * bytes_each);
    return to;
}

/* Replace the side's arrays by copies, absent ones by their defaults. */
static void copy_side(struct lowkey_block *block, const lowkey_layer_desc *layer, int which,
                      lowkey_side_desc *side)
{
    const lowkey_side_desc given = *side;
    const int head_dim = lowkey_side_head_dim(layer, which);
    const size_t d = (size_t)head_dim, n_heads = (size_t)layer->n_kv_heads, n = n_heads * d;
    const size_t n_table = (size_t)given.table_entries;
    uint16_t *order = copy(block, given.order, n, sizeof *order);
    uint8_t *n_entries = copy(block, given.n_entries, n, sizeof *n_entries);
    float *center = copy(block, given.center, n, sizeof *center);
    int16_t *exponent = copy(block, given.exponent, n, sizeof *exponent);
    float *rule_scale = copy(block, given.rule_scale, n, sizeof *rule_scale);
    side->bits = copy(block, given.bits, n, sizeof *given.bits);
    side->table = n_table ? copy(block, given.table, n * n_table, sizeof *given.table) : NULL;
    side->boundary = given.boundary ? copy(block, given.boundary, n * lowkey_n_between(&given), sizeof *given.boundary)
                                    : NULL;
    side->lower = copy(block, given.lower, n, sizeof *given.lower);
    side->upper = copy(block, given.upper, n, sizeof *given.upper);
    side->factor = given.factor ? copy(block, given.factor, n * d, sizeof *given.factor) : NULL;
    side->metric_weight = given.metric_weight ? copy(block, given.metric_weight, n, sizeof *given.metric_weight) : NULL;
    side->order = order, side->n_entries = n_entries, side->center = center, side->exponent = exponent;
    side->rule_scale = rule_scale;
    if (!block->base) return;

    for (size_t h = 0; h < n_heads && !given.order; h++)
        lowkey_default_order(head_dim, which ? 0 : layer->rope_dims, layer->rope_pairing, order + h * d);
    for (size_t c = 0; c < n; c++) {
        if (!given.n_entries) n_entries[c] = (uint8_t)lowkey_most_entries(given.trellis, side->bits[c]);
        if (!given.center) center[c] = 0;
        if (!given.exponent) exponent[c] = 0;
        if (!given.rule_scale) rule_scale[c] = 1;
    }
}

/* The defaults that sizes depend on. */
static void fill_side(const lowkey_layer_desc *layer, int which, lowkey_side_desc *side)
{
    if (side->token_scale != LOWKEY_SCALE_NONE && side->scale_block == 0)
        side->scale_block = layer->n_kv_heads * lowkey_side_head_dim(layer, which);
}

/* Measure, or fill, the block of copies; *out is set when it fills. desc is this version's struct. */
static lowkey_status copy_desc(struct lowkey_block *block, const lowkey_quantizer_desc *desc,
                               lowkey_quantizer **out, lowkey_error *err)
{
    const char *name = desc->model_name ? desc->model_name : "";
    lowkey_quantizer *quantizer = lowkey_block_take(block, 1, sizeof *quantizer);
    lowkey_layer_desc *layers = lowkey_block_take(block, (size_t)desc->n_layers, sizeof *layers);
    const char *name_copy = copy(block, name, strlen(name) + 1, 1);
    for (int i = 0; i < desc->n_layers; i++) {
        lowkey_layer_desc layer;
        LOWKEY_TRY(read_layer(desc, i, 1, &layer, err));
        LOWKEY_TRY(lowkey_geometry_check(&layer, err));
        fill_side(&layer, 0, &layer.key);
        fill_side(&layer, 1, &layer.value);
        LOWKEY_TRY(lowkey_layer_check_shape(&layer, err));
        layer.rope_inv_freq = copy(block, layer.rope_inv_freq, (size_t)layer.rope_dims / 2,
                                   sizeof *layer.rope_inv_freq);
        copy_side(block, &layer, 0, &layer.key);
        copy_side(block, &layer, 1, &layer.value);
        if (layers) layers[i] = layer;
    }
    if (!quantizer) return LOWKEY_OK;
    memset(quantizer, 0, sizeof *quantizer);
    quantizer->desc = *desc;
    quantizer->desc.layers = layers;
    quantizer->desc.model_name = name_copy;
    if (quantizer->desc.sink_rule == LOWKEY_RULE_NONE) quantizer->desc.sink_rule = LOWKEY_RULE_F16;
    *out = quantizer;
    return LOWKEY_OK;
}

static lowkey_status check_desc(const lowkey_quantizer_desc *desc, lowkey_error *err)
{
    if (desc->n_layers < 1 || !desc->layers)
        return lowkey_fail(err, LOWKEY_EFORMAT, "n_layers: expected at least 1 and layers, found %d%s",
                           desc->n_layers, desc->layers ? "" : " and no layers");
    if (desc->n_sink_tokens < 0 || desc->n_sink_tokens > LOWKEY_PAGE_TOKENS)
        return lowkey_fail(err, LOWKEY_EFORMAT, "n_sink_tokens: expected 0 to %d, found %d",
                           LOWKEY_PAGE_TOKENS, desc->n_sink_tokens);
    if (desc->sink_rule != LOWKEY_RULE_NONE && desc->sink_rule != LOWKEY_RULE_F16 &&
        desc->sink_rule != LOWKEY_RULE_BF16)
        return lowkey_fail(err, LOWKEY_EFORMAT, "sink_rule: expected f16 or bf16, found number %d",
                           (int)desc->sink_rule);
    return LOWKEY_OK;
}

static lowkey_status check_layers(const lowkey_quantizer_desc *desc, lowkey_error *err)
{
    for (int i = 0; i < desc->n_layers; i++) {
        if (i > 0 && desc->layers[i].index <= desc->layers[i - 1].index)
            return lowkey_fail(err, LOWKEY_EFORMAT, "layers[%d]: expected an index above %d, found %d", i,
                               desc->layers[i - 1].index, desc->layers[i].index);
        LOWKEY_TRY(lowkey_layer_check_values(&desc->layers[i], err));
    }
    return LOWKEY_OK;
}

/* Measure, or fill, the block of rows. */
static void build_layers(struct lowkey_block *block, lowkey_quantizer *quantizer)
{
    const int n = quantizer->desc.n_layers;
    struct lowkey_layer *layers = lowkey_block_take(block, (size_t)n, sizeof *layers);
    for (int i = 0; i < n; i++)
        lowkey_layer_build(block, &quantizer->desc.layers[i], layers ? &layers[i] : NULL);
    quantizer->layers = layers;
}

/* ---- the interface ---- */

lowkey_status lowkey_quantizer_create(const lowkey_quantizer_desc *given,
                                      const lowkey_allocator *given_allocator, lowkey_quantizer **out,
                                      lowkey_error *err)
{
    if (!out) return lowkey_fail(err, LOWKEY_EINVAL, "lowkey_quantizer_create: out is NULL");
    *out = NULL;
    if (!given) return lowkey_fail(err, LOWKEY_EINVAL, "lowkey_quantizer_create: desc is NULL");
    lowkey_quantizer_desc desc;
    lowkey_allocator allocator;
    LOWKEY_TRY(lowkey_allocator_read(given_allocator, &allocator, err));
    LOWKEY_TRY(lowkey_struct_read(&desc, sizeof desc, given, given->struct_size, "description 0", err));
    LOWKEY_TRY(check_desc(&desc, err));

    struct lowkey_block copies = { 0 };
    lowkey_quantizer *quantizer = NULL;
    LOWKEY_TRY(copy_desc(&copies, &desc, &quantizer, err));
    LOWKEY_TRY(lowkey_block_allocate(&copies, &allocator, "quantizer", err));
    lowkey_status status = copy_desc(&copies, &desc, &quantizer, err);
    if (status != LOWKEY_OK) return allocator.free(allocator.user, copies.base, copies.bytes), status;
    quantizer->allocator = allocator;
    quantizer->copies = copies;

    status = check_layers(&quantizer->desc, err);
    if (status == LOWKEY_OK) {
        build_layers(&quantizer->rows, quantizer);
        status = lowkey_block_allocate(&quantizer->rows, &allocator, "quantizer", err);
    }
    if (status != LOWKEY_OK) return lowkey_quantizer_free(quantizer), status;
    build_layers(&quantizer->rows, quantizer);
    *out = quantizer;
    return LOWKEY_OK;
}

void lowkey_quantizer_free(lowkey_quantizer *quantizer)
{
    if (!quantizer) return;
    const lowkey_allocator allocator = quantizer->allocator;
    const struct lowkey_block copies = quantizer->copies,
                              rows = quantizer->rows; /* the object is in copies */
    if (rows.base) allocator.free(allocator.user, rows.base, rows.bytes);
    allocator.free(allocator.user, copies.base, copies.bytes);
}

const lowkey_quantizer_desc *lowkey_quantizer_describe(const lowkey_quantizer *quantizer)
{
    return &quantizer->desc;
}

const struct lowkey_layer *lowkey_quantizer_layer_at(const lowkey_quantizer *quantizer, int i)
{
    return &quantizer->layers[i];
}

const struct lowkey_layer *lowkey_quantizer_layer(const lowkey_quantizer *quantizer, int index)
{
    int low = 0, high = quantizer->desc.n_layers; /* indices rise: halve [low, high) */
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (quantizer->desc.layers[middle].index < index)
            low = middle + 1;
        else
            high = middle;
    }
    return low < quantizer->desc.n_layers && quantizer->desc.layers[low].index == index
               ? &quantizer->layers[low]
               : NULL;
}

size_t lowkey_quantizer_bytes(const lowkey_quantizer *quantizer)
{
    return quantizer->copies.bytes + quantizer->rows.bytes;
}

void lowkey_default_order(int head_dim, int rope_dims, lowkey_pairing pairing, uint16_t *order)
{
    for (int i = 0; i < rope_dims / 2; i++) {
        int first, second;
        lowkey_rope_pair(rope_dims, pairing, i, &first, &second);
        order[2 * i] = (uint16_t)first;
        order[2 * i + 1] = (uint16_t)second;
    }
    for (int c = rope_dims; c < head_dim; c++) order[c] = (uint16_t)c;
}

/* One side of 16-bit channels. The arrays serve every layer: all elements are alike. */
static lowkey_side_desc side_16bit(lowkey_rule rule, const uint8_t *bits, const float *lower,
                                   const float *upper)
{
    return (lowkey_side_desc) {
        .struct_size = sizeof(lowkey_side_desc), .bits = bits, .lower = lower, .upper = upper, .rule_16 = rule
    };
}

lowkey_status lowkey_quantizer_create_16bit(const lowkey_quantizer_desc *geometry, lowkey_rule rule,
                                            const lowkey_allocator *given_allocator, lowkey_quantizer **out,
                                            lowkey_error *err)
{
    if (!out) return lowkey_fail(err, LOWKEY_EINVAL, "lowkey_quantizer_create_16bit: out is NULL");
    *out = NULL;
    if (!geometry) return lowkey_fail(err, LOWKEY_EINVAL, "lowkey_quantizer_create_16bit: geometry is NULL");
    if (rule != LOWKEY_RULE_F16 && rule != LOWKEY_RULE_BF16)
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "lowkey_quantizer_create_16bit: rule: expected f16 or bf16, found number %d",
                           (int)rule);
    lowkey_quantizer_desc desc;
    lowkey_allocator allocator;
    LOWKEY_TRY(lowkey_allocator_read(given_allocator, &allocator, err));
    LOWKEY_TRY(lowkey_struct_read(&desc, sizeof desc, geometry, geometry->struct_size, "description 0", err));
    LOWKEY_TRY(check_desc(&desc, err));

    struct lowkey_block block = { 0 };
    lowkey_layer_desc *layers = NULL;
    uint8_t *bits = NULL;
    float *lower = NULL, *upper = NULL;
    for (int filling = 0; filling < 2; filling++) {
        layers = lowkey_block_take(&block, (size_t)desc.n_layers, sizeof *layers);
        bits = lowkey_block_take(&block, LOWKEY_MAX_CHANNELS, sizeof *bits);
        lower = lowkey_block_take(&block, LOWKEY_MAX_CHANNELS, sizeof *lower);
        upper = lowkey_block_take(&block, LOWKEY_MAX_CHANNELS, sizeof *upper);
        if (!filling) LOWKEY_TRY(lowkey_block_allocate(&block, &allocator, "quantizer", err));
    }
    const float largest = rule == LOWKEY_RULE_F16 ? 65504.0f : 0x1.fep127f;
    for (int c = 0; c < LOWKEY_MAX_CHANNELS; c++) bits[c] = 16, lower[c] = -largest, upper[c] = largest;
    lowkey_status status = LOWKEY_OK;
    for (int i = 0; i < desc.n_layers && status == LOWKEY_OK; i++) {
        status = read_layer(&desc, i, 0, &layers[i], err);
        layers[i].key = layers[i].value = side_16bit(rule, bits, lower, upper);
    }
    desc.layers = layers;
    desc.n_sink_tokens = 0; /* everything is kept in 16 bits */
    desc.sink_rule = rule;
    if (status == LOWKEY_OK) status = lowkey_quantizer_create(&desc, given_allocator, out, err);
    allocator.free(allocator.user, block.base, block.bytes);
    return status;
}
