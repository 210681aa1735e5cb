/* context.c - picks the level of kernels, once, and keeps the caller's allocator and threads. */
#include "runtime/context.h"

#include <stdio.h>
#include <string.h>

#include "formats/caller.h"
#include "runtime/error.h"

static lowkey_status check_device(const lowkey_context_config *config, lowkey_error *err)
{
    const char *device = config->device ? config->device : "cpu";
    if (strcmp(device, "cuda") == 0)
        return lowkey_fail(err, LOWKEY_EUNSUPPORTED,
                           "device 'cuda': this build of lowkey has no CUDA kernels");
    if (strcmp(device, "cpu") != 0)
        return lowkey_fail(err, LOWKEY_EINVAL, "device: expected 'cpu' or 'cuda', found '%s'", device);
    if (config->device_index != 0)
        return lowkey_fail(err, LOWKEY_EINVAL, "device_index: expected 0 with device 'cpu', found %d",
                           config->device_index);
    if (config->stream)
        return lowkey_fail(err, LOWKEY_EINVAL, "stream: expected none with device 'cpu', found one");
    return LOWKEY_OK;
}

static lowkey_status find_kernels(const char *isa, const struct lowkey_kernels **out, lowkey_error *err)
{
    *out = lowkey_kernels_find(isa);
    if (*out) return LOWKEY_OK;
    char names[128] = "";
    for (const struct lowkey_kernels *row = lowkey_kernels; row->isa; row++)
        if (row->supported())
            snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", names[0] ? ", " : "",
                     row->isa);
    return lowkey_fail(err, LOWKEY_EUNSUPPORTED,
                       "isa: expected one that this CPU and build have (%s), found '%s'", names, isa);
}

lowkey_status lowkey_context_create(const lowkey_context_config *given, lowkey_context **out,
                                    lowkey_error *err)
{
    if (!out) return lowkey_fail(err, LOWKEY_EINVAL, "lowkey_context_create: out is NULL");
    *out = NULL;
    if (!given) return lowkey_fail(err, LOWKEY_EINVAL, "lowkey_context_create: config is NULL");
    lowkey_context_config config;
    lowkey_context context = { 0 };
    LOWKEY_TRY(lowkey_struct_read(&config, sizeof config, given, given->struct_size, "context config", err));
    LOWKEY_TRY(check_device(&config, err));
    LOWKEY_TRY(find_kernels(config.isa, &context.kernels, err));
    LOWKEY_TRY(lowkey_allocator_read(&config.allocator, &context.allocator, err));
    context.parallel_for = config.parallel_for;
    context.parallel_user = config.parallel_user;
    lowkey_block_take(&context.block, 1, sizeof context);
    LOWKEY_TRY(lowkey_block_allocate(&context.block, &context.allocator, "context", err));
    lowkey_context *made = lowkey_block_take(&context.block, 1, sizeof context);
    *made = context;
    *out = made;
    return LOWKEY_OK;
}

void lowkey_context_free(lowkey_context *context)
{
    if (!context) return;
    const lowkey_allocator allocator = context->allocator;
    struct lowkey_block block = context->block; /* the object is in it */
    lowkey_block_free(&block, &allocator);
}

const char *lowkey_context_isa(const lowkey_context *context)
{
    return context->kernels->isa;
}

void lowkey_context_run(const lowkey_context *context, int n, void (*body)(void *arg, int i), void *arg)
{
    if (context->parallel_for && n > 1) {
        context->parallel_for(context->parallel_user, n, body, arg);
        return;
    }
    for (int i = 0; i < n; i++) body(arg, i);
}

int lowkey_context_lanes(const lowkey_context *context, int64_t n_items, int most)
{
    if (!context->parallel_for) most = 1;
    return n_items < most ? (int)n_items : most;
}
