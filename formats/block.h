/* block.h - one block of memory that many arrays are taken from, by code that runs twice: with base NULL it measures and
 * gets NULL, with the block it gets addresses. So a size asked for and a size used cannot differ. */
#ifndef LOWKEY_BLOCK_H
#define LOWKEY_BLOCK_H

#include <stddef.h>

#include "runtime/lowkey.h"

struct lowkey_block {
    char *base;
    size_t used; /* bytes taken, with padding */
    size_t bytes; /* of base */
    int overflow; /* more were measured than size_t counts */
};

/* count * bytes_each bytes, 64-byte aligned; NULL while measuring. */
void *lowkey_block_take(struct lowkey_block *block, size_t count, size_t bytes_each);

/* Give a measured block its memory, and start it over for the run that fills. what: begins the message. */
lowkey_status lowkey_block_allocate(struct lowkey_block *block, const lowkey_allocator *allocator,
                                    const char *what, lowkey_error *err);
void lowkey_block_free(struct lowkey_block *block, const lowkey_allocator *allocator); /* one without base is fine */

#endif
