/* make_quantizer.h - quantizers of any format with random content, for tests of what uses them. */
#ifndef LOWKEY_TEST_MAKE_QUANTIZER_H
#define LOWKEY_TEST_MAKE_QUANTIZER_H

#include "runtime/lowkey.h"
#include "tests/random.h"

enum { LOWKEY_MIXED_BITS = 0 }; /* 1..5, 8 and 16, drawn for every channel */

struct lowkey_side_choice { /* all zero: mixed bits, nothing else */
    int bits; /* 1..5, 8, 16, or LOWKEY_MIXED_BITS */
    lowkey_rule rule_8, rule_16; /* NONE: E4M3, F16 */
    lowkey_token_scale token_scale;
    int scale_block; /* 0: all channels */
    lowkey_outlier_rule outlier_rule;
    int outlier_rank, outlier_cap, outlier_page_capacity; /* cap and capacity 0: room for all */
    int feedback; /* random factors */
    int few_entries; /* some channels use fewer entries than their width has */
    int constant_channels; /* some channels have lower == upper and one entry */
    int shuffled; /* a random order of rows (RoPE partners together), else the default */
    int trellis; /* survivors a state: 1, 2, 4; mixed bits are then 1..5 */
    double magnitude; /* channels are about so large; 0: 1, with a spread of 2^-4..2^4 and some offsets */
};

struct lowkey_quantizer_choice {
    int n_layers; /* 0: 1. Layer i has the index 2 * i + 1 */
    int n_q_heads, n_kv_heads, key_head_dim, value_head_dim;
    int rope_dims;
    lowkey_pairing rope_pairing;
    int rope_varies; /* layers 1, 4, 7, ... turn half as fast as the others */
    double rope_attention_factor, logit_scale;
    int n_sink_tokens;
    lowkey_rule sink_rule;
    struct lowkey_side_choice key, value;
    uint64_t seed;
};

/* Fails the test if the description is refused. allocator may be NULL. */
lowkey_quantizer *lowkey_make_quantizer(const struct lowkey_quantizer_choice *choice,
                                        const lowkey_allocator *allocator);

/* Free the arrays of a side, each malloc'd. */
void lowkey_test_side_free(const lowkey_side_desc *side);

/* Rows of a side: x[n][n_heads * head_dim], drawn about each channel's range, a few elements beyond it, some exactly
 * on boundaries, with a trellis in the middle of two entries of a subset. which: 0 keys, 1 values. */
void lowkey_make_rows(struct lowkey_random *random, const lowkey_layer_desc *layer, int which,
                      enum lowkey_distribution distribution, int n, float *x);

#endif
