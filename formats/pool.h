/* pool.h - allocations that are freed together: what a reader gathers before it knows whether the file is good. */
#ifndef LOWKEY_POOL_H
#define LOWKEY_POOL_H

#include "runtime/lowkey.h"

struct lowkey_pool { /* all zero: empty */
    struct lowkey_pool_node *first;
};

/* count * bytes_each zeroed bytes, which live until lowkey_pool_free. out: the address of a pointer to any type of object. */
lowkey_status lowkey_pool_take(struct lowkey_pool *pool, size_t count, size_t bytes_each, void *out, lowkey_error *err);
/* Own a malloc'd block from now on; if there is no memory for that, the block is freed. NULL is nothing. */
lowkey_status lowkey_pool_own(struct lowkey_pool *pool, void *block, lowkey_error *err);
void lowkey_pool_free(struct lowkey_pool *pool);

#endif
