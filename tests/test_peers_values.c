/* What foreign formats make of numbers that were worked out by hand from their definitions: blocks of
 * llama.cpp, OCP FP8, NVFP4, min-max and NormalFloat per token, KIVI's groups, Kitty's channels. */
#include <math.h>
#include <stdlib.h>

#include "tests/check.h"
#include "tests/peer_cases.h"

static const struct peer_shape flat = { 1, 1, 64, 64, 0, LOWKEY_PAIR_HALF, 0 };

struct known {
    float x, stored;
};

static lowkey_peer *open_flat(const char *name, struct peer_model *model)
{
    peer_model_make(model, &flat);
    lowkey_peer *peer;
    lowkey_error err;
    assert_ok(lowkey_peer_open(name, &model->model, 0, NULL, 1, &peer, &err), err);
    return peer;
}

/* A value vector and a key vector of 64 channels, the first n as known, the rest 0, in one token. */
static void check_token(const char *name, const struct known *known, int n, double tolerance)
{
    struct peer_model model;
    lowkey_peer *peer = open_flat(name, &model);
    struct peer_tokens tokens;
    lowkey_error err;
    peer_tokens_make(&tokens, &flat, 1, 1);
    for (int c = 0; c < 64; c++) tokens.key[c] = tokens.value[c] = c < n ? known[c].x : 0;
    assert_ok(peer_run(peer, &model, 0, &tokens, 0, &err), err);
    for (int c = 0; c < n; c++) {
        const double want = (double)known[c].stored;
        if (!(fabs((double)tokens.stored_value[c] - want) <= tolerance) ||
            !(fabs((double)tokens.stored_key[c] - want) <= tolerance))
            fail_msg("%s: %g is stored as %.9g and %.9g, not %.9g", name, (double)known[c].x,
                     (double)tokens.stored_key[c], (double)tokens.stored_value[c], want);
    }
    peer_tokens_free(&tokens);
    lowkey_peer_close(peer);
}

static void blocks_of_llama_cpp(void **state)
{
    (void)state;
    /* q4_0: the extreme is -8 steps, so the step is 1 and truncation is of x + 8.5; 15 is the last code. */
    static const struct known minus[] = { { -8, -8 },   { 3.4f, 3 },  { 7.9f, 7 },
                                          { -0.5f, 0 }, { 0.49f, 0 }, { 0.5f, 1 } };
    static const struct known plus[] = { { 8, 8 }, { -3.4f, -3 }, { -7.9f, -7 }, { 0.5f, 0 } };
    check_token("q4_0", minus, 6, 0);
    check_token("q4_0", plus, 4, 0);
    /* q8_0: the largest magnitude is 127 steps, halves go away from 0. */
    static const struct known whole[] = { { 127, 127 }, { 0.5f, 1 }, { -2.5f, -3 }, { 2.4f, 2 } };
    check_token("q8_0", whole, 4, 0);
    /* 1 / 127 in f16 is 0.00787353515625: what is stored is 127 of those. */
    static const struct known rounded[] = { { 1, 0.99993896484375f } };
    check_token("q8_0", rounded, 1, 0);
}

static void numbers_of_fp8(void **state)
{
    (void)state;
    static const struct known e4m3[] = { { 1.0625f, 1 }, { 1.1875f, 1.25f },   { 1000, 448 },
                                         { -17, -16 },   { 0x1p-9f, 0x1p-9f }, { 0x1p-10f, 0 } };
    static const struct known e5m2[] = {
        { 1.125f, 1 }, { 1.375f, 1.5f }, { 1e5f, 57344 }, { -9, -8 }, { 0x1p-16f, 0x1p-16f }
    };
    check_token("fp8-e4m3", e4m3, 6, 0);
    check_token("fp8-e5m2", e5m2, 5, 0);
    /* The largest becomes 448: a scale of 1/8, with which 12.5 is 100, halfway between 96 and 104. */
    static const struct known scaled[] = {
        { 56, 56 }, { 12.5f, 12 }, { 0x1p-12f, 0x1p-12f }, { 0x1p-13f, 0 }
    };
    check_token("fp8-e4m3-token", scaled, 4, 0);
    check_token("fp8-e4m3-page", scaled, 4, 0);
    static const struct known wide[] = { { 57344, 57344 }, { 1, 1 } };
    check_token("fp8-e5m2-token", wide, 2, 0);
}

static void pages_of_fp8_have_their_own_scale(void **state)
{
    (void)state;
    struct peer_model model;
    lowkey_peer *peer = open_flat("fp8-e4m3-page", &model);
    struct peer_tokens tokens;
    lowkey_error err;
    peer_tokens_make(&tokens, &flat, 65, 1);
    for (size_t i = 0; i < 65 * 64; i++) tokens.value[i] = 0x1p-12f;
    tokens.value[5 * 64 + 3] = 56; /* scale 1/8: 2^-12 is its smallest number */
    tokens.value[64 * 64] = 224; /* scale 1/2 on the second page */
    assert_ok(peer_run(peer, &model, 0, &tokens, 0, &err), err);
    assert_about(tokens.stored_value[0], 0x1p-12, 0);
    assert_about(tokens.stored_value[63 * 64 + 63], 0x1p-12, 0);
    assert_about(tokens.stored_value[64 * 64 + 1], 0, 0);
    peer_tokens_free(&tokens);
    lowkey_peer_close(peer);
}

static void numbers_of_nvfp4(void **state)
{
    (void)state;
    static const struct known unit[] = { { 6, 6 },     { 0.25f, 0 }, { 0.26f, 0.5f }, { 0.75f, 1 },
                                         { 1.25f, 1 }, { 1.75f, 2 }, { 2.5f, 2 },     { 3.5f, 4 },
                                         { 5, 4 },     { -5.1f, -6 } };
    static const struct known half[] = { { -3, -3 }, { 1.25f, 1 } };
    static const struct known coarse[] = { { 6.375f,
                                             6 } }; /* a block scale of 1.0625 is halfway to 1.125: 1 */
    check_token("nvfp4", unit, 10, 0);
    check_token("nvfp4", half, 2, 0);
    check_token("nvfp4", coarse, 1, 0);
    /* The token's largest block scale becomes 448: with 2688 = 6 * 448 in it the outer scale is 1. */
    struct known outer[17] = { { 2688, 2688 }, { 100, 0 }, { 300, 224 } };
    outer[16] = (struct known) { 6, 6 };
    check_token("nvfp4-token", outer, 17, 0);
    check_token("nvfp4-page", outer, 17, 0);
    static const struct known tiny[] = { { 0x1p-120f, 0x1p-120f } }; /* an outer scale reaches everywhere */
    check_token("nvfp4-token", tiny, 1, 0x1p-123);
}

static void steps_per_token(void **state)
{
    (void)state;
    /* From 0 to 63 in 3 steps of 21; halves go to the even step. */
    static const struct known two[] = { { 63, 63 }, { 10.5f, 0 }, { 10.6f, 21 }, { 31.5f, 42 }, { 52, 42 } };
    static const struct known four[] = { { -7, -7 }, { 8, 8 }, { 0.4f, 0 }, { -3.6f, -4 } };
    check_token("int-2", two, 5, 0);
    check_token("int-4", four, 4, 0);
    /* 7 steps of 1 / 7, which f16 rounds to 0.142822265625. */
    static const struct known three[] = { { 1, 7 * 0.142822265625f }, { 0.3f, 2 * 0.142822265625f } };
    check_token("int-3", three, 2, 0);
    /* QLoRA's 16 numbers (arXiv 2305.14314, appendix E), to seven digits. */
    static const float nf4[] = { -1.0f,       -0.6961928f, -0.5250731f, -0.3949175f, -0.2844414f, -0.1847734f,
                                 -0.0910500f, 0,           0.0795803f,  0.1609302f,  0.2461123f,  0.3379152f,
                                 0.4407098f,  0.5626170f,  0.7229568f,  1.0f };
    struct known nf[32];
    for (int k = 0; k < 16; k++) {
        nf[k] = (struct known) { nf4[k], nf4[k] };
        nf[16 + k] = (struct known) { nf4[k] + (k < 15 ? 0.02f : -0.02f), nf4[k] };
    }
    check_token("nf-4", nf, 32, 1e-6);
}

static void groups_of_kivi(void **state)
{
    (void)state;
    struct peer_model model;
    lowkey_peer *peer = open_flat("kivi-2-g32", &model);
    struct peer_tokens tokens;
    lowkey_error err;
    peer_tokens_make(&tokens, &flat, 65, 1);
    for (size_t t = 0; t < 65; t++)
        for (size_t c = 0; c < 64; c++) {
            tokens.key[t * 64 + c] = (float)t; /* each channel from 0 to 31, from 32 to 63, and 64 alone */
            tokens.value[t * 64 + c] = (float)c; /* each token in two groups alike */
        }
    assert_ok(peer_run(peer, &model, 0, &tokens, 0, &err), err);
    const double step = 10.3359375; /* 31 / 3 in f16 */
    for (int i = 0; i < 64; i++) {
        const int j = i % 32, code = j < 6 ? 0 : j < 16 ? 1 : j < 26 ? 2 : 3;
        assert_about(tokens.stored_key[i * 64 + 7], i / 32 * 32 + code * step, 0);
        assert_about(tokens.stored_value[7 * 64 + i], i / 32 * 32 + code * step, 0);
    }
    for (int c = 0; c < 64; c++) assert_about(tokens.stored_key[64 * 64 + c], 64, 0);
    peer_tokens_free(&tokens);
    lowkey_peer_close(peer);
}

/* Turned, grouped and turned back in f64. A step that rounding may take the other way is looked at with both.
 */
static void kivi_quantizes_keys_after_rope(void **state)
{
    (void)state;
    static const struct peer_shape shapes[] = { { 4, 2, 64, 64, 64, LOWKEY_PAIR_HALF, 0 },
                                                { 2, 1, 128, 64, 64, LOWKEY_PAIR_INTERLEAVED, 1.5 } };
    for (size_t s = 0; s < 2; s++) {
        struct peer_model model;
        peer_model_make(&model, &shapes[s]);
        lowkey_peer *peer;
        lowkey_error err;
        assert_ok(lowkey_peer_open("kivi-4-g32", &model.model, 0, NULL, 2, &peer, &err), err);
        struct peer_tokens tokens;
        peer_tokens_make(&tokens, &shapes[s], 64, 9);
        assert_ok(peer_run(peer, &model, 0, &tokens, 0, &err), err);
        const size_t D = (size_t)shapes[s].key_head_dim, row = tokens.key_row;
        double *turned = malloc(64 * D * sizeof *turned);
        int n_near_half = 0;
        for (size_t h = 0; h < (size_t)shapes[s].n_kv_heads; h++) {
            for (size_t t = 0; t < 64; t++) {
                for (size_t c = 0; c < D; c++) turned[t * D + c] = (double)tokens.key[t * row + h * D + c];
                peer_oracle_turn(&model.layers[0], (int)t, 0, turned + t * D);
            }
            for (size_t first = 0; first < 64; first += 32)
                for (size_t c = 0; c < D; c++) {
                    double low = INFINITY, high = -INFINITY;
                    for (size_t t = first; t < first + 32; t++) {
                        low = fmin(low, turned[t * D + c]);
                        high = fmax(high, turned[t * D + c]);
                    }
                    const double scale = (high - low) / 15; /* f16 rounds both: 2^-11 of their size */
                    for (size_t t = first; t < first + 32; t++) {
                        const double code = (turned[t * D + c] - low) / scale,
                                     rest = fabs(code - floor(code) - 0.5);
                        n_near_half += rest < 0.05;
                        turned[t * D + c] = low + scale * floor(code + 0.5);
                    }
                }
            int n_off = 0;
            for (size_t t = 0; t < 64; t++) {
                peer_oracle_turn(&model.layers[0], (int)t, 1, turned + t * D);
                for (size_t c = 0; c < D; c++)
                    n_off += fabs(turned[t * D + c] - (double)tokens.stored_key[t * row + h * D + c]) > 0.02;
            }
            assert_true(n_off <= 2 * n_near_half && n_near_half < (int)(64 * D) / 5);
        }
        free(turned);
        peer_tokens_free(&tokens);
        lowkey_peer_close(peer);
    }
}

static void kitty_gives_the_largest_channels_twice_the_bits(void **state)
{
    (void)state;
    struct peer_model model;
    lowkey_peer *peer = open_flat("kitty-2-25", &model);
    struct peer_tokens tokens;
    lowkey_error err;
    peer_tokens_make(&tokens, &flat, 256, 1);
    for (size_t t = 0; t < 256; t++)
        for (size_t c = 0; c < 64;
             c++) { /* 16 channels of mean magnitude 30, others of 7.5; on page 2 other ones */
            const size_t boosted = t < 128 ? c >= 48 : c < 16;
            tokens.key[t * 64 + c] = (float)((double)(t % 16) * (boosted ? 4 : 1));
        }
    assert_ok(peer_run(peer, &model, 0, &tokens, 0, &err), err);
    for (size_t t = 0; t < 256; t++)
        for (size_t c = 0; c < 64; c++) {
            const int boosted = t < 128 ? c >= 48 : c < 16, j = (int)(t % 16);
            const int code = (int)floor(j / 5.0 + 0.5); /* 3 steps of 5 from 0 to 15 */
            assert_about(tokens.stored_key[t * 64 + c], boosted ? 4 * j : 5 * code, 0);
        }
    assert_about(lowkey_peer_bits(peer).key, 2.5 + 32 / 128. + 8 / 128., 1e-12);
    assert_about(lowkey_peer_bits(peer).value, 2 + 32 / 64., 1e-12);
    peer_tokens_free(&tokens);
    lowkey_peer_close(peer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_of_llama_cpp),
        cmocka_unit_test(numbers_of_fp8),
        cmocka_unit_test(pages_of_fp8_have_their_own_scale),
        cmocka_unit_test(numbers_of_nvfp4),
        cmocka_unit_test(steps_per_token),
        cmocka_unit_test(groups_of_kivi),
        cmocka_unit_test(kivi_quantizes_keys_after_rope),
        cmocka_unit_test(kitty_gives_the_largest_channels_twice_the_bits),
    };
    return lowkey_run_tests(tests);
}
