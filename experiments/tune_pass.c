/* tune_pass.c - the decoder's backward pass over a store that is either no store at all (the reference) or the packed cache
 * of the quantizer at hand. */
#include "experiments/tune_pass.h"

#include <stdlib.h>
#include <string.h>

#include "experiments/lm/gradient.h"
#include "experiments/packed_store.h"
#include "experiments/tune_entries.h"
#include "runtime/error.h"

struct lowkey_tune_pass {
    const lowkey_model *model;
    int length, n_threads;
    struct lowkey_store store; /* stands for what packed is at the time */
    lowkey_gradient *gradient;
    lowkey_packed_store *packed; /* NULL: keys and values as they are */
    const struct lowkey_tune_measure *measure;
};

static struct lowkey_entry_layer entries_of(const lowkey_tune_pass *pass, int index)
{
    return (struct lowkey_entry_layer) { .cache = lowkey_packed_store_cache(pass->packed),
                                         .quantizer = pass->measure->quantizer,
                                         .index = index,
                                         .n_tokens = pass->length,
                                         .n_threads = pass->n_threads };
}

static lowkey_status put_packed(lowkey_tune_pass *pass, const struct lowkey_store_step *step,
                                lowkey_error *err)
{
    const struct lowkey_store packed = lowkey_packed_store_interface(pass->packed);
    LOWKEY_TRY(packed.put(packed.user, step, err));
    if (!pass->measure->reports) return LOWKEY_OK;
    struct lowkey_entry_layer layer = entries_of(pass, step->layer->index);
    layer.x[0] = step->key;
    layer.x[1] = step->value;
    layer.stored[0] = step->stored_key;
    layer.stored[1] = step->stored_value;
    return lowkey_entry_reports(&layer, pass->measure->reports[step->layer->index], err);
}

static lowkey_status put(void *user, const struct lowkey_store_step *step, lowkey_error *err)
{
    lowkey_tune_pass *pass = user;
    if (pass->packed) return put_packed(pass, step, err);
    const lowkey_layer_desc *layer = step->layer;
    const size_t n = (size_t)step->n_tokens * (size_t)layer->n_kv_heads * sizeof(float);
    memcpy(step->stored_key, step->key, n * (size_t)layer->key_head_dim);
    memcpy(step->stored_value, step->value, n * (size_t)layer->value_head_dim);
    return LOWKEY_OK;
}

static lowkey_status reset(void *user, lowkey_error *err)
{
    lowkey_tune_pass *pass = user;
    if (!pass->packed) return LOWKEY_OK;
    const struct lowkey_store packed = lowkey_packed_store_interface(pass->packed);
    return packed.reset(packed.user, err);
}

static lowkey_status on_layer(void *user, const struct lowkey_gradient_layer *of, lowkey_error *err)
{
    const lowkey_tune_pass *pass = user;
    struct lowkey_entry_layer layer = entries_of(pass, of->layer->index);
    layer.grad[0] = of->key_grad;
    layer.grad[1] = of->value_grad;
    return lowkey_entry_gradients(&layer, pass->measure->gradients[of->layer->index], err);
}

lowkey_status lowkey_tune_pass_create(const lowkey_model *model, int length, int n_threads,
                                      lowkey_tune_pass **out, lowkey_error *err)
{
    lowkey_tune_pass *pass = calloc(1, sizeof *pass);
    *out = pass;
    if (!pass) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory to tune");
    *pass = (struct lowkey_tune_pass) { .model = model, .length = length, .n_threads = n_threads };
    pass->store = (struct lowkey_store) { .put = put, .reset = reset, .user = pass };
    const struct lowkey_gradient_config config = {
        .model = model, .store = &pass->store, .max_tokens = length, .n_threads = n_threads
    };
    const lowkey_status status = lowkey_gradient_create(&config, &pass->gradient, err);
    if (status == LOWKEY_OK) return LOWKEY_OK;
    lowkey_tune_pass_free(pass);
    *out = NULL;
    return status;
}

void lowkey_tune_pass_free(lowkey_tune_pass *pass)
{
    if (!pass) return;
    lowkey_gradient_free(pass->gradient);
    free(pass);
}

lowkey_status lowkey_tune_reference(lowkey_tune_pass *pass, const int32_t *tokens, float *hidden,
                                    lowkey_error *err)
{
    const struct lowkey_gradient_request request = {
        .tokens = tokens, .n_tokens = pass->length, .loss = LOWKEY_LOSS_NONE, .hidden = hidden
    };
    double loss;
    return lowkey_gradient_run(pass->gradient, &request, &loss, err);
}

lowkey_status lowkey_tune_kl(lowkey_tune_pass *pass, const struct lowkey_tune_measure *measure, double *kl,
                             lowkey_error *err)
{
    const struct lowkey_gradient_request request = { .tokens = measure->tokens,
                                                     .n_tokens = pass->length,
                                                     .loss = measure->reference ? LOWKEY_LOSS_KL
                                                                                : LOWKEY_LOSS_NONE,
                                                     .reference = measure->reference,
                                                     .on_layer = measure->gradients ? on_layer : NULL,
                                                     .user = pass };
    pass->measure = measure;
    LOWKEY_TRY(
        lowkey_packed_store_create(measure->quantizer, pass->length, pass->n_threads, &pass->packed, err));
    const lowkey_status status = lowkey_gradient_run(pass->gradient, &request, kl, err);
    lowkey_packed_store_free(pass->packed);
    pass->packed = NULL;
    *kl /= pass->length - 1;
    return status;
}
