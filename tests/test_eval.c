/* Evaluation of a tiny model: windows against sums in f64, formats together and alone, threads, what is wanted, refusals. */
#include "experiments/eval.h"

#include <dirent.h>
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/check.h"
#include "tests/tiny_model.h"

static const struct tiny_shape shape = { 2, 24, 40, 300, 4, 2, 8, 8, 8, LOWKEY_PAIR_HALF, 0, 0, 0, 0, 0 };
enum { N = 1300, WINDOW = 300, N_WINDOWS = 3, MOST = 20 }; /* a window is more than one block of logits */
static const int64_t windows[N_WINDOWS] = { 0, 1, 3 };

struct made { /* what came, and what to leave out */
    struct lowkey_eval_result results[1 + MOST][N_WINDOWS];
    int n[1 + MOST][N_WINDOWS], n_results, left_out_format, left_out_window, stop_after;
};

static int is_wanted(void *user, int format, int i)
{
    const struct made *made = user;
    return format != made->left_out_format || i != made->left_out_window;
}

static lowkey_status note(void *user, int format, int i, const struct lowkey_eval_result *result,
                          lowkey_error *err)
{
    struct made *made = user;
    (void)err;
    made->results[1 + format][i] = *result;
    made->n[1 + format][i]++;
    return ++made->n_results == made->stop_after ? LOWKEY_EIO : LOWKEY_OK;
}

struct machine {
    lowkey_model *model;
    int32_t tokens[N];
    int64_t offsets[2];
    lowkey_tokens text;
    struct lowkey_eval_format formats[MOST];
    struct lowkey_eval_request request;
    struct made made;
};

/* names: NULL behind the last */
static void machine_init(struct machine *m, const char *const *names, int n_threads)
{
    lowkey_error err;
    memset(m, 0, sizeof *m);
    m->model = lowkey_tiny_model(&shape, 3);
    m->model->name = (char *)"tiny";
    m->offsets[1] = N;
    for (int t = 0; t < N; t++) m->tokens[t] = (t * t + 3 * t + t / 300) % shape.vocab;
    m->text = (lowkey_tokens) { .n_tokens = N,
                                .tokens = m->tokens,
                                .n_sequences = 1,
                                .sequence_offsets = m->offsets,
                                .vocab_size = shape.vocab };
    const struct lowkey_eval_format_options options = { .model = m->model,
                                                        .n_sinks = 1,
                                                        .n_threads = n_threads };
    int n = 0;
    for (; names[n]; n++) assert_ok(lowkey_eval_format_open(names[n], &options, &m->formats[n], &err), err);
    m->made.left_out_format = m->made.left_out_window = -9;
    m->request = (struct lowkey_eval_request) { .model = m->model,
                                                .tokens = &m->text,
                                                .window = WINDOW,
                                                .n_windows = N_WINDOWS,
                                                .windows = windows,
                                                .n_formats = n,
                                                .formats = m->formats,
                                                .n_threads = n_threads,
                                                .is_wanted = is_wanted,
                                                .on_result = note,
                                                .user = &m->made };
}

static void machine_free(struct machine *m)
{
    for (int f = 0; f < m->request.n_formats; f++) lowkey_eval_format_close(&m->formats[f]);
    m->model->name = NULL;
    lowkey_tiny_model_free(m->model);
}

/* Negative log-likelihood of a window by the oracle. */
static double oracle_nll(const lowkey_model *model, const int32_t *tokens)
{
    const int width = model->hidden_size;
    double *hidden = calloc((size_t)(WINDOW * width), sizeof *hidden), nll = 0;
    lowkey_tiny_oracle(model, tokens, WINDOW, hidden, -1, NULL, NULL, NULL);
    for (int t = 0; t + 1 < WINDOW; t++) {
        double sum = 0, target = 0;
        for (int v = 0; v < model->vocab_size; v++) {
            double logit = 0;
            for (int c = 0; c < width; c++)
                logit += hidden[t * width + c] * (double)model->output[v * width + c];
            sum += exp(logit);
            if (v == tokens[t + 1]) target = logit;
        }
        nll += log(sum) - target;
    }
    free(hidden);
    return nll;
}

static void each_window_is_read_on_its_own_and_its_first_token_is_not_predicted(void **state)
{
    (void)state;
    static struct machine m;
    static const char *const none[] = { NULL };
    machine_init(&m, none, 2);
    lowkey_error err;
    assert_ok(lowkey_eval(&m.request, &err), err);
    assert_int_equal(m.made.n_results, N_WINDOWS);
    for (int i = 0; i < N_WINDOWS; i++) {
        const struct lowkey_eval_result *got = &m.made.results[0][i];
        const double want = oracle_nll(m.model, m.tokens + windows[i] * WINDOW);
        if (!(fabs(got->nll - want) <= 1e-5 * want)) fail_msg("window %d: %g, wanted %g", i, got->nll, want);
        assert_int_equal(got->n_predicted, WINDOW - 1);
        assert_true(got->kl == 0 && got->n_top1 == WINDOW - 1);
    }
    machine_free(&m);
}

static int same(const struct lowkey_eval_result *a, const struct lowkey_eval_result *b)
{
    return a->nll == b->nll && a->kl == b->kl && a->n_top1 == b->n_top1 && a->n_predicted == b->n_predicted &&
           a->bits.key == b->bits.key && a->bits.value == b->bits.value;
}

/* Eighteen formats do not fit together: groups, order and threads change no bit. */
static void formats_together_are_formats_alone(void **state)
{
    (void)state;
    static struct machine all, one;
    static const char *const many[] = { "f16",   "int-2",   "a=int-4", "bf16",   "b=f16", "c=f16", "d=f16",
                                        "e=f16", "f=f16",   "g=f16",   "h=f16",  "i=f16", "j=f16", "k=f16",
                                        "l=f16", "m=int-4", "n=int-2", "o=bf16", NULL };
    lowkey_error err;
    machine_init(&all, many, 1);
    assert_ok(lowkey_eval(&all.request, &err), err);
    assert_int_equal(all.made.n_results, 19 * N_WINDOWS);
    for (int f = 0; f < 4; f++) {
        const char *const name[] = { many[f], NULL };
        machine_init(&one, name, 3);
        assert_ok(lowkey_eval(&one.request, &err), err);
        for (int i = 0; i < N_WINDOWS; i++) {
            assert_true(same(&one.made.results[1][i], &all.made.results[1 + f][i]));
            assert_true(same(&one.made.results[0][i], &all.made.results[0][i]));
        }
        machine_free(&one);
    }
    for (int i = 0; i < N_WINDOWS; i++) {
        assert_true(same(&all.made.results[1 + 16][i], &all.made.results[1 + 1][i])); /* int-2 again */
        assert_true(same(&all.made.results[1 + 15][i], &all.made.results[1 + 2][i]));
        const struct lowkey_eval_result *f16 = &all.made.results[1][i], *bf16 = &all.made.results[4][i],
                                        *int2 = &all.made.results[2][i], *int4 = &all.made.results[3][i];
        assert_true(f16->kl > 0 && f16->kl < bf16->kl && bf16->kl < int4->kl && int4->kl < int2->kl);
        assert_true(f16->n_top1 > int4->n_top1 && int4->n_top1 > int2->n_top1);
        assert_true(f16->bits.key == 16 && f16->bits.value == 16 && int4->bits.key > 4 && int4->bits.key < 7);
        assert_true(fabs(f16->nll - all.made.results[0][i].nll) < 1e-2 * f16->n_predicted);
    }
    machine_free(&all);
}

static void only_what_is_wanted_is_made(void **state)
{
    (void)state;
    static struct machine m;
    static const char *const names[] = { "f16", "int-4", NULL };
    lowkey_error err;
    for (int format = -1; format < 2; format++) {
        machine_init(&m, names, 1);
        m.made.left_out_format = format;
        m.made.left_out_window = 1;
        assert_ok(lowkey_eval(&m.request, &err), err);
        for (int f = -1; f < 2; f++)
            for (int i = 0; i < N_WINDOWS; i++) assert_int_equal(m.made.n[1 + f][i], f != format || i != 1);
        machine_free(&m);
    }
    machine_init(&m, names, 1);
    m.made.stop_after = 4;
    assert_int_equal(lowkey_eval(&m.request, &err), LOWKEY_EIO);
    assert_int_equal(m.made.n_results, 4);
    machine_free(&m);
}

static void what_cannot_be_is_refused(void **state)
{
    (void)state;
    static struct machine m;
    static const char *const names[] = { "f16", NULL };
    static const int64_t beyond[N_WINDOWS] = { 0, 1, 4 };
    lowkey_error err;
    machine_init(&m, names, 1);
    struct lowkey_eval_request request = m.request;
    request.windows = beyond;
    assert_refused(lowkey_eval(&request, &err), LOWKEY_EINVAL, err,
                   "window 4 of 300 tokens: the text has 4 such");
    m.model->final_norm[0] = NAN;
    assert_refused(lowkey_eval(&m.request, &err), LOWKEY_EINVAL, err,
                   "window 0, f32: the logits are not finite");
    struct lowkey_eval_format format;
    const struct lowkey_eval_format_options options = { .model = m.model, .model_path = "m", .n_threads = 1 };
    assert_refused(lowkey_eval_format_open("no-such-format", &options, &format, &err), LOWKEY_EIO, err,
                   "no-such-format");
    lowkey_eval_format_close(&format);
    assert_refused(lowkey_eval_format_open("=f16", &options, &format, &err), LOWKEY_EINVAL, err, "label");
    lowkey_eval_format_close(&format);
    machine_free(&m);
}

/* A folder of the reference's states: a second run reads them and finds the same; a spoilt file is refused. */
static void kept_states_of_the_reference_change_nothing(void **state)
{
    (void)state;
    static struct machine plain, kept;
    static const char *const names[] = { "f16", NULL };
    char folder[] = "/tmp/lowkey-test-XXXXXX", path[600];
    lowkey_error err;
    assert_non_null(mkdtemp(folder));
    machine_init(&plain, names, 1);
    assert_ok(lowkey_eval(&plain.request, &err), err);
    for (int round = 0; round < 2; round++) {
        machine_init(&kept, names, 2);
        kept.request.references = folder;
        assert_ok(lowkey_eval(&kept.request, &err), err);
        for (int i = 0; i < N_WINDOWS; i++)
            for (int f = 0; f < 2; f++)
                assert_true(same(&kept.made.results[f][i], &plain.made.results[f][i]));
        if (round == 0) machine_free(&kept);
    }
    int n_files = 0;
    DIR *open_folder = opendir(folder);
    for (const struct dirent *entry; (entry = readdir(open_folder));)
        if (entry->d_name[0] != '.') n_files++, snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
    assert_int_equal(n_files, N_WINDOWS);
    FILE *file = fopen(path, "r+b");
    fseek(file, 5000, SEEK_SET);
    fputs("spoilt", file);
    fclose(file);
    assert_refused(lowkey_eval(&kept.request, &err), LOWKEY_EFORMAT, err, "not what was written for window");
    assert_int_equal(truncate(path, 5000), 0);
    assert_refused(lowkey_eval(&kept.request, &err), LOWKEY_EFORMAT, err, "not what was written for window");
    rewinddir(open_folder);
    for (const struct dirent *entry; (entry = readdir(open_folder));)
        if (entry->d_name[0] != '.')
            snprintf(path, sizeof path, "%s/%s", folder, entry->d_name), remove(path);
    closedir(open_folder);
    rmdir(folder);
    machine_free(&kept);
    machine_free(&plain);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_window_is_read_on_its_own_and_its_first_token_is_not_predicted),
        cmocka_unit_test(formats_together_are_formats_alone),
        cmocka_unit_test(only_what_is_wanted_is_made),
        cmocka_unit_test(kept_states_of_the_reference_change_nothing),
        cmocka_unit_test(what_cannot_be_is_refused),
    };
    return lowkey_run_tests(tests);
}
