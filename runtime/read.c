/* read.c - what a cache holds, as values and as bytes. */
#include "runtime/cache.h"

#include "kernels/element.h"
#include "runtime/error.h"

static void read_sinks(const lowkey_cache *cache, const struct lowkey_store *store,
                       const struct lowkey_side *side, int sequence, int first, int n, float *out)
{
    const int n_channels = side->n_heads * side->head_dim;
    for (int i = 0; i < n; i++) {
        const uint16_t *sink = lowkey_store_sink(cache, store, side, sequence, first + i);
        for (int g = 0; g < n_channels; g++)
            out[(size_t)i * (size_t)n_channels + (size_t)g] = lowkey_decode_16(cache->desc->sink_rule,
                                                                               sink[g]);
    }
}

static void read_side(const lowkey_cache *cache, int layer_number, int which, int sequence, int first,
                      int n_tokens, float *out)
{
    const struct lowkey_side *side = &cache->layers[layer_number].layer->side[which];
    const struct lowkey_store *store = &cache->layers[layer_number].store[which];
    const int n_channels = side->n_heads * side->head_dim, n_sinks = cache->desc->n_sink_tokens;
    const int end = first + n_tokens;
    for (int token = first, n; token < end; token += n, out += (size_t)n * (size_t)n_channels) {
        const int page = token / LOWKEY_PAGE_TOKENS, page_end = (page + 1) * LOWKEY_PAGE_TOKENS;
        n = (page_end < end ? page_end : end) - token;
        if (token < n_sinks) {
            if (n > n_sinks - token) n = n_sinks - token;
            read_sinks(cache, store, side, sequence, token, n, out);
            continue;
        }
        const size_t block = lowkey_cache_block(cache, sequence, page);
        for (int h = 0; h < side->n_heads; h++)
            cache->context->kernels->unpack(
                &(struct lowkey_unpack_args) { .side = side,
                                               .head = h,
                                               .page = lowkey_store_page(store, side, h, block),
                                               .side_page = lowkey_store_side_page(store, side, block),
                                               .first_slot = token % LOWKEY_PAGE_TOKENS,
                                               .n_slots = n,
                                               .first_live_slot = lowkey_cache_sink_slots(cache, page),
                                               .out = out + h * side->head_dim,
                                               .out_stride = n_channels });
    }
}

lowkey_status lowkey_cache_read(const lowkey_cache *cache, int sequence, int layer, int first, int n_tokens,
                                float *keys, float *values, lowkey_error *err)
{
    int number;
    LOWKEY_TRY(lowkey_cache_check_layer(cache, layer, &number, err));
    LOWKEY_TRY(lowkey_cache_check_sequence(cache, sequence, err));
    const int length = *lowkey_cache_length_at(cache, sequence, number);
    if (first < 0 || n_tokens < 0 || first > length || n_tokens > length - first)
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "sequence %d: layer %d holds tokens 0 to %d, asked for %d from %d on", sequence,
                           layer, length - 1, n_tokens, first);
    if (keys) read_side(cache, number, 0, sequence, first, n_tokens, keys);
    if (values) read_side(cache, number, 1, sequence, first, n_tokens, values);
    return LOWKEY_OK;
}

lowkey_status lowkey_cache_page(const lowkey_cache *cache, int sequence, int layer, int page, int side,
                                int head, const void **bytes, size_t *n_bytes, lowkey_error *err)
{
    int number;
    if (!bytes || !n_bytes)
        return lowkey_fail(err, LOWKEY_EINVAL, "lowkey_cache_page: bytes or n_bytes is NULL");
    *bytes = NULL;
    *n_bytes = 0;
    LOWKEY_TRY(lowkey_cache_check_layer(cache, layer, &number, err));
    LOWKEY_TRY(lowkey_cache_check_sequence(cache, sequence, err));
    const int length = *lowkey_cache_length_at(cache, sequence, number);
    if (page < 0 || (int64_t)page * LOWKEY_PAGE_TOKENS >= length)
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "sequence %d: layer %d holds %d tokens, which page %d is no page of", sequence,
                           layer, length, page);
    if (side < 0 || side > 1) return lowkey_fail(err, LOWKEY_EINVAL, "side: expected 0 or 1, found %d", side);
    const struct lowkey_side *of = &cache->layers[number].layer->side[side];
    if (head < -1 || head >= of->n_heads)
        return lowkey_fail(err, LOWKEY_EINVAL, "head: expected -1 to %d at layer %d, found %d",
                           of->n_heads - 1, layer, head);
    const struct lowkey_store *store = &cache->layers[number].store[side];
    const size_t block = lowkey_cache_block(cache, sequence, page);
    *bytes = head < 0 ? lowkey_store_side_page(store, of, block) : lowkey_store_page(store, of, head, block);
    *n_bytes = head < 0 ? of->layout.bytes : of->heads[head].page_bytes;
    return LOWKEY_OK;
}
