/* sha256.h - SHA-256, through libcrypto. Of files, hence in liblowkey-h5.so and not in the core. */
#ifndef LOWKEY_SHA256_H
#define LOWKEY_SHA256_H

#include <stddef.h>

#include "runtime/lowkey.h"

typedef struct lowkey_sha256 lowkey_sha256;

lowkey_sha256 *lowkey_sha256_begin(void); /* NULL: no memory */
void lowkey_sha256_add(lowkey_sha256 *sha256, const void *bytes, size_t n);
/* Frees it; takes NULL. digest NULL: not wanted. LOWKEY_ENOMEM where any step failed, begin included. */
lowkey_status lowkey_sha256_end(lowkey_sha256 *sha256, unsigned char digest[32], lowkey_error *err);
/* Of one run of bytes. */
lowkey_status lowkey_sha256_of(const void *bytes, size_t n, unsigned char digest[32], lowkey_error *err);

/* 64 lower-case hexadecimal digits and NUL. */
void lowkey_sha256_print(const unsigned char digest[32], char text[65]);

#endif
