/* fuzz_quantizer.h - a fuzz target: bytes taken for a quantizer.h5. */
#ifndef LOWKEY_TESTS_FUZZ_QUANTIZER_H
#define LOWKEY_TESTS_FUZZ_QUANTIZER_H

#include <stddef.h>
#include <stdint.h>

#include "runtime/lowkey.h"

/* What lowkey_quantizer_open says of the bytes; aborts where a promise is broken. */
lowkey_status lowkey_fuzz_quantizer(const uint8_t *data, size_t size);
/* The same for libFuzzer: always 0. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
