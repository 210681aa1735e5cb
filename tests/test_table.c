/* Tables as stored: on the grid of f16 times a power of two, exact where that can be, never falling
 * together silently. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include <gsl/gsl_randist.h>
#include <gsl/gsl_rng.h>
#include <gsl/gsl_sort.h>

#include "calib/table.h"
#include "formats/half.h"
#include "tests/check.h"

/* Is entry the f32 nearest to center + h 2^exponent for an f16 h? Every h is tried. */
static int is_on_grid(float entry, float center, int exponent)
{
    for (unsigned code = 0; code < 65536; code++) {
        const double h = (double)lowkey_f16_to_f32((uint16_t)code);
        if (isfinite(h) && (float)((double)center + ldexp(h, exponent)) == entry) return 1;
    }
    return 0;
}

static void check_stored(const struct lowkey_stored_table *stored)
{
    assert_in_range(stored->n_entries, 1, 32);
    assert_in_range(stored->exponent + 200, 200 - 126, 200 + 127);
    for (int k = 0; k < 32; k++) {
        assert_true(isfinite(stored->entry[k]));
        if (k < stored->n_entries)
            assert_true(is_on_grid(stored->entry[k], stored->center, stored->exponent));
        if (k > 0 && k < stored->n_entries) assert_true(stored->entry[k] > stored->entry[k - 1]);
        if (k >= stored->n_entries) assert_true(stored->entry[k] == stored->entry[stored->n_entries - 1]);
        if (k < 31 && k >= stored->n_entries - 1) assert_true(stored->boundary[k] == FLT_MAX);
    }
}

static struct lowkey_table table_of(int n, const double *entries)
{
    double midpoint[32];
    struct lowkey_table table;
    lowkey_midpoints(n, entries, midpoint);
    lowkey_table_make(n, entries, midpoint, 0, 1, &table);
    return table;
}

static void constants_are_exact(void **state)
{
    (void)state;
    const float values[] = { 0, 7.5f, -65504, 1e-30f, 3e38f, FLT_MAX, -FLT_MAX, 1e-45f, 0.1f, 123456.789f };
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        const double entry = (double)values[i];
        const struct lowkey_table table = table_of(1, &entry);
        struct lowkey_stored_table stored;
        for (int r = 0; r < 2; r++) {
            lowkey_table_store(&table, r ? 1e20 : 0, &stored);
            check_stored(&stored);
            assert_int_equal(stored.n_entries, 1);
            assert_true(stored.entry[0] == values[i]);
        }
    }
}

static void two_values_an_ulp_apart_are_exact_and_told_apart(void **state)
{
    (void)state;
    const float values[] = { 7.5f, -65504, 1e-30f, 3e38f, 0.1f, 123456.789f, 1e-38f, 1e-40f };
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        const float next = nextafterf(values[i], INFINITY);
        const double entries[2] = { (double)values[i], (double)next };
        const struct lowkey_table table = table_of(2, entries);
        struct lowkey_stored_table stored;
        lowkey_table_store(&table, 0, &stored);
        check_stored(&stored);
        assert_int_equal(stored.n_entries, 2);
        assert_true(stored.entry[0] == values[i] && stored.entry[1] == next);
        assert_false(stored.boundary[0] < values[i]);
        assert_true(stored.boundary[0] < next);
    }
}

static void entries_of_any_magnitude_keep_eleven_bits(void **state)
{
    (void)state;
    gsl_rng *rng = gsl_rng_alloc(gsl_rng_mt19937);
    for (int trial = 0; trial < 60; trial++) {
        const double magnitude = pow(10, 75 * gsl_rng_uniform(rng) - 37.5);
        const double offset = trial % 3 ? 0 : 600 * magnitude; /* a key's bias */
        const int n = 1 + (int)gsl_rng_uniform_int(rng, 32);
        double entries[32];
        for (int k = 0; k < n; k++) entries[k] = offset + magnitude * gsl_ran_ugaussian(rng);
        gsl_sort(entries, 1, (size_t)n);
        const struct lowkey_table table = table_of(n, entries);
        struct lowkey_stored_table stored;
        lowkey_table_store(&table, 0, &stored);
        check_stored(&stored);
        if (fabs(offset) + 5 * magnitude > 3e38) continue;
        const double half = 0.5 * (entries[n - 1] - entries[0]);
        const double ulp = fmax(fabs(entries[0]), fabs(entries[n - 1])) * 0x1p-23;
        for (int k = 0; k < n;
             k++) { /* the nearest stored entry is within 2^-11 of the spread (or of the values) */
            double nearest = HUGE_VAL;
            for (int s = 0; s < stored.n_entries; s++)
                nearest = fmin(nearest, fabs((double)stored.entry[s] - entries[k]));
            const double scale = stored.center != 0 ? 2 * half : fmax(fabs(entries[0]), fabs(entries[n - 1]));
            assert_true(nearest <= 0x1p-11 * scale + ulp + 0x1p-149);
        }
        if (offset > 0 && n > 1) assert_true(stored.center != 0);
    }
    gsl_rng_free(rng);
}

static void entries_that_fall_together_are_one(void **state)
{
    (void)state;
    const double entries[4] = { 1, 1 + 1e-9, 1 + 2e-9,
                                3.3 }; /* not exact in f32, and 3.3 keeps the center at 0 */
    const struct lowkey_table table = table_of(4, entries);
    struct lowkey_stored_table stored;
    lowkey_table_store(&table, 0, &stored);
    check_stored(&stored);
    assert_int_equal(stored.n_entries, 2);
    assert_true(stored.boundary[0] > 2.1f &&
                stored.boundary[0] < 2.2f); /* that between the last of them and 3.3 */
}

static void boundaries_part_floats_as_the_midpoint_does(void **state)
{
    (void)state;
    gsl_rng *rng = gsl_rng_alloc(gsl_rng_mt19937);
    for (int trial = 0; trial < 2000; trial++) {
        const float a = (float)gsl_ran_ugaussian(rng), b = nextafterf(a, INFINITY),
                    c = nextafterf(b, INFINITY);
        const double entries[2] = { (double)a, trial % 2 ? (double)b : (double)c };
        const struct lowkey_table table = table_of(2, entries);
        const double middle = 0.5 * (entries[0] + entries[1]);
        for (float x = nextafterf(a, -INFINITY); x <= c; x = nextafterf(x, INFINITY))
            assert_int_equal(table.boundary[0] < x, middle < (double)x); /* a tie goes to the lower code */
    }
    gsl_rng_free(rng);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(constants_are_exact),
        cmocka_unit_test(two_values_an_ulp_apart_are_exact_and_told_apart),
        cmocka_unit_test(entries_of_any_magnitude_keep_eleven_bits),
        cmocka_unit_test(entries_that_fall_together_are_one),
        cmocka_unit_test(boundaries_part_floats_as_the_midpoint_does),
    };
    return lowkey_run_tests(tests);
}
