/* append.c - rows into pages. Everything that can fail is checked first; then pages are packed side by side, since a token's
 * bytes depend on no token but earlier ones of its own page (through the room for outliers). */
#include "kernels/element.h"
#include "runtime/cache.h"
#include "runtime/error.h"
#include "runtime/rows.h"

struct append {
    lowkey_cache *cache;
    int layer, n, n_lanes; /* layer: its number in the cache */
    const int *sequences, *n_tokens;
    lowkey_rows rows[2]; /* keys, values */
};

struct piece { /* tokens of one sequence that go to one page */
    int sequence, page, first, n; /* first: token of the sequence */
    int64_t row; /* of the first */
};

static void put_sinks(const struct append *append, const struct piece *piece, int which,
                      struct lowkey_append_lane *lane)
{
    const lowkey_cache *cache = append->cache;
    const struct lowkey_cache_layer *layer = &cache->layers[append->layer];
    const struct lowkey_side *side = &layer->layer->side[which];
    const int D = side->head_dim;
    for (int i = 0; i < piece->n; i++) {
        uint16_t *sink = lowkey_store_sink(cache, &layer->store[which], side, piece->sequence,
                                           piece->first + i);
        for (int h = 0; h < side->n_heads; h++) {
            lowkey_rows_read(&append->rows[which], piece->row + i, h, D, lane->rows);
            for (int c = 0; c < D; c++)
                sink[h * D + c] = lowkey_encode_16(cache->desc->sink_rule, lane->rows[c],
                                                   &lane->counts.saturated);
        }
    }
}

/* f32 rows are packed where they lie; others are converted a few at a time. */
static void put_page(const struct append *append, const struct piece *piece, int which,
                     struct lowkey_append_lane *lane)
{
    const lowkey_cache *cache = append->cache;
    const struct lowkey_cache_layer *layer = &cache->layers[append->layer];
    const struct lowkey_side *side = &layer->layer->side[which];
    const lowkey_rows *rows = &append->rows[which];
    const size_t block = lowkey_cache_block(cache, piece->sequence, piece->page);
    const int D = side->head_dim, n_channels = side->n_heads * D,
              first_slot = piece->first % LOWKEY_PAGE_TOKENS;
    for (int h = 0; h < side->n_heads; h++)
        lane->pages[h] = lowkey_store_page(&layer->store[which], side, h, block);
    struct lowkey_pack_args args = { .side = side,
                                     .first_live_slot = lowkey_cache_sink_slots(cache, piece->page),
                                     .pages = lane->pages,
                                     .side_page = lowkey_store_side_page(&layer->store[which], side, block),
                                     .scratch = lane->scratch,
                                     .counts = &lane->counts };
    const int is_f32 = rows->dtype == LOWKEY_F32, step = is_f32 ? piece->n : LOWKEY_APPEND_ROWS;
    for (int done = 0; done < piece->n; done += step) {
        args.first_slot = first_slot + done;
        args.n_tokens = piece->n - done < step ? piece->n - done : step;
        args.x = is_f32 ? (const float *)rows->data + (ptrdiff_t)piece->row * rows->token_stride : lane->rows;
        args.token_stride = is_f32 ? rows->token_stride : n_channels;
        args.head_stride = is_f32 ? rows->head_stride : D;
        for (int i = 0; i < args.n_tokens && !is_f32; i++)
            for (int h = 0; h < side->n_heads; h++)
                lowkey_rows_read(rows, piece->row + done + i, h, D, lane->rows + i * n_channels + h * D);
        cache->context->kernels->pack(&args);
    }
}

static void put_piece(const struct append *append, struct piece piece, int which,
                      struct lowkey_append_lane *lane)
{
    const int n_sinks = append->cache->desc->n_sink_tokens;
    if (piece.first < n_sinks) {
        struct piece sinks = piece;
        if (sinks.n > n_sinks - sinks.first) sinks.n = n_sinks - sinks.first;
        put_sinks(append, &sinks, which, lane);
        piece.first += sinks.n, piece.row += sinks.n, piece.n -= sinks.n;
    }
    if (piece.n > 0) put_page(append, &piece, which, lane);
}

/* A lane's share of the pieces: every n_lanes-th. */
static void append_lane(void *arg, int lane)
{
    const struct append *append = arg;
    int64_t row = 0, number = 0;
    for (int i = 0; i < append->n; i++) {
        const int sequence = append->sequences[i];
        const int length = *lowkey_cache_length_at(append->cache, sequence, append->layer);
        const int end = length + append->n_tokens[i];
        for (int token = length, n; token < end; token += n, row += n) {
            const int page = token / LOWKEY_PAGE_TOKENS, room = (page + 1) * LOWKEY_PAGE_TOKENS - token;
            n = room < end - token ? room : end - token;
            for (int which = 0; which < 2; which++)
                if (number++ % append->n_lanes == lane)
                    put_piece(append, (struct piece) { sequence, page, token, n, row }, which,
                              &append->cache->lanes[lane]);
        }
    }
}

/* ---- checks ---- */

static lowkey_status check_sequences(lowkey_cache *cache, int layer_number, const struct append *append,
                                     lowkey_error *err)
{
    for (int i = 0; i < append->n; i++) {
        const int sequence = append->sequences[i], n_tokens = append->n_tokens[i];
        LOWKEY_TRY(lowkey_cache_check_sequence(cache, sequence, err));
        const int length = *lowkey_cache_length_at(cache, sequence, layer_number);
        if (n_tokens < 0)
            return lowkey_fail(err, LOWKEY_EINVAL,
                               "sequence %d: expected to append 0 or more tokens, found %d", sequence,
                               n_tokens);
        if ((int64_t)length + n_tokens > cache->reserved[sequence])
            return lowkey_fail(err, LOWKEY_EINVAL,
                               "sequence %d: layer %d holds %d tokens and %d more do not fit the %d that "
                               "are reserved",
                               sequence, cache->desc->layers[layer_number].index, length, n_tokens,
                               cache->reserved[sequence]);
    }
    int twice = -1;
    for (int i = 0; i < append->n; i++) {
        uint8_t *is_named = &cache->is_named[append->sequences[i]];
        if (*is_named) twice = append->sequences[i];
        *is_named = 1;
    }
    for (int i = 0; i < append->n; i++) cache->is_named[append->sequences[i]] = 0;
    if (twice >= 0) return lowkey_fail(err, LOWKEY_EINVAL, "sequence %d: named twice in one append", twice);
    return LOWKEY_OK;
}

static lowkey_status check_rows(struct append *append, lowkey_error *err)
{
    const struct lowkey_layer *layer = append->cache->layers[append->layer].layer;
    struct lowkey_rows_shape shape = { .n_heads = layer->desc->n_kv_heads };
    for (int i = 0; i < append->n; i++) shape.n_tokens += append->n_tokens[i];
    for (int which = 0; which < 2; which++) {
        const char *what = which ? "values" : "keys";
        struct lowkey_bad_element bad;
        shape.head_dim = layer->side[which].head_dim;
        LOWKEY_TRY(lowkey_rows_check(&append->rows[which], shape, what, err));
        if (!lowkey_rows_find_bad(&append->rows[which], shape, &bad)) continue;
        int i = 0; /* whose row it is, and which of its tokens */
        int64_t token = bad.token;
        while (token >= append->n_tokens[i]) token -= append->n_tokens[i++];
        token += *lowkey_cache_length_at(append->cache, append->sequences[i], append->layer);
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "%s of layer %d: sequence %d token %lld head %d channel %d: expected a finite "
                           "number, found %g (%lld such in all)",
                           what, layer->desc->index, append->sequences[i], (long long)token, bad.head,
                           bad.channel, (double)bad.value, (long long)bad.n_bad);
    }
    return LOWKEY_OK;
}

lowkey_status lowkey_cache_append(lowkey_cache *cache, int layer, int n, const int *sequences,
                                  const int *n_tokens, lowkey_rows keys, lowkey_rows values,
                                  lowkey_error *err)
{
    struct append append = {
        .cache = cache, .n = n, .sequences = sequences, .n_tokens = n_tokens, .rows = { keys, values }
    };
    LOWKEY_TRY(lowkey_cache_check_layer(cache, layer, &append.layer, err));
    if (n < 0 || (n > 0 && (!sequences || !n_tokens)))
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "lowkey_cache_append: expected n >= 0 with sequences and n_tokens, found %d", n);
    LOWKEY_TRY(check_sequences(cache, append.layer, &append, err));
    LOWKEY_TRY(check_rows(&append, err));

    append.n_lanes = lowkey_context_lanes(cache->context, LOWKEY_APPEND_LANES, LOWKEY_APPEND_LANES);
    for (int i = 0; i < append.n_lanes; i++) cache->lanes[i].counts = (struct lowkey_pack_counts) { 0 };
    lowkey_context_run(cache->context, append.n_lanes, append_lane, &append);
    for (int i = 0; i < append.n_lanes; i++) {
        cache->counts.outliers += cache->lanes[i].counts.outliers;
        cache->counts.clamped += cache->lanes[i].counts.clamped;
        cache->counts.saturated += cache->lanes[i].counts.saturated;
    }
    for (int i = 0; i < n; i++) *lowkey_cache_length_at(cache, sequences[i], append.layer) += n_tokens[i];
    return LOWKEY_OK;
}
