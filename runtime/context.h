/* context.h - where and with what a cache computes. The one device of this build is the CPU. */
#ifndef LOWKEY_CONTEXT_H
#define LOWKEY_CONTEXT_H

#include "formats/block.h"
#include "kernels/kernels.h"

struct lowkey_context {
    struct lowkey_block block; /* this object */
    lowkey_allocator allocator;
    const struct lowkey_kernels *kernels;
    lowkey_parallel_for *parallel_for; /* NULL: the calling thread does all */
    void *parallel_user;
};

/* Call body(arg, i) for i in 0..n-1, on the caller's threads if there are any. */
void lowkey_context_run(const lowkey_context *context, int n, void (*body)(void *arg, int i), void *arg);

/* How many bodies may usefully run at once for so much work: min(n_items, most), 1 without threads. */
int lowkey_context_lanes(const lowkey_context *context, int64_t n_items, int most);

#endif
