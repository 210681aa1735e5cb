/* Sinks around a store: what the inner store is handed, what comes back, over chunks that cut them. */
#include "experiments/sink_store.h"

#include <stdlib.h>

#include "formats/half.h"
#include "tests/check.h"
#include "tests/random.h"

enum { N = 12, HEADS = 2, KEY = 8, VALUE = 16 };

struct inner { /* notes what it was handed, gives back its negative */
    float keys[N * HEADS * KEY], values[N * HEADS * VALUE];
    int n_tokens, n_resets;
};

static lowkey_status put(void *user, const struct lowkey_store_step *step, lowkey_error *err)
{
    struct inner *inner = user;
    (void)err;
    assert_int_equal(step->first, inner->n_tokens);
    for (int i = 0; i < step->n_tokens * HEADS * KEY; i++) {
        inner->keys[step->first * HEADS * KEY + i] = step->key[i];
        step->stored_key[i] = -step->key[i];
    }
    for (int i = 0; i < step->n_tokens * HEADS * VALUE; i++) {
        inner->values[step->first * HEADS * VALUE + i] = step->value[i];
        step->stored_value[i] = -step->value[i];
    }
    inner->n_tokens += step->n_tokens;
    return LOWKEY_OK;
}

static lowkey_status reset(void *user, lowkey_error *err)
{
    struct inner *inner = user;
    (void)err;
    inner->n_resets++;
    inner->n_tokens = 0;
    return LOWKEY_OK;
}

static int exact_from(void *user, enum lowkey_store_side side, int position)
{
    (void)user;
    return position - 3 - (int)side;
}

static const lowkey_layer_desc layer = {
    .n_q_heads = HEADS, .n_kv_heads = HEADS, .key_head_dim = KEY, .value_head_dim = VALUE
};

/* One side: tokens below n_sinks are rounded, others the negative; the inner store saw the first token behind the sinks of
 * the same chunk in their place, or themselves where the chunk had none. */
static void check_side(const float *x, const float *seen, const float *stored, int width, int n_sinks,
                       int chunk)
{
    for (int t = 0; t < N; t++) {
        const int start = t / chunk * chunk, end = start + chunk < N ? start + chunk : N;
        const int handed = t < n_sinks && n_sinks < end ? n_sinks : t;
        for (int c = 0; c < width; c++) {
            const float want = t < n_sinks ? lowkey_f16_to_f32(lowkey_f32_to_f16(x[t * width + c]))
                                           : -x[t * width + c];
            assert_true(stored[t * width + c] == want);
            assert_true(seen[t * width + c] == x[handed * width + c]);
        }
    }
}

static void sinks_come_back_in_16_bits_and_the_store_sees_the_token_behind_them(void **state)
{
    (void)state;
    static const int chunks[] = { 1, 2, 3, 5, N };
    float keys[N * HEADS * KEY], values[N * HEADS * VALUE], stored_keys[N * HEADS * KEY],
        stored_values[N * HEADS * VALUE];
    struct lowkey_random random = { 4 };
    lowkey_random_fill(&random, LOWKEY_NORMAL, keys, N * HEADS * KEY);
    lowkey_random_fill(&random, LOWKEY_NORMAL, values, N * HEADS * VALUE);
    for (int n_sinks = 0; n_sinks <= N + 1; n_sinks++)
        for (int i = 0; i < 5; i++) {
            struct inner inner = { .n_tokens = 0 };
            struct lowkey_sink_store sinks = { { put, reset, NULL, &inner }, n_sinks };
            const struct lowkey_store store = lowkey_sink_store_interface(&sinks);
            lowkey_error err;
            assert_ok(store.reset(store.user, &err), err);
            for (int t = 0; t < N; t += chunks[i]) {
                const struct lowkey_store_step step = { .layer = &layer,
                                                        .first = t,
                                                        .n_tokens = N - t < chunks[i] ? N - t : chunks[i],
                                                        .key = keys + t * HEADS * KEY,
                                                        .value = values + t * HEADS * VALUE,
                                                        .stored_key = stored_keys + t * HEADS * KEY,
                                                        .stored_value = stored_values + t * HEADS * VALUE };
                assert_ok(store.put(store.user, &step, &err), err);
            }
            assert_int_equal(inner.n_resets, 1);
            check_side(keys, inner.keys, stored_keys, HEADS * KEY, n_sinks, chunks[i]);
            check_side(values, inner.values, stored_values, HEADS * VALUE, n_sinks, chunks[i]);
        }
}

static void a_window_goes_through(void **state)
{
    (void)state;
    struct lowkey_sink_store with = { { put, reset, exact_from, NULL }, 2 },
                             without = { { put, reset, NULL, NULL }, 2 };
    const struct lowkey_store store = lowkey_sink_store_interface(&with);
    assert_int_equal(store.exact_from(store.user, LOWKEY_STORE_KEY, 10), 7);
    assert_int_equal(store.exact_from(store.user, LOWKEY_STORE_VALUE, 10), 6);
    assert_null(lowkey_sink_store_interface(&without).exact_from);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sinks_come_back_in_16_bits_and_the_store_sees_the_token_behind_them),
        cmocka_unit_test(a_window_goes_through),
    };
    return lowkey_run_tests(tests);
}
