/* plain_attention.c - causal attention in f32 with BLAS. Keys are rotated when they come and kept per head, so that a
 * head's scores over all tokens are one matrix product. Work is cut into blocks of queries of one head, which do not
 * depend on the number of threads; a thread ("lane") takes every n-th block and has scores of its own. With a recent
 * window there are two views of the tokens, as stored and in 16 bits: scores are made with both and each row takes
 * either side of its window's edge from one of them. */
#include "experiments/lm/plain_attention.h"

#include <cblas.h>
#include <stdlib.h>
#include <string.h>

#include "calib/threads.h"
#include "experiments/lm/attention_block.h"
#include "experiments/lm/rope.h"
#include "formats/half.h"
#include "runtime/error.h"

struct view { /* of the tokens of one layer */
    float *keys; /* [n_kv_heads][max_tokens][key_head_dim], after RoPE */
    float *values; /* [n_kv_heads][max_tokens][value_head_dim] */
};

struct layer {
    int n_tokens;
    struct view stored, exact; /* exact: where the store has a window; else NULL */
};

struct lowkey_plain_attention {
    int n_layers, max_tokens, n_threads;
    int has_store;
    struct lowkey_store store;
    struct layer *layers; /* [n_layers] */
    struct lowkey_rope_table rope;
    float *scores,
        *exact_scores; /* [n_threads][LOWKEY_QUERY_BLOCK][max_tokens]; exact_scores: with a window */
    float *queries; /* [n_threads][LOWKEY_QUERY_BLOCK][LOWKEY_MAX_ROPE_PAIRS * 2], after RoPE */
    float *stored_key, *stored_value; /* what the store gave for a step; grown as needed */
    size_t stored_key_size, stored_value_size;
};

struct work { /* one step, as its lanes see it */
    lowkey_plain_attention *attention;
    const struct lowkey_attention_step *step;
    struct layer *layer;
    int first; /* position of the step's first token */
    const float *key, *value; /* of the step, as stored */
};

static float *new_floats(size_t a, size_t b, size_t c)
{
    size_t n;
    if (__builtin_mul_overflow(a, b, &n) || __builtin_mul_overflow(n, c, &n)) return NULL;
    return calloc(n ? n : 1, sizeof(float));
}

static int allocate_view(struct view *view, const lowkey_layer_desc *layer, size_t max_tokens)
{
    view->keys = new_floats((size_t)layer->n_kv_heads, max_tokens, (size_t)layer->key_head_dim);
    view->values = new_floats((size_t)layer->n_kv_heads, max_tokens, (size_t)layer->value_head_dim);
    return view->keys && view->values;
}

static int allocate(lowkey_plain_attention *attention, const lowkey_model *model)
{
    const size_t max_tokens = (size_t)attention->max_tokens, lanes = (size_t)attention->n_threads;
    const int has_window = attention->has_store && attention->store.exact_from;
    attention->layers = calloc((size_t)attention->n_layers, sizeof *attention->layers);
    attention->scores = new_floats(lanes, LOWKEY_QUERY_BLOCK, max_tokens);
    attention->queries = new_floats(lanes, LOWKEY_QUERY_BLOCK, 2 * LOWKEY_MAX_ROPE_PAIRS);
    if (!attention->layers || !attention->scores || !attention->queries) return 0;
    if (!lowkey_rope_table_init(&attention->rope, attention->max_tokens)) return 0;
    if (has_window && !(attention->exact_scores = new_floats(lanes, LOWKEY_QUERY_BLOCK, max_tokens)))
        return 0;
    for (int l = 0; l < attention->n_layers; l++) {
        struct layer *layer = &attention->layers[l];
        if (!allocate_view(&layer->stored, &model->geometry[l], max_tokens)) return 0;
        if (has_window && !allocate_view(&layer->exact, &model->geometry[l], max_tokens)) return 0;
    }
    return 1;
}

lowkey_status lowkey_plain_attention_create(const lowkey_model *model, int n_layers, int max_tokens,
                                            int n_threads, const struct lowkey_store *store,
                                            lowkey_plain_attention **out, lowkey_error *err)
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
        attention->has_store = store != NULL;
        if (store) attention->store = *store;
    }
    if (!attention || !allocate(attention, model)) {
        lowkey_plain_attention_free(attention);
        return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for keys and values of %d tokens in %d layers",
                           max_tokens, n_layers);
    }
    *out = attention;
    return LOWKEY_OK;
}

static void free_view(struct view *view)
{
    free(view->keys);
    free(view->values);
}

void lowkey_plain_attention_free(lowkey_plain_attention *attention)
{
    if (!attention) return;
    for (int l = 0; attention->layers && l < attention->n_layers; l++) {
        free_view(&attention->layers[l].stored);
        free_view(&attention->layers[l].exact);
    }
    free(attention->layers);
    free(attention->scores);
    free(attention->exact_scores);
    free(attention->queries);
    lowkey_rope_table_free(&attention->rope);
    free(attention->stored_key);
    free(attention->stored_value);
    free(attention);
}

static float in_16_bits(float x)
{
    return lowkey_f16_to_f32(lowkey_f32_to_f16_saturate(x, NULL));
}

/* A token's key and value of one head, before RoPE, into a view. rounded: in 16 bits. */
static void add_token(const struct work *work, const struct view *view, int h, int position, const float *key,
                      const float *value, int rounded)
{
    const lowkey_layer_desc *layer = work->step->layer;
    const size_t key_dim = (size_t)layer->key_head_dim, value_dim = (size_t)layer->value_head_dim;
    const size_t to = (size_t)h * (size_t)work->attention->max_tokens + (size_t)position;
    float *key_to = view->keys + to * key_dim, *value_to = view->values + to * value_dim;
    memcpy(key_to, key, key_dim * sizeof(float));
    memcpy(value_to, value, value_dim * sizeof(float));
    for (size_t c = 0; rounded && c < key_dim; c++) key_to[c] = in_16_bits(key_to[c]);
    for (size_t c = 0; rounded && c < value_dim; c++) value_to[c] = in_16_bits(value_to[c]);
    lowkey_rope_table_turn(&work->attention->rope, layer, position, key_to, key_to);
}

/* Tokens i * LOWKEY_QUERY_BLOCK.. of the step into the layer's views, keys rotated. */
static void add_block(void *arg, int i)
{
    const struct work *work = arg;
    const struct lowkey_attention_step *step = work->step;
    const lowkey_layer_desc *layer = step->layer;
    const size_t key_dim = (size_t)layer->key_head_dim, value_dim = (size_t)layer->value_head_dim;
    for (int t = i * LOWKEY_QUERY_BLOCK; t < step->n_tokens && t < (i + 1) * LOWKEY_QUERY_BLOCK; t++) {
        const int position = work->first + t;
        for (int h = 0; h < layer->n_kv_heads; h++) {
            const size_t from = (size_t)t * (size_t)layer->n_kv_heads + (size_t)h;
            add_token(work, &work->layer->stored, h, position, work->key + from * key_dim,
                      work->value + from * value_dim, 0);
            if (work->layer->exact.keys)
                add_token(work, &work->layer->exact, h, position, step->key + from * key_dim,
                          step->value + from * value_dim, 1);
        }
    }
}

/* Where the window begins for a query at a position: tokens from there on are seen as they were. */
static int window_start(const lowkey_plain_attention *attention, enum lowkey_store_side side, int position)
{
    const int from = attention->store.exact_from(attention->store.user, side, position);
    return from < 0 ? 0 : from > position + 1 ? position + 1 : from;
}

struct block { /* queries of one query head, and what they see: tokens start..n_visible-1 */
    int n_rows, start, n_visible;
    int position; /* of the first query */
    size_t kv; /* offset of the KV head's tokens in a view */
    const float *queries; /* [n_rows][key_head_dim], after RoPE */
    float *scores, *exact_scores; /* [n_rows][n_visible] */
};

/* scores[n_rows][n_visible] of tokens first.. of a view */
static void score(const struct work *work, const struct block *block, const struct view *view, int first,
                  float *scores)
{
    const lowkey_layer_desc *layer = work->step->layer;
    const int key_dim = layer->key_head_dim;
    if (first >= block->n_visible) return;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, block->n_rows, block->n_visible - first, key_dim,
                lowkey_attention_scale(layer), block->queries, key_dim,
                view->keys + (block->kv + (size_t)first) * (size_t)key_dim, key_dim, 0, scores + first,
                block->n_visible);
}

/* Scores of tokens within a row's window are of the exact keys. */
static void take_exact_scores(const struct work *work, const struct block *block)
{
    const lowkey_plain_attention *attention = work->attention;
    score(work, block, &work->layer->exact, window_start(attention, LOWKEY_STORE_KEY, block->position),
          block->exact_scores);
    for (int j = 0; j < block->n_rows; j++) {
        const int position = block->position + j, from = window_start(attention, LOWKEY_STORE_KEY, position);
        const size_t at = (size_t)j * (size_t)block->n_visible + (size_t)from;
        memcpy(block->scores + at, block->exact_scores + at,
               (size_t)(position + 1 - from) * sizeof *block->scores);
    }
}

/* Move the weights of tokens within a row's value window to exact_scores, from token first on; both are 0 elsewhere. */
static void part_weights(const struct work *work, const struct block *block, int first)
{
    for (int j = 0; j < block->n_rows; j++) {
        const int from = window_start(work->attention, LOWKEY_STORE_VALUE, block->position + j);
        float *stored = block->scores + (size_t)j * (size_t)block->n_visible,
              *exact = block->exact_scores + (size_t)j * (size_t)block->n_visible;
        memset(exact + first, 0, (size_t)(from - first) * sizeof *exact);
        memcpy(exact + from, stored + from, (size_t)(block->n_visible - from) * sizeof *exact);
        memset(stored + from, 0, (size_t)(block->n_visible - from) * sizeof *stored);
    }
}

/* out = (out +) weights of tokens first..end-1, times the values of a view */
static void mix(const struct work *work, const struct block *block, const struct view *view, int first,
                int end, const float *weights, int add, float *out)
{
    const lowkey_layer_desc *layer = work->step->layer;
    const int value_dim = layer->value_head_dim;
    if (first >= end) { /* not BLAS's business: what it does with no terms differs */
        for (int j = 0; j < block->n_rows && !add; j++)
            memset(out + (size_t)j * (size_t)(layer->n_q_heads * value_dim), 0,
                   (size_t)value_dim * sizeof *out);
        return;
    }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, block->n_rows, value_dim, end - first, 1,
                weights + first, block->n_visible,
                view->values + (block->kv + (size_t)first) * (size_t)value_dim, value_dim, (float)add, out,
                layer->n_q_heads * value_dim);
}

/* Queries first_query.. of query head h: n_rows of them. */
static void attend_block(const struct work *work, int h, int first_query, int n_rows, float *queries,
                         float *scores, float *exact_scores)
{
    const struct lowkey_attention_step *step = work->step;
    const lowkey_layer_desc *layer = step->layer;
    const int key_dim = layer->key_head_dim, value_dim = layer->value_head_dim;
    const size_t row = (size_t)first_query * (size_t)layer->n_q_heads + (size_t)h;
    const int position = work->first + first_query, n_visible = position + n_rows;
    const int has_window = work->layer->exact.keys != NULL;
    const struct block block = {
        .n_rows = n_rows,
        .start = lowkey_attention_start(step->window, position),
        .n_visible = n_visible,
        .position = position,
        .kv = (size_t)(h / (layer->n_q_heads / layer->n_kv_heads)) * (size_t)work->attention->max_tokens,
        .queries = queries,
        .scores = scores,
        .exact_scores = exact_scores,
    };
    for (int j = 0; j < n_rows; j++)
        lowkey_rope_table_turn(&work->attention->rope, layer, position + j,
                               step->query + (row + (size_t)j * (size_t)layer->n_q_heads) * (size_t)key_dim,
                               queries + (size_t)j * (size_t)key_dim);
    score(work, &block, &work->layer->stored, block.start, scores);
    if (has_window) take_exact_scores(work, &block);
    for (int j = 0; j < n_rows; j++)
        lowkey_softmax(scores + (size_t)j * (size_t)n_visible,
                       lowkey_attention_start(step->window, position + j), position + j + 1, n_visible);

    float *out = step->out + row * (size_t)value_dim;
    if (!has_window) {
        mix(work, &block, &work->layer->stored, block.start, n_visible, scores, 0, out);
        return;
    }
    const int first = window_start(work->attention, LOWKEY_STORE_VALUE, position),
              end = window_start(work->attention, LOWKEY_STORE_VALUE, n_visible - 1);
    part_weights(work, &block, first);
    mix(work, &block, &work->layer->exact, first, n_visible, exact_scores, 0, out);
    mix(work, &block, &work->layer->stored, block.start, end, scores, 1, out);
}

static void attend_lane(void *arg, int lane)
{
    const struct work *work = arg;
    const struct lowkey_attention_step *step = work->step;
    const lowkey_plain_attention *attention = work->attention;
    const int n_heads = step->layer->n_q_heads;
    const int n_blocks = (step->n_tokens + LOWKEY_QUERY_BLOCK - 1) / LOWKEY_QUERY_BLOCK;
    float *queries = attention->queries + (size_t)lane * LOWKEY_QUERY_BLOCK * 2 * LOWKEY_MAX_ROPE_PAIRS;
    const size_t scores = (size_t)lane * LOWKEY_QUERY_BLOCK * (size_t)attention->max_tokens;
    for (int i = lane; i < n_blocks * n_heads; i += attention->n_threads) {
        const int first = i / n_heads * LOWKEY_QUERY_BLOCK;
        const int n_rows = step->n_tokens - first < LOWKEY_QUERY_BLOCK ? step->n_tokens - first
                                                                       : LOWKEY_QUERY_BLOCK;
        attend_block(work, i % n_heads, first, n_rows, queries, attention->scores + scores,
                     attention->exact_scores ? attention->exact_scores + scores : NULL);
    }
}

static lowkey_status grow(float **rows, size_t *size, int n_tokens, int n_heads, int head_dim,
                          lowkey_error *err)
{
    const size_t wanted = (size_t)n_tokens * (size_t)n_heads * (size_t)head_dim;
    if (wanted <= *size) return LOWKEY_OK;
    free(*rows);
    *rows = malloc(wanted * sizeof **rows);
    *size = *rows ? wanted : 0;
    return *rows ? LOWKEY_OK : lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %d stored tokens", n_tokens);
}

/* Hand the step to the store, and let work see what it gives back. */
static lowkey_status put(struct work *work, lowkey_error *err)
{
    lowkey_plain_attention *attention = work->attention;
    const struct lowkey_attention_step *step = work->step;
    const lowkey_layer_desc *layer = step->layer;
    LOWKEY_TRY(grow(&attention->stored_key, &attention->stored_key_size, step->n_tokens, layer->n_kv_heads,
                    layer->key_head_dim, err));
    LOWKEY_TRY(grow(&attention->stored_value, &attention->stored_value_size, step->n_tokens,
                    layer->n_kv_heads, layer->value_head_dim, err));
    const struct lowkey_store_step store_step = {
        .layer = layer,
        .first = work->first,
        .n_tokens = step->n_tokens,
        .key = step->key,
        .value = step->value,
        .query = step->query,
        .stored_key = attention->stored_key,
        .stored_value = attention->stored_value,
    };
    work->key = attention->stored_key;
    work->value = attention->stored_value;
    return attention->store.put(attention->store.user, &store_step, err);
}

static lowkey_status attend(void *user, const struct lowkey_attention_step *step, lowkey_error *err)
{
    lowkey_plain_attention *attention = user;
    const int l = step->layer->index,
              n_blocks = (step->n_tokens + LOWKEY_QUERY_BLOCK - 1) / LOWKEY_QUERY_BLOCK;
    if (l < 0 || l >= attention->n_layers)
        return lowkey_fail(err, LOWKEY_EINVAL, "attention: no layer %d", l);
    struct layer *layer = &attention->layers[l];
    if (step->n_tokens < 1 || step->n_tokens > attention->max_tokens - layer->n_tokens)
        return lowkey_fail(err, LOWKEY_EFULL,
                           "attention: layer %d holds %d tokens of at most %d, %d more given", l,
                           layer->n_tokens, attention->max_tokens, step->n_tokens);
    struct work work = { .attention = attention,
                         .step = step,
                         .layer = layer,
                         .first = layer->n_tokens,
                         .key = step->key,
                         .value = step->value };
    if (attention->has_store) LOWKEY_TRY(put(&work, err));
    lowkey_rope_table_make(&attention->rope, step->layer, work.first + step->n_tokens);
    lowkey_threads_run(&attention->n_threads, n_blocks, add_block, &work);
    layer->n_tokens += step->n_tokens;
    lowkey_threads_run(&attention->n_threads, attention->n_threads, attend_lane, &work);
    return LOWKEY_OK;
}

static lowkey_status reset(void *user, lowkey_error *err)
{
    lowkey_plain_attention *attention = user;
    for (int l = 0; l < attention->n_layers; l++) attention->layers[l].n_tokens = 0;
    return attention->has_store ? attention->store.reset(attention->store.user, err) : LOWKEY_OK;
}

struct lowkey_attention lowkey_plain_attention_interface(lowkey_plain_attention *attention)
{
    return (struct lowkey_attention) { .step = attend, .reset = reset, .user = attention };
}
