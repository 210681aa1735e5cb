/* cases.h - the formats and shapes that tests cross: what comparable projects left out was always the same. */
#ifndef LOWKEY_TEST_CASES_H
#define LOWKEY_TEST_CASES_H

#include "tests/make_quantizer.h"

static const struct lowkey_case_shape {
    int n_q_heads, n_kv_heads, key_head_dim, value_head_dim, rope_dims;
    lowkey_pairing pairing;
} lowkey_shapes[] = {
    { 1, 1, 8, 8, 8, LOWKEY_PAIR_HALF },
    { 9, 3, 64, 64, 64, LOWKEY_PAIR_HALF }, /* SmolLM2-135M */
    { 4, 1, 72, 72, 72, LOWKEY_PAIR_INTERLEAVED },
    { 8, 2, 80, 64, 20, LOWKEY_PAIR_HALF },
    { 7, 1, 96, 96, 0, LOWKEY_PAIR_HALF },
    { 8, 1, 128, 128, 64, LOWKEY_PAIR_INTERLEAVED },
    { 2, 2, 192, 128, 64, LOWKEY_PAIR_INTERLEAVED },
    { 2, 1, 256, 256, 256, LOWKEY_PAIR_HALF },
    { 14, 2, 120, 112, 40, LOWKEY_PAIR_HALF }, /* seven query heads to each KV head */
    { 8, 8, 8, 16, 8, LOWKEY_PAIR_INTERLEAVED },
};
enum { LOWKEY_N_SHAPES = sizeof lowkey_shapes / sizeof lowkey_shapes[0] };

static const struct lowkey_case_format {
    const char *name;
    struct lowkey_side_choice side;
} lowkey_formats[] = {
    { "1 bit", { .bits = 1 } },
    { "2 bits", { .bits = 2, .shuffled = 1 } },
    { "3 bits", { .bits = 3 } },
    { "4 bits", { .bits = 4, .few_entries = 1, .constant_channels = 1 } },
    { "5 bits", { .bits = 5 } },
    { "e4m3", { .bits = 8, .rule_8 = LOWKEY_RULE_E4M3 } },
    { "e5m2", { .bits = 8, .rule_8 = LOWKEY_RULE_E5M2 } },
    { "int8", { .bits = 8, .rule_8 = LOWKEY_RULE_INT8, .feedback = 1 } },
    { "f16", { .bits = 16 } },
    { "bf16", { .bits = 16, .rule_16 = LOWKEY_RULE_BF16 } },
    { "mixed", { .bits = LOWKEY_MIXED_BITS, .shuffled = 1, .few_entries = 1 } },
    { "2 bits, feedback", { .bits = 2, .feedback = 1, .shuffled = 1 } },
    { "mixed, feedback, limit",
      { .bits = LOWKEY_MIXED_BITS,
        .feedback = 1,
        .outlier_rule = LOWKEY_OUTLIER_LIMIT,
        .outlier_cap = 3,
        .shuffled = 1,
        .constant_channels = 1 } },
    { "3 bits, limit, small page",
      { .bits = 3, .outlier_rule = LOWKEY_OUTLIER_LIMIT, .outlier_cap = 4, .outlier_page_capacity = 50 } },
    { "mixed, rank", { .bits = LOWKEY_MIXED_BITS, .outlier_rule = LOWKEY_OUTLIER_RANK, .outlier_rank = 2 } },
    { "3 bits, f16 scale, rank, feedback",
      { .bits = 3,
        .feedback = 1,
        .token_scale = LOWKEY_SCALE_F16,
        .outlier_rule = LOWKEY_OUTLIER_RANK,
        .outlier_rank = 1 } },
    { "mixed, f32 scales of 8, rank, small page",
      { .bits = LOWKEY_MIXED_BITS,
        .token_scale = LOWKEY_SCALE_F32,
        .scale_block = 8,
        .outlier_rule = LOWKEY_OUTLIER_RANK,
        .outlier_rank = 3,
        .outlier_cap = 5,
        .outlier_page_capacity = 70,
        .few_entries = 1,
        .shuffled = 1 } },
    { "2 bits, f16 scales of 8",
      { .bits = 2, .token_scale = LOWKEY_SCALE_F16, .scale_block = 8, .few_entries = 1 } },
    { "1 bit, trellis of 4", { .bits = 1, .trellis = 4 } },
    { "2 bits, trellis, feedback", { .bits = 2, .trellis = 1, .feedback = 1, .shuffled = 1 } },
    { "3 bits, trellis", { .bits = 3, .trellis = 1, .shuffled = 1 } },
    { "4 bits, trellis of 2, feedback", { .bits = 4, .trellis = 2, .feedback = 1 } },
    { "5 bits, trellis of 2", { .bits = 5, .trellis = 2, .few_entries = 1 } },
    { "mixed, trellis of 4, feedback",
      { .bits = LOWKEY_MIXED_BITS,
        .trellis = 4,
        .feedback = 1,
        .shuffled = 1,
        .few_entries = 1,
        .constant_channels = 1 } },
};
enum { LOWKEY_N_FORMATS = sizeof lowkey_formats / sizeof lowkey_formats[0] };

static inline struct lowkey_quantizer_choice lowkey_case(int shape, int key_format, int value_format)
{
    const struct lowkey_case_shape *s = &lowkey_shapes[shape];
    return (struct lowkey_quantizer_choice) {
        .n_q_heads = s->n_q_heads,
        .n_kv_heads = s->n_kv_heads,
        .key_head_dim = s->key_head_dim,
        .value_head_dim = s->value_head_dim,
        .rope_dims = s->rope_dims,
        .rope_pairing = s->pairing,
        .key = lowkey_formats[key_format].side,
        .value = lowkey_formats[value_format].side,
        .seed = 1000u * (unsigned)shape + 31u * (unsigned)key_format + (unsigned)value_format,
    };
}

#endif
