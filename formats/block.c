/* block.c - measure, allocate, fill. */
#include "formats/block.h"

#include "runtime/error.h"

void *lowkey_block_take(struct lowkey_block *block, size_t count, size_t bytes_each)
{
    const size_t start = block->used;
    size_t bytes, end;
    block->overflow |= __builtin_mul_overflow(count, bytes_each, &bytes) ||
                       __builtin_add_overflow(bytes, 63, &bytes) ||
                       __builtin_add_overflow(start, bytes & ~(size_t)63, &end);
    block->used = block->overflow ? start : end;
    return block->base ? block->base + start : NULL;
}

lowkey_status lowkey_block_allocate(struct lowkey_block *block, const lowkey_allocator *allocator,
                                    const char *what, lowkey_error *err)
{
    block->bytes = block->used;
    block->used = 0;
    if (block->overflow)
        return lowkey_fail(err, LOWKEY_ENOMEM, "%s: needs more memory than can be addressed", what);
    block->base = allocator->alloc(allocator->user, block->bytes, 64);
    if (!block->base)
        return lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory for %zu bytes", what, block->bytes);
    return LOWKEY_OK;
}

void lowkey_block_free(struct lowkey_block *block, const lowkey_allocator *allocator)
{
    if (block->base) allocator->free(allocator->user, block->base, block->bytes);
    block->base = NULL;
}
