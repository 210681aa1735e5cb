/* rope.h - rotary position embedding by an explicit vector of inverse frequencies, both pairings. */
#ifndef LOWKEY_ROPE_H
#define LOWKEY_ROPE_H

#include "runtime/lowkey.h"

enum { LOWKEY_MAX_ROPE_PAIRS = 128 }; /* of a head: head_dim is at most 256 */

/* cosine, sine: [rope_dims / 2], of a position's angles, times the attention factor. */
void lowkey_rope_angles(const lowkey_layer_desc *layer, int64_t position, float *cosine, float *sine);

/* Turn one head's vector x[key_head_dim] into out, which may be x; channels from rope_dims on are copied. */
void lowkey_rope_turn(const lowkey_layer_desc *layer, const float *cosine, const float *sine, const float *x,
                      float *out);

/* Cosines and sines of positions as one layer wants them. Most models turn alike in all layers, and making angles for every
 * head of every layer takes a twentieth of a forward pass. */
struct lowkey_rope_table {
    int n_pairs, max_positions, n_made; /* positions 0..n_made-1 are there */
    double factor;
    double *inv_freq; /* [LOWKEY_MAX_ROPE_PAIRS] that they were made for */
    float *cosine, *sine; /* [max_positions][n_pairs] */
};
int lowkey_rope_table_init(struct lowkey_rope_table *table,
                           int max_positions); /* 0: no memory; free it then, too */
void lowkey_rope_table_free(struct lowkey_rope_table *table);
/* Positions 0..end-1 as the layer turns; nothing to do where they are there already. */
void lowkey_rope_table_make(struct lowkey_rope_table *table, const lowkey_layer_desc *layer, int end);
/* As lowkey_rope_turn, to a position that was made for this layer. */
void lowkey_rope_table_turn(const struct lowkey_rope_table *table, const lowkey_layer_desc *layer,
                            int position, const float *x, float *out);

#endif
