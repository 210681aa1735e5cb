/* Cutting tokens into samples and windows. */
#include "experiments/samples.h"

#include "tests/check.h"

static int64_t offsets[] = { 0, 10, 13, 30 };
static const lowkey_tokens three = {
    .n_tokens = 30, .n_sequences = 3, .sequence_offsets = offsets, .vocab_size = 100, .tokenizer = (char *)"T"
};

static void pieces_lie_inside_sequences_and_leave_out_short_ends(void **state)
{
    (void)state;
    static const int64_t starts[] = { 0, 4, 13, 17, 21, 25 };
    assert_int_equal(lowkey_samples_count(&three, 4, 4), 2 + 0 + 4);
    for (int i = 0; i < 6; i++) assert_int_equal(lowkey_samples_start(&three, 4, 4, i), starts[i]);
    assert_int_equal(lowkey_samples_count(&three, 1, 1), 30);
    assert_int_equal(lowkey_samples_start(&three, 1, 1, 29), 29);
    assert_int_equal(lowkey_samples_count(&three, 17, 17), 1);
    assert_int_equal(lowkey_samples_start(&three, 17, 17, 0), 13);
    assert_int_equal(lowkey_samples_count(&three, 18, 18), 0);
}

static void strides_may_be_shorter_or_longer_than_a_piece(void **state)
{
    (void)state;
    assert_int_equal(lowkey_samples_count(&three, 8, 1), 3 + 0 + 10);
    assert_int_equal(lowkey_samples_start(&three, 8, 1, 2), 2);
    assert_int_equal(lowkey_samples_start(&three, 8, 1, 3), 13);
    assert_int_equal(lowkey_samples_count(&three, 2, 8), 2 + 1 + 2);
    assert_int_equal(lowkey_samples_start(&three, 2, 8, 1), 8);
    assert_int_equal(lowkey_samples_start(&three, 2, 8, 2), 10);
    assert_int_equal(lowkey_samples_start(&three, 2, 8, 4), 21);
}

static void tokens_of_a_larger_vocabulary_than_the_models_are_refused(void **state)
{
    (void)state;
    lowkey_error err;
    assert_ok(lowkey_samples_check("t.h5", &three, 100, &err), err);
    assert_ok(lowkey_samples_check("t.h5", &three, 101, &err), err); /* models pad their vocabulary */
    assert_refused(lowkey_samples_check("t.h5", &three, 99, &err), LOWKEY_EINVAL, err,
                   "t.h5: tokens of a vocabulary of 100, the model's has 99");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_lie_inside_sequences_and_leave_out_short_ends),
        cmocka_unit_test(strides_may_be_shorter_or_longer_than_a_piece),
        cmocka_unit_test(tokens_of_a_larger_vocabulary_than_the_models_are_refused),
    };
    return lowkey_run_tests(tests);
}
