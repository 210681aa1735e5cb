/* tune.c - the steps: a window in f32, the same window through the packed cache and back, and the tables moved. Validations
 * come before the step of their number, so that the first is of the tables as they were. */
#include "experiments/tune.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "calib/command.h"
#include "experiments/samples.h"
#include "experiments/tune_checkpoint.h"
#include "experiments/tune_pass.h"
#include "runtime/error.h"

/* ---- the order of windows ---- */

/* A number of 64 bits for each counter: the finalizer of a 64-bit mixing function. */
static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

int lowkey_tune_window(const struct lowkey_tune_request *request, int step)
{
    const int n = request->end_window - request->first_window;
    int *order = malloc((size_t)n * sizeof *order);
    if (!order) return -1;
    uint64_t state = mix(mix((uint64_t)request->seed) + (uint64_t)(step / n));
    for (int i = 0; i < n; i++) { /* Fisher and Yates, from the front */
        state += 0x9e3779b97f4a7c15u;
        const int at = (int)(mix(state) % (uint64_t)(i + 1));
        order[i] = order[at];
        order[at] = request->first_window + i;
    }
    const int window = order[step % n];
    free(order);
    return window;
}

/* ---- beginning ---- */

static int overlap(int first, int end, int other_first, int other_end)
{
    return first < other_end && other_first < end;
}

static lowkey_status check(const struct lowkey_tune_request *request, lowkey_error *err)
{
    const int n_sinks = lowkey_quantizer_describe(request->quantizer)->n_sink_tokens;
    const struct {
        const char *name;
        int first, end;
    } ranges[] = { { "to tune on", request->first_window, request->end_window },
                   { "to validate on", request->first_validation, request->end_validation } };
    const int64_t n = lowkey_samples_count(request->tokens, request->length, request->length);
    for (int i = 0; i < 2; i++)
        if (ranges[i].first < 0 || ranges[i].first >= ranges[i].end || ranges[i].end > n)
            return lowkey_fail(err, LOWKEY_EINVAL, "windows %d:%d %s: the text has %lld of %d tokens",
                               ranges[i].first, ranges[i].end, ranges[i].name, (long long)n, request->length);
    if (overlap(ranges[0].first, ranges[0].end, ranges[1].first, ranges[1].end))
        return lowkey_fail(err, LOWKEY_EINVAL, "windows %d:%d to tune on and %d:%d to validate on overlap",
                           ranges[0].first, ranges[0].end, ranges[1].first, ranges[1].end);
    if (request->length < n_sinks + 2)
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "windows of %d tokens: the quantizer keeps %d as sinks, expected at least 2 more",
                           request->length, n_sinks);
    return LOWKEY_OK;
}

lowkey_status lowkey_tune_begin(const struct lowkey_tune_request *request, struct lowkey_tune_state *state,
                                lowkey_error *err)
{
    *state = (struct lowkey_tune_state) { .steps = request->steps, .best_step = -1, .best_kl = INFINITY };
    LOWKEY_TRY(check(request, err));
    LOWKEY_TRY(lowkey_tuned_tables_create(lowkey_quantizer_describe(request->quantizer), request->record,
                                          &state->tables, err));
    state->log = malloc(((size_t)request->steps + 1) * sizeof *state->log);
    if (!state->log) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %d steps", request->steps);
    for (int s = 0; s <= request->steps; s++) state->log[s] = (struct lowkey_tune_step) { NAN, NAN };
    return request->checkpoint ? lowkey_tune_checkpoint_read(request, state, err) : LOWKEY_OK;
}

void lowkey_tune_state_free(struct lowkey_tune_state *state)
{
    lowkey_tuned_tables_free(state->tables);
    free(state->log);
    *state = (struct lowkey_tune_state) { 0 };
}

/* ---- the run ---- */

struct run {
    const struct lowkey_tune_request *request;
    struct lowkey_tune_state *state;
    lowkey_tune_pass *pass;
    size_t states; /* numbers in the hidden states of a window */
    float *reference; /* of the window to tune on */
    float *validation; /* [validation windows][states] */
    int has_validation;
    double *gradient; /* [tables->n] */
    double *(*gradients)[2]; /* [n_layers], into gradient */
    struct lowkey_progress progress;
    double shown; /* passes */
};

static const int32_t *tokens_of(const struct lowkey_tune_request *request, int window)
{
    return request->tokens->tokens +
           lowkey_samples_start(request->tokens, request->length, request->length, window);
}

/* What a pass costs, forward alone being 1. */
static lowkey_status passed(struct run *run, double passes, lowkey_error *err)
{
    lowkey_progress_at(&run->progress, run->shown += passes);
    return lowkey_interrupted() ? lowkey_fail(err, LOWKEY_ECANCELLED, "interrupted") : LOWKEY_OK;
}

static int is_validated(const struct lowkey_tune_request *request, int step)
{
    return step % request->validate_every == 0 || step == request->steps;
}

static double count_passes(const struct lowkey_tune_request *request, const struct lowkey_tune_state *state)
{
    const int n = request->end_validation - request->first_validation;
    double passes = n;
    for (int s = state->done; s <= request->steps; s++)
        passes += (s < request->steps ? 4 : 0) +
                  (is_validated(request, s) && isnan(state->log[s].validation) ? n : 0);
    return passes;
}

static lowkey_status take(struct run *run, lowkey_error *err)
{
    const struct lowkey_tune_request *request = run->request;
    const struct lowkey_tuned_tables *tables = run->state->tables;
    const size_t n_validation = (size_t)(request->end_validation - request->first_validation);
    run->states = (size_t)request->length * (size_t)request->model->hidden_size;
    run->reference = malloc(run->states * sizeof(float));
    run->validation = calloc(n_validation, run->states * sizeof(float));
    run->gradient = malloc(tables->n * sizeof *run->gradient);
    run->gradients = malloc((size_t)tables->desc->n_layers * sizeof *run->gradients);
    if (!run->reference || !run->validation || !run->gradient || !run->gradients)
        return lowkey_fail(err, LOWKEY_ENOMEM, "no memory to tune with %zu validation windows", n_validation);
    for (int i = 0; i < 2 * tables->desc->n_layers; i++)
        run->gradients[i / 2][i % 2] = run->gradient + tables->sides[i].first;
    return lowkey_tune_pass_create(request->model, request->length, request->n_threads, &run->pass, err);
}

static lowkey_status validate_windows(struct run *run, const lowkey_quantizer *quantizer, double *kl,
                                      lowkey_error *err)
{
    const struct lowkey_tune_request *request = run->request;
    const int n = request->end_validation - request->first_validation;
    *kl = 0;
    for (int i = 0; i < n; i++) {
        const int32_t *tokens = tokens_of(request, request->first_validation + i);
        float *reference = run->validation + (size_t)i * run->states;
        double of_window;
        if (!run->has_validation) {
            LOWKEY_TRY(lowkey_tune_reference(run->pass, tokens, reference, err));
            LOWKEY_TRY(passed(run, 1, err));
        }
        const struct lowkey_tune_measure measure = { .quantizer = quantizer,
                                                     .tokens = tokens,
                                                     .reference = reference };
        LOWKEY_TRY(lowkey_tune_kl(run->pass, &measure, &of_window, err));
        LOWKEY_TRY(passed(run, 1, err));
        *kl += of_window / n;
    }
    run->has_validation = 1;
    return LOWKEY_OK;
}

static lowkey_status validate(struct run *run, const lowkey_quantizer *quantizer, lowkey_error *err)
{
    struct lowkey_tune_state *state = run->state;
    double kl;
    LOWKEY_TRY(validate_windows(run, quantizer, &kl, err));
    state->log[state->done].validation = kl;
    const int is_best = kl < state->best_kl;
    if (is_best) {
        state->best_kl = kl;
        state->best_step = state->done;
        memcpy(state->tables->best, state->tables->move, state->tables->n * sizeof *state->tables->best);
    }
    if (run->request->on_validation)
        run->request->on_validation(run->request->user, state->done, kl, is_best);
    return LOWKEY_OK;
}

static double rate_at(const struct lowkey_tune_request *request, int step)
{
    return request->rate * 0.5 * (1 + cos(acos(-1) * step / request->steps));
}

static lowkey_status step(struct run *run, const lowkey_quantizer *quantizer, lowkey_error *err)
{
    const struct lowkey_tune_request *request = run->request;
    struct lowkey_tune_state *state = run->state;
    const int window = lowkey_tune_window(request, state->done);
    if (window < 0) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for the order of windows");
    const int32_t *tokens = tokens_of(request, window);
    LOWKEY_TRY(lowkey_tune_reference(run->pass, tokens, run->reference, err));
    LOWKEY_TRY(passed(run, 1, err));
    const struct lowkey_tune_measure measure = {
        .quantizer = quantizer, .tokens = tokens, .reference = run->reference, .gradients = run->gradients
    };
    double kl;
    memset(run->gradient, 0, state->tables->n * sizeof *run->gradient);
    LOWKEY_TRY(lowkey_tune_kl(run->pass, &measure, &kl, err));
    LOWKEY_TRY(passed(run, 3, err));
    for (size_t i = 0; i < state->tables->n; i++) run->gradient[i] /= request->length - 1;
    lowkey_tuned_tables_step(state->tables, run->gradient, rate_at(request, state->done), state->done);
    state->log[state->done++].kl = kl;
    return LOWKEY_OK;
}

/* One validation, if it is the time, and one step, if any is left. */
static lowkey_status advance(struct run *run, lowkey_error *err)
{
    const struct lowkey_tune_request *request = run->request;
    struct lowkey_tune_state *state = run->state;
    lowkey_quantizer *quantizer;
    LOWKEY_TRY(lowkey_tuned_tables_quantizer(state->tables, state->tables->move, &quantizer, err));
    lowkey_status status = LOWKEY_OK;
    if (is_validated(request, state->done) && isnan(state->log[state->done].validation)) {
        status = validate(run, quantizer, err);
        if (status == LOWKEY_OK && request->checkpoint)
            status = lowkey_tune_checkpoint_write(request, state, err);
    }
    if (status == LOWKEY_OK && state->done < request->steps) {
        status = step(run, quantizer, err);
        if (status == LOWKEY_OK && request->checkpoint)
            status = lowkey_tune_checkpoint_write(request, state, err);
    }
    lowkey_quantizer_free(quantizer);
    return status;
}

lowkey_status lowkey_tune(const struct lowkey_tune_request *request, struct lowkey_tune_state *state,
                          lowkey_error *err)
{
    struct run run = { .request = request, .state = state };
    double best = INFINITY;
    for (int s = 0; s <= state->done; s++) {
        const double kl = state->log[s].validation;
        if (isnan(kl) || !request->on_validation) continue;
        request->on_validation(request->user, s, kl, kl < best);
        best = fmin(best, kl);
    }
    lowkey_status status = take(&run, err);
    lowkey_progress_start(&run.progress, "tune", count_passes(request, state));
    while (status == LOWKEY_OK &&
           (state->done < request->steps || isnan(state->log[request->steps].validation)))
        status = advance(&run, err);
    lowkey_progress_end(&run.progress);
    lowkey_tune_pass_free(run.pass);
    free(run.reference);
    free(run.validation);
    free(run.gradient);
    free(run.gradients);
    return status;
}
