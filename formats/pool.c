/* pool.c - a list of blocks, for code that has no caller's allocator: reading whole files. */
#include "formats/pool.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/error.h"

struct lowkey_pool_node {
    struct lowkey_pool_node *next;
    void *block;
};

lowkey_status lowkey_pool_own(struct lowkey_pool *pool, void *block, lowkey_error *err)
{
    if (!block) return LOWKEY_OK;
    struct lowkey_pool_node *node = malloc(sizeof *node);
    if (!node) {
        free(block);
        return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %zu bytes", sizeof *node);
    }
    *node = (struct lowkey_pool_node) { .next = pool->first, .block = block };
    pool->first = node;
    return LOWKEY_OK;
}

lowkey_status lowkey_pool_take(struct lowkey_pool *pool, size_t count, size_t bytes_each, void *out,
                               lowkey_error *err)
{
    void *block = calloc(count ? count : 1, bytes_each ? bytes_each : 1);
    lowkey_status status = LOWKEY_OK;
    if (!block) status = lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %zu * %zu bytes", count, bytes_each);
    if (status == LOWKEY_OK) status = lowkey_pool_own(pool, block, err);
    if (status != LOWKEY_OK) block = NULL; /* freed by the pool */
    memcpy(out, &block, sizeof block); /* *out is no void *, and may not be written as one */
    return status;
}

void lowkey_pool_free(struct lowkey_pool *pool)
{
    while (pool->first) {
        struct lowkey_pool_node *node = pool->first;
        pool->first = node->next;
        free(node->block);
        free(node);
    }
}
