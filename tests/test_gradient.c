/* Gradients of keys and values against differences of the loss in f64 (tests/tiny_model.c), over the axes of Llama-like
 * models, all losses, with and without a store; and what the caller is promised beside. */
#include "experiments/lm/gradient.h"

#include <math.h>
#include <stdlib.h>

#include "experiments/lm/gradient_loss.h"
#include "tests/check.h"
#include "tests/tiny_model.h"

static const struct tiny_shape shapes[] = {
    /* layers hidden ffn vocab  q kv key value rope pairing  factor scale untied bias norm */
    { 2, 24, 40, 50, 3, 3, 8, 8, 8, LOWKEY_PAIR_HALF, 0, 0, 0, 0, 0 },
    { 2, 24, 40, 410, 9, 3, 16, 16, 16, LOWKEY_PAIR_INTERLEAVED, 0, 0, 1, 0, 0 },
    { 2, 32, 16, 60, 8, 1, 16, 8, 16, LOWKEY_PAIR_HALF, 1.2, 0.5, 1, 1, 0 },
    { 2, 16, 24, 30, 2, 1, 24, 40, 8, LOWKEY_PAIR_INTERLEAVED, 0, 0, 0, 1, 1 },
    { 2, 16, 24, 30, 4, 2, 64, 64, 32, LOWKEY_PAIR_HALF, 0.9, 0, 1, 0, 1 },
    { 3, 16, 24, 30, 2, 2, 8, 16, 0, LOWKEY_PAIR_HALF, 0, 0, 0, 0, 0 },
};
/* What Gemma has beside: norms behind projections, GELU, a window in every second layer, scaled embeddings. */
static const struct tiny_extras gemma = { .post_norms = 1, .gelu = 1, .window = 21, .embedding_scale = 3 };
static const struct tiny_extras plain = { 0 };
enum { N_SHAPES = sizeof shapes / sizeof *shapes, MAX_TOKENS = 600, MAX_LAYERS = 3 };

/* A store that adds to every element a number of its place: passing gradients through it unchanged is exact. */
static double added(int l, int t, int c, int side)
{
    return 0.3 * sin(1 + 7 * l + 3 * side + 0.37 * t + 1.9 * c);
}

struct counts { /* of an additive store's calls */
    int n_put, n_reset;
};

static lowkey_status put(void *user, const struct lowkey_store_step *step, lowkey_error *err)
{
    (void)err;
    struct counts *counts = user;
    const lowkey_layer_desc *g = step->layer;
    const int nk = g->n_kv_heads * g->key_head_dim, nv = g->n_kv_heads * g->value_head_dim;
    counts->n_put++;
    for (int t = 0; t < step->n_tokens; t++) {
        for (int c = 0; c < nk; c++)
            step->stored_key[t * nk + c] = (float)((double)step->key[t * nk + c] +
                                                   added(g->index, step->first + t, c, 0));
        for (int c = 0; c < nv; c++)
            step->stored_value[t * nv + c] = (float)((double)step->value[t * nv + c] +
                                                     added(g->index, step->first + t, c, 1));
    }
    return LOWKEY_OK;
}

static lowkey_status reset(void *user, lowkey_error *err)
{
    (void)err;
    ((struct counts *)user)->n_reset++;
    return LOWKEY_OK;
}

struct sample {
    lowkey_model *model;
    int n, n_threads, use_store;
    enum lowkey_loss loss;
    int32_t tokens[MAX_TOKENS], labels[MAX_TOKENS];
    float *reference; /* [n][hidden] */
    struct counts counts;
    /* what the gradient gives */
    double value;
    float *hidden, *key_grad[MAX_LAYERS], *value_grad[MAX_LAYERS];
    int n_layers_seen;
};

static size_t n_keys(const struct sample *s)
{
    return (size_t)(s->n * s->model->geometry[0].n_kv_heads * s->model->geometry[0].key_head_dim);
}

static size_t n_values(const struct sample *s)
{
    return (size_t)(s->n * s->model->geometry[0].n_kv_heads * s->model->geometry[0].value_head_dim);
}

static float *copy_of(const float *x, size_t n)
{
    float *y = malloc(n * sizeof *y);
    memcpy(y, x, n * sizeof *y);
    return y;
}

static lowkey_status keep(void *user, const struct lowkey_gradient_layer *layer, lowkey_error *err)
{
    (void)err;
    struct sample *s = user;
    const int l = layer->layer->index, nk = (int)n_keys(s) / s->n;
    assert_int_equal(layer->n_tokens, s->n);
    assert_int_equal(l, s->model->n_layers - 1 - s->n_layers_seen++); /* the last layer first */
    if (!s->use_store) {
        assert_ptr_equal(layer->key, layer->stored_key);
        assert_ptr_equal(layer->value, layer->stored_value);
    } else {
        assert_true(fabs((double)layer->stored_key[nk + 2] - (double)layer->key[nk + 2] - added(l, 1, 2, 0)) <
                    1e-4);
    }
    s->key_grad[l] = copy_of(layer->key_grad, n_keys(s));
    s->value_grad[l] = copy_of(layer->value_grad, n_values(s));
    return LOWKEY_OK;
}

static struct sample sample_with(const struct tiny_shape *shape, const struct tiny_extras *extras, int n,
                                 enum lowkey_loss loss, int use_store)
{
    struct sample s = { .model = lowkey_tiny_model_with(shape, extras, 7),
                        .n = n,
                        .n_threads = 1,
                        .loss = loss,
                        .use_store = use_store };
    for (int t = 0; t < n; t++) s.tokens[t] = (t * 31 + t / 7) % shape->vocab;
    const size_t n_hidden = (size_t)(n * shape->hidden);
    s.hidden = calloc(n_hidden, sizeof *s.hidden);
    if (loss == LOWKEY_LOSS_KL) { /* of another model */
        lowkey_model *other = lowkey_tiny_model_with(shape, extras, 8);
        double *hidden = calloc(n_hidden, sizeof *hidden);
        lowkey_tiny_oracle(other, s.tokens, n, hidden, -1, NULL, NULL, NULL);
        s.reference = calloc(n_hidden, sizeof *s.reference);
        for (size_t i = 0; i < n_hidden; i++) s.reference[i] = (float)hidden[i];
        free(hidden);
        lowkey_tiny_model_free(other);
    }
    return s;
}

static struct sample sample_of(const struct tiny_shape *shape, int n, enum lowkey_loss loss, int use_store)
{
    return sample_with(shape, &plain, n, loss, use_store);
}

static void run(struct sample *s)
{
    lowkey_error err;
    lowkey_gradient *gradient;
    const struct lowkey_store store = { put, reset, NULL, &s->counts };
    const struct lowkey_gradient_config config = { s->model, s->use_store ? &store : NULL, MAX_TOKENS,
                                                   s->n_threads };
    assert_ok(lowkey_gradient_create(&config, &gradient, &err), err);
    const struct lowkey_gradient_request request = { .tokens = s->tokens,
                                                     .n_tokens = s->n,
                                                     .loss = s->loss,
                                                     .seed = 42,
                                                     .reference = s->reference,
                                                     .on_layer = keep,
                                                     .user = s,
                                                     .hidden = s->hidden };
    assert_ok(lowkey_gradient_run(gradient, &request, &s->value, &err), err);
    assert_int_equal(s->n_layers_seen, s->model->n_layers);
    lowkey_gradient_free(gradient);
}

static void sample_free(struct sample *s)
{
    for (int l = 0; l < s->model->n_layers; l++) free(s->key_grad[l]), free(s->value_grad[l]);
    free(s->hidden);
    free(s->reference);
    lowkey_tiny_model_free(s->model);
}

/* ---- the oracle's loss ---- */

struct direction { /* keys and values of which layers move, and how far */
    const struct sample *sample;
    int layer, side, token; /* token -1: all, by +-1 of their places */
    double step;
};

static double move_of(const struct direction *d, int t, int c)
{
    if (d->token >= 0) return t == d->token && c == 5 ? 1 : 0;
    return ((unsigned)(t * 2654435761u + (unsigned)c * 40503u) >> 7 & 1) ? 1 : -1;
}

static void change(void *user, int l, int t, double *key, double *value)
{
    const struct direction *d = user;
    const int nk = (int)n_keys(d->sample) / d->sample->n, nv = (int)n_values(d->sample) / d->sample->n;
    for (int c = 0; c < nk; c++) {
        if (d->sample->use_store) key[c] += added(l, t, c, 0);
        if (l == d->layer && d->side == 0) key[c] += d->step * move_of(d, t, c);
    }
    for (int c = 0; c < nv; c++) {
        if (d->sample->use_store) value[c] += added(l, t, c, 1);
        if (l == d->layer && d->side == 1) value[c] += d->step * move_of(d, t, c);
    }
}

/* log-softmax of a row of hidden states; out: [vocab] */
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

static double row_loss(struct sample *s, int t, const double *hidden, int choose)
{
    const lowkey_model *m = s->model;
    double loss = 0, *here = calloc((size_t)m->vocab_size, sizeof *here),
           *there = calloc((size_t)m->vocab_size, sizeof *there);
    log_softmax(m, hidden, here);
    if (choose) { /* a token of the unmoved model's own distribution */
        float *weights = calloc((size_t)m->vocab_size, sizeof *weights);
        for (int v = 0; v < m->vocab_size; v++) weights[v] = (float)exp(here[v]);
        s->labels[t] = s->loss == LOWKEY_LOSS_TEXT ? s->tokens[t + 1]
                                                   : lowkey_loss_draw(weights, m->vocab_size, 1, 42, t);
        free(weights);
    }
    if (s->loss == LOWKEY_LOSS_KL) {
        double *reference = calloc((size_t)m->hidden_size, sizeof *reference);
        for (int c = 0; c < m->hidden_size; c++) reference[c] = (double)s->reference[t * m->hidden_size + c];
        log_softmax(m, reference, there);
        for (int v = 0; v < m->vocab_size; v++) loss += exp(there[v]) * (there[v] - here[v]);
        free(reference);
    } else {
        loss = -here[s->labels[t]];
    }
    free(here);
    free(there);
    return loss;
}

static double oracle_loss(struct sample *s, struct direction d, int choose)
{
    const int width = s->model->hidden_size;
    double *hidden = calloc((size_t)(s->n * width), sizeof *hidden), loss = 0;
    lowkey_tiny_oracle_changed(s->model, s->tokens, s->n, hidden, change, &d);
    for (int t = 0; t + 1 < s->n; t++) loss += row_loss(s, t, hidden + t * width, choose);
    free(hidden);
    return loss;
}

/* Compares the slope along a direction with the gradient's; the error is measured by the norm of the gradient. */
static void check_direction(struct sample *s, int layer, int side, int token, const char *what)
{
    const double step = 1e-5;
    struct direction d = { s, layer, side, token, step };
    const double up = oracle_loss(s, d, 0);
    d.step = -step;
    const double want = (up - oracle_loss(s, d, 0)) / (2 * step);
    const float *grad = side ? s->value_grad[layer] : s->key_grad[layer];
    const int width = (int)(side ? n_values(s) : n_keys(s)) / s->n;
    double got = 0, norm = 0;
    for (int t = 0; t < s->n; t++)
        for (int c = 0; c < width; c++) {
            const double g = (double)grad[t * width + c];
            got += g * move_of(&d, t, c);
            norm += g * g;
        }
    if (!(fabs(got - want) <= 1e-4 * sqrt(norm) + 1e-6))
        fail_msg("%s, layer %d, side %d, token %d: slope %.9g, gradient %.9g, norm %g", what, layer, side,
                 token, want, got, sqrt(norm));
}

static void check_sample(struct sample *s, const char *what)
{
    static const int tokens[] = { 0, 1, 63, 64, 255, 256 };
    run(s);
    const double want = oracle_loss(s, (struct direction) { .sample = s }, 1);
    if (!(fabs(s->value - want) <= 2e-6 * fabs(want)))
        fail_msg("%s: loss %.9g, wanted %.9g", what, s->value, want);
    for (int l = 0; l < s->model->n_layers; l++)
        for (int side = 0; side < 2; side++) check_direction(s, l, side, -1, what);
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
        if (tokens[i] < s->n) check_direction(s, 0, (int)i % 2, tokens[i], what);
}

static void gradients_agree_with_differences_of_the_loss(void **state)
{
    (void)state;
    static const char *const names[] = { "text", "model", "KL" };
    for (int i = 0; i < N_SHAPES; i++)
        for (int loss = 0; loss < 3; loss++)
            for (int use_store = 0; use_store < 2; use_store++) {
                struct sample s = sample_of(&shapes[i], loss == 0 ? 70 : 33, (enum lowkey_loss)loss,
                                            use_store);
                char what[64];
                snprintf(what, sizeof what, "shape %d, %s, store %d", i, names[loss], use_store);
                check_sample(&s, what);
                assert_int_equal(s.counts.n_put, use_store ? s.model->n_layers : 0);
                assert_int_equal(s.counts.n_reset, use_store);
                sample_free(&s);
            }
}

static void gradients_agree_in_models_like_gemma(void **state)
{
    (void)state;
    for (int i = 0; i < N_SHAPES; i++)
        for (int use_store = 0; use_store < 2; use_store++) {
            struct sample s = sample_with(&shapes[i], &gemma, 150,
                                          use_store ? LOWKEY_LOSS_KL : LOWKEY_LOSS_TEXT, use_store);
            check_sample(&s, "like Gemma");
            sample_free(&s);
        }
    struct sample far = sample_with(&shapes[0], &gemma, 600, LOWKEY_LOSS_TEXT, 0);
    check_sample(&far, "like Gemma, 600 tokens");
    sample_free(&far);
}

static void gradients_agree_where_blocks_of_tokens_and_tiles_of_keys_end(void **state)
{
    (void)state;
    static const int lengths[] = { 2, 64, 65, 257, 600 };
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        struct sample s = sample_of(&shapes[0], lengths[i], LOWKEY_LOSS_TEXT, 1);
        check_sample(&s, "length");
        sample_free(&s);
    }
}

static void the_last_token_predicts_nothing_and_earlier_ones_do(void **state)
{
    (void)state;
    for (int i = 0; i < N_SHAPES; i++) {
        struct sample s = sample_of(&shapes[i], 70, LOWKEY_LOSS_TEXT, 0);
        run(&s);
        const size_t nk = n_keys(&s) / 70, nv = n_values(&s) / 70;
        for (int l = 0; l < s.model->n_layers; l++) {
            double before = 0;
            for (size_t c = 0; c < nk; c++) {
                assert_true(s.key_grad[l][69 * nk + c] == 0);
                before += fabs((double)s.key_grad[l][68 * nk + c]);
            }
            for (size_t c = 0; c < nv; c++) assert_true(s.value_grad[l][69 * nv + c] == 0);
            assert_true(before > 0);
        }
        sample_free(&s);
    }
}

static void the_number_of_threads_changes_no_bit(void **state)
{
    (void)state;
    for (int i = 0; i < N_SHAPES; i++)
        for (int loss = 0; loss < 3; loss++) {
            struct sample one = sample_of(&shapes[i], 300, (enum lowkey_loss)loss, 1);
            struct sample many = sample_of(&shapes[i], 300, (enum lowkey_loss)loss, 1);
            many.n_threads = 7;
            run(&one);
            run(&many);
            assert_memory_equal(&one.value, &many.value, sizeof one.value);
            assert_memory_equal(one.hidden, many.hidden, 300 * (size_t)shapes[i].hidden * sizeof(float));
            for (int l = 0; l < one.model->n_layers; l++) {
                assert_memory_equal(one.key_grad[l], many.key_grad[l], n_keys(&one) * sizeof(float));
                assert_memory_equal(one.value_grad[l], many.value_grad[l], n_values(&one) * sizeof(float));
            }
            sample_free(&one);
            sample_free(&many);
        }
}

static void one_object_gives_each_sample_what_a_fresh_one_gives(void **state)
{
    (void)state;
    lowkey_error err;
    lowkey_gradient *gradient;
    struct sample first = sample_of(&shapes[4], 300, LOWKEY_LOSS_TEXT, 0),
                  again = sample_of(&shapes[4], 300, LOWKEY_LOSS_TEXT, 0);
    run(&first);
    const struct lowkey_gradient_config config = { again.model, NULL, MAX_TOKENS, 2 };
    assert_ok(lowkey_gradient_create(&config, &gradient, &err), err);
    struct lowkey_gradient_request request = { .tokens = again.tokens, .n_tokens = 600 };
    for (int t = 300; t < 600; t++) again.tokens[t] = t % 30;
    assert_ok(lowkey_gradient_run(gradient, &request, &again.value, &err), err); /* without a way back */
    request.n_tokens = 300;
    request.on_layer = keep;
    request.user = &again;
    assert_ok(lowkey_gradient_run(gradient, &request, &again.value, &err), err);
    assert_memory_equal(&first.value, &again.value, sizeof first.value);
    for (int l = 0; l < 2; l++)
        assert_memory_equal(first.key_grad[l], again.key_grad[l], n_keys(&first) * sizeof(float));
    lowkey_gradient_free(gradient);
    sample_free(&first);
    sample_free(&again);
}

static void without_a_loss_the_hidden_states_are_the_same(void **state)
{
    (void)state;
    lowkey_error err;
    lowkey_gradient *gradient;
    struct sample s = sample_of(&shapes[1], 70, LOWKEY_LOSS_TEXT, 1);
    run(&s);
    const size_t n = (size_t)(70 * s.model->hidden_size);
    float *hidden = calloc(n, sizeof *hidden);
    double loss = 5;
    const struct lowkey_store store = { put, reset, NULL, &s.counts };
    const struct lowkey_gradient_config config = { s.model, &store, 70, 2 };
    assert_ok(lowkey_gradient_create(&config, &gradient, &err), err);
    const struct lowkey_gradient_request request = {
        .tokens = s.tokens, .n_tokens = 70, .loss = LOWKEY_LOSS_NONE, .hidden = hidden
    };
    assert_ok(lowkey_gradient_run(gradient, &request, &loss, &err), err);
    assert_true(loss == 0 && s.value > 0);
    assert_memory_equal(hidden, s.hidden, n * sizeof *hidden);
    lowkey_gradient_free(gradient);
    free(hidden);
    sample_free(&s);
}

static void tokens_are_drawn_as_often_as_their_weights_say(void **state)
{
    (void)state;
    static const float weights[] = { 0, 1, 5, 0, 2, 0 };
    int counts[6] = { 0 }, moved = 0;
    enum { N = 40000 };
    for (int t = 0; t < N; t++) {
        const int a = lowkey_loss_draw(weights, 6, 8, 3, t);
        counts[a]++;
        moved += a != lowkey_loss_draw(weights, 6, 8, 4, t); /* another seed, other tokens */
    }
    for (int i = 0; i < 6; i++) {
        const double p = (double)weights[i] / 8;
        assert_true(fabs(counts[i] - N * p) <= 4 * sqrt(N * p * (1 - p)));
    }
    const double same = (1 + 25 + 4) / 64.0;
    assert_true(fabs(moved - N * (1 - same)) <= 4 * sqrt(N * same * (1 - same)));
}

static lowkey_status refuse(void *user, const struct lowkey_gradient_layer *layer, lowkey_error *err)
{
    (void)user;
    (void)layer;
    if (err) err->message[0] = 'n', err->message[1] = 'o', err->message[2] = 0;
    return LOWKEY_ECANCELLED;
}

static int none_exact(void *user, enum lowkey_store_side side, int position)
{
    (void)user;
    (void)side;
    return position;
}

static void bad_calls_are_refused_in_words(void **state)
{
    (void)state;
    struct sample s = sample_of(&shapes[0], 10, LOWKEY_LOSS_TEXT, 0);
    const struct lowkey_store windowed = { put, reset, none_exact, &s.counts };
    lowkey_gradient *gradient;
    lowkey_error err;
    double loss;
    struct lowkey_gradient_config config = { s.model, &windowed, 10, 1 };
    assert_refused(lowkey_gradient_create(&config, &gradient, &err), LOWKEY_EUNSUPPORTED, err, "exact_from");
    assert_null(gradient);
    config.store = NULL;
    config.max_tokens = 1;
    assert_refused(lowkey_gradient_create(&config, &gradient, &err), LOWKEY_EINVAL, err, "at most 1 tokens");
    config.max_tokens = 10;
    assert_ok(lowkey_gradient_create(&config, &gradient, &err), err);
    struct lowkey_gradient_request request = { .tokens = s.tokens, .n_tokens = 11 };
    assert_refused(lowkey_gradient_run(gradient, &request, &loss, &err), LOWKEY_EINVAL, err,
                   "11 tokens, expected 2 to 10");
    request.n_tokens = 1;
    assert_refused(lowkey_gradient_run(gradient, &request, &loss, &err), LOWKEY_EINVAL, err, "1 tokens");
    request.n_tokens = 10;
    request.loss = LOWKEY_LOSS_KL;
    assert_refused(lowkey_gradient_run(gradient, &request, &loss, &err), LOWKEY_EINVAL, err, "reference");
    request.loss = (enum lowkey_loss)4;
    assert_refused(lowkey_gradient_run(gradient, &request, &loss, &err), LOWKEY_EINVAL, err, "no loss 4");
    request.on_layer = refuse;
    request.loss = LOWKEY_LOSS_NONE;
    assert_refused(lowkey_gradient_run(gradient, &request, &loss, &err), LOWKEY_EINVAL, err,
                   "goes with a loss");
    request.loss = LOWKEY_LOSS_TEXT;
    assert_refused(lowkey_gradient_run(gradient, &request, &loss, &err), LOWKEY_ECANCELLED, err, "no");
    s.tokens[9] = 50;
    assert_refused(lowkey_gradient_run(gradient, &request, &loss, &err), LOWKEY_EINVAL, err,
                   "token 9 is 50, expected 0 to 49");
    lowkey_gradient_free(gradient);
    lowkey_gradient_free(NULL);
    sample_free(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_agree_with_differences_of_the_loss),
        cmocka_unit_test(gradients_agree_in_models_like_gemma),
        cmocka_unit_test(gradients_agree_where_blocks_of_tokens_and_tiles_of_keys_end),
        cmocka_unit_test(the_last_token_predicts_nothing_and_earlier_ones_do),
        cmocka_unit_test(the_number_of_threads_changes_no_bit),
        cmocka_unit_test(one_object_gives_each_sample_what_a_fresh_one_gives),
        cmocka_unit_test(without_a_loss_the_hidden_states_are_the_same),
        cmocka_unit_test(tokens_are_drawn_as_often_as_their_weights_say),
        cmocka_unit_test(bad_calls_are_refused_in_words),
    };
    return lowkey_run_tests(tests);
}
