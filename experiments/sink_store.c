/* sink_store.c - see sink_store.h. Only a step that holds sinks is copied; the others go through as they are. */
#include "experiments/sink_store.h"

#include <stdlib.h>
#include <string.h>

#include "formats/half.h"
#include "runtime/error.h"

/* Rows of a step's keys or values: the first n_sinks are to be those of the row behind them. */
static float *without_sinks(const float *x, int n_tokens, int n_sinks, size_t width)
{
    float *copy = malloc((size_t)n_tokens * width * sizeof *copy);
    if (!copy) return NULL;
    memcpy(copy, x, (size_t)n_tokens * width * sizeof *copy);
    for (int t = 0; t < n_sinks && n_sinks < n_tokens; t++)
        memcpy(copy + (size_t)t * width, x + (size_t)n_sinks * width, width * sizeof *copy);
    return copy;
}

static void keep(const float *x, size_t n, float *stored)
{
    for (size_t i = 0; i < n; i++) stored[i] = lowkey_f16_to_f32(lowkey_f32_to_f16_saturate(x[i], NULL));
}

static lowkey_status put(void *user, const struct lowkey_store_step *step, lowkey_error *err)
{
    const struct lowkey_sink_store *sinks = user;
    const lowkey_layer_desc *layer = step->layer;
    const size_t key = (size_t)layer->n_kv_heads * (size_t)layer->key_head_dim,
                 value = (size_t)layer->n_kv_heads * (size_t)layer->value_head_dim;
    int n = sinks->n_sinks - step->first; /* sinks of this step */
    if (n <= 0) return sinks->inner.put(sinks->inner.user, step, err);
    if (n > step->n_tokens) n = step->n_tokens;
    struct lowkey_store_step inner = *step;
    float *keys = without_sinks(step->key, step->n_tokens, n, key);
    float *values = without_sinks(step->value, step->n_tokens, n, value);
    inner.key = keys;
    inner.value = values;
    lowkey_status status = keys && values
                               ? sinks->inner.put(sinks->inner.user, &inner, err)
                               : lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %d tokens", step->n_tokens);
    free(keys);
    free(values);
    if (status != LOWKEY_OK) return status;
    keep(step->key, (size_t)n * key, step->stored_key);
    keep(step->value, (size_t)n * value, step->stored_value);
    return LOWKEY_OK;
}

static lowkey_status reset(void *user, lowkey_error *err)
{
    const struct lowkey_sink_store *sinks = user;
    return sinks->inner.reset(sinks->inner.user, err);
}

static int exact_from(void *user, enum lowkey_store_side side, int position)
{
    const struct lowkey_sink_store *sinks = user;
    return sinks->inner.exact_from(sinks->inner.user, side, position);
}

struct lowkey_store lowkey_sink_store_interface(struct lowkey_sink_store *sinks)
{
    return (struct lowkey_store) { put, reset, sinks->inner.exact_from ? exact_from : NULL, sinks };
}
