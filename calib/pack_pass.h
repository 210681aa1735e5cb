/* pack_pass.h - all kept tokens of one side of a layer through the packing kernel, page by page as a cache
 * has them. */
#ifndef LOWKEY_PACK_PASS_H
#define LOWKEY_PACK_PASS_H

#include "calib/captures.h"
#include "calib/weights.h"
#include "kernels/kernels.h"

struct lowkey_packed_page {
    const struct lowkey_side *side;
    const float *x; /* [n_tokens][C] what was packed, C = n_heads * head_dim */
    const float *weight; /* [n_tokens][C] raw; NULL: none */
    int n_tokens, first_slot, first_live_slot;
    int64_t start; /* number of its first token among all kept */
    uint8_t *const *pages; /* [n_heads] */
    const uint8_t *side_page;
};

/* What a head's page gives back. value: [n_tokens][head_dim], by channel. */
void lowkey_packed_page_read(const struct lowkey_packed_page *page, int head, float *value);

struct lowkey_pack_pass {
    const lowkey_captures *captures;
    int layer;
    enum lowkey_stream stream; /* LOWKEY_KEY or LOWKEY_VALUE */
    const struct lowkey_side *side;
    const struct lowkey_weights *weights; /* NULL, or of source NONE: none */
    int n_threads;
    /* Pages of one run of tokens of a sample, in order, from one thread; sums are zero at the start of a
     * run. */
    void (*visit)(void *user, void *sums, const struct lowkey_packed_page *page);
    /* On the calling thread, run after run in the order of samples: so sums do not depend on threads. May
     * be NULL. */
    void (*fold)(void *user, const void *sums);
    size_t sums_bytes;
    void *user;
};

lowkey_status lowkey_pack_pass(const struct lowkey_pack_pass *pass, struct lowkey_pack_counts *counts,
                               lowkey_error *err);

#endif
