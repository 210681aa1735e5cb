/* Gradients of table entries against differences of the KL divergence in f64 (tests/tiny_model.c), codes held fixed; reports
 * against plain sums. Which entry an element stands for is found from what the cache gives back, not from its codes. */
#include "experiments/tune_pass.h"

#include <math.h>
#include <stdlib.h>

#include "experiments/lm/gradient.h"
#include "experiments/packed_store.h"
#include "experiments/tune_entries.h"
#include "tests/check.h"
#include "tests/tuning.h"

enum { N = TUNING_WINDOW, MAX_LAYERS = 3 };

struct seen { /* what went into the cache and what came out, by layer and side: [N][channels] */
    const struct tuning *tuning;
    float *x[MAX_LAYERS][2], *stored[MAX_LAYERS][2];
    struct lowkey_store packed;
};

static int channels(const lowkey_layer_desc *layer, int side)
{
    return layer->n_kv_heads * (side ? layer->value_head_dim : layer->key_head_dim);
}

static const lowkey_side_desc *side_of(const struct tuning *tuning, int l, int side)
{
    const lowkey_layer_desc *layer = &lowkey_quantizer_describe(tuning->quantizer)->layers[l];
    return side ? &layer->value : &layer->key;
}

static lowkey_status put(void *user, const struct lowkey_store_step *step, lowkey_error *err)
{
    struct seen *seen = user;
    assert_ok(seen->packed.put(seen->packed.user, step, err), *err);
    for (int side = 0; side < 2; side++) {
        const size_t bytes = (size_t)(N * channels(step->layer, side)) * sizeof(float);
        float **x = &seen->x[step->layer->index][side], **stored = &seen->stored[step->layer->index][side];
        memcpy(*x = malloc(bytes), side ? step->value : step->key, bytes);
        memcpy(*stored = malloc(bytes), side ? step->stored_value : step->stored_key, bytes);
    }
    return LOWKEY_OK;
}

static lowkey_status reset(void *user, lowkey_error *err)
{
    const struct seen *seen = user;
    return seen->packed.reset(seen->packed.user, err);
}

/* A forward pass like that of tuning, and what it stores. */
static struct seen look(const struct tuning *tuning, const int32_t *tokens)
{
    struct seen seen = { .tuning = tuning };
    const struct lowkey_store store = { put, reset, NULL, &seen };
    const struct lowkey_gradient_config config = { tuning->model, &store, N, 1 };
    const struct lowkey_gradient_request request = { .tokens = tokens, .n_tokens = N };
    lowkey_packed_store *packed;
    lowkey_gradient *gradient;
    lowkey_error err;
    double loss;
    assert_ok(lowkey_packed_store_create(tuning->quantizer, N, 1, &packed, &err), err);
    seen.packed = lowkey_packed_store_interface(packed);
    assert_ok(lowkey_gradient_create(&config, &gradient, &err), err);
    assert_ok(lowkey_gradient_run(gradient, &request, &loss, &err), err);
    lowkey_gradient_free(gradient);
    lowkey_packed_store_free(packed);
    return seen;
}

static void seen_free(struct seen *seen)
{
    for (int l = 0; l < MAX_LAYERS; l++)
        for (int side = 0; side < 2; side++) free(seen->x[l][side]), free(seen->stored[l][side]);
}

/* The entry that element (t, c) stands for, or -1: a sink. */
static int entry_of(const struct seen *seen, int l, int side, int t, int c)
{
    const lowkey_side_desc *desc = side_of(seen->tuning, l, side);
    const int C = channels(&seen->tuning->model->geometry[l], side);
    if (t < lowkey_quantizer_describe(seen->tuning->quantizer)->n_sink_tokens) return -1;
    for (int k = 0; k < desc->n_entries[c]; k++)
        if (desc->table[c * desc->table_entries + k] == seen->stored[l][side][t * C + c]) return k;
    fail_msg("layer %d, side %d, token %d, channel %d: no entry", l, side, t, c);
    return -1;
}

/* ---- the oracle's KL ---- */

struct nudge { /* one entry moved, all elements that stand for it with it; others keep the error they have */
    const struct seen *seen;
    int layer, side, channel, entry;
    double by;
};

static void change(void *user, int l, int t, double *key, double *value)
{
    const struct nudge *n = user;
    for (int side = 0; side < 2; side++) {
        const int C = channels(&n->seen->tuning->model->geometry[l], side);
        double *x = side ? value : key;
        for (int c = 0; c < C; c++) {
            const int i = t * C + c;
            x[c] += (double)n->seen->stored[l][side][i] - (double)n->seen->x[l][side][i];
            if (l == n->layer && side == n->side && c == n->channel &&
                entry_of(n->seen, l, side, t, c) == n->entry)
                x[c] += n->by;
        }
    }
}

static void log_softmax(const lowkey_model *m, const double *hidden, double *out)
{
    double sum = 0;
    for (int v = 0; v < m->vocab_size; v++) {
        out[v] = 0;
        for (int c = 0; c < m->hidden_size; c++)
            out[v] += hidden[c] * (double)m->output[v * m->hidden_size + c];
        sum += exp(out[v]);
    }
    for (int v = 0; v < m->vocab_size; v++) out[v] -= log(sum);
}

static double oracle_kl(const int32_t *tokens, const double *reference, struct nudge nudge)
{
    const lowkey_model *m = nudge.seen->tuning->model;
    const size_t V = (size_t)m->vocab_size;
    double *hidden = calloc((size_t)(N * m->hidden_size), sizeof *hidden),
           *here = calloc(2 * V, sizeof *here), kl = 0;
    lowkey_tiny_oracle_changed(m, tokens, N, hidden, change, &nudge);
    for (int t = 0; t + 1 < N; t++) {
        log_softmax(m, hidden + t * m->hidden_size, here);
        log_softmax(m, reference + t * m->hidden_size, here + V);
        for (size_t v = 0; v < V; v++) kl += exp(here[V + v]) * (here[V + v] - here[v]) / (N - 1);
    }
    free(hidden);
    free(here);
    return kl;
}

/* ---- gradients ---- */

struct gradients {
    double *all, *(*of)[2];
    size_t n;
};

static struct gradients gradients_make(const struct tuning *tuning)
{
    const int n_layers = tuning->model->n_layers;
    struct gradients g = { .of = calloc((size_t)n_layers, sizeof *g.of) };
    size_t at[2 * MAX_LAYERS];
    for (int i = 0; i < 2 * n_layers; i++) {
        at[i] = g.n;
        g.n += (size_t)(channels(&tuning->model->geometry[i / 2], i % 2) *
                        side_of(tuning, i / 2, i % 2)->table_entries);
    }
    g.all = calloc(g.n, sizeof *g.all);
    for (int i = 0; i < 2 * n_layers; i++) g.of[i / 2][i % 2] = g.all + at[i];
    return g;
}

static double run(const struct tuning *tuning, const int32_t *tokens, int n_threads, struct gradients *g,
                  struct lowkey_side_report (*reports)[2])
{
    float *reference = calloc((size_t)(N * tuning->model->hidden_size), sizeof *reference);
    lowkey_tune_pass *pass;
    lowkey_error err;
    double kl;
    assert_ok(lowkey_tune_pass_create(tuning->model, N, n_threads, &pass, &err), err);
    assert_ok(lowkey_tune_reference(pass, tokens, reference, &err), err);
    const struct lowkey_tune_measure measure = { tuning->quantizer, tokens, reference, g ? g->of : NULL,
                                                 reports };
    assert_ok(lowkey_tune_kl(pass, &measure, &kl, &err), err);
    lowkey_tune_pass_free(pass);
    free(reference);
    return kl;
}

static void check_side(const struct seen *seen, const int32_t *tokens, const double *reference,
                       const struct gradients *g, int l, int side)
{
    const lowkey_side_desc *desc = side_of(seen->tuning, l, side);
    const int C = channels(&seen->tuning->model->geometry[l], side), E = desc->table_entries;
    double norm = 0;
    for (int i = 0; i < C * E; i++) norm = fmax(norm, fabs(g->of[l][side][i]));
    for (int c = l; c < C; c += C / 5)
        for (int k = c % 2; k < desc->n_entries[c]; k += 1 + desc->n_entries[c] / 3) {
            const double step = 1e-4 * sqrt(seen->tuning->record.reports[l][side].mse[c]);
            const struct nudge up = { seen, l, side, c, k, step }, down = { seen, l, side, c, k, -step };
            const double want = (oracle_kl(tokens, reference, up) - oracle_kl(tokens, reference, down)) /
                                (2 * step);
            const double got = g->of[l][side][c * E + k] / (N - 1);
            if (!(fabs(got - want) <= 2e-4 * norm / (N - 1) + 1e-9))
                fail_msg("layer %d, side %d, channel %d, entry %d: slope %.9g, gradient %.9g, largest %g", l,
                         side, c, k, want, got, norm / (N - 1));
        }
}

static void check_choice(const struct tuning_choice *choice)
{
    struct tuning tuning = tuning_make(choice);
    const int32_t *tokens = tuning.tokens->tokens + N;
    struct seen seen = look(&tuning, tokens);
    struct gradients g = gradients_make(&tuning);
    double *reference = calloc((size_t)(N * tuning.model->hidden_size), sizeof *reference);
    lowkey_tiny_oracle(tuning.model, tokens, N, reference, -1, NULL, NULL, NULL);
    const double kl = run(&tuning, tokens, 1, &g, NULL),
                 want = oracle_kl(tokens, reference, (struct nudge) { .seen = &seen });
    if (!(fabs(kl - want) <= 1e-5 * want + 3e-7)) fail_msg("KL %.9g, wanted %.9g", kl, want);
    for (int l = 0; l < tuning.model->n_layers; l++)
        for (int side = 0; side < 2; side++) check_side(&seen, tokens, reference, &g, l, side);
    free(reference);
    free(g.all), free(g.of);
    seen_free(&seen);
    tuning_free(&tuning);
}

static void gradients_of_entries_agree_with_differences_of_the_kl(void **state)
{
    (void)state;
    struct tuning_choice choice = tuning_plain();
    check_choice(&choice);
    choice.feedback = 1;
    choice.n_sinks = 5;
    choice.shape.bias = choice.shape.untied = 1;
    check_choice(&choice);
    choice = (struct tuning_choice) { { 1, 16, 24, 30, 3, 1, 72, 80, 20, LOWKEY_PAIR_INTERLEAVED, 0, 0, 0, 0,
                                        1 },
                                      { { 1, 5, 2, 1 }, { 5, 3, 2, 2 } },
                                      0,
                                      0,
                                      0 };
    check_choice(&choice);
    choice = (struct tuning_choice) { { 3, 24, 40, 50, 2, 2, 8, 16, 0, LOWKEY_PAIR_HALF, 0, 0, 0, 0, 0 },
                                      { { 2, 2, 2, 2 }, { 1, 1, 1, 1 } },
                                      1,
                                      0,
                                      64 };
    check_choice(&choice);
}

static void gradients_agree_where_rows_are_trellis_coded(void **state)
{
    (void)state;
    struct tuning_choice choice = tuning_plain();
    choice.trellis = 4;
    choice.feedback = 1;
    check_choice(&choice);
    choice = (struct tuning_choice) { { 1, 16, 24, 30, 3, 1, 72, 80, 20, LOWKEY_PAIR_INTERLEAVED, 0, 0, 0, 0,
                                        1 },
                                      { { 1, 5, 2, 1 }, { 1, 1, 1, 1 } },
                                      0,
                                      1,
                                      0 };
    check_choice(&choice);
}

static void threads_change_no_bit(void **state)
{
    (void)state;
    const struct tuning_choice choice = tuning_plain();
    struct tuning tuning = tuning_make(&choice);
    struct gradients one = gradients_make(&tuning), three = gradients_make(&tuning);
    const double a = run(&tuning, tuning.tokens->tokens, 1, &one, NULL),
                 b = run(&tuning, tuning.tokens->tokens, 3, &three, NULL);
    assert_true(a == b);
    assert_memory_equal(one.all, three.all, one.n * sizeof *one.all);
    free(one.all), free(one.of), free(three.all), free(three.of);
    tuning_free(&tuning);
}

/* ---- reports ---- */

static void check_report(const struct seen *seen, int l, int side, struct lowkey_side_report *report)
{
    const lowkey_side_desc *desc = side_of(seen->tuning, l, side);
    const int C = channels(&seen->tuning->model->geometry[l], side), E = desc->table_entries,
              n_sinks = lowkey_quantizer_describe(seen->tuning->quantizer)->n_sink_tokens;
    uint64_t *histogram = calloc((size_t)(C * E), sizeof *histogram);
    lowkey_entry_report_end(report, (size_t)C);
    assert_int_equal(report->n_tokens, N - n_sinks);
    for (int c = 0; c < C; c++) {
        double mean = 0, variance = 0, mse = 0;
        for (int t = n_sinks; t < N; t++) {
            mean += (double)seen->x[l][side][t * C + c] / (N - n_sinks);
            mse += pow((double)seen->stored[l][side][t * C + c] - (double)seen->x[l][side][t * C + c], 2) /
                   (N - n_sinks);
            histogram[c * E + entry_of(seen, l, side, t, c)]++;
        }
        for (int t = n_sinks; t < N; t++)
            variance += pow((double)seen->x[l][side][t * C + c] - mean, 2) / (N - n_sinks);
        assert_true(fabs(report->mean[c] - mean) < 1e-9 && fabs(report->variance[c] - variance) < 1e-9);
        assert_true(fabs(report->mse[c] - mse) < 1e-12 && report->weighted_mse[c] == report->mse[c]);
    }
    assert_memory_equal(histogram, report->histogram, (size_t)(C * E) * sizeof *histogram);
    free(histogram);
}

static void reports_are_sums_over_what_is_packed(void **state)
{
    (void)state;
    struct tuning_choice choice = tuning_plain();
    choice.feedback = 1;
    choice.n_sinks = 3;
    struct tuning tuning = tuning_make(&choice);
    struct seen seen = look(&tuning, tuning.tokens->tokens);
    for (int l = 0; l < tuning.model->n_layers; l++) /* mse stands for the errors fitted: begin from zeros */
        for (int side = 0; side < 2; side++)
            memset(tuning.record.reports[l][side].mse, 0,
                   (size_t)channels(&tuning.model->geometry[l], side) * sizeof(double));
    run(&tuning, tuning.tokens->tokens, 2, NULL, tuning.record.reports);
    for (int l = 0; l < tuning.model->n_layers; l++)
        for (int side = 0; side < 2; side++) check_report(&seen, l, side, &tuning.record.reports[l][side]);
    seen_free(&seen);
    tuning_free(&tuning);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_of_entries_agree_with_differences_of_the_kl),
        cmocka_unit_test(gradients_agree_where_rows_are_trellis_coded),
        cmocka_unit_test(threads_change_no_bit),
        cmocka_unit_test(reports_are_sums_over_what_is_packed),
    };
    return lowkey_run_tests(tests);
}
