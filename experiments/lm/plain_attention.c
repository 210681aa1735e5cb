/* plain_attention.c - causal attention in f32 with BLAS. Keys are rotated when they come and kept per head, so that a
 * head's scores over all tokens are one matrix product. Work is cut into blocks of queries of one head, which do not
 * depend on the number of threads; a thread ("lane") takes every n-th block and has scores of its own. */
#include "experiments/lm/plain_attention.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "calib/threads.h"
#include "experiments/lm/rope.h"
#include "runtime/error.h"

enum { QUERY_BLOCK = 64 }; /* queries of one head that share a matrix product */

struct layer_store {
    int n_tokens;
    float *keys; /* [n_kv_heads][max_tokens][key_head_dim], after RoPE */
    float *values; /* [n_kv_heads][max_tokens][value_head_dim] */
};

struct lowkey_plain_attention {
    int n_layers, max_tokens, n_threads;
    struct layer_store *layers; /* [n_layers] */
    float *scores; /* [n_threads][QUERY_BLOCK][max_tokens] */
    float *queries; /* [n_threads][QUERY_BLOCK][LOWKEY_MAX_ROPE_PAIRS * 2], after RoPE */
};

struct work { /* one step, as its lanes see it */
    lowkey_plain_attention *attention;
    const struct lowkey_attention_step *step;
    struct layer_store *store;
    int first; /* position of the step's first token */
};

static float *new_floats(size_t a, size_t b, size_t c)
{
    size_t n;
    if (__builtin_mul_overflow(a, b, &n) || __builtin_mul_overflow(n, c, &n)) return NULL;
    return calloc(n ? n : 1, sizeof(float));
}

static int allocate(lowkey_plain_attention *attention, const lowkey_model *model)
{
    const size_t max_tokens = (size_t)attention->max_tokens, lanes = (size_t)attention->n_threads;
    attention->layers = calloc((size_t)attention->n_layers, sizeof *attention->layers);
    attention->scores = new_floats(lanes, QUERY_BLOCK, max_tokens);
    attention->queries = new_floats(lanes, QUERY_BLOCK, 2 * LOWKEY_MAX_ROPE_PAIRS);
    if (!attention->layers || !attention->scores || !attention->queries) return 0;
    for (int l = 0; l < attention->n_layers; l++) {
        const lowkey_layer_desc *layer = &model->geometry[l];
        struct layer_store *store = &attention->layers[l];
        store->keys = new_floats((size_t)layer->n_kv_heads, max_tokens, (size_t)layer->key_head_dim);
        store->values = new_floats((size_t)layer->n_kv_heads, max_tokens, (size_t)layer->value_head_dim);
        if (!store->keys || !store->values) return 0;
    }
    return 1;
}

lowkey_status lowkey_plain_attention_create(const lowkey_model *model, int n_layers, int max_tokens,
                                            int n_threads, lowkey_plain_attention **out, lowkey_error *err)
{
    *out = NULL;
    if (n_layers < 1 || n_layers > model->n_layers || max_tokens < 1 || n_threads < 1)
        return lowkey_fail(err, LOWKEY_EINVAL, "attention: %d layers of %d, %d tokens, %d threads", n_layers,
                           model->n_layers, max_tokens, n_threads);
    lowkey_plain_attention *attention = calloc(1, sizeof *attention);
    if (attention) {
        attention->n_layers = n_layers;
        attention->max_tokens = max_tokens;
        attention->n_threads = n_threads;
    }
    if (!attention || !allocate(attention, model)) {
        lowkey_plain_attention_free(attention);
        return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for keys and values of %d tokens in %d layers",
                           max_tokens, n_layers);
    }
    *out = attention;
    return LOWKEY_OK;
}

void lowkey_plain_attention_free(lowkey_plain_attention *attention)
{
    if (!attention) return;
    for (int l = 0; attention->layers && l < attention->n_layers; l++) {
        free(attention->layers[l].keys);
        free(attention->layers[l].values);
    }
    free(attention->layers);
    free(attention->scores);
    free(attention->queries);
    free(attention);
}

/* Tokens i * QUERY_BLOCK.. of the step: rotate their keys into the store, copy their values. */
static void store_block(void *arg, int i)
{
    const struct work *work = arg;
    const struct lowkey_attention_step *step = work->step;
    const lowkey_layer_desc *layer = step->layer;
    const size_t key_dim = (size_t)layer->key_head_dim, value_dim = (size_t)layer->value_head_dim;
    float cosine[LOWKEY_MAX_ROPE_PAIRS], sine[LOWKEY_MAX_ROPE_PAIRS];
    for (int t = i * QUERY_BLOCK; t < step->n_tokens && t < (i + 1) * QUERY_BLOCK; t++) {
        lowkey_rope_angles(layer, work->first + t, cosine, sine);
        for (int h = 0; h < layer->n_kv_heads; h++) {
            const size_t from = (size_t)t * (size_t)layer->n_kv_heads + (size_t)h;
            const size_t to = (size_t)h * (size_t)work->attention->max_tokens + (size_t)(work->first + t);
            lowkey_rope_turn(layer, cosine, sine, step->key + from * key_dim,
                             work->store->keys + to * key_dim);
            memcpy(work->store->values + to * value_dim, step->value + from * value_dim,
                   value_dim * sizeof(float));
        }
    }
}

/* In lanes that do not wait for each other; n >= 1. */
static float largest(const float *x, int n)
{
    enum { LANES = 16 };
    float max[LANES];
    int t = 0;
    for (int i = 0; i < LANES; i++) max[i] = x[0];
    for (; t + LANES <= n; t += LANES)
        for (int i = 0; i < LANES; i++) max[i] = x[t + i] > max[i] ? x[t + i] : max[i];
    for (; t < n; t++) max[0] = x[t] > max[0] ? x[t] : max[0];
    for (int i = 1; i < LANES; i++) max[0] = max[i] > max[0] ? max[i] : max[0];
    return max[0];
}

/* Softmax over the first n_visible of n scores, the rest 0. The sum is f64: n may be large. */
static void softmax(float *scores, int n_visible, int n)
{
    const float max = largest(scores, n_visible);
    double sum = 0;
    for (int t = 0; t < n_visible; t++) {
        scores[t] = expf(scores[t] - max);
        sum += (double)scores[t];
    }
    const float scale = (float)(1 / sum);
    for (int t = 0; t < n_visible; t++) scores[t] *= scale;
    memset(scores + n_visible, 0, (size_t)(n - n_visible) * sizeof *scores);
}

/* Queries first_query.. of query head h: n_rows of them. */
static void attend_block(const struct work *work, int h, int first_query, int n_rows, float *queries,
                         float *scores)
{
    const struct lowkey_attention_step *step = work->step;
    const lowkey_layer_desc *layer = step->layer;
    const int key_dim = layer->key_head_dim, value_dim = layer->value_head_dim;
    const size_t kv = (size_t)(h / (layer->n_q_heads / layer->n_kv_heads)) *
                      (size_t)work->attention->max_tokens;
    const size_t row = (size_t)first_query * (size_t)layer->n_q_heads + (size_t)h;
    const double scale = layer->logit_scale != 0 ? layer->logit_scale : 1 / sqrt(key_dim);
    const int n_visible = work->first + first_query + n_rows; /* to the last of them */

    float cosine[LOWKEY_MAX_ROPE_PAIRS], sine[LOWKEY_MAX_ROPE_PAIRS];
    for (int j = 0; j < n_rows; j++) {
        const float *query = step->query + (row + (size_t)j * (size_t)layer->n_q_heads) * (size_t)key_dim;
        lowkey_rope_angles(layer, work->first + first_query + j, cosine, sine);
        lowkey_rope_turn(layer, cosine, sine, query, queries + (size_t)j * (size_t)key_dim);
    }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n_rows, n_visible, key_dim, (float)scale, queries,
                key_dim, work->store->keys + kv * (size_t)key_dim, key_dim, 0, scores, n_visible);
    for (int j = 0; j < n_rows; j++)
        softmax(scores + (size_t)j * (size_t)n_visible, work->first + first_query + j + 1, n_visible);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n_rows, value_dim, n_visible, 1, scores, n_visible,
                work->store->values + kv * (size_t)value_dim, value_dim, 0,
                step->out + row * (size_t)value_dim, layer->n_q_heads * value_dim);
}

static void attend_lane(void *arg, int lane)
{
    const struct work *work = arg;
    const struct lowkey_attention_step *step = work->step;
    const lowkey_plain_attention *attention = work->attention;
    const int n_heads = step->layer->n_q_heads;
    const int n_blocks = (step->n_tokens + QUERY_BLOCK - 1) / QUERY_BLOCK;
    float *queries = attention->queries + (size_t)lane * QUERY_BLOCK * 2 * LOWKEY_MAX_ROPE_PAIRS;
    float *scores = attention->scores + (size_t)lane * QUERY_BLOCK * (size_t)attention->max_tokens;
    for (int i = lane; i < n_blocks * n_heads; i += attention->n_threads) {
        const int first = i / n_heads * QUERY_BLOCK;
        const int n_rows = step->n_tokens - first < QUERY_BLOCK ? step->n_tokens - first : QUERY_BLOCK;
        attend_block(work, i % n_heads, first, n_rows, queries, scores);
    }
}

static lowkey_status attend(void *user, const struct lowkey_attention_step *step, lowkey_error *err)
{
    lowkey_plain_attention *attention = user;
    const int l = step->layer->index;
    if (l < 0 || l >= attention->n_layers)
        return lowkey_fail(err, LOWKEY_EINVAL, "attention: no layer %d", l);
    struct layer_store *store = &attention->layers[l];
    if (step->n_tokens < 1 || step->n_tokens > attention->max_tokens - store->n_tokens)
        return lowkey_fail(err, LOWKEY_EFULL,
                           "attention: layer %d holds %d tokens of at most %d, %d more given", l,
                           store->n_tokens, attention->max_tokens, step->n_tokens);
    struct work work = { .attention = attention, .step = step, .store = store, .first = store->n_tokens };
    lowkey_threads_run(&attention->n_threads, (step->n_tokens + QUERY_BLOCK - 1) / QUERY_BLOCK, store_block,
                       &work);
    store->n_tokens += step->n_tokens;
    lowkey_threads_run(&attention->n_threads, attention->n_threads, attend_lane, &work);
    return LOWKEY_OK;
}

static lowkey_status reset(void *user, lowkey_error *err)
{
    (void)err;
    lowkey_plain_attention *attention = user;
    for (int l = 0; l < attention->n_layers; l++) attention->layers[l].n_tokens = 0;
    return LOWKEY_OK;
}

struct lowkey_attention lowkey_plain_attention_interface(lowkey_plain_attention *attention)
{
    return (struct lowkey_attention) { .step = attend, .reset = reset, .user = attention };
}
