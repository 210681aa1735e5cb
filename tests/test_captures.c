/* Several files as one body of samples. */
#include <stdlib.h>

#include "calib/captures.h"
#include "tests/captured.h"
#include "tests/check.h"

static const lowkey_layer_desc geometry = { .struct_size = sizeof(lowkey_layer_desc),
                                            .n_q_heads = 2,
                                            .n_kv_heads = 2,
                                            .key_head_dim = 8,
                                            .value_head_dim = 16,
                                            .logit_scale = 0.3,
                                            .rope_dims = 8,
                                            .rope_attention_factor = 1 };
static const int lengths[CAPTURED_SAMPLES] = { 10, 3, 20 };
enum { BOTH = 1 << LOWKEY_KEY | 1 << LOWKEY_VALUE };

static void samples_come_in_the_order_of_their_hashes(void **state)
{
    (void)state;
    struct captured captured;
    captured_make(&captured, &geometry, lengths, BOTH, 1);
    lowkey_captures *captures;
    lowkey_error err;
    const char *paths[] = { captured.path };
    assert_ok(lowkey_captures_open(1, paths, 0, 0, 5, &captures, &err), err);
    assert_int_equal(captures->n_tokens, 5 + 0 + 15); /* the sample of 3 is all sinks */
    for (int s = 0; s < 3; s++) {
        const struct lowkey_sample *sample = &captures->samples[s];
        assert_int_equal(sample->n_tokens, lengths[2 - s]); /* hashes fall in the file */
        assert_int_equal(sample->n_sinks, lengths[2 - s] < 5 ? 3 : 5);
        float row[2 * 16];
        assert_ok(lowkey_captures_read(captures, 0, LOWKEY_VALUE, s, 2, 1, 0, 2, row, &err), err);
        assert_memory_equal(row, captured.rows[LOWKEY_VALUE] + (sample->offset + 2) * 32, sizeof row);
    }
    assert_int_equal(captures->samples[2].start, 15);
    assert_string_equal(captures->text_name, "text");
    lowkey_captures_close(captures);
    assert_refused(lowkey_captures_open(1, paths, 0, 0, 20, &captures, &err), LOWKEY_EINVAL, err,
                   "no token is left");
    captured_free(&captured);
}

static void files_join_and_a_sample_in_two_is_refused(void **state)
{
    (void)state;
    struct captured first, second;
    captured_make(&first, &geometry, lengths, BOTH, 1);
    captured_make(&second, &geometry, lengths, BOTH | 1 << LOWKEY_QUERY, 2);
    lowkey_captures *captures;
    lowkey_error err;
    const char *paths[] = { first.path, second.path }, *twice[] = { first.path, first.path };
    assert_ok(lowkey_captures_open(2, paths, 0, 0, 0, &captures, &err), err);
    assert_int_equal(captures->n_samples, 6);
    assert_int_equal(captures->n_tokens, 66);
    assert_int_equal(captures->contents, BOTH);
    assert_int_equal(captures->some_contents, BOTH | 1 << LOWKEY_QUERY);
    assert_string_equal(captures->text_name, "text");
    lowkey_captures_close(captures);
    assert_refused(lowkey_captures_open(2, twice, 0, 0, 0, &captures, &err), LOWKEY_EINVAL, err,
                   "count twice");
    captured_free(&second);
    lowkey_layer_desc other = geometry;
    other.rope_pairing = LOWKEY_PAIR_INTERLEAVED;
    captured_make(&second, &other, lengths, BOTH, 2);
    paths[1] = second.path;
    assert_refused(lowkey_captures_open(2, paths, 0, 0, 0, &captures, &err), LOWKEY_EFORMAT, err, "pairing");
    captured_free(&first);
    captured_free(&second);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(samples_come_in_the_order_of_their_hashes),
        cmocka_unit_test(files_join_and_a_sample_in_two_is_refused),
    };
    return lowkey_run_tests(tests);
}
