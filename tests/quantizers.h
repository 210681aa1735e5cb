/* quantizers.h - good descriptions of quantizers for tests to use, spoil, write and read. Every array is there, and
 * filled from a seed. */
#ifndef LOWKEY_TESTS_QUANTIZERS_H
#define LOWKEY_TESTS_QUANTIZERS_H

#include "runtime/lowkey.h"

struct lowkey_test_side {
    int bits[8], n_bits;      /* channel c has bits[c % n_bits] bits */
    lowkey_rule rule_8, rule_16;
    lowkey_token_scale token_scale;
    int scale_block;
    lowkey_outlier_rule outlier_rule;
    int feedback;
    int trellis;              /* survivors a state; 0: none */
};

struct lowkey_test_spec {     /* every layer is like this */
    int n_layers, first_layer, n_q_heads, n_kv_heads, key_head_dim, value_head_dim, rope_dims;
    lowkey_pairing rope_pairing;
    int n_sink_tokens;
    struct lowkey_test_side side[2]; /* key, value */
    unsigned seed;
};

/* Two layers, mixed bits and everything on: what spoiling starts from. */
struct lowkey_test_spec lowkey_test_spec_rich(void);
/* The same shapes with trellises: keys of 1 to 5 bits with feedback, values of 2 and 3. */
struct lowkey_test_spec lowkey_test_spec_trellis(void);

/* Freed by lowkey_test_desc_free. Arrays may be written through a cast: they are this description's own. */
lowkey_quantizer_desc *lowkey_test_desc_make(const struct lowkey_test_spec *spec);
void lowkey_test_desc_free(lowkey_quantizer_desc *desc);

/* Fails the running test where two descriptions differ in any field or element; pointers may differ. */
void lowkey_test_desc_equal(const lowkey_quantizer_desc *a, const lowkey_quantizer_desc *b);

#endif
