/* The radix sort: rising, stable, every float in its place. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include <gsl/gsl_rng.h>

#include "calib/sort.h"
#include "tests/check.h"

static void keys_order_floats_and_give_them_back(void **state)
{
    (void)state;
    const float rising[] = { -INFINITY, -FLT_MAX, -1, -FLT_MIN, -1e-45f, 0,
                             1e-45f,    FLT_MIN,  1,  FLT_MAX,  INFINITY };
    for (size_t i = 0; i < sizeof rising / sizeof rising[0]; i++) {
        assert_true(lowkey_key_float(lowkey_float_key(rising[i])) == rising[i]);
        if (i) assert_true(lowkey_float_key(rising[i - 1]) < lowkey_float_key(rising[i]));
    }
    assert_int_equal(lowkey_float_key(-0.0f), lowkey_float_key(0.0f));
}

static void sorting_is_stable_at_every_length(void **state)
{
    (void)state;
    gsl_rng *rng = gsl_rng_alloc(gsl_rng_mt19937);
    for (size_t n = 0; n < 5000; n = n * 2 + 1) {
        struct lowkey_keyed *items = malloc((2 * n + 1) * sizeof *items);
        for (size_t i = 0; i < n; i++) {
            const uint32_t wide = (uint32_t)gsl_rng_get(rng), few = (uint32_t)gsl_rng_uniform_int(rng, 3)
                                                                    << 30;
            items[i] = (struct lowkey_keyed) { n % 2 ? wide : few, (uint32_t)i };
        }
        uint64_t before = 0, after = 0;
        for (size_t i = 0; i < n; i++) before += items[i].key * (uint64_t)(items[i].load + 1);
        lowkey_sort_keyed(n, items, items + n);
        for (size_t i = 0; i < n; i++) after += items[i].key * (uint64_t)(items[i].load + 1);
        assert_true(before == after);
        for (size_t i = 1; i < n; i++)
            assert_true(items[i - 1].key < items[i].key ||
                        (items[i - 1].key == items[i].key && items[i - 1].load < items[i].load));
        free(items);
    }
    gsl_rng_free(rng);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys_order_floats_and_give_them_back),
        cmocka_unit_test(sorting_is_stable_at_every_length),
    };
    return lowkey_run_tests(tests);
}
