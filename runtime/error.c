/* error.c - errors in words. A message is made where the fault is seen, and only handed up from there. */
#include "runtime/error.h"

#include <stdarg.h>
#include <stdio.h>

lowkey_status lowkey_fail(lowkey_error *err, lowkey_status status, const char *format, ...)
{
    if (err) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(err->message, sizeof err->message, format, arguments);
        va_end(arguments);
        for (char *c = err->message; *c; c++) /* a file's strings must not break the one line */
            if ((unsigned char)*c < ' ' || *c == 0x7f) *c = '?';
        err->status = status;
    }
    return status;
}

const char *lowkey_status_name(lowkey_status status)
{
    static const char *const names[] = {
        [LOWKEY_OK] = "LOWKEY_OK",
        [LOWKEY_EINVAL] = "LOWKEY_EINVAL",
        [LOWKEY_ENOMEM] = "LOWKEY_ENOMEM",
        [LOWKEY_EIO] = "LOWKEY_EIO",
        [LOWKEY_EFORMAT] = "LOWKEY_EFORMAT",
        [LOWKEY_EUNSUPPORTED] = "LOWKEY_EUNSUPPORTED",
        [LOWKEY_EFULL] = "LOWKEY_EFULL",
        [LOWKEY_EDEVICE] = "LOWKEY_EDEVICE",
        [LOWKEY_ECANCELLED] = "LOWKEY_ECANCELLED",
    };
    const unsigned i = (unsigned)status;
    return i < sizeof names / sizeof names[0] ? names[i] : "?";
}

#define STRING_(x) #x
#define STRING(x) STRING_(x)

const char *lowkey_version(void)
{
    return STRING(LOWKEY_VERSION_MAJOR) "." STRING(LOWKEY_VERSION_MINOR);
}
