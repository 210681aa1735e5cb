/* TurboQuant and its pieces: random rotations, Lloyd-Max tables against the paper's numbers, unbiased
 * products. */
#include <math.h>
#include <stdlib.h>

#include "experiments/peers/rotation.h"
#include "tests/check.h"
#include "tests/peer_cases.h"

static void tables_of_a_normal_distribution_are_the_known_ones(void **state)
{
    (void)state;
    float value[16], boundary[15];
    lowkey_lloyd_max(1, 0, value, boundary);
    assert_about(value[1], sqrt(2 / M_PI), 1e-6);
    lowkey_lloyd_max(2, 0, value, boundary);
    /* arXiv 2504.19874: 0.453 and 1.51; Max (1960), Table I, to four digits. */
    static const double max_4[] = { 0.4528, 1.510 }, edge_4[] = { 0, 0.9816 };
    static const double max_8[] = { 0.2451, 0.7560, 1.344, 2.152 };
    static const double max_16[] = { 0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733 };
    for (int k = 0; k < 2; k++) {
        assert_about(value[2 + k], max_4[k], 5e-4);
        assert_about(value[1 - k], -max_4[k], 5e-4);
        assert_about(boundary[1 + k], edge_4[k], 5e-4);
    }
    lowkey_lloyd_max(3, 0, value, boundary);
    for (int k = 0; k < 4; k++) assert_about(value[4 + k], max_8[k], 6e-4);
    lowkey_lloyd_max(4, 0, value, boundary);
    for (int k = 0; k < 8; k++) assert_about(value[8 + k], max_16[k], 6e-4);
}

static void tables_of_unit_vectors_go_to_the_normal_ones(void **state)
{
    (void)state;
    float value[4], boundary[3];
    /* In 3 dimensions a coordinate is uniform on [-1, 1]: equal steps. */
    lowkey_lloyd_max(2, 3, value, boundary);
    for (int k = 0; k < 4; k++) assert_about(value[k], sqrt(3) * (-0.75 + 0.5 * k), 1e-5);
    /* One bit, any dimension: E|x| sqrt(dim), E|x| = Gamma(d/2) / (sqrt(pi) Gamma((d + 1)/2)). */
    lowkey_lloyd_max(1, 64, value, boundary);
    assert_about(value[1], 8 * exp(lgamma(32) - lgamma(32.5)) / sqrt(M_PI), 1e-6);
    lowkey_lloyd_max(2, 100000, value, boundary);
    assert_about(value[3], 1.510, 1e-3);
    assert_about(value[2], 0.4528, 1e-3);
}

static void random_rotations_are_orthogonal_and_seeded(void **state)
{
    (void)state;
    static float q[80 * 80], again[80 * 80], other[80 * 80];
    lowkey_error err;
    assert_ok(lowkey_random_rotation(80, 5, q, &err), err);
    assert_ok(lowkey_random_rotation(80, 5, again, &err), err);
    assert_ok(lowkey_random_rotation(80, 6, other, &err), err);
    assert_memory_equal(q, again, sizeof q);
    assert_true(memcmp(q, other, sizeof q) != 0);
    for (int i = 0; i < 80; i++)
        for (int j = 0; j < 80; j++) {
            double sum = 0;
            for (int c = 0; c < 80; c++) sum += (double)q[i * 80 + c] * (double)q[j * 80 + c];
            assert_about(sum, i == j, 1e-5);
        }
}

static void eigenvectors_are_orthogonal_and_give_the_matrix_back(void **state)
{
    (void)state;
    enum { N = 24 };
    double a[N * N], copy[N * N], value[N], v[N * N];
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++)
            a[i * N + j] = copy[i * N + j] = cos(i * j) + cos(i + j) + (i == j) * i % 5;
    lowkey_error err;
    assert_ok(lowkey_eigenvectors(N, a, value, v, &err), err);
    for (int i = 0; i < N; i++) {
        if (i) assert_true(value[i] <= value[i - 1]);
        for (int j = 0; j < N; j++) {
            double product = 0, back = 0;
            for (int k = 0; k < N; k++) {
                product += v[k * N + i] * v[k * N + j];
                back += v[i * N + k] * value[k] * v[j * N + k];
            }
            assert_about(product, i == j, 1e-12);
            assert_about(back, copy[i * N + j], 1e-12);
        }
    }
}

static const struct peer_shape shape = { 4, 2, 64, 128, 64, LOWKEY_PAIR_HALF, 0 };

/* Theorem 1 of the paper: 0.36, 0.117, 0.03, 0.009 of a unit vector's square at 1 to 4 bits. */
static void the_loss_is_the_papers(void **state)
{
    (void)state;
    struct peer_model model;
    peer_model_make(&model, &shape);
    struct peer_tokens tokens;
    peer_tokens_make(&tokens, &shape, 500, 5);
    static const char *const names[] = { "turboquant-2", "turboquant-3", "turboquant-4" };
    static const double low[] = { 0.105, 0.028, 0.0080 }, high[] = { 0.120, 0.036, 0.0100 };
    for (int i = 0; i < 3; i++) {
        lowkey_peer *peer;
        lowkey_error err;
        assert_ok(lowkey_peer_open(names[i], &model.model, 0, NULL, 1, &peer, &err), err);
        assert_ok(peer_run(peer, &model, 0, &tokens, 0, &err), err);
        const double key = peer_relative_error(tokens.key, tokens.stored_key, 500 * tokens.key_row);
        const double value = peer_relative_error(tokens.value, tokens.stored_value, 500 * tokens.value_row);
        if (!(key > low[i] && key < high[i] && value > low[i] && value < high[i]))
            fail_msg("%s: %g and %g, expected %g to %g", names[i], key, value, low[i], high[i]);
        assert_about(lowkey_peer_bits(peer).key, i + 2 + 16.0 / 64, 1e-12);
        assert_about(lowkey_peer_bits(peer).value, i + 2 + 16.0 / 128, 1e-12);
        lowkey_peer_close(peer);
    }
    peer_tokens_free(&tokens);
}

/* What stands for a vector has, on average over vectors, a product with it of the square of its norm; the MSE
 * variant's is smaller by its loss. */
static void products_of_the_other_variant_are_unbiased(void **state)
{
    (void)state;
    struct peer_model model;
    peer_model_make(&model, &shape);
    struct peer_tokens tokens;
    peer_tokens_make(&tokens, &shape, 500, 5);
    static const char *const names[] = { "turboquant-2", "turboquant-prod-2", "turboquant-prod-3" };
    static const double expected[] = { 1 - 0.113, 1, 1 };
    for (int i = 0; i < 3; i++) {
        lowkey_peer *peer;
        lowkey_error err;
        assert_ok(lowkey_peer_open(names[i], &model.model, 0, NULL, 1, &peer, &err), err);
        assert_ok(peer_run(peer, &model, 0, &tokens, 0, &err), err);
        double product = 0, square = 0;
        for (size_t c = 0; c < 500 * tokens.key_row; c++) {
            product += (double)tokens.key[c] * (double)tokens.stored_key[c];
            square += (double)tokens.key[c] * (double)tokens.key[c];
        }
        assert_about(product / square, expected[i], 0.012);
        if (i) assert_about(lowkey_peer_bits(peer).key, i + 1 + 32.0 / 64, 1e-12);
        lowkey_peer_close(peer);
    }
    peer_tokens_free(&tokens);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_of_a_normal_distribution_are_the_known_ones),
        cmocka_unit_test(tables_of_unit_vectors_go_to_the_normal_ones),
        cmocka_unit_test(random_rotations_are_orthogonal_and_seeded),
        cmocka_unit_test(eigenvectors_are_orthogonal_and_give_the_matrix_back),
        cmocka_unit_test(the_loss_is_the_papers),
        cmocka_unit_test(products_of_the_other_variant_are_unbiased),
    };
    return lowkey_run_tests(tests);
}
