/* Moments of packed tokens against the same sums written out, and the corrections by hand. */
#include <math.h>
#include <stdlib.h>

#include <gsl/gsl_randist.h>
#include <gsl/gsl_rng.h>

#include "calib/moments.h"
#include "tests/captured.h"
#include "tests/check.h"
#include "tests/make_quantizer.h"
#include "tests/pack_oracle.h"

static void gain_restores_the_spread_of_what_it_saw(void **state)
{
    (void)state;
    /* u = 0, 1, 2, 3 and v = 0.5, 0.5, 2.5, 2.5: var(u) = 1.25, cov = 1, means 1.5 */
    struct lowkey_channel_moments m = { .n = 4, .u = 6, .uu = 14, .v = 6, .vv = 13, .uv = 0.5 + 5 + 7.5 };
    struct lowkey_correction correction = lowkey_gain_correction(&m, 10);
    assert_true(fabs(correction.factor - 1.25) < 1e-12);
    assert_true(correction.from == 11.5 && correction.to == 11.5);
    /* Every v 0.25 higher: entries are moved about the mean of v, to that of u. */
    const struct lowkey_channel_moments higher = {
        .n = 4, .u = 6, .uu = 14, .v = 7, .vv = 16.25, .uv = m.uv + 1.5
    };
    correction = lowkey_gain_correction(&higher, 10);
    assert_true(fabs(correction.factor - 1.25) < 1e-12 && correction.from == 11.75 && correction.to == 11.5);
    m.uv = 6 * 6 / 4.0; /* covariance 0 */
    correction = lowkey_gain_correction(&m, 10);
    assert_true(correction.factor == 1 && correction.to == correction.from);
    m = (struct lowkey_channel_moments) { 0 };
    correction = lowkey_gain_correction(&m, 0);
    assert_true(correction.factor == 1 && correction.to == correction.from);
}

static void qnorm_matches_mean_and_deviation(void **state)
{
    (void)state;
    /* Two channels of one codebook: x = zero + scale * u with u as above and v = 0.5, 0.5, 2, 2 */
    const double u[4] = { 0, 1, 2, 3 }, v[4] = { 0.5, 0.5, 2, 2 };
    const double zero[3] = { 5, -100, 0 }, scale[3] = { 2, 0.1, 0 }, shift[3] = { 4, -100.5, 0 };
    struct lowkey_channel_moments m[3] = { { 0 } };
    for (int c = 0; c < 3; c++)
        for (int i = 0; i < 4; i++) {
            const double a = zero[c] + scale[c] * u[i] - shift[c], b = zero[c] + scale[c] * v[i] - shift[c];
            m[c].n++, m[c].u += a, m[c].uu += a * a, m[c].v += b, m[c].vv += b * b, m[c].uv += a * b;
        }
    const struct lowkey_correction got = lowkey_qnorm_correction(3, m, shift, zero, scale);
    assert_true(fabs(got.factor - sqrt(1.25) / 0.75) < 1e-9);
    assert_true(fabs(got.from - 1.25) < 1e-9 && fabs(got.to - 1.5) < 1e-9);
}

/* Every format of the shape: the sums of a pass against those of the packing oracle. */
static void check_format(const struct lowkey_side_choice *format, int n_threads)
{
    static const int lengths[CAPTURED_SAMPLES] = { 150, 3, 70 };
    struct lowkey_quantizer_choice choice = { .n_q_heads = 2,
                                              .n_kv_heads = 2,
                                              .key_head_dim = 16,
                                              .value_head_dim = 16,
                                              .rope_dims = 16,
                                              .n_sink_tokens = 4,
                                              .key = *format,
                                              .value = *format };
    lowkey_quantizer *quantizer = lowkey_make_quantizer(&choice, NULL);
    const struct lowkey_layer *layer = lowkey_quantizer_layer_at(quantizer, 0);
    const lowkey_side_desc *desc = &layer->desc->value;
    struct captured captured;
    captured_make(&captured, layer->desc, lengths,
                  1u << LOWKEY_KEY | 1u << LOWKEY_VALUE | 1u << LOWKEY_VALUE_WEIGHT, 3);
    struct lowkey_random random = { 5 };
    lowkey_make_rows(&random, layer->desc, 1, LOWKEY_NORMAL, captured.n_tokens, captured.rows[LOWKEY_VALUE]);
    captured_write(&captured);
    enum { C = 32 };
    const int E = desc->table_entries;
    struct lowkey_channel_moments channel[C], want[C] = { { 0 } };
    double shift[C], shift_x[C];
    struct lowkey_weight_shape shapes[C];
    uint64_t histogram[C * 32], counted[C * 32] = { 0 };
    for (int c = 0; c < C; c++) {
        shift[c] = 0.25 * c, shift_x[c] = -0.5 * c;
        shapes[c] = (struct lowkey_weight_shape) { .largest = 2, .clip = 0.9, .floor = 0.1, .mean = 0.5 };
    }
    struct lowkey_moments moments = { .n_channels = C,
                                      .n_table = E,
                                      .shift = shift,
                                      .shift_x = shift_x,
                                      .shapes = shapes,
                                      .channel = channel,
                                      .histogram = histogram };
    lowkey_captures *captures;
    lowkey_error err;
    const char *paths[] = { captured.path };
    assert_ok(lowkey_captures_open(1, paths, 0, 0, 4, &captures, &err), err);
    const struct lowkey_weights weights = { LOWKEY_WEIGHTS_FILE, captures, 0, 16, LOWKEY_VALUE_WEIGHT, NULL };
    const struct lowkey_pack_pass pass = { .captures = captures,
                                           .stream = LOWKEY_VALUE,
                                           .side = &layer->side[1],
                                           .weights = &weights,
                                           .n_threads = n_threads };
    assert_ok(lowkey_moments_run(&pass, &moments, &err), err);
    struct lowkey_oracle_token *token = lowkey_oracle_token_new(C);
    long n_outliers = 0, n_clamped = 0, n_saturated = 0;
    for (int s = 0, start = 0; s < CAPTURED_SAMPLES; start += lengths[s++])
        for (int t = 4, room = desc->outlier_page_capacity; t < lengths[s]; t++) {
            const float *x = captured.rows[LOWKEY_VALUE] + (start + t) * C;
            const float *raw = captured.rows[LOWKEY_VALUE_WEIGHT] + (start + t) * C;
            if (t % 64 == 0) room = desc->outlier_page_capacity;
            lowkey_oracle_pack(desc, 2, 16, x, room, token);
            room -= token->n_outliers;
            n_outliers += token->n_outliers, n_clamped += token->clamped, n_saturated += token->saturated;
            for (int c = 0; c < C; c++) {
                struct lowkey_channel_moments *m = &want[c];
                const double e = (double)token->values[c] - (double)x[c];
                const double w = fmin(fmax((double)raw[c] / 2, 0.1), 0.9);
                m->x += (double)x[c] - shift_x[c], m->xx += pow((double)x[c] - shift_x[c], 2);
                m->error += e * e, m->weighted_error += w * e * e, m->weight += w;
                int is_outlier = 0;
                for (int o = 0; o < token->n_outliers; o++) is_outlier |= token->outliers[o].channel == c;
                if (desc->bits[c] > 5) continue;
                counted[c * E + (int)token->codes[c]]++;
                if (desc->outlier_rule == LOWKEY_OUTLIER_LIMIT &&
                    (x[c] > desc->upper[c] || x[c] < desc->lower[c]))
                    is_outlier = 1;
                const int block = desc->token_scale ? c / desc->scale_block : 0;
                const double scale = desc->token_scale ? (double)token->scales[block] : 1;
                const double zero = desc->token_scale ? (double)token->zeros[block] : 0;
                if (is_outlier || scale == 0) continue;
                const double u = ((double)x[c] - zero) / scale - shift[c];
                const double v = (double)desc->table[c * E + (int)token->codes[c]] - shift[c];
                m->n++, m->u += u, m->uu += u * u, m->v += v, m->vv += v * v, m->uv += u * v;
            }
        }
    assert_int_equal(moments.counts.outliers, n_outliers);
    assert_int_equal(moments.counts.clamped, n_clamped);
    assert_int_equal(moments.counts.saturated, n_saturated);
    for (int c = 0; c < C; c++) {
        const double *got = &channel[c].n, *expected = &want[c].n;
        for (size_t i = 0; i < sizeof want[c] / sizeof(double); i++)
            assert_true(fabs(got[i] - expected[i]) <= 1e-6 * fabs(expected[i]) + 1e-9);
        for (int k = 0; k < E; k++) assert_int_equal(histogram[c * E + k], counted[c * E + k]);
    }
    lowkey_oracle_token_free(token);
    lowkey_captures_close(captures);
    captured_free(&captured);
    lowkey_quantizer_free(quantizer);
}

static void sums_of_a_pass_are_those_of_the_oracle(void **state)
{
    (void)state;
    static const struct lowkey_side_choice formats[] = {
        { .bits = 1 },
        { .bits = 3, .feedback = 1, .shuffled = 1 },
        { .bits = LOWKEY_MIXED_BITS, .shuffled = 1 },
        { .bits = LOWKEY_MIXED_BITS,
          .outlier_rule = LOWKEY_OUTLIER_LIMIT,
          .outlier_cap = 3,
          .outlier_page_capacity = 60 },
        { .bits = 2,
          .token_scale = LOWKEY_SCALE_F16,
          .outlier_rule = LOWKEY_OUTLIER_RANK,
          .outlier_rank = 1 },
        { .bits = LOWKEY_MIXED_BITS, .token_scale = LOWKEY_SCALE_F32, .scale_block = 8 },
    };
    for (size_t f = 0; f < sizeof formats / sizeof formats[0]; f++)
        for (int threads = 1; threads < 4; threads += 2) check_format(&formats[f], threads);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gain_restores_the_spread_of_what_it_saw),
        cmocka_unit_test(qnorm_matches_mean_and_deviation),
        cmocka_unit_test(sums_of_a_pass_are_those_of_the_oracle),
    };
    return lowkey_run_tests(tests);
}
