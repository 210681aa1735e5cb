/* A whole tuning of a tiny model: the best state is kept and written, a run that was killed goes on to the same bits, the
 * order of windows, what the written file says, and refusals. */
#include "experiments/tune.h"

#include <math.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "experiments/tune_checkpoint.h"
#include "experiments/tune_pass.h"
#include "formats/sha256.h"
#include "tests/check.h"
#include "tests/quantizers.h"
#include "tests/tuning.h"

struct noted { /* validations as they came */
    int n, steps[64], best[64];
    double kl[64];
    int die_at; /* step; < 0: never */
};

static void note(void *user, int step, double kl, int is_best)
{
    struct noted *noted = user;
    noted->steps[noted->n] = step;
    noted->kl[noted->n] = kl;
    noted->best[noted->n++] = is_best;
    if (step == noted->die_at) _exit(7);
}

static struct lowkey_tune_request request_of(const struct tuning *tuning, struct noted *noted)
{
    *noted = (struct noted) { .die_at = -1 };
    return (struct lowkey_tune_request) {
        .model = tuning->model,
        .tokens = tuning->tokens,
        .quantizer = tuning->quantizer,
        .record = &tuning->record,
        .length = TUNING_WINDOW,
        .end_window = 8,
        .first_validation = 9,
        .end_validation = 12,
        .steps = 11,
        .validate_every = 4,
        .rate = 0.1,
        .seed = 5,
        .n_threads = 1,
        .on_validation = note,
        .user = noted,
    };
}

static struct lowkey_tune_state tune(const struct lowkey_tune_request *request)
{
    struct lowkey_tune_state state;
    lowkey_error err;
    assert_ok(lowkey_tune_begin(request, &state, &err), err);
    assert_ok(lowkey_tune(request, &state, &err), err);
    return state;
}

static void windows_come_in_random_order_each_once_before_any_comes_again(void **state)
{
    (void)state;
    struct lowkey_tune_request request = { .first_window = 3, .end_window = 20, .seed = 1 };
    int differs = 0, rises = 0;
    for (int round = 0; round < 4; round++) {
        int count[20] = { 0 };
        for (int i = 0; i < 17; i++) count[lowkey_tune_window(&request, round * 17 + i)]++;
        for (int w = 0; w < 20; w++) assert_int_equal(count[w], w >= 3);
        for (int i = 0; i < 17; i++) {
            differs += lowkey_tune_window(&request, i) != lowkey_tune_window(&request, round * 17 + i);
            rises += lowkey_tune_window(&request, round * 17 + i) == 3 + i;
        }
    }
    assert_true(differs > 30 && rises < 20);
    request.seed = 2;
    const int second = lowkey_tune_window(&request, 0) * 400 + lowkey_tune_window(&request, 1) * 20;
    request.seed = 1;
    assert_true(second != lowkey_tune_window(&request, 0) * 400 + lowkey_tune_window(&request, 1) * 20);
}

/* The mean KL on the validation windows, made anew. */
static double validate(const struct lowkey_tune_request *request, const lowkey_quantizer *quantizer)
{
    lowkey_tune_pass *pass;
    lowkey_error err;
    double kl, mean = 0;
    float *reference = calloc((size_t)(TUNING_WINDOW * request->model->hidden_size), sizeof *reference);
    assert_ok(lowkey_tune_pass_create(request->model, TUNING_WINDOW, 1, &pass, &err), err);
    for (int w = request->first_validation; w < request->end_validation; w++) {
        const int32_t *tokens = request->tokens->tokens + w * TUNING_WINDOW;
        const struct lowkey_tune_measure measure = { .quantizer = quantizer,
                                                     .tokens = tokens,
                                                     .reference = reference };
        assert_ok(lowkey_tune_reference(pass, tokens, reference, &err), err);
        assert_ok(lowkey_tune_kl(pass, &measure, &kl, &err), err);
        mean += kl / (request->end_validation - request->first_validation);
    }
    lowkey_tune_pass_free(pass);
    free(reference);
    return mean;
}

static void name_file(char path[64], const char *what)
{
    snprintf(path, 64, "/tmp/lowkey_test_tune.%ld.%s", (long)getpid(), what);
}

static void the_best_state_is_written(void **state)
{
    (void)state;
    const struct tuning_choice choice = tuning_plain();
    static const struct {
        double rate;
        int steps;
    } cases[] = { { 0.1, 11 }, { 0.02, 5 }, { 8, 6 } }; /* it pays at first, and never */
    int best_steps[3];
    for (int i = 0; i < 3; i++) {
        struct tuning tuning = tuning_make(&choice);
        struct noted noted;
        struct lowkey_tune_request request = request_of(&tuning, &noted);
        request.rate = cases[i].rate;
        request.steps = cases[i].steps;
        struct lowkey_tune_state found = tune(&request);
        int best = 0;
        for (int v = 0; v < noted.n; v++) {
            assert_int_equal(noted.steps[v], v + 1 < noted.n ? 4 * v : request.steps);
            assert_int_equal(noted.best[v], v == 0 || noted.kl[v] < noted.kl[best]);
            if (noted.kl[v] < noted.kl[best]) best = v;
        }
        assert_int_equal(noted.n, (request.steps + 3) / 4 + 1);
        assert_int_equal(found.best_step, noted.steps[best]);
        best_steps[i] = found.best_step;

        char path[64];
        lowkey_error err;
        lowkey_quantizer *written;
        struct lowkey_fit_record *record;
        name_file(path, "out.h5");
        assert_ok(lowkey_tune_write(&request, &found, path, &err), err);
        assert_ok(lowkey_quantizer_read(path, &written, &record, &err), err);
        unlink(path);
        assert_true(fabs(validate(&request, written) - noted.kl[best]) < 1e-12);
        if (found.best_step == 0)
            lowkey_test_desc_equal(lowkey_quantizer_describe(written),
                                   lowkey_quantizer_describe(tuning.quantizer));
        assert_int_equal(record->n_samples,
                         found.best_step ? 1 + (request.steps < 8 ? request.steps : 8) : 1);
        lowkey_quantizer_free(written);
        lowkey_fit_record_free(record);
        lowkey_tune_state_free(&found);
        tuning_free(&tuning);
    }
    assert_true(best_steps[0] > 0 && best_steps[0] < 11 && best_steps[2] == 0);
}

static void the_written_file_says_what_it_was_tuned_on(void **state)
{
    (void)state;
    const struct tuning_choice choice = tuning_plain();
    struct tuning tuning = tuning_make(&choice);
    struct noted noted;
    struct lowkey_tune_request request = request_of(&tuning, &noted);
    request.steps = 3;
    struct lowkey_tune_state found = tune(&request);
    char path[64], text[65];
    lowkey_error err;
    lowkey_quantizer *written;
    struct lowkey_fit_record *record;
    name_file(path, "out.h5");
    assert_ok(lowkey_tune_write(&request, &found, path, &err), err);
    assert_ok(lowkey_quantizer_read(path, &written, &record, &err), err);
    unlink(path);
    assert_int_equal(record->n_samples, 4);
    assert_true(found.best_step > 0 && record->tuned_steps == found.best_step);
    assert_int_equal(record->n_tokens, 69 + 3 * 69);
    lowkey_sha256_print(tuning.tokens->text_sha256, text);
    assert_string_equal(record->text_name, "another;made up");
    assert_memory_equal(record->text_sha256 + 65, text, 65);
    for (int step = 0; step < 3; step++) { /* little-endian machines: ids as they are */
        unsigned char hash[32];
        int there = 0;
        lowkey_sha256_of(tuning.tokens->tokens + lowkey_tune_window(&request, step) * TUNING_WINDOW,
                         TUNING_WINDOW * sizeof(int32_t), hash, &err);
        for (int s = 0; s < 4; s++) there += memcmp(hash, record->sample_sha256[s], 32) == 0;
        assert_int_equal(there, 1);
    }
    for (int side = 0; side < 2; side++) {
        const struct lowkey_side_report *report = &record->reports[1][side];
        const lowkey_layer_desc *layer = &lowkey_quantizer_describe(written)->layers[1];
        const int E = (side ? &layer->value : &layer->key)->table_entries;
        uint64_t n = 0;
        for (int k = 0; k < E; k++) n += report->histogram[k];
        assert_true(n == 3 * 69 && report->n_tokens == 3 * 69 && report->mse[0] > 0 && report->gain[0] == 1);
    }
    lowkey_quantizer_free(written);
    lowkey_fit_record_free(record);
    lowkey_tune_state_free(&found);
    tuning_free(&tuning);
}

static void a_run_that_was_killed_goes_on_to_the_same_bits(void **state)
{
    (void)state;
    const struct tuning_choice choice = tuning_plain();
    struct tuning tuning = tuning_make(&choice);
    struct noted noted, again;
    struct lowkey_tune_request request = request_of(&tuning, &noted);
    struct lowkey_tune_state whole = tune(&request);
    char path[64];
    name_file(path, "checkpoint");
    for (int die_at = 4; die_at <= 12; die_at += 4) {
        request.checkpoint = path;
        const pid_t child = fork();
        if (child == 0) {
            noted.die_at = die_at < 12 ? die_at : 11;
            tune(&request);
            _exit(0);
        }
        int status;
        waitpid(child, &status, 0);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 7);
        request.user = &again;
        again = (struct noted) { .die_at = -1 };
        request.n_threads = 2;
        struct lowkey_tune_state state_again;
        lowkey_error err;
        assert_ok(lowkey_tune_begin(&request, &state_again, &err), err);
        assert_true(state_again.done >= (die_at < 12 ? die_at : 11) && state_again.done < 12);
        assert_ok(lowkey_tune(&request, &state_again, &err), err);
        assert_memory_equal(state_again.tables->move, whole.tables->move,
                            4 * whole.tables->n * sizeof(double));
        assert_true(state_again.best_step == whole.best_step && state_again.best_kl == whole.best_kl);
        assert_int_equal(again.n, noted.n);
        assert_memory_equal(again.kl, noted.kl, sizeof again.kl);
        lowkey_tune_state_free(&state_again);
        unlink(path);
        request.user = &noted;
        request.n_threads = 1;
    }
    lowkey_tune_state_free(&whole);
    tuning_free(&tuning);
}

static lowkey_status begin(const struct lowkey_tune_request *request, lowkey_error *err)
{
    struct lowkey_tune_state state;
    const lowkey_status status = lowkey_tune_begin(request, &state, err);
    lowkey_tune_state_free(&state);
    return status;
}

static void a_checkpoint_of_another_run_is_refused_with_both_values(void **state)
{
    (void)state;
    struct tuning_choice choice = tuning_plain();
    struct tuning tuning = tuning_make(&choice);
    struct noted noted;
    char path[64];
    lowkey_error err;
    struct lowkey_tune_request request = request_of(&tuning, &noted), other = request;
    name_file(path, "checkpoint");
    request.steps = 1;
    request.checkpoint = path;
    struct lowkey_tune_state found = tune(&request);
    lowkey_tune_state_free(&found);
    assert_ok(begin(&request, &err), err);
    other = request, other.steps = 2;
    assert_refused(begin(&other, &err), LOWKEY_EINVAL, err, "its steps is 1, of this run 2");
    other = request, other.end_window = 7;
    assert_refused(begin(&other, &err), LOWKEY_EINVAL, err, "its end-window is 8, of this run 7");
    other = request, other.rate = 0.2;
    assert_refused(begin(&other, &err), LOWKEY_EINVAL, err, "its rate is 0.1, of this run 0.2");
    other = request, other.seed = 6;
    assert_refused(begin(&other, &err), LOWKEY_EINVAL, err, "its seed is 5, of this run 6");
    tuning.tokens->tokens[3] ^= 1;
    assert_refused(begin(&request, &err), LOWKEY_EINVAL, err, "its tokens is");
    tuning.tokens->tokens[3] ^= 1;
    tuning.model->sha256[0] ^= 1;
    assert_refused(begin(&request, &err), LOWKEY_EINVAL, err, "its model is");
    tuning.model->sha256[0] ^= 1;
    tuning.record.reports[1][0].mse[2] *= 2;
    assert_refused(begin(&request, &err), LOWKEY_EINVAL, err, "its quantizer is");
    tuning.record.reports[1][0].mse[2] /= 2;
    FILE *file = fopen(path, "r+b");
    fseek(file, -9, SEEK_END);
    fputc(0x5a, file);
    fclose(file);
    assert_refused(begin(&request, &err), LOWKEY_EFORMAT, err, "not what was written");
    assert_int_equal(truncate(path, 300), 0);
    assert_refused(begin(&request, &err), LOWKEY_EFORMAT, err, "");
    assert_int_equal(truncate(path, 3), 0);
    assert_refused(begin(&request, &err), LOWKEY_EFORMAT, err, "no checkpoint");
    unlink(path);
    tuning_free(&tuning);
}

static void windows_that_are_not_there_overlap_or_hold_sinks_alone_are_refused(void **state)
{
    (void)state;
    struct tuning_choice choice = tuning_plain();
    choice.n_sinks = 64;
    struct tuning tuning = tuning_make(&choice);
    struct noted noted;
    lowkey_error err;
    struct lowkey_tune_request request = request_of(&tuning, &noted), other = request;
    assert_ok(begin(&request, &err), err);
    other.end_window = 10;
    assert_refused(begin(&other, &err), LOWKEY_EINVAL, err,
                   "0:10 to tune on and 9:12 to validate on overlap");
    other = request, other.first_window = other.end_window = 3;
    assert_refused(begin(&other, &err), LOWKEY_EINVAL, err,
                   "windows 3:3 to tune on: the text has 12 of 70 tokens");
    other = request, other.end_validation = 13;
    assert_refused(begin(&other, &err), LOWKEY_EINVAL, err, "windows 9:13 to validate on: the text has 12");
    other = request, other.length = 65;
    assert_refused(begin(&other, &err), LOWKEY_EINVAL, err,
                   "windows of 65 tokens: the quantizer keeps 64 as sinks");
    tuning_free(&tuning);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(windows_come_in_random_order_each_once_before_any_comes_again),
        cmocka_unit_test(the_best_state_is_written),
        cmocka_unit_test(the_written_file_says_what_it_was_tuned_on),
        cmocka_unit_test(a_run_that_was_killed_goes_on_to_the_same_bits),
        cmocka_unit_test(a_checkpoint_of_another_run_is_refused_with_both_values),
        cmocka_unit_test(windows_that_are_not_there_overlap_or_hold_sinks_alone_are_refused),
    };
    return lowkey_run_tests(tests);
}
