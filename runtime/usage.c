/* usage.c - the real bytes of a cache, part by part. */
#include "runtime/cache.h"

#include <string.h>

#include "kernels/element.h"
#include "runtime/error.h"

/* Bits that one packed token's codes take, over all heads. */
static uint64_t code_bits(const struct lowkey_side *side)
{
    uint64_t bits = 0;
    for (int h = 0; h < side->n_heads; h++)
        for (int r = 0; r < side->head_dim; r++) bits += side->heads[h].rows[r].bits;
    return bits;
}

/* Entries that a sequence's side pages hold. */
static uint64_t stored_outliers(const lowkey_cache *cache, const struct lowkey_side *side,
                                const struct lowkey_store *store, int sequence, int length)
{
    uint64_t n = 0;
    for (int page = 0; page * LOWKEY_PAGE_TOKENS < length; page++) {
        const int left = length - page * LOWKEY_PAGE_TOKENS;
        const int n_slots = left < LOWKEY_PAGE_TOKENS ? left : LOWKEY_PAGE_TOKENS;
        if (n_slots <= lowkey_cache_sink_slots(cache, page)) continue;
        const size_t block = lowkey_cache_block(cache, sequence, page);
        n += (uint64_t)lowkey_end_outlier(side, lowkey_store_side_page(store, side, block), n_slots - 1);
    }
    return n;
}

/* Adds one side's payload; codes are counted in bits. */
static void add_side(const lowkey_cache *cache, int layer_number, int which, lowkey_cache_usage *usage,
                     uint64_t *bits)
{
    const struct lowkey_side *side = &cache->layers[layer_number].layer->side[which];
    const uint64_t n_channels = (uint64_t)side->n_heads * (uint64_t)side->head_dim,
                   token_bits = code_bits(side);
    const uint64_t scale_bytes = side->token_scale == LOWKEY_SCALE_F32 ? 4 : 2;
    for (int s = 0; s < cache->max_sequences; s++) {
        const int length = *lowkey_cache_length_at(cache, s, layer_number),
                  n_sinks = cache->desc->n_sink_tokens;
        const uint64_t sinks = (uint64_t)(length < n_sinks ? length : n_sinks),
                       packed = (uint64_t)length - sinks;
        usage->elements += (uint64_t)length * n_channels;
        usage->sinks_bytes += sinks * n_channels * 2;
        usage->scales_bytes += packed * (uint64_t)side->n_blocks * 2 * scale_bytes;
        *bits += packed * token_bits;
        if (side->outlier_rule != LOWKEY_OUTLIER_NONE)
            usage->outliers_bytes += packed * 2 +
                                     4 * stored_outliers(cache, side,
                                                         &cache->layers[layer_number].store[which], s,
                                                         length);
    }
}

lowkey_status lowkey_cache_measure(const lowkey_cache *cache, lowkey_cache_usage *out, lowkey_error *err)
{
    if (!out || out->struct_size < sizeof out->struct_size || out->struct_size > 1 << 16)
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "lowkey_cache_measure: usage: struct_size: expected the struct's size");
    lowkey_cache_usage usage = { .struct_size = out->struct_size };
    uint64_t bits = 0, n_sequences = 0;
    for (int i = 0; i < 2 * cache->desc->n_layers; i++) add_side(cache, i / 2, i % 2, &usage, &bits);
    for (int s = 0; s < cache->max_sequences; s++) n_sequences += cache->n_blocks[s] > 0;
    usage.codes_bytes = (bits + 7) / 8;
    usage.outliers = cache->counts.outliers;
    usage.clamped = cache->counts.clamped;
    usage.saturated = cache->counts.saturated;
    usage.held_pages_bytes = (uint64_t)(cache->n_pages - cache->n_free) * cache->page_bytes;
    usage.held_sinks_bytes = n_sequences * cache->sinks_bytes;
    usage.held_tables_bytes = lowkey_quantizer_bytes(cache->quantizer) + cache->angles_bytes;
    usage.held_other_bytes = cache->fixed.bytes - cache->angles_bytes;
    usage.allocated_bytes = cache->fixed.bytes + cache->store.bytes +
                            lowkey_quantizer_bytes(cache->quantizer);
    if (usage.elements) {
        const uint64_t payload = usage.codes_bytes + usage.scales_bytes + usage.outliers_bytes +
                                 usage.sinks_bytes;
        const uint64_t held = usage.held_pages_bytes + usage.held_sinks_bytes + usage.held_tables_bytes +
                              usage.held_other_bytes;
        usage.bits_payload = 8 * (double)payload / (double)usage.elements;
        usage.bits_held = 8 * (double)held / (double)usage.elements;
    }
    const size_t known = out->struct_size < sizeof usage ? out->struct_size : sizeof usage;
    memset(out, 0, usage.struct_size);
    memcpy(out, &usage, known);
    return LOWKEY_OK;
}
