/* error.h - the two ways an error is made and handed up, used by all of lowkey. */
#ifndef LOWKEY_ERROR_H
#define LOWKEY_ERROR_H

#include "runtime/lowkey.h"

/* Fill err (may be NULL) with a status and a printf-style line, and return the status. */
lowkey_status lowkey_fail(lowkey_error *err, lowkey_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Return from the calling function with the status of a call that failed. */
#define LOWKEY_TRY(call)                                \
    do {                                                \
        const lowkey_status try_status = (call);        \
        if (try_status != LOWKEY_OK) return try_status; \
    } while (0)

#endif
