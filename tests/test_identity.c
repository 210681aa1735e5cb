/* test_identity.c - files of the same model agree, whatever they are; of another hash, geometry, theta, layer set or
 * samples they are refused with both values. */
#include <math.h>

#include "formats/identity.h"
#include "tests/check.h"

enum { N = 3, PAIRS = 4 };
static lowkey_error err;

struct subject { /* one model's worth of identity, to be spoilt */
    double inv_freq[N][PAIRS];
    lowkey_layer_desc layers[N];
    unsigned char sha256[32], samples[2][32];
    struct lowkey_identity identity;
};

static void make(struct subject *s, const char *name, double theta)
{
    *s = (struct subject) { .sha256 = { 1, 2, 0xab }, .samples = { { 3 }, { 4 } } };
    for (int i = 0; i < N; i++) {
        for (int p = 0; p < PAIRS; p++) s->inv_freq[i][p] = pow(theta, -2.0 * p / (2 * PAIRS));
        s->layers[i] = (lowkey_layer_desc) { .struct_size = sizeof s->layers[i],
                                             .index = 2 * i,
                                             .n_q_heads = 6,
                                             .n_kv_heads = 2,
                                             .key_head_dim = 16,
                                             .value_head_dim = 8,
                                             .logit_scale = 0.25,
                                             .rope_dims = 2 * PAIRS,
                                             .rope_attention_factor = 1,
                                             .rope_inv_freq = s->inv_freq[i] };
    }
    s->identity = (struct lowkey_identity) { .name = name,
                                             .model_name = "m",
                                             .model_sha256 = s->sha256,
                                             .n_model_layers = 5,
                                             .n_layers = N,
                                             .layers = s->layers,
                                             .n_samples = 2,
                                             .sample_sha256 = (const unsigned char(*)[32])s->samples };
}

static struct subject a, b;

static void reset(void)
{
    make(&a, "a.h5", 1e4);
    make(&b, "b.h5", 1e4);
}

static lowkey_status check(unsigned flags)
{
    return lowkey_identity_check(&a.identity, &b.identity, flags, &err);
}

static void the_same_model_agrees_whatever_its_name(void **state)
{
    (void)state;
    reset();
    b.identity.model_name = "another name of it";
    assert_ok(check(LOWKEY_SAME_LAYERS | LOWKEY_SAME_SAMPLES), err);
    b.identity.n_model_layers = 0; /* a quantizer in memory does not know */
    assert_ok(check(0), err);
    for (int p = 0; p < PAIRS; p++)
        b.inv_freq[1][p] = (double)(float)b.inv_freq[1][p]; /* another framework's rounding */
    assert_ok(check(0), err);
}

static void each_difference_is_refused_with_both_values(void **state)
{
    (void)state;
#define REFUSED(code, words)                                                                                 \
    do {                                                                                                     \
        reset();                                                                                             \
        code;                                                                                                \
        assert_refused(check(LOWKEY_SAME_SAMPLES), LOWKEY_EFORMAT, err, words);                              \
        const struct subject kept = a;                                                                       \
        a = b, b = kept; /* the other way round it is refused too */                                         \
        a.identity.layers = a.layers, b.identity.layers = b.layers;                                          \
        for (int i = 0; i < N; i++)                                                                          \
            a.layers[i].rope_inv_freq = a.inv_freq[i], b.layers[i].rope_inv_freq = b.inv_freq[i];            \
        a.identity.model_sha256 = a.sha256, b.identity.model_sha256 = b.sha256;                              \
        a.identity.sample_sha256 = (const unsigned char(*)[32])a.samples;                                    \
        b.identity.sample_sha256 = (const unsigned char(*)[32])b.samples;                                    \
        assert_int_equal(check(LOWKEY_SAME_SAMPLES), LOWKEY_EFORMAT);                                        \
    } while (0)
    REFUSED(b.sha256[31] = 0xfe,
            "model_sha256: a.h5 is of model m, 0102ab00000000000000000000000000000000000000000000000000000000"
            "00; b.h5 is of model m, 0102ab00000000000000000000000000000000000000000000000000000000fe");
    REFUSED(b.identity.n_model_layers = 6, "n_layers: a.h5 has 5, b.h5 has 6");
    REFUSED(b.layers[1].n_q_heads = 8, "layer 2: n_q_heads: a.h5 has 6, b.h5 has 8");
    REFUSED(b.layers[1].n_kv_heads = 6, "layer 2: n_kv_heads: a.h5 has 2, b.h5 has 6");
    REFUSED(b.layers[2].key_head_dim = 24, "layer 4: key_head_dim: a.h5 has 16, b.h5 has 24");
    REFUSED(b.layers[0].value_head_dim = 16, "layer 0: value_head_dim: a.h5 has 8, b.h5 has 16");
    REFUSED(b.layers[0].logit_scale = 0.125, "layer 0: logit_scale: a.h5 has 0.25, b.h5 has 0.125");
    REFUSED(b.layers[0].rope_dims = 6, "layer 0: rope_dims: a.h5 has 8, b.h5 has 6");
    REFUSED(b.layers[0].rope_pairing = LOWKEY_PAIR_INTERLEAVED,
            "layer 0: rope_pairing: a.h5 has half, b.h5 has interleaved");
    REFUSED(b.layers[0].rope_attention_factor = 1.1,
            "layer 0: rope_attention_factor: a.h5 has 1, b.h5 has 1.1");
    REFUSED(make(&b, "b.h5", 5e5),
            "layer 0: rope_inv_freq pair 1 (another theta?): a.h5 has 0.1, b.h5 has 0.0376060309");
    REFUSED(make(&b, "b.h5", 10001), "layer 0: rope_inv_freq pair 1");
    REFUSED(b.inv_freq[2][3] = 0,
            "layer 4: rope_inv_freq pair 3 (another theta?): a.h5 has 0.001, b.h5 has 0");
    REFUSED(b.samples[1][0] = 9, "sample_sha256 sample 1: a.h5 has 04000000");
    REFUSED(b.identity.n_samples = 1, "sample_sha256: a.h5 has 2 samples, b.h5 has 1");
}

static void layers_of_b_must_be_in_a_and_the_same_where_asked(void **state)
{
    (void)state;
    for (int left_out = 0; left_out < N; left_out++) {
        reset();
        for (int i = left_out; i + 1 < N; i++) b.layers[i] = b.layers[i + 1];
        b.identity.n_layers = N - 1;
        char words[100];
        snprintf(words, sizeof words, "layer %d: a.h5 has it, b.h5 has not", 2 * left_out);
        assert_ok(check(0), err);
        assert_refused(check(LOWKEY_SAME_LAYERS), LOWKEY_EFORMAT, err, words);
        assert_refused(lowkey_identity_check(&b.identity, &a.identity, 0, &err), LOWKEY_EFORMAT, err, words);
        assert_refused(lowkey_identity_check(&b.identity, &a.identity, LOWKEY_SAME_LAYERS, &err),
                       LOWKEY_EFORMAT, err, words);
    }
    reset();
    b.layers[1].index = 3;
    assert_refused(check(0), LOWKEY_EFORMAT, err, "layer 3: b.h5 has it, a.h5 has not");
}

static void unknown_samples_cannot_be_the_same(void **state)
{
    (void)state;
    reset();
    b.identity.sample_sha256 = NULL;
    assert_ok(check(0), err);
    assert_refused(check(LOWKEY_SAME_SAMPLES), LOWKEY_EINVAL, err, "b.h5 does not say its samples");
}

static void models_activations_and_quantizers_are_compared_alike(void **state)
{
    (void)state;
    reset();
    lowkey_model model = { .n_layers = N, .name = "m", .geometry = a.layers };
    struct lowkey_activations_info info = { .n_model_layers = N,
                                            .model_name = "m",
                                            .n_layers = N,
                                            .layers = b.layers,
                                            .n_samples = 2,
                                            .sample_sha256 = (const unsigned char(*)[32])b.samples };
    lowkey_quantizer_desc desc = {
        .struct_size = sizeof desc, .n_layers = N, .layers = b.layers, .model_name = "m"
    };
    memcpy(model.sha256, a.sha256, 32);
    memcpy(info.model_sha256, a.sha256, 32);
    memcpy(desc.model_sha256, a.sha256, 32);
    const struct lowkey_identity m = lowkey_identity_of_model("model", &model),
                                 i = lowkey_identity_of_activations("activations", &info),
                                 q = lowkey_identity_of_quantizer("quantizer", &desc);
    assert_ok(lowkey_identity_check(&m, &q, LOWKEY_SAME_LAYERS, &err), err);
    assert_ok(lowkey_identity_check(&m, &i, LOWKEY_SAME_LAYERS, &err), err);
    assert_ok(lowkey_identity_check(&i, &q, LOWKEY_SAME_LAYERS, &err), err);
    assert_ok(lowkey_identity_check(&i, &i, LOWKEY_SAME_SAMPLES, &err), err);
    desc.model_sha256[0] = 7;
    assert_refused(lowkey_identity_check(&m, &q, 0, &err), LOWKEY_EFORMAT, err,
                   "model_sha256: model is of model m, 01");
    info.n_model_layers = 9;
    const struct lowkey_identity longer = lowkey_identity_of_activations("activations", &info);
    assert_refused(lowkey_identity_check(&m, &longer, 0, &err), LOWKEY_EFORMAT, err,
                   "n_layers: model has 3, activations has 9");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_same_model_agrees_whatever_its_name),
        cmocka_unit_test(each_difference_is_refused_with_both_values),
        cmocka_unit_test(layers_of_b_must_be_in_a_and_the_same_where_asked),
        cmocka_unit_test(unknown_samples_cannot_be_the_same),
        cmocka_unit_test(models_activations_and_quantizers_are_compared_alike),
    };
    return lowkey_run_tests(tests);
}
