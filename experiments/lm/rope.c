/* rope.c - rotation of queries and keys for the decoder. Angles are made in f64: at position 2^17 an f32 angle would
 * be wrong by 0.004; their cosines are then f32, as the vectors are. */
#include "experiments/lm/rope.h"

#include <math.h>
#include <string.h>

#include "formats/geometry.h"

void lowkey_rope_angles(const lowkey_layer_desc *layer, int64_t position, float *cosine, float *sine)
{
    const double factor = layer->rope_attention_factor != 0 ? layer->rope_attention_factor : 1;
    for (int i = 0; i < layer->rope_dims / 2; i++) {
        const double angle = (double)position * layer->rope_inv_freq[i];
        cosine[i] = (float)(factor * cos(angle));
        sine[i] = (float)(factor * sin(angle));
    }
}

void lowkey_rope_turn(const lowkey_layer_desc *layer, const float *cosine, const float *sine, const float *x,
                      float *out)
{
    for (int i = 0; i < layer->rope_dims / 2; i++) {
        int first, second;
        lowkey_rope_pair(layer->rope_dims, layer->rope_pairing, i, &first, &second);
        const float x1 = x[first], x2 = x[second];
        out[first] = x1 * cosine[i] - x2 * sine[i];
        out[second] = x1 * sine[i] + x2 * cosine[i];
    }
    const size_t rest = (size_t)(layer->key_head_dim - layer->rope_dims);
    if (out != x && rest) memcpy(out + layer->rope_dims, x + layer->rope_dims, rest * sizeof *x);
}
