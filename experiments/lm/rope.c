/* rope.c - rotation of queries and keys for the decoder. Angles are made in f64: at position 2^17 an f32 angle would
 * be wrong by 0.004; their cosines are then f32, as the vectors are. */
#include "experiments/lm/rope.h"

#include <math.h>
#include <stdlib.h>
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

int lowkey_rope_table_init(struct lowkey_rope_table *table, int max_positions)
{
    *table = (struct lowkey_rope_table) { .max_positions = max_positions };
    const size_t n = (size_t)max_positions;
    table->inv_freq = calloc(LOWKEY_MAX_ROPE_PAIRS, sizeof *table->inv_freq);
    table->cosine = calloc(n, LOWKEY_MAX_ROPE_PAIRS * sizeof *table->cosine);
    table->sine = calloc(n, LOWKEY_MAX_ROPE_PAIRS * sizeof *table->sine);
    return table->inv_freq && table->cosine && table->sine;
}

void lowkey_rope_table_free(struct lowkey_rope_table *table)
{
    free(table->inv_freq);
    free(table->cosine);
    free(table->sine);
    *table = (struct lowkey_rope_table) { 0 };
}

void lowkey_rope_table_make(struct lowkey_rope_table *table, const lowkey_layer_desc *layer, int end)
{
    const int n_pairs = layer->rope_dims / 2;
    int same = table->n_pairs == n_pairs && table->factor == layer->rope_attention_factor;
    for (int i = 0; same && i < n_pairs; i++) same = table->inv_freq[i] == layer->rope_inv_freq[i];
    if (!same) {
        table->n_pairs = n_pairs;
        table->n_made = 0;
        table->factor = layer->rope_attention_factor;
        for (int i = 0; i < n_pairs; i++) table->inv_freq[i] = layer->rope_inv_freq[i];
    }
    for (; table->n_made < end; table->n_made++) {
        const size_t at = (size_t)table->n_made * (size_t)n_pairs;
        lowkey_rope_angles(layer, table->n_made, table->cosine + at, table->sine + at);
    }
}

void lowkey_rope_table_turn(const struct lowkey_rope_table *table, const lowkey_layer_desc *layer,
                            int position, const float *x, float *out)
{
    const size_t at = (size_t)position * (size_t)table->n_pairs;
    lowkey_rope_turn(layer, table->cosine + at, table->sine + at, x, out);
}
