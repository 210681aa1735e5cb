/* Formats of other people as stores: what all of them keep to. What each of them computes is in
 * test_peers_*.c. */
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "experiments/peers/peer_parts.h"
#include "tests/check.h"
#include "tests/peer_cases.h"

static const struct peer_shape shapes[] = {
    { 9, 3, 64, 64, 64, LOWKEY_PAIR_HALF, 0 },       { 8, 2, 128, 128, 64, LOWKEY_PAIR_INTERLEAVED, 0 },
    { 2, 1, 256, 256, 256, LOWKEY_PAIR_HALF, 1.25 }, { 4, 2, 80, 80, 20, LOWKEY_PAIR_HALF, 0 },
    { 4, 4, 128, 64, 0, LOWKEY_PAIR_HALF, 0 },
};
enum { N_SHAPES = sizeof shapes / sizeof shapes[0] };
enum { ALL = 1 << LOWKEY_KEY | 1 << LOWKEY_VALUE | 1 << LOWKEY_QUERY };

/* Formats need what they need: heads of 80 are refused by some, by name. */
static lowkey_peer *open_or_null(const char *name, const struct peer_model *model, const char *path,
                                 int n_threads)
{
    lowkey_peer *peer;
    lowkey_error err;
    const lowkey_status status = lowkey_peer_open(name, &model->model, 1, &path, n_threads, &peer, &err);
    if (status == LOWKEY_OK) return peer;
    if (status != LOWKEY_EUNSUPPORTED || !strstr(err.message, name) || model->layers[0].key_head_dim != 80)
        fail_msg("%s, heads of %d: %s", name, model->layers[0].key_head_dim, err.message);
    assert_null(peer);
    return NULL;
}

static void names_are_unique_and_found(void **state)
{
    (void)state;
    int n = 0;
    for (const char *name; (name = lowkey_peer_name(n)); n++) {
        assert_true(lowkey_peer_known(name));
        for (int i = 0; i < n; i++) assert_string_not_equal(name, lowkey_peer_name(i));
    }
    assert_true(n > 20);
    assert_null(lowkey_peer_name(-1));
    assert_false(lowkey_peer_known("kivi"));
    struct peer_model model;
    peer_model_make(&model, &shapes[0]);
    lowkey_peer *peer;
    lowkey_error err;
    assert_refused(lowkey_peer_open("kivi", &model.model, 0, NULL, 1, &peer, &err), LOWKEY_EINVAL, err,
                   "'kivi'");
    lowkey_peer_close(NULL);
}

static void expect_same(const char *name, const struct peer_tokens *a, const struct peer_tokens *b)
{
    const size_t n_key = (size_t)a->n * a->key_row, n_value = (size_t)a->n * a->value_row;
    if (memcmp(a->stored_key, b->stored_key, n_key * sizeof(float)) != 0 ||
        memcmp(a->stored_value, b->stored_value, n_value * sizeof(float)) != 0)
        fail_msg("%s: %d tokens differ in chunks", name, a->n);
    for (size_t c = 0; c < n_key; c++) assert_true(isfinite(a->stored_key[c]));
    for (size_t c = 0; c < n_value; c++) assert_true(isfinite(a->stored_value[c]));
}

static void any_cut_at_groups_and_any_threads_store_the_same(void **state)
{
    (void)state;
#ifdef __SANITIZE_ADDRESS__ /* ten times as slow */
    static const int lengths[] = { 1, 33, 65, 130 };
#else
    static const int lengths[] = { 1, 31, 32, 33, 64, 65, 130, 2048 };
#endif
    enum { N_LENGTHS = sizeof lengths / sizeof lengths[0] };
    for (int s = 0; s < N_SHAPES; s++) {
        const int n_lengths = s ? N_LENGTHS - 1 : N_LENGTHS;
        struct peer_model model;
        struct peer_tokens a[N_LENGTHS], b[N_LENGTHS];
        peer_model_make(&model, &shapes[s]);
        for (int j = 0; j < n_lengths; j++) {
            peer_tokens_make(&a[j], &shapes[s], lengths[j], 3);
            peer_tokens_make(&b[j], &shapes[s], lengths[j], 3);
        }
        char path[64];
        peer_captures_make(&model, 2, 40, ALL, 7, path);
        const char *name;
        for (int i = 0; (name = lowkey_peer_name(i)); i++) {
            lowkey_peer *three = open_or_null(name, &model, path, 3);
            if (!three) continue;
            lowkey_peer *one = s ? three
                                 : open_or_null(name, &model, path, 1); /* other threads, the same fit */
            const int group = lowkey_peer_find(name)->group_tokens;
            for (int j = 0; j < n_lengths; j++) {
                lowkey_error err;
                assert_ok(peer_run(one, &model, 1, &a[j], 0, &err), err);
                assert_ok(peer_run(three, &model, 1, &b[j], group > 1 ? group : 17, &err), err);
                expect_same(name, &a[j], &b[j]);
            }
            if (one != three) lowkey_peer_close(one);
            lowkey_peer_close(three);
        }
        for (int j = 0; j < n_lengths; j++) {
            peer_tokens_free(&a[j]);
            peer_tokens_free(&b[j]);
        }
        unlink(path);
    }
}

static void more_bits_lose_less_and_none_loses_all(void **state)
{
    (void)state;
    struct peer_model model;
    peer_model_make(&model, &shapes[0]);
    char path[64];
    peer_captures_make(&model, 2, 150, ALL, 7, path);
    struct peer_tokens tokens;
    peer_tokens_make(&tokens, &shapes[0], 256, 5);
    const char *name;
    for (int i = 0; (name = lowkey_peer_name(i)); i++) {
        lowkey_peer *peer = open_or_null(name, &model, path, 2);
        lowkey_error err;
        assert_ok(peer_run(peer, &model, 0, &tokens, 0, &err), err);
        const struct lowkey_peer_bits bits = lowkey_peer_bits(peer);
        const double key = peer_relative_error(tokens.key, tokens.stored_key, 256 * tokens.key_row);
        const double value = peer_relative_error(tokens.value, tokens.stored_value, 256 * tokens.value_row);
        printf("# %-18s %5.3f %5.3f bits, relative MSE %.5f %.5f\n", name, bits.key, bits.value, key, value);
        assert_true(bits.key >= 1 && bits.key < 9 && bits.value >= 1 && bits.value < 9);
        assert_true(key < (bits.key < 2 ? 1 : 0.8) && value < (bits.value < 2 ? 1 : 0.8));
        if (bits.key > 4 && !strstr(name, "prod"))
            assert_true(key < 0.03); /* those trade error for no bias */
        if (bits.key >= 8) assert_true(key < 0.004);
        lowkey_peer_close(peer);
    }
    peer_tokens_free(&tokens);
    unlink(path);
}

static void chunks_that_break_groups_and_wrong_tokens_are_refused(void **state)
{
    (void)state;
    struct peer_model model;
    peer_model_make(&model, &shapes[0]);
    lowkey_peer *peer;
    lowkey_error err;
    assert_ok(lowkey_peer_open("kivi-2-g32", &model.model, 0, NULL, 1, &peer, &err), err);
    struct peer_tokens tokens;
    peer_tokens_make(&tokens, &shapes[0], 70, 5);
    assert_refused(peer_run(peer, &model, 0, &tokens, 33, &err), LOWKEY_EINVAL, err,
                   "kivi-2-g32: 32 tokens are quantized together");
    assert_ok(peer_run(peer, &model, 0, &tokens, 64, &err), err);

    const struct lowkey_store store = lowkey_peer_store(peer);
    struct lowkey_store_step step = { .layer = &model.layers[0],
                                      .first = 64,
                                      .n_tokens = 1,
                                      .key = tokens.key,
                                      .value = tokens.value,
                                      .query = tokens.query,
                                      .stored_key = tokens.stored_key,
                                      .stored_value = tokens.stored_value };
    assert_refused(store.put(store.user, &step, &err), LOWKEY_EINVAL, err,
                   "70 tokens; token 64 does not follow");
    assert_ok(store.reset(store.user, &err), err);
    step.first = 0;
    tokens.value[64 + 3] = NAN;
    assert_refused(store.put(store.user, &step, &err), LOWKEY_EINVAL, err,
                   "values, head 1, channel 3, token 0");
    lowkey_layer_desc beyond = model.layers[0];
    beyond.index = 2;
    step.layer = &beyond;
    assert_refused(store.put(store.user, &step, &err), LOWKEY_EINVAL, err, "no layer 2");
    peer_tokens_free(&tokens);
    lowkey_peer_close(peer);
}

static void windows_are_kivis(void **state)
{
    (void)state;
    struct peer_model model;
    peer_model_make(&model, &shapes[0]);
    lowkey_peer *with, *without;
    lowkey_error err;
    assert_ok(lowkey_peer_open("kivi-2-g32-w128", &model.model, 0, NULL, 1, &with, &err), err);
    assert_ok(lowkey_peer_open("kivi-2-g32", &model.model, 0, NULL, 1, &without, &err), err);
    const struct lowkey_store store = lowkey_peer_store(with);
    assert_null(lowkey_peer_store(without).exact_from);
    /* Keys are quantized 128 at a time once there are as many, values one by one when 128 newer ones are
     * there. */
    static const struct {
        int position, key, value;
    } known[] = { { 0, 0, 0 }, { 127, 0, 0 }, { 128, 128, 1 }, { 200, 128, 73 }, { 256, 256, 129 } };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        assert_int_equal(store.exact_from(store.user, LOWKEY_STORE_KEY, known[i].position), known[i].key);
        assert_int_equal(store.exact_from(store.user, LOWKEY_STORE_VALUE, known[i].position), known[i].value);
    }
    lowkey_peer_close(with);
    lowkey_peer_close(without);
}

static void formats_that_calibrate_refuse_to_do_without(void **state)
{
    (void)state;
    struct peer_model model, other;
    peer_model_make(&model, &shapes[0]);
    peer_model_make(&other, &shapes[1]);
    char path[64], wrong[64];
    peer_captures_make(&model, 1, 80, 1 << LOWKEY_KEY | 1 << LOWKEY_VALUE, 7, path);
    peer_captures_make(&other, 1, 80, ALL, 7, wrong);
    const char *paths[] = { path }, *wrong_paths[] = { wrong };
    const char *name;
    int n_calibrate = 0, n_queries = 0;
    for (int i = 0; (name = lowkey_peer_name(i)); i++) {
        lowkey_peer *peer;
        lowkey_error err;
        const unsigned wants = lowkey_peer_find(name)->wants;
        if (!wants) {
            assert_ok(lowkey_peer_open(name, &model.model, 0, NULL, 1, &peer, &err), err);
            lowkey_peer_close(peer);
            continue;
        }
        n_calibrate++;
        assert_refused(lowkey_peer_open(name, &model.model, 0, NULL, 1, &peer, &err), LOWKEY_EINVAL, err,
                       name);
        assert_refused(lowkey_peer_open(name, &model.model, 1, wrong_paths, 1, &peer, &err), LOWKEY_EFORMAT,
                       err, name);
        if (!(wants & LOWKEY_PEER_QUERIES)) continue;
        n_queries++;
        assert_refused(lowkey_peer_open(name, &model.model, 1, paths, 1, &peer, &err), LOWKEY_EINVAL, err,
                       "queries");
    }
    assert_true(n_calibrate > 0 && n_queries >= 0);
    unlink(path);
    unlink(wrong);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_are_unique_and_found),
        cmocka_unit_test(any_cut_at_groups_and_any_threads_store_the_same),
        cmocka_unit_test(more_bits_lose_less_and_none_loses_all),
        cmocka_unit_test(chunks_that_break_groups_and_wrong_tokens_are_refused),
        cmocka_unit_test(windows_are_kivis),
        cmocka_unit_test(formats_that_calibrate_refuse_to_do_without),
    };
    return lowkey_run_tests(tests);
}
