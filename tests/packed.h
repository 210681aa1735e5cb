/* packed.h - one page of every head of a side, for tests of kernels: buffers of exactly the right size between guard
 * bytes, filled with noise at first. */
#ifndef LOWKEY_TEST_PACKED_H
#define LOWKEY_TEST_PACKED_H

#include "kernels/kernels.h"
#include "tests/random.h"

/* 64-byte aligned, between guard bytes, filled with the byte; free checks the guards. */
void *lowkey_guarded_new(size_t bytes, int fill);
void lowkey_guarded_check(const void *block);
void lowkey_guarded_free(void *block);

struct lowkey_packed {
    const struct lowkey_side *side;
    int first_live_slot;
    uint8_t *pages[64]; /* [n_heads] */
    uint8_t *side_page; /* NULL where there is none */
    void *scratch;
    struct lowkey_pack_counts counts;
};

void lowkey_packed_init(struct lowkey_packed *packed, const struct lowkey_side *side, int first_live_slot,
                        int fill);
void lowkey_packed_free(struct lowkey_packed *packed);
/* Pack dense rows x[n][n_heads * head_dim] into slots first_slot.. */
void lowkey_packed_add(struct lowkey_packed *packed, const struct lowkey_kernels *kernels, int first_slot,
                       int n, const float *x);
/* Unpack a head's slots into out[n][head_dim]. */
void lowkey_packed_read(const struct lowkey_packed *packed, const struct lowkey_kernels *kernels, int head,
                        int first_slot, int n, float *out);

#endif
