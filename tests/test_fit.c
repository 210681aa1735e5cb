/* lowkey_fit as a function: what it returns, that blocks of channels do not matter, what options it
 * refuses. The command's test (test_fit.py) has the data. */
#include <stdlib.h>
#include <unistd.h>

#include "calib/fit.h"
#include "calib/fit_options.h"
#include "tests/captured.h"
#include "tests/check.h"

static const lowkey_layer_desc geometry = { .struct_size = sizeof(lowkey_layer_desc),
                                            .n_q_heads = 4,
                                            .n_kv_heads = 2,
                                            .key_head_dim = 16,
                                            .value_head_dim = 24,
                                            .logit_scale = 0.25,
                                            .rope_dims = 16,
                                            .rope_attention_factor = 1 };
static const int lengths[CAPTURED_SAMPLES] = { 100, 3, 65 };

static size_t read_whole(const char *path, char **bytes)
{
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    *bytes = malloc(1 << 22);
    const size_t n = fread(*bytes, 1, 1 << 22, file);
    fclose(file);
    return n;
}

static void blocks_of_channels_do_not_change_the_file(void **state)
{
    (void)state;
    struct captured captured;
    char out[80];
    captured_make(&captured, &geometry, lengths, 1u << LOWKEY_KEY | 1u << LOWKEY_VALUE | 1u << LOWKEY_QUERY,
                  3);
    snprintf(out, sizeof out, "%s.out", captured.path);
    const char *paths[] = { captured.path };
    char *first = NULL;
    size_t n_first = 0;
    lowkey_error err;
    for (int scope = 0; scope < 3; scope++) {
        for (int64_t bytes = 0; bytes < 20000;
             bytes = bytes * 7 + 1) { /* all; one channel at a time; several */
            struct lowkey_fit_options options = lowkey_fit_defaults();
            options.side[0].scope = options.side[1].scope = (enum lowkey_scope)scope;
            options.side[1].token_scale = scope == 2 ? LOWKEY_SCALE_F16 : LOWKEY_SCALE_NONE;
            options.column_bytes = bytes;
            options.n_threads = 1 + (int)(bytes % 3);
            assert_ok(lowkey_fit(1, paths, out, &options, NULL, &err), err);
            char *now;
            const size_t n = read_whole(out, &now);
            if (bytes == 0) first = now, n_first = n;
            assert_int_equal(n, n_first);
            assert_memory_equal(now, first, n);
            if (bytes) free(now);
        }
        free(first);
    }
    unlink(out);
    captured_free(&captured);
}

static void the_result_is_what_was_written(void **state)
{
    (void)state;
    struct captured captured;
    char out[80];
    captured_make(&captured, &geometry, lengths, 1u << LOWKEY_KEY | 1u << LOWKEY_VALUE, 3);
    snprintf(out, sizeof out, "%s.out", captured.path);
    const char *paths[] = { captured.path };
    struct lowkey_fit_options options = lowkey_fit_defaults();
    options.n_sinks = 4;
    struct lowkey_fit_result *result;
    lowkey_error err;
    assert_ok(lowkey_fit(1, paths, out, &options, &result, &err), err);
    assert_int_equal(result->record->n_tokens, 96 + 0 + 61);
    assert_string_equal(result->record->sensitivity, "none");
    lowkey_quantizer *quantizer;
    assert_ok(lowkey_quantizer_open(out, NULL, &quantizer, &err), err);
    const lowkey_side_desc *stored = &lowkey_quantizer_describe(quantizer)->layers[0].value;
    const lowkey_side_desc *made = &result->desc->layers[0].value;
    assert_int_equal(stored->table_entries, 16);
    assert_memory_equal(stored->table, made->table, 48 * 16 * sizeof(float));
    assert_memory_equal(stored->boundary, made->boundary, 48 * 15 * sizeof(float));
    lowkey_quantizer_free(quantizer);
    lowkey_fit_result_free(result);
    lowkey_fit_result_free(NULL);
    unlink(out);
    captured_free(&captured);
}

static void options_that_do_not_go_together_are_refused(void **state)
{
    (void)state;
    lowkey_error err;
    struct lowkey_fit_options o = lowkey_fit_defaults();
    assert_ok(lowkey_fit_options_check(&o, &err), err);
    o.side[0].widths[0] = 6;
    assert_refused(lowkey_fit_options_check(&o, &err), LOWKEY_EINVAL, err, "keys: a width");
    o = lowkey_fit_defaults();
    o.side[1].outlier_fraction = 1.5;
    assert_refused(lowkey_fit_options_check(&o, &err), LOWKEY_EINVAL, err, "values: a fraction");
    o = lowkey_fit_defaults();
    o.side[1].gain = o.side[1].qnorm = 1;
    assert_refused(lowkey_fit_options_check(&o, &err), LOWKEY_EINVAL, err, "choose one");
    o = lowkey_fit_defaults();
    o.n_sinks = 65;
    assert_refused(lowkey_fit_options_check(&o, &err), LOWKEY_EINVAL, err, "65");
    o = lowkey_fit_defaults();
    o.damp = 0;
    assert_refused(lowkey_fit_options_check(&o, &err), LOWKEY_EINVAL, err, "damp");
}

static void presets_are_known_by_name(void **state)
{
    (void)state;
    const char *const good[] = { "kvquant-nuq2", "kvquant-nuq3", "kvquant-nuq4", "kvquant-nuq2-1%",
                                 "kvquant-nuq4-1%" };
    const char *const bad[] = {
        "kvquant-nuq1", "kvquant-nuq5", "kvquant-nuq", "kvquant-nuq3-2%", "nuq3", "", "1", "5", "2.5"
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        struct lowkey_fit_options o = lowkey_fit_defaults();
        lowkey_error err;
        assert_true(lowkey_fit_preset(good[i], &o));
        assert_ok(lowkey_fit_options_check(&o, &err), err);
        assert_int_equal(o.side[1].widths[0], good[i][11] - '0');
        assert_true(o.budget == 0);
        assert_true(o.side[0].outlier_fraction == (strstr(good[i], "1%") ? 0.01 : 0));
    }
    for (int bits = 2; bits <= 4; bits++) {
        struct lowkey_fit_options o = lowkey_fit_defaults();
        lowkey_error err;
        assert_true(lowkey_fit_preset((const char[]) { (char)('0' + bits), 0 }, &o));
        assert_ok(lowkey_fit_options_check(&o, &err), err);
        assert_true(o.budget == bits && o.side[0].feedback == LOWKEY_FEEDBACK_IF_POSSIBLE && !o.side[1].feedback);
        assert_true(o.side[0].trellis == 4 && o.side[1].trellis == 4 && !o.side[1].gain);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct lowkey_fit_options o = lowkey_fit_defaults();
        assert_false(lowkey_fit_preset(bad[i], &o));
    }
}

static void sensitivity_is_the_first_that_all_files_have(void **state)
{
    (void)state;
    enum {
        BASE = 1 << LOWKEY_KEY | 1 << LOWKEY_VALUE,
        GRADS = 1 << LOWKEY_KEY_GRAD | 1 << LOWKEY_VALUE_GRAD,
        WEIGHTS = 1 << LOWKEY_KEY_WEIGHT | 1 << LOWKEY_VALUE_WEIGHT,
        QUERY = 1 << LOWKEY_QUERY
    };
    const struct {
        unsigned contents;
        enum lowkey_sensitivity want;
    } cases[] = {
        { BASE, LOWKEY_SENSITIVITY_NONE },
        { BASE | QUERY, LOWKEY_SENSITIVITY_ATTENTION },
        { BASE | QUERY | WEIGHTS, LOWKEY_SENSITIVITY_WEIGHT },
        { BASE | QUERY | GRADS, LOWKEY_SENSITIVITY_FISHER },
        { BASE | 1 << LOWKEY_KEY_GRAD, LOWKEY_SENSITIVITY_NONE },
    };
    enum lowkey_sensitivity got;
    lowkey_error err;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_ok(lowkey_choose_sensitivity(LOWKEY_SENSITIVITY_AUTO, cases[i].contents, cases[i].contents,
                                            &got, &err),
                  err);
        assert_int_equal(got, cases[i].want);
    }
    assert_refused(lowkey_choose_sensitivity(LOWKEY_SENSITIVITY_AUTO, BASE, BASE | QUERY, &got, &err),
                   LOWKEY_EINVAL, err, "same contents");
    assert_ok(lowkey_choose_sensitivity(LOWKEY_SENSITIVITY_NONE, BASE, BASE | QUERY, &got, &err), err);
    assert_refused(lowkey_choose_sensitivity(LOWKEY_SENSITIVITY_FISHER, BASE | WEIGHTS, BASE, &got, &err),
                   LOWKEY_EINVAL, err, "key_grad");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_of_channels_do_not_change_the_file),
        cmocka_unit_test(the_result_is_what_was_written),
        cmocka_unit_test(options_that_do_not_go_together_are_refused),
        cmocka_unit_test(presets_are_known_by_name),
        cmocka_unit_test(sensitivity_is_the_first_that_all_files_have),
    };
    return lowkey_run_tests(tests);
}
