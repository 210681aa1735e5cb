/* pack_oracle.h - the rules of formats/README.md, "Pages" and "Packing", a second time: written from the document by
 * channel numbers, sharing no code with kernels/ or formats/page.h, and slow. */
#ifndef LOWKEY_TEST_PACK_ORACLE_H
#define LOWKEY_TEST_PACK_ORACLE_H

#include "runtime/lowkey.h"

struct lowkey_oracle_outlier {
    int channel;
    double residual; /* as stored, in units of 2^exponent */
};

struct lowkey_oracle_token { /* of one side of one layer; C = n_heads * head_dim */
    unsigned *codes; /* [C] by channel */
    float *values; /* [C] decoded */
    float *scales, *zeros; /* [n_blocks] as stored */
    int n_outliers;
    struct lowkey_oracle_outlier *outliers; /* [C] channels rising */
    long clamped, saturated;
};

struct lowkey_oracle_token *lowkey_oracle_token_new(int n_channels);
void lowkey_oracle_token_free(struct lowkey_oracle_token *token);

/* Pack x[C]; room: entries that are left in the page. */
void lowkey_oracle_pack(const lowkey_side_desc *side, int n_heads, int head_dim, const float *x, int room,
                        struct lowkey_oracle_token *token);

/* Read from bytes what the document says is there. */
unsigned lowkey_oracle_code(const lowkey_side_desc *side, int head_dim, int head, const uint8_t *page,
                            int channel, int slot);
size_t lowkey_oracle_page_bytes(const lowkey_side_desc *side, int head_dim, int head);
float lowkey_oracle_scale(const lowkey_side_desc *side, int n_channels, const uint8_t *side_page, int slot,
                          int block, int want_zero);
/* The slot's entries; first_live_slot as in the document. Returns how many. */
int lowkey_oracle_outliers(const lowkey_side_desc *side, int n_channels, const uint8_t *side_page, int slot,
                           int first_live_slot, struct lowkey_oracle_outlier *out);
size_t lowkey_oracle_side_page_bytes(const lowkey_side_desc *side, int n_channels);

#endif
