/* packed_store.c - append to a cache, read back what it holds. Appending is shared by threads page by page within the
 * library; reading here, since a cache may be read by many threads. */
#include "experiments/packed_store.h"

#include <stdlib.h>

#include "calib/threads.h"
#include "runtime/error.h"

struct lowkey_packed_store {
    int max_tokens, n_threads;
    lowkey_context *context;
    lowkey_cache *cache;
};

static lowkey_status create(const lowkey_quantizer *quantizer, lowkey_packed_store *packed, lowkey_error *err)
{
    const lowkey_context_config context = { .struct_size = sizeof context,
                                            .parallel_for = packed->n_threads > 1 ? lowkey_threads_run : NULL,
                                            .parallel_user = &packed->n_threads };
    const lowkey_cache_config cache = { .struct_size = sizeof cache,
                                        .n_pages = (packed->max_tokens - 1) / LOWKEY_PAGE_TOKENS + 1,
                                        .max_sequences = 1,
                                        .max_tokens = packed->max_tokens };
    LOWKEY_TRY(lowkey_context_create(&context, &packed->context, err));
    LOWKEY_TRY(lowkey_cache_create(packed->context, quantizer, &cache, &packed->cache, err));
    return lowkey_cache_reserve(packed->cache, 0, packed->max_tokens, err);
}

lowkey_status lowkey_packed_store_create(const lowkey_quantizer *quantizer, int max_tokens, int n_threads,
                                         lowkey_packed_store **out, lowkey_error *err)
{
    *out = NULL;
    if (max_tokens < 1 || n_threads < 1)
        return lowkey_fail(err, LOWKEY_EINVAL, "packed store: %d tokens, %d threads", max_tokens, n_threads);
    lowkey_packed_store *packed = calloc(1, sizeof *packed);
    if (!packed) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for a packed store");
    packed->max_tokens = max_tokens;
    packed->n_threads = n_threads;
    const lowkey_status status = create(quantizer, packed, err);
    if (status != LOWKEY_OK) {
        lowkey_packed_store_free(packed);
        return status;
    }
    *out = packed;
    return LOWKEY_OK;
}

void lowkey_packed_store_free(lowkey_packed_store *packed)
{
    if (!packed) return;
    lowkey_cache_free(packed->cache);
    lowkey_context_free(packed->context);
    free(packed);
}

/* Whole pages of the tokens that were just appended, one to a thread. */
struct reading {
    const lowkey_packed_store *packed;
    const struct lowkey_store_step *step;
    lowkey_status *statuses; /* [pages] */
};

static int first_page(const struct lowkey_store_step *step)
{
    return step->first / LOWKEY_PAGE_TOKENS;
}

static int n_pages(const struct lowkey_store_step *step)
{
    return (step->first + step->n_tokens - 1) / LOWKEY_PAGE_TOKENS - first_page(step) + 1;
}

static void read_page(void *arg, int i)
{
    const struct reading *reading = arg;
    const struct lowkey_store_step *step = reading->step;
    const lowkey_layer_desc *layer = step->layer;
    const int page = first_page(step) + i, step_end = step->first + step->n_tokens;
    int first = page * LOWKEY_PAGE_TOKENS, end = first + LOWKEY_PAGE_TOKENS;
    if (first < step->first) first = step->first;
    if (end > step_end) end = step_end;
    const size_t row = (size_t)(first - step->first) * (size_t)layer->n_kv_heads;
    /* It cannot fail: sequence, layer and tokens are those that append took. */
    reading->statuses[i] = lowkey_cache_read(reading->packed->cache, 0, layer->index, first, end - first,
                                             step->stored_key + row * (size_t)layer->key_head_dim,
                                             step->stored_value + row * (size_t)layer->value_head_dim, NULL);
}

static lowkey_status put(void *user, const struct lowkey_store_step *step, lowkey_error *err)
{
    lowkey_packed_store *packed = user;
    const int sequence = 0, index = step->layer->index, pages = n_pages(step);
    const int length = lowkey_cache_length(packed->cache, 0, index);
    if (length != step->first)
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "packed store: layer %d holds %d tokens, token %d is to follow", index, length,
                           step->first);
    const lowkey_rows keys = { .data = step->key }, values = { .data = step->value };
    LOWKEY_TRY(lowkey_cache_append(packed->cache, index, 1, &sequence, &step->n_tokens, keys, values, err));
    struct reading reading = { packed, step, calloc((size_t)pages, sizeof *reading.statuses) };
    if (!reading.statuses) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory to read %d pages", pages);
    lowkey_threads_run(&packed->n_threads, pages, read_page, &reading);
    lowkey_status status = LOWKEY_OK;
    for (int i = 0; i < pages; i++)
        if (reading.statuses[i] != LOWKEY_OK) status = reading.statuses[i];
    free(reading.statuses);
    return status == LOWKEY_OK ? status
                               : lowkey_fail(err, status, "packed store: layer %d: cannot be read", index);
}

static lowkey_status reset(void *user, lowkey_error *err)
{
    lowkey_packed_store *packed = user;
    LOWKEY_TRY(lowkey_cache_trim(packed->cache, 0, 0, err));
    return lowkey_cache_reserve(packed->cache, 0, packed->max_tokens, err);
}

struct lowkey_store lowkey_packed_store_interface(lowkey_packed_store *packed)
{
    return (struct lowkey_store) { .put = put, .reset = reset, .user = packed };
}

const lowkey_cache *lowkey_packed_store_cache(const lowkey_packed_store *packed)
{
    return packed->cache;
}
