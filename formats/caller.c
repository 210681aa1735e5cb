/* caller.c - the caller's structs, of any version, read into ours. */
#include "formats/caller.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/error.h"

lowkey_status lowkey_struct_read(void *to, size_t to_size, const void *from, size_t from_size,
                                 const char *what, lowkey_error *err)
{
    if (from_size < sizeof from_size || from_size > 1 << 16)
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: struct_size: expected the struct's size, found %zu", what,
                           from_size);
    const unsigned char *bytes = from;
    for (size_t i = to_size; i < from_size; i++)
        if (bytes[i])
            return lowkey_fail(err, LOWKEY_EUNSUPPORTED,
                               "%s: byte %zu of %zu is set, but lowkey %s knows only %zu", what, i, from_size,
                               lowkey_version(), to_size);
    memset(to, 0, to_size);
    memcpy(to, from, from_size < to_size ? from_size : to_size);
    memcpy(to, &to_size, sizeof to_size);
    return LOWKEY_OK;
}

static void *default_alloc(void *user, size_t bytes, size_t alignment)
{
    (void)user;
    return aligned_alloc(alignment, bytes);
}

static void default_free(void *user, void *block, size_t bytes)
{
    (void)user;
    (void)bytes;
    free(block);
}

lowkey_status lowkey_allocator_read(const lowkey_allocator *given, lowkey_allocator *out, lowkey_error *err)
{
    *out = given && given->alloc ? *given
                                 : (lowkey_allocator) { .alloc = default_alloc, .free = default_free };
    if (given && !given->alloc != !given->free)
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "allocator: expected both of alloc and free or neither, found one");
    return LOWKEY_OK;
}
