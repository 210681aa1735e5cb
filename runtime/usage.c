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

/* Adds the payload of a sequence of so many tokens at one side (which: 0 keys, 1 values) with so many outliers' entries.
 * Codes are counted in bits. */
static void add_side(const struct lowkey_side *side, int which, int n_sink_tokens, int length,
                     uint64_t n_outliers, lowkey_cache_usage *usage, uint64_t *bits)
{
    const uint64_t n_channels = (uint64_t)side->n_heads * (uint64_t)side->head_dim;
    const uint64_t scale_bytes = side->token_scale == LOWKEY_SCALE_F32 ? 4 : 2;
    const uint64_t sinks = (uint64_t)(length < n_sink_tokens ? length : n_sink_tokens),
                   packed = (uint64_t)length - sinks;
    const uint64_t elements = (uint64_t)length * n_channels, sinks_bytes = sinks * n_channels * 2,
                   scales = packed * (uint64_t)side->n_blocks * 2 * scale_bytes,
                   codes = packed * code_bits(side),
                   outliers = side->outlier_rule == LOWKEY_OUTLIER_NONE ? 0 : packed * 2 + n_outliers * 4;
    usage->elements += elements;
    usage->sinks_bytes += sinks_bytes;
    usage->scales_bytes += scales;
    usage->outliers_bytes += outliers;
    *bits += codes;
    *(which ? &usage->value_elements : &usage->key_elements) += elements;
    *(which ? &usage->value_payload_bits : &usage->key_payload_bits) += codes +
                                                                        8 * (sinks_bytes + scales + outliers);
}

/* Puts in what a cache holds with so many pages and sequences in use, and what follows, as much as the caller knows. */
static void answer(const lowkey_cache *cache, uint64_t n_pages, uint64_t n_sequences, size_t fixed_bytes,
                   size_t store_bytes, lowkey_cache_usage usage, lowkey_cache_usage *out)
{
    usage.struct_size = out->struct_size;
    usage.held_pages_bytes = n_pages * cache->page_bytes;
    usage.held_sinks_bytes = n_sequences * cache->sinks_bytes;
    usage.held_tables_bytes = lowkey_quantizer_bytes(cache->quantizer) + cache->angles_bytes;
    usage.held_other_bytes = fixed_bytes - cache->angles_bytes;
    usage.allocated_bytes = fixed_bytes + store_bytes + lowkey_quantizer_bytes(cache->quantizer);
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
}

static lowkey_status check_usage(const char *function, const lowkey_cache_usage *usage, lowkey_error *err)
{
    if (!usage || usage->struct_size < sizeof usage->struct_size || usage->struct_size > 1 << 16)
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "%s: usage: struct_size: expected the struct's size, found %zu", function,
                           usage ? usage->struct_size : 0);
    return LOWKEY_OK;
}

lowkey_status lowkey_cache_measure(const lowkey_cache *cache, lowkey_cache_usage *out, lowkey_error *err)
{
    if (!cache) return lowkey_fail(err, LOWKEY_EINVAL, "lowkey_cache_measure: cache is NULL");
    LOWKEY_TRY(check_usage("lowkey_cache_measure", out, err));
    lowkey_cache_usage usage = { .outliers = cache->counts.outliers,
                                 .clamped = cache->counts.clamped,
                                 .saturated = cache->counts.saturated };
    uint64_t bits = 0, n_sequences = 0;
    for (int i = 0; i < 2 * cache->desc->n_layers; i++) {
        const struct lowkey_side *side = &cache->layers[i / 2].layer->side[i % 2];
        const struct lowkey_store *store = &cache->layers[i / 2].store[i % 2];
        for (int s = 0; s < cache->max_sequences; s++) {
            const int length = *lowkey_cache_length_at(cache, s, i / 2);
            const uint64_t n_outliers = side->outlier_rule == LOWKEY_OUTLIER_NONE
                                            ? 0
                                            : stored_outliers(cache, side, store, s, length);
            add_side(side, i % 2, cache->desc->n_sink_tokens, length, n_outliers, &usage, &bits);
        }
    }
    for (int s = 0; s < cache->max_sequences; s++) n_sequences += cache->n_blocks[s] > 0;
    usage.codes_bytes = (bits + 7) / 8;
    answer(cache, (uint64_t)(cache->n_pages - cache->n_free), n_sequences, cache->fixed.bytes,
           cache->store.bytes, usage, out);
    return LOWKEY_OK;
}

lowkey_status lowkey_cache_estimate(const lowkey_quantizer *quantizer, const lowkey_cache_config *config,
                                    int n_sequences, int tokens_each, lowkey_cache_usage *out,
                                    lowkey_error *err)
{
    if (!quantizer || !config)
        return lowkey_fail(err, LOWKEY_EINVAL, "lowkey_cache_estimate: %s is NULL",
                           quantizer ? "config" : "quantizer");
    LOWKEY_TRY(check_usage("lowkey_cache_estimate", out, err));
    struct lowkey_cache cache;
    LOWKEY_TRY(lowkey_cache_plan(quantizer, config, &cache, err));
    if (n_sequences < 0 || n_sequences > cache.max_sequences || tokens_each < 0)
        return lowkey_fail(
            err, LOWKEY_EINVAL,
            "lowkey_cache_estimate: expected 0 to %d sequences of 0 or more tokens, found %d of %d",
            cache.max_sequences, n_sequences, tokens_each);
    const int64_t n_blocks = lowkey_pages_of(tokens_each);
    if (n_sequences > 0 && (tokens_each > cache.max_tokens || n_blocks * n_sequences > cache.n_pages))
        return lowkey_fail(
            err, LOWKEY_EFULL,
            "lowkey_cache_estimate: %d sequences of %d tokens are over the limit of %d tokens and %d pages",
            n_sequences, tokens_each, cache.max_tokens, cache.n_pages);
    if (cache.fixed.overflow || cache.store.overflow)
        return lowkey_fail(err, LOWKEY_ENOMEM,
                           "lowkey_cache_estimate: such a cache is more memory than can be addressed");
    lowkey_cache_usage usage = { 0 };
    uint64_t bits = 0;
    for (int i = 0; i < 2 * cache.desc->n_layers; i++)
        for (int s = 0; s < n_sequences; s++)
            add_side(&lowkey_quantizer_layer_at(quantizer, i / 2)->side[i % 2], i % 2,
                     cache.desc->n_sink_tokens, tokens_each, 0, &usage, &bits);
    usage.codes_bytes = (bits + 7) / 8;
    answer(&cache, (uint64_t)(n_blocks * n_sequences), tokens_each > 0 ? (uint64_t)n_sequences : 0,
           cache.fixed.used, cache.store.used, usage, out);
    return LOWKEY_OK;
}
