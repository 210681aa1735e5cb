/* caller.h - what callers hand in: structs as their version of lowkey.h has them, and an allocator. */
#ifndef LOWKEY_CALLER_H
#define LOWKEY_CALLER_H

#include <stddef.h>

#include "runtime/lowkey.h"

/* to = from, of from_size bytes as the caller says in its struct_size; fields that the caller's version lacked become 0,
 * fields that this one lacks must be 0. what: begins the message. */
lowkey_status lowkey_struct_read(void *to, size_t to_size, const void *from, size_t from_size,
                                 const char *what, lowkey_error *err);

/* The caller's allocator (NULL, or both functions NULL: aligned_alloc and free). */
lowkey_status lowkey_allocator_read(const lowkey_allocator *given, lowkey_allocator *out, lowkey_error *err);

#endif
