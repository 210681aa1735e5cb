/* packed_store.h - the packed cache of liblowkey as what the decoder's attention stands on: tokens are appended, then
 * dequantized once for all queries of their chunk. What is measured is what a runtime holds, no simulation. */
#ifndef LOWKEY_PACKED_STORE_H
#define LOWKEY_PACKED_STORE_H

#include "experiments/lm/store.h"

typedef struct lowkey_packed_store lowkey_packed_store;

/* Room for one sequence of max_tokens in the quantizer's layers. The quantizer is borrowed. Bytes and values do not
 * depend on n_threads. */
lowkey_status lowkey_packed_store_create(const lowkey_quantizer *quantizer, int max_tokens, int n_threads,
                                         lowkey_packed_store **out, lowkey_error *err);
void lowkey_packed_store_free(lowkey_packed_store *packed); /* takes NULL */

/* Lives as long as the object. */
struct lowkey_store lowkey_packed_store_interface(lowkey_packed_store *packed);

/* Holds sequence 0; what it holds may be measured and attended to. */
const lowkey_cache *lowkey_packed_store_cache(const lowkey_packed_store *packed);

#endif
