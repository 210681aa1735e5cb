/* Perplexity of windows against sums written out in f64. */
#include "experiments/perplexity.h"

#include <math.h>
#include <stdlib.h>

#include "experiments/lm/plain_attention.h"
#include "tests/check.h"
#include "tests/tiny_model.h"

static const struct tiny_shape shape = { 2, 24, 40, 300, 4, 2, 8, 8, 8, LOWKEY_PAIR_HALF, 0, 0, 0, 0, 0 };
enum { N = 500, WINDOW = 160 }; /* three windows and an end; a window is more than one block of logits */

static void assert_close(double got, double want, double tolerance)
{
    if (!(fabs(got - want) <= tolerance)) fail_msg("%.17g, wanted %.17g", got, want);
}

static void log_likelihood_of_a_token_is_exact_for_any_logits(void **state)
{
    (void)state;
    const float even[4] = { 3, 3, 3, 3 }, far[3] = { -1e30f, 0, 1e4f }, low[2] = { -3e4f, -3e4f };
    assert_close(lowkey_token_nll(even, 4, 2), log(4), 1e-15);
    assert_close(lowkey_token_nll(far, 3, 2), 0, 0);
    assert_close(lowkey_token_nll(far, 3, 1), 1e4, 1e-9);
    assert_close(lowkey_token_nll(low, 2, 0), log(2), 1e-12);
}

static void note(void *user, int i, double nll)
{
    ((double *)user)[i] = nll;
}

/* Negative log-likelihood of window i by the oracle. */
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
    static const int chunks[] = { 1, 37, 159, 160, 512 };
    lowkey_error err;
    int32_t tokens[N];
    int64_t offsets[2] = { 0, N };
    for (int t = 0; t < N; t++) tokens[t] = (t * t + 3 * t) % shape.vocab;
    const lowkey_tokens text = { .n_tokens = N,
                                 .tokens = tokens,
                                 .n_sequences = 1,
                                 .sequence_offsets = offsets,
                                 .vocab_size = shape.vocab };
    lowkey_model *model = lowkey_tiny_model(&shape, 3);
    double want[3], got[5][3];
    for (int i = 0; i < 3; i++) want[i] = oracle_nll(model, tokens + i * WINDOW);
    for (int i = 0; i < 5; i++) {
        lowkey_plain_attention *attention;
        lowkey_decoder *decoder;
        assert_ok(lowkey_plain_attention_create(model, 2, WINDOW, 1 + i, NULL, &attention, &err), err);
        const struct lowkey_decoder_config config = { .model = model,
                                                      .attention = lowkey_plain_attention_interface(
                                                          attention),
                                                      .max_chunk = chunks[i],
                                                      .n_threads = 1 + i };
        assert_ok(lowkey_decoder_create(&config, &decoder, &err), err);
        const struct lowkey_perplexity_request request = { .decoder = decoder,
                                                           .tokens = &text,
                                                           .window = WINDOW,
                                                           .n_windows = 3,
                                                           .n_threads = 1 + i,
                                                           .on_window = note,
                                                           .user = got[i] };
        assert_ok(lowkey_perplexity(&request, &err), err);
        for (int w = 0; w < 3; w++) assert_close(got[i][w], want[w], 1e-5 * want[w]);
        struct lowkey_perplexity_request wrong = request;
        wrong.n_windows = 4;
        assert_refused(lowkey_perplexity(&wrong, &err), LOWKEY_EINVAL, err,
                       "4 windows of 160 tokens: the text has 3 such");
        const float kept = model->final_norm[0];
        model->final_norm[0] = NAN;
        assert_refused(lowkey_perplexity(&request, &err), LOWKEY_EINVAL, err,
                       "window 0: the model's logits are not finite");
        model->final_norm[0] = kept;
        lowkey_decoder_free(decoder);
        lowkey_plain_attention_free(attention);
    }
    lowkey_tiny_model_free(model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(log_likelihood_of_a_token_is_exact_for_any_logits),
        cmocka_unit_test(each_window_is_read_on_its_own_and_its_first_token_is_not_predicted),
    };
    return lowkey_run_tests(tests);
}
