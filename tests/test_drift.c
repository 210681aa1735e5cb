/* Drift: the divergence by hand; captures and caches count the same codes as the fit did; a channel that changed is named. */
#include "experiments/drift.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "calib/fit.h"
#include "calib/fit_options.h"
#include "tests/caches.h"
#include "tests/captured.h"
#include "tests/check.h"

enum { N_SINKS = 3 };

static const int lengths[CAPTURED_SAMPLES] = { 130, 2, 64 };

static lowkey_layer_desc geometry_of(int key_dim, int value_dim)
{
    return (lowkey_layer_desc) { .struct_size = sizeof(lowkey_layer_desc),
                                 .n_q_heads = 4,
                                 .n_kv_heads = 2,
                                 .key_head_dim = key_dim,
                                 .value_head_dim = value_dim,
                                 .logit_scale = 0.25,
                                 .rope_dims = 8,
                                 .rope_attention_factor = 1 };
}

struct bench { /* captures, a quantizer that was fitted to them, and drift of it */
    struct captured captured;
    const char *paths[1];
    char out[80];
    lowkey_quantizer *quantizer;
    struct lowkey_fit_record *record;
    lowkey_drift *drift;
};

static void bench_make(struct bench *b, int key_dim, int value_dim, int bits)
{
    lowkey_error err;
    const lowkey_layer_desc geometry = geometry_of(key_dim, value_dim);
    captured_make(&b->captured, &geometry, lengths, 1u << LOWKEY_KEY | 1u << LOWKEY_VALUE, 3);
    b->paths[0] = b->captured.path;
    snprintf(b->out, sizeof b->out, "%s.out", b->captured.path);
    struct lowkey_fit_options options = lowkey_fit_defaults();
    options.n_sinks = N_SINKS;
    options.side[0].widths[0] = (uint8_t)bits;
    options.side[1].widths[0] = bits == 16 ? 16 : 3;
    assert_ok(lowkey_fit(1, b->paths, b->out, &options, NULL, &err), err);
    assert_ok(lowkey_quantizer_read(b->out, &b->quantizer, &b->record, &err), err);
    assert_ok(lowkey_drift_create(b->quantizer, b->record, &b->drift, &err), err);
}

static void bench_free(struct bench *b)
{
    lowkey_drift_free(b->drift);
    lowkey_fit_record_free(b->record);
    lowkey_quantizer_free(b->quantizer);
    unlink(b->out);
    captured_free(&b->captured);
}

static void divergence_is_that_of_jensen_and_shannon(void **state)
{
    (void)state;
    const uint64_t left[] = { 7, 0 }, right[] = { 0, 9 }, a[] = { 3, 1 }, b[] = { 10, 30 }, none[] = { 0, 0 };
    assert_true(lowkey_divergence(left, right, 2) == 1);
    assert_true(lowkey_divergence(a, a, 2) == 0);
    assert_true(lowkey_divergence(a, none, 2) == 0);
    /* shares 3/4, 1/4 against 1/4, 3/4: 3/4 log2(3/2) + 1/4 log2(1/2) */
    assert_true(fabs(lowkey_divergence(a, b, 2) - (0.75 * log2(1.5) - 0.25)) < 1e-15);
    assert_true(lowkey_divergence(a, b, 2) == lowkey_divergence(b, a, 2));
}

static void its_own_captures_have_the_histograms_of_the_fit(void **state)
{
    (void)state;
    static const int widths[] = { 1, 2, 3, 4, 5 };
    for (int w = 0; w < 5; w++)
        for (int n_threads = 1; n_threads < 4; n_threads += 2) {
            struct bench b;
            lowkey_error err;
            bench_make(&b, w % 2 ? 72 : 16, 8, widths[w]);
            assert_ok(lowkey_drift_add_captures(b.drift, b.out, 1, b.paths, n_threads, &err), err);
            for (int which = 0; which < 2; which++) {
                const struct lowkey_drift_side *side = &b.drift->sides[which];
                const size_t n = which ? 2u * 8 * 8 : 2u * (w % 2 ? 72 : 16) << widths[w];
                assert_int_equal(side->n_tokens, 130 - N_SINKS + 64 - N_SINKS);
                assert_memory_equal(side->counts, b.record->reports[0][which].histogram, n * sizeof(uint64_t));
                assert_true(lowkey_drift_mean(b.drift, which).divergence == 0);
                assert_true(lowkey_drift_mean(b.drift, which).outside == 0);
            }
            bench_free(&b);
        }
}

/* The same tokens in a cache, sample by sample as sequences. */
static void a_cache_gives_the_same_counts_as_captures(void **state)
{
    (void)state;
    struct bench b;
    lowkey_error err;
    bench_make(&b, 16, 24, 2);
    lowkey_context *context = lowkey_test_context(NULL, NULL);
    lowkey_cache *cache = lowkey_test_cache(context, b.quantizer, 8, CAPTURED_SAMPLES, 256);
    for (int s = 0, first = 0; s < CAPTURED_SAMPLES; first += lengths[s++]) {
        const lowkey_rows keys = { .data = b.captured.rows[LOWKEY_KEY] + first * 2 * 16 },
                          values = { .data = b.captured.rows[LOWKEY_VALUE] + first * 2 * 24 };
        assert_ok(lowkey_cache_reserve(cache, s, lengths[s], &err), err);
        assert_ok(lowkey_cache_append(cache, 1, 1, &s, &lengths[s], keys, values, &err), err);
        assert_ok(lowkey_drift_add_cache(b.drift, cache, s, &err), err);
    }
    for (int which = 0; which < 2; which++) {
        const struct lowkey_drift_side *side = &b.drift->sides[which];
        assert_int_equal(side->n_tokens, 130 - N_SINKS + 64 - N_SINKS);
        assert_memory_equal(side->counts, b.record->reports[0][which].histogram,
                            (which ? 2 * 24 * 8 : 2 * 16 * 4) * sizeof(uint64_t));
        assert_true(isnan(lowkey_drift_mean(b.drift, which).outside)); /* x is not there any more */
    }
    assert_refused(lowkey_drift_add_cache(b.drift, cache, 7, &err), LOWKEY_EINVAL, err, "no sequence 7");
    lowkey_cache_free(cache);
    lowkey_context_free(context);
    bench_free(&b);
}

static void a_channel_that_changed_is_the_worst_and_leaves_its_range(void **state)
{
    (void)state;
    struct bench b;
    lowkey_error err;
    size_t n;
    bench_make(&b, 16, 24, 2);
    const size_t at = 24 + 5; /* value, head 1, channel 5 */
    const lowkey_side_desc *value = &lowkey_quantizer_describe(b.quantizer)->layers[0].value;
    uint64_t outside = 0;
    for (int t = 0; t < b.captured.n_tokens; t++) {
        float *x = b.captured.rows[LOWKEY_VALUE] + (size_t)t * 48 + at;
        *x *= 4;
        const int position = t < 130 ? t : t < 132 ? t - 130 : t - 132;
        outside += position >= N_SINKS && (*x < value->lower[at] || *x > value->upper[at]);
    }
    captured_write(&b.captured);
    assert_ok(lowkey_drift_add_captures(b.drift, b.out, 1, b.paths, 2, &err), err);
    struct lowkey_drift_channel *channels = lowkey_drift_channels(b.drift, &n);
    assert_int_equal(n, 2 * 16 + 2 * 24);
    assert_int_equal(channels[0].layer, 1);
    assert_int_equal(channels[0].which, 1);
    assert_int_equal(channels[0].head, 1);
    assert_int_equal(channels[0].channel, 5);
    assert_true(channels[0].divergence > 0.05 && channels[1].divergence == 0);
    assert_true(channels[0].ends > channels[0].ends_fit + 0.2);
    assert_true(outside > 0 && b.drift->sides[1].outside[at] == outside);
    assert_true(channels[0].outside == (double)outside / (130 - N_SINKS + 64 - N_SINKS));
    free(channels);
    bench_free(&b);
}

static void other_models_are_refused_and_sides_without_tables_are_left_out(void **state)
{
    (void)state;
    struct bench b, other;
    lowkey_error err;
    size_t n;
    bench_make(&b, 16, 24, 16);
    bench_make(&other, 72, 24, 2);
    assert_refused(lowkey_drift_add_captures(b.drift, "Q", 1, other.paths, 1, &err), LOWKEY_EFORMAT, err,
                   "key_head_dim: Q has 16");
    assert_ok(lowkey_drift_add_captures(b.drift, "Q", 1, b.paths, 1, &err), err);
    free(lowkey_drift_channels(b.drift, &n));
    assert_int_equal(n, 0);
    bench_free(&b);
    bench_free(&other);
}

static void verdicts_are_as_documented(void **state)
{
    (void)state;
    assert_string_equal(lowkey_drift_verdict(0, 0), "fits");
    assert_string_equal(lowkey_drift_verdict(0.012, 0.25), "fits");
    assert_string_equal(lowkey_drift_verdict(0.001, 0.26), "shifted");
    assert_string_equal(lowkey_drift_verdict(0.03, 0.1), "shifted");
    assert_string_equal(lowkey_drift_verdict(0.031, 0.1), "does not fit");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(divergence_is_that_of_jensen_and_shannon),
        cmocka_unit_test(its_own_captures_have_the_histograms_of_the_fit),
        cmocka_unit_test(a_cache_gives_the_same_counts_as_captures),
        cmocka_unit_test(a_channel_that_changed_is_the_worst_and_leaves_its_range),
        cmocka_unit_test(other_models_are_refused_and_sides_without_tables_are_left_out),
        cmocka_unit_test(verdicts_are_as_documented),
    };
    return lowkey_run_tests(tests);
}
