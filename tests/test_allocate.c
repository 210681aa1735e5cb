/* Widths under a budget, against all widths there are; costs of a channel, by hand and in plain loops. */
#include <math.h>

#include "calib/allocate.h"
#include "tests/check.h"
#include "tests/random.h"

enum { UNITS = 5, LOW = 1, HIGH = 5 };

static double total_cost(const struct lowkey_unit *units, const uint8_t *widths, int64_t *bits)
{
    double cost = 0;
    *bits = 0;
    for (int u = 0; u < UNITS; u++) {
        cost += units[u].cost[widths[u]];
        *bits += (int64_t)widths[u] * units[u].n_channels;
    }
    return cost;
}

/* The least cost of at most so many bits, over all 5^5 choices. */
static double least_cost(const struct lowkey_unit *units, int64_t most)
{
    double least = HUGE_VAL;
    uint8_t widths[UNITS];
    for (int i = 0; i < 3125; i++) {
        for (int u = 0, rest = i; u < UNITS; u++, rest /= 5) widths[u] = (uint8_t)(LOW + rest % 5);
        int64_t bits;
        const double cost = total_cost(units, widths, &bits);
        if (bits <= most && cost < least) least = cost;
    }
    return least;
}

static void fill(struct lowkey_unit *units, int is_convex, int n_channels, unsigned seed)
{
    struct lowkey_random random = { seed };
    for (int u = 0; u < UNITS; u++) {
        const double size = exp(2 * lowkey_random_normal(&random));
        units[u] = (struct lowkey_unit) { .n_channels = n_channels };
        for (int b = LOW; b <= HIGH; b++)
            units[u].cost[b] = is_convex ? size * exp2(-2.0 * b)
                                         : size * exp2(-2.0 * b) * exp(lowkey_random_normal(&random));
    }
}

static void convex_costs_are_shared_out_as_well_as_can_be(void **state)
{
    (void)state;
    struct lowkey_unit units[UNITS];
    uint8_t widths[UNITS];
    lowkey_error err;
    for (unsigned seed = 0; seed < 20; seed++) {
        fill(units, 1, 1, seed);
        for (int64_t budget = UNITS * LOW; budget <= UNITS * HIGH; budget++) {
            assert_ok(lowkey_allocate(UNITS, units, LOW, HIGH, budget, widths, &err), err);
            int64_t bits;
            const double cost = total_cost(units, widths, &bits);
            assert_int_equal(bits, budget); /* single channels: spent to the bit */
            assert_true(fabs(cost - least_cost(units, budget)) <= 1e-12 * cost);
        }
    }
}

static void of_any_costs_no_widths_of_as_many_bits_cost_less(void **state)
{
    (void)state;
    struct lowkey_unit units[UNITS];
    uint8_t widths[UNITS];
    lowkey_error err;
    int n_exact = 0;
    for (unsigned seed = 0; seed < 40; seed++) {
        fill(units, 0, 1 + seed % 2, seed);
        double reached = HUGE_VAL;
        for (int64_t budget = UNITS * LOW; budget <= 2 * UNITS * HIGH; budget++) {
            assert_ok(lowkey_allocate(UNITS, units, LOW, HIGH, budget, widths, &err), err);
            int64_t bits;
            const double cost = total_cost(units, widths, &bits);
            if (budget < UNITS * LOW * units[0].n_channels) continue;
            assert_true(bits <= budget);
            reached = fmin(reached, cost);
            /* the hull's steps were taken in order, none left out: then it is the optimum of these bits */
            uint8_t same[UNITS];
            assert_ok(lowkey_allocate(UNITS, units, LOW, HIGH, bits, same, &err), err);
            if (bits != budget || memcmp(same, widths, sizeof same) != 0) continue;
            const double least = least_cost(units, bits);
            assert_true(cost >= least - 1e-12 * cost);
            n_exact += fabs(cost - least) <= 1e-12 * cost;
        }
        assert_true(fabs(reached - least_cost(units, INT64_MAX)) <= 1e-12); /* with room for all: the optimum */
    }
    assert_true(n_exact > 400);
}

static void ties_go_to_the_lower_unit_and_misfits_are_passed_over(void **state)
{
    (void)state;
    lowkey_error err;
    uint8_t widths[3];
    const struct lowkey_unit equal[3] = { { 1, { 0, 8, 4, 2, 1, 0.5 } },
                                          { 1, { 0, 8, 4, 2, 1, 0.5 } },
                                          { 1, { 0, 8, 4, 2, 1, 0.5 } } };
    assert_ok(lowkey_allocate(3, equal, 1, 5, 5, widths, &err), err);
    assert_memory_equal(widths, ((uint8_t[]) { 2, 2, 1 }), 3);
    const struct lowkey_unit pair[3] = { { 2, { 0, 80, 40, 20, 10, 5 } },
                                         { 1, { 0, 8, 4, 2, 1, 0.5 } },
                                         { 1, { 0, 8, 4, 2, 1, 0.5 } } };
    assert_ok(lowkey_allocate(3, pair, 1, 5, 5, widths, &err), err); /* one bit to spend: no pair */
    assert_memory_equal(widths, ((uint8_t[]) { 1, 2, 1 }), 3);
    const struct lowkey_unit hollow[3] = { { 1, { 0, 9, 8.9, 0, 0, 0 } }, /* a step of 2 bits: 4.5 a bit */
                                           { 1, { 0, 9, 5, 4, 4, 4 } },
                                           { 1, { 0, 9, 9, 9, 9, 10 } } }; /* bits do not help */
    assert_ok(lowkey_allocate(3, hollow, 1, 5, 5, widths, &err), err);
    assert_memory_equal(widths, ((uint8_t[]) { 3, 1, 1 }), 3);
    assert_ok(lowkey_allocate(3, hollow, 1, 5, 15, widths, &err), err);
    assert_memory_equal(widths, ((uint8_t[]) { 3, 3, 1 }), 3);
    assert_ok(lowkey_allocate(3, hollow, 2, 2, 15, widths, &err), err);
    assert_memory_equal(widths, ((uint8_t[]) { 2, 2, 2 }), 3);
}

enum { TOKENS = 700 };

static void costs_of_a_channel_are_half_diagonal_half_coherent(void **state)
{
    (void)state;
    struct lowkey_random random = { 5 };
    /* three samples, the first with two sinks, the second with nothing else */
    struct lowkey_sample samples[3] = { { .n_tokens = 302, .n_sinks = 2, .start = 0 },
                                        { .n_tokens = 2, .n_sinks = 2, .start = 300 },
                                        { .n_tokens = 402, .n_sinks = 2, .start = 300 } };
    const lowkey_captures captures = { .n_samples = 3, .n_tokens = TOKENS, .samples = samples };
    const struct lowkey_stored_table table = { .n_entries = 3,
                                               .entry = { -1, 0.25f, 2 },
                                               .boundary = { -0.5f, 1 } };
    float x[TOKENS], g[TOKENS];
    double diagonal = 0, coherent = 0, plain = 0, squares = 0;
    for (int t = 0; t < TOKENS; t++) x[t] = (float)lowkey_random_normal(&random);
    for (int t = 0; t < TOKENS; t++) g[t] = (float)lowkey_random_normal(&random) + 0.5f;
    x[7] = -0.5f, x[8] = 1; /* on a boundary: the lower */
    double sum[2] = { 0 };
    for (int t = 0; t < TOKENS; t++) {
        const double value = x[t] > 1 ? 2 : (double)x[t] > -0.5 ? 0.25 : -1, e = value - (double)x[t];
        diagonal += (double)g[t] * e * (double)g[t] * e;
        sum[t >= 300] += (double)g[t] * e;
        plain += (double)g[t] * e * e;
        squares += 3 * e * e;
    }
    coherent = sum[0] * sum[0] + sum[1] * sum[1];
    assert_true(coherent > 2 * diagonal);
    const double by_gradient = lowkey_channel_cost(&captures, &table, x, g, 0, 1);
    assert_true(fabs(by_gradient / ((diagonal + coherent) / 2 / (2 * TOKENS)) - 1) < 1e-12);
    assert_true(fabs(lowkey_channel_cost(&captures, &table, x, g, 0, 0) / (plain / (2 * TOKENS)) - 1) < 1e-12);
    assert_true(fabs(lowkey_channel_cost(&captures, &table, x, NULL, 3, 0) / (squares / (2 * TOKENS)) - 1) < 1e-12);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(convex_costs_are_shared_out_as_well_as_can_be),
        cmocka_unit_test(of_any_costs_no_widths_of_as_many_bits_cost_less),
        cmocka_unit_test(ties_go_to_the_lower_unit_and_misfits_are_passed_over),
        cmocka_unit_test(costs_of_a_channel_are_half_diagonal_half_coherent),
    };
    return lowkey_run_tests(tests);
}
