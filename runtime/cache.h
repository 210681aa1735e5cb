/* cache.h - what a cache is made of, for the files of this folder alone. Lengths, block tables and pages are arrays that a
 * device could hold as they are. */
#ifndef LOWKEY_CACHE_H
#define LOWKEY_CACHE_H

#include "formats/block.h"
#include "runtime/context.h"

enum {
    LOWKEY_APPEND_LANES = 16, /* bodies that append at once: each has scratch of its own */
    LOWKEY_APPEND_ROWS = 8 /* tokens that are converted to f32 at once */
};

struct lowkey_angles { /* cosines and sines of RoPE, made in f64; layers that turn alike share them */
    int n_pairs; /* 0: no RoPE, no arrays */
    float *base_cos, *base_sin; /* [max_blocks][n_pairs] of position 64 * page */
    float *slot_cos, *slot_sin; /* [64][n_pairs] of position slot */
};

struct lowkey_store { /* keys or values of one layer, all sequences */
    uint8_t **pages; /* [n_heads] -> [n_pages][page_bytes of the head] */
    uint8_t *side_pages; /* [n_pages][layout.bytes] */
    uint16_t *sinks; /* [max_sequences][n_sink_tokens][n_heads][head_dim] by sink_rule */
};

struct lowkey_cache_layer {
    const struct lowkey_layer *layer;
    struct lowkey_angles angles;
    struct lowkey_store store[2]; /* 0 keys, 1 values */
};

struct lowkey_append_lane {
    void *scratch; /* of the pack kernel */
    float *rows; /* [LOWKEY_APPEND_ROWS][channels] */
    uint8_t **pages; /* [n_heads] */
    struct lowkey_pack_counts counts;
};

struct lowkey_cache {
    lowkey_context *context;
    const lowkey_quantizer *quantizer;
    const lowkey_quantizer_desc *desc; /* of the quantizer */
    int n_pages, max_sequences, max_tokens;
    int max_blocks; /* pages that a sequence may have */
    struct lowkey_cache_layer *layers; /* [desc->n_layers] */
    int *lengths; /* [max_sequences][n_layers] tokens appended */
    int *reserved; /* [max_sequences] tokens there is room for, in every layer */
    int *n_blocks; /* [max_sequences] pages held: of the reserved tokens */
    int *block_table; /* [max_sequences][max_blocks] page numbers */
    int *references; /* [n_pages] sequences that hold the page */
    int *free_pages; /* [n_free] a stack */
    int n_free;
    uint8_t *is_named; /* [max_sequences] scratch of append: all 0 between calls */
    struct lowkey_append_lane *lanes; /* [LOWKEY_APPEND_LANES] */
    struct lowkey_pack_counts counts; /* since creation */
    struct lowkey_block fixed, store; /* this object and its arrays; pages and sinks */
    size_t angles_bytes; /* of fixed */
    size_t page_bytes; /* of one page number: all layers, heads, sides */
    size_t sinks_bytes; /* of one sequence */
};

/* Check a size and plan a cache of it: every number of *cache is set, both blocks are measured, nothing is allocated. */
lowkey_status lowkey_cache_plan(const lowkey_quantizer *quantizer, const lowkey_cache_config *config, lowkey_cache *cache,
                                lowkey_error *err);

/* Number of a layer among those described, from its index in the model; -1: none. */
int lowkey_cache_find_layer(const lowkey_cache *cache, int layer);
/* ... and with words. */
lowkey_status lowkey_cache_check_layer(const lowkey_cache *cache, int layer, int *number, lowkey_error *err);
lowkey_status lowkey_cache_check_sequence(const lowkey_cache *cache, int sequence, lowkey_error *err);

static inline int *lowkey_cache_length_at(const lowkey_cache *cache, int sequence, int layer_number)
{
    return cache->lengths + (size_t)sequence * (size_t)cache->desc->n_layers + layer_number;
}

/* Pages that so many tokens take. */
static inline int64_t lowkey_pages_of(int64_t n_tokens)
{
    return (n_tokens + LOWKEY_PAGE_TOKENS - 1) / LOWKEY_PAGE_TOKENS;
}

/* Page number of a sequence's page. */
static inline size_t lowkey_cache_block(const lowkey_cache *cache, int sequence, int page)
{
    return (size_t)cache->block_table[(size_t)sequence * (size_t)cache->max_blocks + (size_t)page];
}

static inline uint8_t *lowkey_store_page(const struct lowkey_store *store, const struct lowkey_side *side,
                                         int head, size_t block)
{
    return store->pages[head] + block * side->heads[head].page_bytes;
}

static inline uint8_t *lowkey_store_side_page(const struct lowkey_store *store,
                                              const struct lowkey_side *side, size_t block)
{
    return side->layout.bytes ? store->side_pages + block * side->layout.bytes : NULL;
}

/* Sink token t of a sequence: [n_heads][head_dim]. */
static inline uint16_t *lowkey_store_sink(const lowkey_cache *cache, const struct lowkey_store *store,
                                          const struct lowkey_side *side, int sequence, int t)
{
    const size_t n_channels = (size_t)side->n_heads * (size_t)side->head_dim;
    return store->sinks + ((size_t)sequence * (size_t)cache->desc->n_sink_tokens + (size_t)t) * n_channels;
}

/* Slots of a page that are sinks, at most 64. */
static inline int lowkey_cache_sink_slots(const lowkey_cache *cache, int page)
{
    return page == 0 ? cache->desc->n_sink_tokens : 0;
}

#endif
