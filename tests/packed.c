/* packed.c - pages in guarded buffers. */
#include "tests/packed.h"

#include <stdlib.h>

#include "tests/check.h"

enum { GUARD = 64, GUARD_BYTE = 0xa5 };

void *lowkey_guarded_new(size_t bytes, int fill)
{
    uint8_t *base = aligned_alloc(64, (2 * GUARD + bytes + 63) / 64 * 64);
    assert_non_null(base);
    memset(base, GUARD_BYTE, GUARD);
    memcpy(base, &bytes, sizeof bytes);
    memset(base + GUARD, fill, bytes);
    memset(base + GUARD + bytes, GUARD_BYTE, GUARD);
    return base + GUARD;
}

void lowkey_guarded_check(const void *block)
{
    const uint8_t *base = (const uint8_t *)block - GUARD;
    size_t bytes;
    memcpy(&bytes, base, sizeof bytes);
    for (size_t i = sizeof bytes; i < GUARD; i++) assert_int_equal(base[i], GUARD_BYTE);
    for (size_t i = 0; i < GUARD; i++) assert_int_equal(base[GUARD + bytes + i], GUARD_BYTE);
}

void lowkey_guarded_free(void *block)
{
    if (!block) return;
    lowkey_guarded_check(block);
    free((uint8_t *)block - GUARD);
}

void lowkey_packed_init(struct lowkey_packed *packed, const struct lowkey_side *side, int first_live_slot,
                        int fill)
{
    *packed = (struct lowkey_packed) { .side = side, .first_live_slot = first_live_slot };
    assert_in_range(side->n_heads, 1, 64);
    for (int h = 0; h < side->n_heads; h++)
        packed->pages[h] = lowkey_guarded_new(side->heads[h].page_bytes, fill);
    if (side->layout.bytes) packed->side_page = lowkey_guarded_new(side->layout.bytes, fill);
    packed->scratch = lowkey_guarded_new(lowkey_pack_scratch_bytes(side), fill);
}

void lowkey_packed_free(struct lowkey_packed *packed)
{
    for (int h = 0; h < packed->side->n_heads; h++) lowkey_guarded_free(packed->pages[h]);
    lowkey_guarded_free(packed->side_page);
    lowkey_guarded_free(packed->scratch);
}

void lowkey_packed_add(struct lowkey_packed *packed, const struct lowkey_kernels *kernels, int first_slot,
                       int n, const float *x)
{
    const int d = packed->side->head_dim;
    kernels->pack(&(struct lowkey_pack_args) { .side = packed->side,
                                               .x = x,
                                               .token_stride = packed->side->n_heads * d,
                                               .head_stride = d,
                                               .n_tokens = n,
                                               .first_slot = first_slot,
                                               .first_live_slot = packed->first_live_slot,
                                               .pages = packed->pages,
                                               .side_page = packed->side_page,
                                               .scratch = packed->scratch,
                                               .counts = &packed->counts });
}

void lowkey_packed_read(const struct lowkey_packed *packed, const struct lowkey_kernels *kernels, int head,
                        int first_slot, int n, float *out)
{
    kernels->unpack(&(struct lowkey_unpack_args) { .side = packed->side,
                                                   .head = head,
                                                   .page = packed->pages[head],
                                                   .side_page = packed->side_page,
                                                   .first_slot = first_slot,
                                                   .n_slots = n,
                                                   .first_live_slot = packed->first_live_slot,
                                                   .out = out,
                                                   .out_stride = packed->side->head_dim });
}
