/* test_merge.c - merging partial results of attention, on every level: against double, with empty states, at the ends of
 * f32's range. */
#include <float.h>
#include <math.h>

#include "tests/check.h"
#include "tests/packed.h"

enum { DIM = 24, ROWS = 5 };

struct state {
    float out[ROWS * DIM], max[ROWS], sum[ROWS];
};

static struct lowkey_state view(struct state *state)
{
    return (struct lowkey_state) { state->out, state->max, state->sum };
}

static struct state random_state(struct lowkey_random *random, double spread)
{
    struct state state;
    lowkey_random_fill(random, LOWKEY_NORMAL, state.out, ROWS * DIM);
    for (int j = 0; j < ROWS; j++) {
        state.max[j] = (float)(spread * lowkey_random_normal(random));
        state.sum[j] = 1 + 20 * (float)lowkey_random_uniform(random);
    }
    return state;
}

static struct state empty_state(void)
{
    struct state state = { { 0 }, { 0 }, { 0 } };
    for (int j = 0; j < ROWS; j++) state.max[j] = -INFINITY;
    return state;
}

static void test_against_double(void **unused)
{
    (void)unused;
    struct lowkey_random random = { 1 };
    for (const struct lowkey_kernels *kernels = lowkey_kernels; kernels->isa; kernels++)
        for (int trial = 0; trial < 200; trial++) {
            const double spread = trial % 4 == 0 ? 0 : trial % 4 == 1 ? 1 : trial % 4 == 2 ? 30 : 1e4;
            struct state a = random_state(&random, spread), b = random_state(&random, spread), got = a;
            kernels->merge(ROWS, DIM, view(&got), view(&b));
            for (int j = 0; j < ROWS; j++) {
                const double top = fmax((double)a.max[j], (double)b.max[j]);
                const double u = (double)a.sum[j] * exp((double)a.max[j] - top),
                             v = (double)b.sum[j] * exp((double)b.max[j] - top);
                assert_true((double)got.max[j] == top);
                assert_true(fabs((double)got.sum[j] - (u + v)) <= 1e-6 * (u + v) * (1 + spread));
                for (int c = 0; c < DIM; c++) {
                    const double x = (double)a.out[j * DIM + c], y = (double)b.out[j * DIM + c];
                    const double want = (u * x + v * y) / (u + v);
                    assert_true(fabs((double)got.out[j * DIM + c] - want) <=
                                1e-6 * (1 + spread) * fmax(fabs(x), fabs(y)));
                }
            }
        }
}

static void test_empty_changes_nothing(void **unused)
{
    (void)unused;
    struct lowkey_random random = { 2 };
    for (const struct lowkey_kernels *kernels = lowkey_kernels; kernels->isa; kernels++) {
        struct state a = random_state(&random, 10);
        a.out[3] = -0.0f;
        struct state got = a, nothing = empty_state(), still = empty_state();
        kernels->merge(ROWS, DIM, view(&got), view(&nothing));
        assert_memory_equal(&got, &a, sizeof a);
        got = empty_state();
        struct state from = a;
        kernels->merge(ROWS, DIM, view(&got), view(&from));
        assert_memory_equal(&got, &a, sizeof a);
        kernels->merge(ROWS, DIM, view(&nothing), view(&still));
        assert_memory_equal(&nothing, &still, sizeof still);
    }
}

static void test_ends_of_the_range(void **unused)
{
    (void)unused;
    for (const struct lowkey_kernels *kernels = lowkey_kernels; kernels->isa; kernels++) {
        struct state a, b;
        for (int j = 0; j < ROWS; j++) {
            a.max[j] = FLT_MAX, b.max[j] = j % 2 ? FLT_MAX : -FLT_MAX;
            a.sum[j] = b.sum[j] = 64;
            for (int c = 0; c < DIM; c++)
                a.out[j * DIM + c] = 3e38f, b.out[j * DIM + c] = j % 2 ? 3e38f : -3e38f;
        }
        kernels->merge(ROWS, DIM, view(&a), view(&b));
        for (int i = 0; i < ROWS * DIM; i++) assert_true(a.out[i] == 3e38f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        { "merge: against double, maxima 0 to 1e4 apart", test_against_double, NULL, NULL, NULL },
        { "merge: an empty state changes nothing, to the bit", test_empty_changes_nothing, NULL, NULL, NULL },
        { "merge: scores and values at the ends of f32's range", test_ends_of_the_range, NULL, NULL, NULL },
    };
    return lowkey_run_tests(tests);
}
