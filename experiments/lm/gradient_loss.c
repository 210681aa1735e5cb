/* gradient_loss.c - losses of next tokens from final hidden states. Logits are made for blocks of rows; a thread takes a
 * block and has room for its logits. */
#include "experiments/lm/gradient_loss.h"

#include <cblas.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "calib/threads.h"
#include "experiments/lm/exponential.h"

enum { LOGIT_ROWS = 128 };

size_t lowkey_loss_scratch(const lowkey_model *model, int n_threads)
{
    size_t n;
    if (__builtin_mul_overflow((size_t)n_threads, 2 * LOGIT_ROWS * (size_t)model->vocab_size, &n)) return 0;
    return n;
}

/* A number of 64 bits for each counter: the finalizer of a 64-bit mixing function. */
static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

int32_t lowkey_loss_draw(const float *weights, int n, double sum, uint64_t seed, int t)
{
    const uint64_t random = mix(mix(seed) + 0x9e3779b97f4a7c15u * ((uint64_t)t + 1));
    const double wanted = (double)(random >> 11) * 0x1p-53 * sum;
    double reached = 0;
    int32_t last = 0; /* of those that can be drawn, should rounding let none reach what is wanted */
    for (int32_t i = 0; i < n; i++) {
        reached += (double)weights[i];
        if (weights[i] > 0) last = i;
        if (reached > wanted) return i;
    }
    return last;
}

/* logits [n] -> weights exp(logit - largest), whose sum is returned. */
static double to_weights(float *logits, int n, float *largest)
{
    *largest = lowkey_largest(logits, n, NULL);
    return lowkey_exp_row(logits, n, *largest);
}

/* logits -> softmax less the label's one. */
static double row_of_label(const struct lowkey_loss_work *work, int t, float *logits)
{
    const int n = work->model->vocab_size;
    const int given = work->loss == LOWKEY_LOSS_TEXT;
    float largest, logit = given ? logits[work->labels[t]] : 0;
    const double sum = to_weights(logits, n, &largest);
    const int32_t label = given ? work->labels[t] : lowkey_loss_draw(logits, n, sum, work->seed, t);
    const double loss = given ? log(sum) + ((double)largest - (double)logit)
                              : log(sum) - log((double)logits[label]);
    const float scale = (float)(1 / sum);
    for (int i = 0; i < n; i++) logits[i] *= scale;
    logits[label] -= 1;
    return loss;
}

/* In f64, in lanes that do not wait for each other. */
static double dot(const float *x, const float *y, int n)
{
    enum { LANES = 8 };
    double sums[LANES] = { 0 }, sum = 0;
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) sums[j] += (double)x[i + j] * (double)y[i + j];
    for (; i < n; i++) sum += (double)x[i] * (double)y[i];
    for (int j = 0; j < LANES; j++) sum += sums[j];
    return sum;
}

/* KL(reference || this) = sum r (a - b) - log sum exp a + log sum exp b, a and b logits, r = softmax a. logits -> this less
 * reference; reference is used up. */
static double row_of_reference(int n, float *logits, float *reference)
{
    enum { PIECE = 1024 };
    const float largest = lowkey_largest(reference, n, NULL);
    double cross = 0, sum = 0;
    for (int first = 0; first < n; first += PIECE) {
        const int m = n - first < PIECE ? n - first : PIECE;
        float difference[PIECE], *weight = reference + first;
        for (int i = 0; i < m; i++) difference[i] = weight[i] - logits[first + i];
        sum += lowkey_exp_row(weight, m, largest);
        cross += dot(weight, difference, m);
    }
    float largest_here;
    const double sum_here = to_weights(logits, n, &largest_here);
    const float scale = (float)(1 / sum), scale_here = (float)(1 / sum_here);
    for (int i = 0; i < n; i++) logits[i] = logits[i] * scale_here - reference[i] * scale;
    return cross / sum - log(sum) + log(sum_here) + ((double)largest_here - (double)largest);
}

static void make_logits(const lowkey_model *model, const float *hidden, int n_rows, float *logits)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n_rows, model->vocab_size, model->hidden_size, 1,
                hidden, model->hidden_size, model->output, model->hidden_size, 0, logits, model->vocab_size);
}

static void loss_block(struct lowkey_loss_work *work, int first, float *logits)
{
    const lowkey_model *model = work->model;
    const int n_rows = work->n_rows - first < LOGIT_ROWS ? work->n_rows - first : LOGIT_ROWS;
    const size_t vocab = (size_t)model->vocab_size, at = (size_t)first * (size_t)model->hidden_size;
    float *reference = logits + LOGIT_ROWS * vocab;
    make_logits(model, work->hidden + at, n_rows, logits);
    if (work->loss == LOWKEY_LOSS_KL) make_logits(model, work->reference + at, n_rows, reference);
    for (int j = 0; j < n_rows; j++)
        work->row_loss[first + j] = work->loss == LOWKEY_LOSS_KL
                                        ? row_of_reference(model->vocab_size, logits + (size_t)j * vocab,
                                                           reference + (size_t)j * vocab)
                                        : row_of_label(work, first + j, logits + (size_t)j * vocab);
    if (!work->hidden_grad) return;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n_rows, model->hidden_size, model->vocab_size, 1,
                logits, model->vocab_size, model->output, model->hidden_size, 0, work->hidden_grad + at,
                model->hidden_size);
}

struct lanes {
    struct lowkey_loss_work *work;
    atomic_int next;
};

static void loss_lane(void *arg, int lane)
{
    struct lanes *lanes = arg;
    struct lowkey_loss_work *work = lanes->work;
    float *logits = work->scratch + (size_t)lane * 2 * LOGIT_ROWS * (size_t)work->model->vocab_size;
    for (int first; (first = LOGIT_ROWS * atomic_fetch_add(&lanes->next, 1)) < work->n_rows;)
        loss_block(work, first, logits);
}

void lowkey_loss_run(struct lowkey_loss_work *work)
{
    struct lanes lanes = { .work = work };
    lowkey_threads_run(&work->n_threads, work->n_threads, loss_lane, &lanes);
}
