/* cache.c - makes a cache, and keeps its pages: a stack of free ones, counts of references, a block table for every
 * sequence. One page number serves all layers, heads and sides, so that a sequence has one table. */
#include "runtime/cache.h"

#include <limits.h>
#include <math.h>
#include <string.h>

#include "formats/caller.h"
#include "runtime/error.h"

/* ---- layout: run twice, to measure and to fill ---- */

static int turns_alike(const lowkey_layer_desc *a, const lowkey_layer_desc *b)
{
    return a->rope_dims == b->rope_dims && memcmp(a->rope_inv_freq, b->rope_inv_freq,
                                                  (size_t)a->rope_dims / 2 * sizeof *a->rope_inv_freq) == 0;
}

/* Angles are made in f64 and rounded once. */
static void fill_angles(float *cosines, float *sines, int n, int step, int n_pairs, const double *inv_freq)
{
    for (int i = 0; i < n; i++)
        for (int pair = 0; pair < n_pairs; pair++) {
            const double angle = (double)i * step * inv_freq[pair];
            cosines[(size_t)i * (size_t)n_pairs + (size_t)pair] = (float)cos(angle);
            sines[(size_t)i * (size_t)n_pairs + (size_t)pair] = (float)sin(angle);
        }
}

static struct lowkey_angles take_angles(struct lowkey_block *block, const lowkey_layer_desc *desc,
                                        int max_blocks)
{
    const int n_pairs = desc->rope_dims / 2;
    const size_t n_base = (size_t)max_blocks, pair_bytes = (size_t)n_pairs * sizeof(float);
    struct lowkey_angles angles = { .n_pairs = n_pairs };
    angles.base_cos = lowkey_block_take(block, n_base, pair_bytes);
    angles.base_sin = lowkey_block_take(block, n_base, pair_bytes);
    angles.slot_cos = lowkey_block_take(block, LOWKEY_PAGE_TOKENS, pair_bytes);
    angles.slot_sin = lowkey_block_take(block, LOWKEY_PAGE_TOKENS, pair_bytes);
    if (block->base) {
        fill_angles(angles.base_cos, angles.base_sin, max_blocks, LOWKEY_PAGE_TOKENS, n_pairs,
                    desc->rope_inv_freq);
        fill_angles(angles.slot_cos, angles.slot_sin, LOWKEY_PAGE_TOKENS, 1, n_pairs, desc->rope_inv_freq);
    }
    return angles;
}

/* The angles of layer i: those of the first layer that turns alike. */
static void lay_out_angles(struct lowkey_block *block, struct lowkey_cache *cache)
{
    const lowkey_layer_desc *descs = cache->desc->layers;
    const size_t before = block->used;
    for (int i = 0; i < cache->desc->n_layers; i++) {
        int like = 0;
        while (like < i && !turns_alike(&descs[like], &descs[i])) like++;
        struct lowkey_angles angles = { 0 };
        if (descs[i].rope_dims == 0) continue;
        if (like == i)
            angles = take_angles(block, &descs[i], cache->max_blocks);
        else if (block->base)
            angles = cache->layers[like].angles;
        if (block->base) cache->layers[i].angles = angles;
    }
    cache->angles_bytes = block->used - before;
}

static void lay_out_lanes(struct lowkey_block *block, struct lowkey_cache *cache)
{
    size_t scratch_bytes = 0, n_channels = 0, n_heads = 0;
    for (int i = 0; i < 2 * cache->desc->n_layers; i++) {
        const struct lowkey_side *side = &lowkey_quantizer_layer_at(cache->quantizer, i / 2)->side[i % 2];
        const size_t bytes = lowkey_pack_scratch_bytes(side),
                     n = (size_t)side->n_heads * (size_t)side->head_dim;
        if (bytes > scratch_bytes) scratch_bytes = bytes;
        if (n > n_channels) n_channels = n;
        if ((size_t)side->n_heads > n_heads) n_heads = (size_t)side->n_heads;
    }
    cache->lanes = lowkey_block_take(block, LOWKEY_APPEND_LANES, sizeof *cache->lanes);
    for (int i = 0; i < LOWKEY_APPEND_LANES; i++) {
        void *scratch = lowkey_block_take(block, 1, scratch_bytes);
        float *rows = lowkey_block_take(block, LOWKEY_APPEND_ROWS * n_channels, sizeof *rows);
        uint8_t **pages = lowkey_block_take(block, n_heads, sizeof *pages);
        if (block->base)
            cache->lanes[i] = (struct lowkey_append_lane) { .scratch = scratch,
                                                            .rows = rows,
                                                            .pages = pages };
    }
}

/* The object and its arrays. cache holds the numbers and gets the pointers; returns where it is to be copied to. */
static lowkey_cache *lay_out_fixed(struct lowkey_block *block, struct lowkey_cache *cache)
{
    const size_t n_layers = (size_t)cache->desc->n_layers, n_sequences = (size_t)cache->max_sequences;
    const size_t n_pages = (size_t)cache->n_pages;
    lowkey_cache *object = lowkey_block_take(block, 1, sizeof *object);
    cache->layers = lowkey_block_take(block, n_layers, sizeof *cache->layers);
    cache->lengths = lowkey_block_take(block, n_sequences, n_layers * sizeof *cache->lengths);
    cache->reserved = lowkey_block_take(block, n_sequences, sizeof *cache->reserved);
    cache->n_blocks = lowkey_block_take(block, n_sequences, sizeof *cache->n_blocks);
    cache->block_table = lowkey_block_take(block, n_sequences,
                                           (size_t)cache->max_blocks * sizeof *cache->block_table);
    cache->references = lowkey_block_take(block, n_pages, sizeof *cache->references);
    cache->free_pages = lowkey_block_take(block, n_pages, sizeof *cache->free_pages);
    cache->is_named = lowkey_block_take(block, n_sequences, sizeof *cache->is_named);
    for (size_t i = 0; i < n_layers; i++)
        for (int which = 0; which < 2; which++) {
            const struct lowkey_layer *layer = lowkey_quantizer_layer_at(cache->quantizer, (int)i);
            uint8_t **pages = lowkey_block_take(block, (size_t)layer->side[which].n_heads, sizeof *pages);
            if (block->base) cache->layers[i].layer = layer, cache->layers[i].store[which].pages = pages;
        }
    if (block->base)
        for (size_t i = 0; i < n_layers; i++) cache->layers[i].angles = (struct lowkey_angles) { 0 };
    lay_out_angles(block, cache);
    lay_out_lanes(block, cache);
    return object;
}

/* Pages and sinks. Addresses go to cache->layers when it fills. */
static void lay_out_store(struct lowkey_block *block, struct lowkey_cache *cache)
{
    const size_t n_pages = (size_t)cache->n_pages, n_sinks = (size_t)cache->desc->n_sink_tokens;
    cache->page_bytes = cache->sinks_bytes = 0;
    for (int i = 0; i < 2 * cache->desc->n_layers; i++) {
        const struct lowkey_side *side = &lowkey_quantizer_layer_at(cache->quantizer, i / 2)->side[i % 2];
        struct lowkey_store *store = block->base ? &cache->layers[i / 2].store[i % 2] : NULL;
        for (int h = 0; h < side->n_heads; h++) {
            uint8_t *pages = lowkey_block_take(block, n_pages, side->heads[h].page_bytes);
            if (store) store->pages[h] = pages;
            cache->page_bytes += side->heads[h].page_bytes;
        }
        const size_t sink_bytes = n_sinks * (size_t)side->n_heads * (size_t)side->head_dim * sizeof(uint16_t);
        uint8_t *side_pages = lowkey_block_take(block, n_pages, side->layout.bytes);
        uint16_t *sinks = lowkey_block_take(block, (size_t)cache->max_sequences, sink_bytes);
        if (store) store->side_pages = side_pages, store->sinks = sinks;
        cache->page_bytes += side->layout.bytes;
        cache->sinks_bytes += sink_bytes;
    }
}

/* ---- create and free ---- */

static lowkey_status check_config(const lowkey_cache_config *config, lowkey_error *err)
{
    if (config->n_pages < 1)
        return lowkey_fail(err, LOWKEY_EINVAL, "cache config: n_pages: expected at least 1, found %d",
                           config->n_pages);
    if (config->max_sequences < 1)
        return lowkey_fail(err, LOWKEY_EINVAL, "cache config: max_sequences: expected at least 1, found %d",
                           config->max_sequences);
    if (config->max_tokens < 0)
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "cache config: max_tokens: expected at least 1, or 0 for all pages, found %d",
                           config->max_tokens);
    if (config->reserved != 0)
        return lowkey_fail(err, LOWKEY_EINVAL, "cache config: reserved: expected 0, found %d",
                           config->reserved);
    return LOWKEY_OK;
}

static void start_empty(lowkey_cache *cache)
{
    const size_t n_sequences = (size_t)cache->max_sequences;
    memset(cache->lengths, 0, n_sequences * (size_t)cache->desc->n_layers * sizeof *cache->lengths);
    memset(cache->reserved, 0, n_sequences * sizeof *cache->reserved);
    memset(cache->n_blocks, 0, n_sequences * sizeof *cache->n_blocks);
    memset(cache->references, 0, (size_t)cache->n_pages * sizeof *cache->references);
    memset(cache->is_named, 0, n_sequences);
    cache->n_free = cache->n_pages;
    for (int i = 0; i < cache->n_pages; i++)
        cache->free_pages[i] = cache->n_pages - 1 - i; /* page 0 goes first */
}

lowkey_status lowkey_cache_plan(const lowkey_quantizer *quantizer, const lowkey_cache_config *given,
                                lowkey_cache *cache, lowkey_error *err)
{
    lowkey_cache_config config;
    LOWKEY_TRY(lowkey_struct_read(&config, sizeof config, given, given->struct_size, "cache config", err));
    LOWKEY_TRY(check_config(&config, err));
    *cache = (lowkey_cache) { .quantizer = quantizer,
                              .desc = lowkey_quantizer_describe(quantizer),
                              .n_pages = config.n_pages,
                              .max_sequences = config.max_sequences };
    const int64_t room = (int64_t)config.n_pages * LOWKEY_PAGE_TOKENS, most = room < INT_MAX ? room : INT_MAX;
    cache->max_tokens = config.max_tokens && config.max_tokens < most ? config.max_tokens : (int)most;
    cache->max_blocks = (int)lowkey_pages_of(cache->max_tokens);
    lay_out_fixed(&cache->fixed, cache);
    lay_out_store(&cache->store, cache);
    return LOWKEY_OK;
}

lowkey_status lowkey_cache_create(lowkey_context *context, const lowkey_quantizer *quantizer,
                                  const lowkey_cache_config *config, lowkey_cache **out, lowkey_error *err)
{
    if (!out) return lowkey_fail(err, LOWKEY_EINVAL, "lowkey_cache_create: out is NULL");
    *out = NULL;
    if (!context || !quantizer || !config)
        return lowkey_fail(err, LOWKEY_EINVAL, "lowkey_cache_create: %s is NULL",
                           !context     ? "context"
                           : !quantizer ? "quantizer"
                                        : "config");
    struct lowkey_cache cache;
    LOWKEY_TRY(lowkey_cache_plan(quantizer, config, &cache, err));
    cache.context = context;
    LOWKEY_TRY(lowkey_block_allocate(&cache.fixed, &context->allocator, "cache", err));
    const lowkey_status status = lowkey_block_allocate(&cache.store, &context->allocator, "cache pages", err);
    if (status != LOWKEY_OK) return lowkey_block_free(&cache.fixed, &context->allocator), status;
    lowkey_cache *object = lay_out_fixed(&cache.fixed, &cache);
    lay_out_store(&cache.store, &cache);
    start_empty(&cache);
    *object = cache;
    *out = object;
    return LOWKEY_OK;
}

void lowkey_cache_free(lowkey_cache *cache)
{
    if (!cache) return;
    const lowkey_allocator *allocator = &cache->context->allocator;
    struct lowkey_block fixed = cache->fixed; /* the object is in it */
    lowkey_block_free(&cache->store, allocator);
    lowkey_block_free(&fixed, allocator);
}

/* ---- sequences and their pages ---- */

int lowkey_cache_find_layer(const lowkey_cache *cache, int layer)
{
    const struct lowkey_layer *found = lowkey_quantizer_layer(cache->quantizer, layer);
    return found ? (int)(found - lowkey_quantizer_layer_at(cache->quantizer, 0)) : -1;
}

lowkey_status lowkey_cache_check_layer(const lowkey_cache *cache, int layer, int *number, lowkey_error *err)
{
    if (!cache) return lowkey_fail(err, LOWKEY_EINVAL, "cache is NULL");
    *number = lowkey_cache_find_layer(cache, layer);
    if (*number < 0)
        return lowkey_fail(err, LOWKEY_EINVAL, "layer %d: the quantizer has no such layer", layer);
    return LOWKEY_OK;
}

lowkey_status lowkey_cache_check_sequence(const lowkey_cache *cache, int sequence, lowkey_error *err)
{
    if (!cache) return lowkey_fail(err, LOWKEY_EINVAL, "cache is NULL");
    if (sequence < 0 || sequence >= cache->max_sequences)
        return lowkey_fail(err, LOWKEY_EINVAL, "sequence %d: expected 0 to %d", sequence,
                           cache->max_sequences - 1);
    return LOWKEY_OK;
}

int lowkey_cache_length(const lowkey_cache *cache, int sequence, int layer)
{
    const int number = cache ? lowkey_cache_find_layer(cache, layer) : -1;
    if (number < 0 || sequence < 0 || sequence >= cache->max_sequences) return -1;
    return *lowkey_cache_length_at(cache, sequence, number);
}

/* The most tokens that any layer holds of a sequence. */
static int longest(const lowkey_cache *cache, int sequence)
{
    int length = 0;
    for (int i = 0; i < cache->desc->n_layers; i++) {
        const int of_layer = *lowkey_cache_length_at(cache, sequence, i);
        if (of_layer > length) length = of_layer;
    }
    return length;
}

lowkey_status lowkey_cache_reserve(lowkey_cache *cache, int sequence, int n_tokens, lowkey_error *err)
{
    LOWKEY_TRY(lowkey_cache_check_sequence(cache, sequence, err));
    if (n_tokens < 0)
        return lowkey_fail(err, LOWKEY_EINVAL, "sequence %d: expected to reserve 0 or more tokens, found %d",
                           sequence, n_tokens);
    const int length = longest(cache, sequence);
    const int64_t wanted = (int64_t)length + n_tokens;
    if (wanted > cache->max_tokens)
        return lowkey_fail(err, LOWKEY_EFULL, "sequence %d: %d tokens and %d more are over the limit of %d",
                           sequence, length, n_tokens, cache->max_tokens);
    if (wanted <= cache->reserved[sequence]) return LOWKEY_OK;
    int *n_blocks = &cache->n_blocks[sequence];
    const int n_more = (int)lowkey_pages_of(wanted) - *n_blocks;
    if (n_more > cache->n_free)
        return lowkey_fail(err, LOWKEY_EFULL,
                           "sequence %d: %d more tokens need %d more pages, %d of %d are free", sequence,
                           n_tokens, n_more, cache->n_free, cache->n_pages);
    for (int i = 0; i < n_more; i++) {
        const int page = cache->free_pages[--cache->n_free];
        cache->references[page] = 1;
        cache->block_table[(size_t)sequence * (size_t)cache->max_blocks + (size_t)(*n_blocks)++] = page;
    }
    cache->reserved[sequence] = (int)wanted;
    return LOWKEY_OK;
}

lowkey_status lowkey_cache_trim(lowkey_cache *cache, int sequence, int n_tokens, lowkey_error *err)
{
    LOWKEY_TRY(lowkey_cache_check_sequence(cache, sequence, err));
    if (n_tokens < 0)
        return lowkey_fail(err, LOWKEY_EINVAL, "sequence %d: expected to trim to 0 or more tokens, found %d",
                           sequence, n_tokens);
    for (int i = 0; i < cache->desc->n_layers; i++) {
        int *length = lowkey_cache_length_at(cache, sequence, i);
        if (*length > n_tokens) *length = n_tokens;
    }
    cache->reserved[sequence] = longest(cache, sequence);
    int *n_blocks = &cache->n_blocks[sequence];
    while (*n_blocks > lowkey_pages_of(cache->reserved[sequence])) {
        const size_t page = lowkey_cache_block(cache, sequence, --*n_blocks);
        if (--cache->references[page] == 0) cache->free_pages[cache->n_free++] = (int)page;
    }
    return LOWKEY_OK;
}
