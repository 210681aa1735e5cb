/* attend_scalar.c - attention of some query rows over one page: dequantize once, turn the keys to their positions,
 * then a softmax for each row, folded into what earlier pages gave. */
#include <float.h>
#include <math.h>

#include "formats/block.h"
#include "formats/geometry.h"
#include "kernels/element.h"
#include "kernels/kernels.h"

struct scratch {
    float *keys; /* [64][key_head_dim] as stored, before RoPE */
    float *turned; /* [key_head_dim][64] after RoPE, so that scores of all slots are summed side by side */
    float *values; /* [64][value_head_dim] */
    float *scores; /* [64], then weights */
    float *out; /* [value_head_dim] of one row */
};

static struct scratch take_scratch(struct lowkey_block *block, int key_head_dim, int value_head_dim)
{
    struct scratch scratch;
    scratch.keys = lowkey_block_take(block, LOWKEY_PAGE_SLOTS * (size_t)key_head_dim, sizeof *scratch.keys);
    scratch.turned = lowkey_block_take(block, LOWKEY_PAGE_SLOTS * (size_t)key_head_dim,
                                       sizeof *scratch.turned);
    scratch.values = lowkey_block_take(block, LOWKEY_PAGE_SLOTS * (size_t)value_head_dim,
                                       sizeof *scratch.values);
    scratch.scores = lowkey_block_take(block, LOWKEY_PAGE_SLOTS, sizeof *scratch.scores);
    scratch.out = lowkey_block_take(block, (size_t)value_head_dim, sizeof *scratch.out);
    return scratch;
}

size_t lowkey_attend_scratch_bytes(const struct lowkey_side *key, const struct lowkey_side *value)
{
    struct lowkey_block block = { 0 };
    take_scratch(&block, key->head_dim, value->head_dim);
    return block.used;
}

/* Slots 0..n_slots-1 of keys or values into out[slot][channel]: sinks from their store, the rest from the page. */
static void load(const struct lowkey_attend_page_args *args, int n_slots, const struct lowkey_side *side,
                 const uint8_t *page, const uint8_t *side_page, const uint16_t *sinks, ptrdiff_t sink_stride,
                 float *out)
{
    const int D = side->head_dim, n_sinks = args->n_sink_slots < n_slots ? args->n_sink_slots : n_slots;
    for (int t = 0; t < n_sinks; t++)
        for (int c = 0; c < D; c++)
            out[t * D + c] = lowkey_decode_16(args->sink_rule, sinks[t * sink_stride + c]);
    if (n_sinks == n_slots) return;
    lowkey_unpack_scalar(&(struct lowkey_unpack_args) { .side = side,
                                                        .head = args->head,
                                                        .page = page,
                                                        .side_page = side_page,
                                                        .first_slot = n_sinks,
                                                        .n_slots = n_slots - n_sinks,
                                                        .first_live_slot = args->n_sink_slots,
                                                        .out = out + n_sinks * D,
                                                        .out_stride = D });
}

/* Turn each slot's key by the page's base angle and the slot's own: the angle of the sum from both cosines and sines. */
static void turn_keys(const struct lowkey_attend_page_args *args, int n_slots, const struct scratch *scratch)
{
    const int D = args->key->head_dim, n_pairs = args->rope_dims / 2;
    for (int i = 0; i < n_pairs; i++) {
        int first, second;
        lowkey_rope_pair(args->rope_dims, args->rope_pairing, i, &first, &second);
        float *turned_x = scratch->turned + first * LOWKEY_PAGE_SLOTS,
              *turned_y = scratch->turned + second * LOWKEY_PAGE_SLOTS;
        for (int t = 0; t < n_slots; t++) {
            const float slot_cos = args->slot_cos[t * n_pairs + i],
                        slot_sin = args->slot_sin[t * n_pairs + i];
            const float cosine = args->base_cos[i] * slot_cos - args->base_sin[i] * slot_sin;
            const float sine = args->base_sin[i] * slot_cos + args->base_cos[i] * slot_sin;
            const float x = scratch->keys[t * D + first], y = scratch->keys[t * D + second];
            turned_x[t] = x * cosine - y * sine;
            turned_y[t] = x * sine + y * cosine;
        }
    }
    for (int c = args->rope_dims; c < D; c++)
        for (int t = 0; t < n_slots; t++)
            scratch->turned[c * LOWKEY_PAGE_SLOTS + t] = scratch->keys[t * D + c];
}

/* One row over slots 0..n-1, n > 0, into scratch->out, *max and *sum. Products and sums are rounded apart, so that wider
 * registers give the same bits (a third faster). */
LOWKEY_CLONES("avx2")
static void attend_row(const struct lowkey_attend_page_args *args, const float *q, int n,
                       const struct scratch *scratch, float *max, float *sum)
{
    float *scores = scratch->scores, *out = scratch->out;
    for (int t = 0; t < n; t++) scores[t] = 0;
    for (int c = 0; c < args->key->head_dim; c++) {
        const float *keys = scratch->turned + c * LOWKEY_PAGE_SLOTS;
        for (int t = 0; t < n; t++) scores[t] += q[c] * keys[t];
    }
    *max = -INFINITY;
    for (int t = 0; t < n; t++) {
        scores[t] = fminf(fmaxf(scores[t], -FLT_MAX), FLT_MAX); /* past f32's range: large, not NaN */
        *max = fmaxf(*max, scores[t]);
    }
    *sum = 0;
    for (int t = 0; t < n; t++) *sum += scores[t] = expf(scores[t] - *max);
    for (int c = 0; c < args->value->head_dim; c++) out[c] = 0;
    for (int t = 0; t < n; t++) {
        const float weight = scores[t] / *sum, *value = scratch->values + t * args->value->head_dim;
        for (int c = 0; c < args->value->head_dim; c++) out[c] += weight * value[c];
    }
    for (int c = 0; c < args->value->head_dim; c++) out[c] = lowkey_within_f32(out[c]);
}

void lowkey_attend_page_scalar(const struct lowkey_attend_page_args *args)
{
    const int key_dim = args->key->head_dim, value_dim = args->value->head_dim;
    const struct scratch scratch = take_scratch(&(struct lowkey_block) { .base = args->scratch }, key_dim,
                                                value_dim);
    int n_slots = 0; /* that any row sees */
    for (int j = 0; j < args->n_rows; j++)
        if (args->n_visible[j] > n_slots) n_slots = args->n_visible[j];
    if (n_slots == 0) return;
    load(args, n_slots, args->key, args->key_page, args->key_side_page, args->key_sinks,
         args->key_sink_stride, scratch.keys);
    load(args, n_slots, args->value, args->value_page, args->value_side_page, args->value_sinks,
         args->value_sink_stride, scratch.values);
    turn_keys(args, n_slots, &scratch);
    for (int j = 0; j < args->n_rows; j++) {
        if (args->n_visible[j] == 0) continue;
        float max, sum;
        attend_row(args, args->q + (size_t)j * (size_t)key_dim, args->n_visible[j], &scratch, &max, &sum);
        lowkey_merge_scalar(1, value_dim,
                            (struct lowkey_state) { args->state.out + (size_t)j * (size_t)value_dim,
                                                    args->state.max + j, args->state.sum + j },
                            (struct lowkey_state) { scratch.out, &max, &sum });
    }
}
