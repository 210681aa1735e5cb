/* Weights: what is made of raw ones, and the scratch file that holds those of attention. */
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "calib/weights.h"
#include "tests/check.h"

static void weights_are_clipped_and_floored_around_their_mean(void **state)
{
    (void)state;
    enum { N = 1000 };
    static float raw[N];
    for (int i = 0; i < N; i++) raw[i] = 1;
    raw[7] = 9001; /* mean 10 */
    raw[8] = 0;
    struct lowkey_weight_shape shape;
    lowkey_weight_learn(N, raw, 0, 50, 0.001, &shape);
    const double mean = (9001 + 998) / 1000.0;
    assert_true(fabs((double)lowkey_weight_made(&shape, 9001) * lowkey_weight_unit(&shape) - 50 * mean) <
                1e-3);
    assert_true(fabs((double)lowkey_weight_made(&shape, 0) * lowkey_weight_unit(&shape) - 0.001 * mean) <
                1e-6);
    assert_true(fabs((double)lowkey_weight_made(&shape, 1) * lowkey_weight_unit(&shape) - 1) < 1e-6);
    const double made_mean = (50 * mean + 0.001 * mean + 998) / N;
    assert_true(fabs(shape.mean * lowkey_weight_unit(&shape) - made_mean) < 1e-4);
    assert_false(shape.any_tiny);
    lowkey_weight_learn(N, raw, 0, 0, 0, &shape);
    assert_true(lowkey_weight_made(&shape, 9001) == 1 && lowkey_weight_made(&shape, 0) == 0);
}

static void gradients_are_squared_without_underflow(void **state)
{
    (void)state;
    const float raw[4] = { -1e-30f, 5e-31f, 1e-31f, 0 };
    struct lowkey_weight_shape shape;
    lowkey_weight_learn(4, raw, 1, 0, 0, &shape);
    assert_true(lowkey_weight_made(&shape, -1e-30f) == 1);
    assert_true(fabs((double)lowkey_weight_made(&shape, 5e-31f) - 0.25) < 1e-6);
    assert_true(fabs((double)lowkey_weight_made(&shape, 1e-31f) - 0.01) < 1e-8);
    assert_true(lowkey_weight_unit(&shape) > 0.99e-60 && lowkey_weight_unit(&shape) < 1.01e-60);
}

static void all_zero_is_all_one_and_tiny_ones_are_zero(void **state)
{
    (void)state;
    const float zero[3] = { 0, 0, 0 }, wide[3] = { 1e-30f, 1e30f, 1e19f };
    struct lowkey_weight_shape shape;
    lowkey_weight_learn(3, zero, 0, 50, 0.001, &shape);
    assert_true(shape.largest == 0 && lowkey_weight_made(&shape, 0) == 1 && shape.mean == 1);
    lowkey_weight_learn(3, NULL, 0, 50, 0.001, &shape);
    assert_true(lowkey_weight_made(&shape, 1) == 1 && shape.mean == 1);
    lowkey_weight_learn(3, wide, 0, 0, 0, &shape);
    assert_true(shape.any_tiny);
    assert_true(lowkey_weight_made(&shape, 1e-30f) == 0 && lowkey_weight_made(&shape, 1e19f) > 0);
}

static void stored_rows_come_back_by_head_and_token(void **state)
{
    (void)state;
    lowkey_error err;
    struct lowkey_store store;
    assert_ok(lowkey_store_open("/tmp/lowkey-store.h5", 10, 3, 4, &store, &err), err);
    float rows[10 * 4];
    for (int h = 2; h >= 0; h--)
        for (int first = 5; first >= 0; first -= 5) {
            for (int i = 0; i < 20; i++) rows[i] = (float)(1000 * h + 4 * first + i);
            assert_ok(lowkey_store_write(&store, h, first, 5, rows, &err), err);
        }
    for (int h = 0; h < 3; h++) {
        assert_ok(lowkey_store_read(&store, h, 2, 7, rows, &err), err);
        for (int i = 0; i < 28; i++) assert_true(rows[i] == (float)(1000 * h + 8 + i));
    }
    lowkey_store_close(&store);
    assert_refused(lowkey_store_open("/nowhere/at/all/q.h5", 10, 3, 4, &store, &err), LOWKEY_EIO, err,
                   "/nowhere/at/all");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(weights_are_clipped_and_floored_around_their_mean),
        cmocka_unit_test(gradients_are_squared_without_underflow),
        cmocka_unit_test(all_zero_is_all_one_and_tiny_ones_are_zero),
        cmocka_unit_test(stored_rows_come_back_by_head_and_token),
    };
    return lowkey_run_tests(tests);
}
