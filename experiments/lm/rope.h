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

#endif
