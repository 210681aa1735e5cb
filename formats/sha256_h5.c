/* sha256_h5.c - SHA-256 by libcrypto's EVP, which uses the CPU's instructions for it. A failure is remembered
 * to the end. */
#include "formats/sha256.h"

#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>

#include "runtime/error.h"

struct lowkey_sha256 {
    EVP_MD_CTX *context;
    int failed;
};

lowkey_sha256 *lowkey_sha256_begin(void)
{
    lowkey_sha256 *sha256 = calloc(1, sizeof *sha256);
    if (!sha256) return NULL;
    sha256->context = EVP_MD_CTX_new();
    sha256->failed = !sha256->context || EVP_DigestInit_ex(sha256->context, EVP_sha256(), NULL) != 1;
    return sha256;
}

void lowkey_sha256_add(lowkey_sha256 *sha256, const void *bytes, size_t n)
{
    if (!sha256->failed) sha256->failed = EVP_DigestUpdate(sha256->context, bytes, n) != 1;
}

lowkey_status lowkey_sha256_end(lowkey_sha256 *sha256, unsigned char digest[32], lowkey_error *err)
{
    unsigned char unused[32];
    const int good = sha256 && !sha256->failed &&
                     EVP_DigestFinal_ex(sha256->context, digest ? digest : unused, NULL) == 1;
    if (sha256) EVP_MD_CTX_free(sha256->context);
    free(sha256);
    return good ? LOWKEY_OK : lowkey_fail(err, LOWKEY_ENOMEM, "SHA-256: no memory, or libcrypto refused");
}

lowkey_status lowkey_sha256_of(const void *bytes, size_t n, unsigned char digest[32], lowkey_error *err)
{
    lowkey_sha256 *sha256 = lowkey_sha256_begin();
    if (sha256) lowkey_sha256_add(sha256, bytes, n);
    return lowkey_sha256_end(sha256, digest, err);
}

void lowkey_sha256_print(const unsigned char digest[32], char text[65])
{
    for (int i = 0; i < 32; i++) snprintf(text + 2 * i, 3, "%02x", digest[i]);
}
