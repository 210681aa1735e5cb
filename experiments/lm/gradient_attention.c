/* gradient_attention.c - attention of one layer over a whole sample, and back. Threads share blocks of queries on the
 * way forward; on the way back they share query heads, each with sums of its own over the tokens, which are then added
 * in the order of heads: the same bits for any number of threads. */
#include <string.h>

#include "calib/threads.h"
#include "experiments/lm/attention_block.h"
#include "experiments/lm/gradient_parts.h"

struct work {
    lowkey_gradient *gradient;
    const lowkey_layer_desc *layer;
    struct lowkey_tape *tape;
    atomic_int next;
};

/* from, to: a head's vector of token t */
static void turn(const struct work *work, int t, const float *from, float *to)
{
    lowkey_rope_table_turn(&work->gradient->rope, work->layer, t, from, to);
}

/* Gradients turn by the transposed rotation, which is the one by the negative angle. */
static void turn_back(const struct work *work, int t, const float *from, float *to)
{
    const struct lowkey_rope_table *rope = &work->gradient->rope;
    const size_t at = (size_t)t * (size_t)rope->n_pairs;
    float sine[LOWKEY_MAX_ROPE_PAIRS];
    for (int i = 0; i < rope->n_pairs; i++) sine[i] = -rope->sine[at + (size_t)i];
    lowkey_rope_turn(work->layer, rope->cosine + at, sine, from, to);
}

static int block_end(const struct work *work, int first, int size)
{
    return work->gradient->n_tokens - first < size ? work->gradient->n_tokens : first + size;
}

static void turn_keys(void *arg, int i)
{
    const struct work *work = arg;
    const size_t dim = (size_t)work->layer->key_head_dim, heads = (size_t)work->layer->n_kv_heads;
    const int first = i * LOWKEY_TOKEN_BLOCK, end = block_end(work, first, LOWKEY_TOKEN_BLOCK);
    for (int t = first; t < end; t++)
        for (size_t h = 0; h < heads; h++) {
            const size_t at = ((size_t)t * heads + h) * dim;
            turn(work, t, work->tape->stored_key + at, work->gradient->turned_key + at);
        }
}

static void turn_all_keys(struct work *work)
{
    lowkey_gradient *gradient = work->gradient;
    lowkey_rope_table_make(&gradient->rope, work->layer, gradient->n_tokens);
    lowkey_threads_run(&gradient->config.n_threads,
                       (gradient->n_tokens + LOWKEY_TOKEN_BLOCK - 1) / LOWKEY_TOKEN_BLOCK, turn_keys, work);
}

static struct lowkey_attention_head head_of(const struct work *work, int h)
{
    const lowkey_layer_desc *layer = work->layer;
    const int kv = h / (layer->n_q_heads / layer->n_kv_heads);
    return (struct lowkey_attention_head) {
        .key_dim = layer->key_head_dim,
        .value_dim = layer->value_head_dim,
        .scale = lowkey_attention_scale(layer),
        .keys = work->gradient->turned_key + (size_t)kv * (size_t)layer->key_head_dim,
        .values = work->tape->stored_value + (size_t)kv * (size_t)layer->value_head_dim,
        .key_stride = layer->n_kv_heads * layer->key_head_dim,
        .value_stride = layer->n_kv_heads * layer->value_head_dim,
    };
}

/* Block i of head h's queries, turned into room [LOWKEY_QUERY_BLOCK][key_head_dim]. */
static struct lowkey_attention_queries queries_of(const struct work *work, int h, int first, float *room)
{
    const lowkey_layer_desc *layer = work->layer;
    const size_t dim = (size_t)layer->key_head_dim, heads = (size_t)layer->n_q_heads;
    const int end = block_end(work, first, LOWKEY_QUERY_BLOCK);
    for (int t = first; t < end; t++)
        turn(work, t, work->tape->rows.query + ((size_t)t * heads + (size_t)h) * dim,
             room + (size_t)(t - first) * dim);
    return (struct lowkey_attention_queries) {
        .first = first,
        .window = work->gradient->config.model->layers[work->layer->index].window,
        .n_rows = end - first,
        .queries = room,
        .mixed_stride = layer->n_q_heads * layer->value_head_dim,
        .lse_stride = layer->n_q_heads,
    };
}

/* Where head h's row of token t is in rows [tokens][n_q_heads][width]. */
static size_t row_at(const struct work *work, int t, int h, int width)
{
    return ((size_t)t * (size_t)work->layer->n_q_heads + (size_t)h) * (size_t)width;
}

static void attend_lane(void *arg, int lane)
{
    struct work *work = arg;
    lowkey_gradient *gradient = work->gradient;
    const lowkey_layer_desc *layer = work->layer;
    const int n_blocks = (gradient->n_tokens + LOWKEY_QUERY_BLOCK - 1) / LOWKEY_QUERY_BLOCK;
    float *room = gradient->lanes + (size_t)lane * gradient->lane_floats;
    float *scores = room + LOWKEY_QUERY_BLOCK * (size_t)layer->key_head_dim;
    for (int i; (i = atomic_fetch_add(&work->next, 1)) < n_blocks * layer->n_q_heads;) {
        const int h = i % layer->n_q_heads, first = i / layer->n_q_heads * LOWKEY_QUERY_BLOCK;
        const struct lowkey_attention_head head = head_of(work, h);
        const struct lowkey_attention_queries queries = queries_of(work, h, first, room);
        lowkey_attention_block(&head, &queries, scores,
                               work->tape->rows.mixed + row_at(work, first, h, layer->value_head_dim),
                               work->tape->lse + row_at(work, first, h, 1));
    }
}

void lowkey_gradient_attend(lowkey_gradient *gradient, int l)
{
    struct work work = { .gradient = gradient,
                         .layer = &gradient->config.model->geometry[l],
                         .tape = &gradient->tape[l] };
    turn_all_keys(&work);
    lowkey_threads_run(&gradient->config.n_threads, gradient->config.n_threads, attend_lane, &work);
}

/* All queries of head h: gradients of keys and values into the head's own sums, of queries turned back at once. */
static void head_back(struct work *work, int h, float *room)
{
    lowkey_gradient *gradient = work->gradient;
    const lowkey_layer_desc *layer = work->layer;
    const int key_dim = layer->key_head_dim, value_dim = layer->value_head_dim;
    const size_t n_tokens = (size_t)gradient->n_tokens, at = (size_t)h * (size_t)gradient->config.max_tokens;
    float *key_grad = gradient->head_key_grad + at * (size_t)key_dim;
    float *value_grad = gradient->head_value_grad + at * (size_t)value_dim;
    float *query_grad = room + LOWKEY_QUERY_BLOCK * (size_t)key_dim;
    float *scratch = query_grad + LOWKEY_QUERY_BLOCK * (size_t)key_dim;
    const struct lowkey_attention_head head = head_of(work, h);
    memset(key_grad, 0, n_tokens * (size_t)key_dim * sizeof *key_grad);
    memset(value_grad, 0, n_tokens * (size_t)value_dim * sizeof *value_grad);
    for (int first = 0; first < gradient->n_tokens; first += LOWKEY_QUERY_BLOCK) {
        const struct lowkey_attention_queries queries = queries_of(work, h, first, room);
        const size_t mixed = row_at(work, first, h, value_dim);
        lowkey_attention_block_back(&head, &queries, work->tape->rows.mixed + mixed,
                                    work->tape->lse + row_at(work, first, h, 1),
                                    gradient->grads.mixed + mixed, scratch, query_grad, key_grad, value_grad);
        for (int j = 0; j < queries.n_rows; j++)
            turn_back(work, first + j, query_grad + (size_t)j * (size_t)key_dim,
                      gradient->grads.query + row_at(work, first + j, h, key_dim));
    }
}

static void back_lane(void *arg, int lane)
{
    struct work *work = arg;
    float *room = work->gradient->lanes + (size_t)lane * work->gradient->lane_floats;
    for (int h; (h = atomic_fetch_add(&work->next, 1)) < work->layer->n_q_heads;) head_back(work, h, room);
}

/* out[dim] = the sum over the query heads of KV head kv of their parts of token t. */
static void add_heads(const struct work *work, const float *parts, int kv, int t, int dim, float *out)
{
    const int group = work->layer->n_q_heads / work->layer->n_kv_heads;
    memset(out, 0, (size_t)dim * sizeof *out);
    for (int h = kv * group; h < (kv + 1) * group; h++) {
        const size_t row = (size_t)h * (size_t)work->gradient->config.max_tokens + (size_t)t;
        for (int c = 0; c < dim; c++) out[c] += parts[row * (size_t)dim + (size_t)c];
    }
}

static void gather(void *arg, int i)
{
    const struct work *work = arg;
    const lowkey_gradient *gradient = work->gradient;
    const int key_dim = work->layer->key_head_dim, value_dim = work->layer->value_head_dim;
    const int first = i * LOWKEY_TOKEN_BLOCK, end = block_end(work, first, LOWKEY_TOKEN_BLOCK);
    for (int t = first; t < end; t++)
        for (int h = 0; h < work->layer->n_kv_heads; h++) {
            const size_t row = (size_t)t * (size_t)work->layer->n_kv_heads + (size_t)h;
            float *key_grad = gradient->grads.key + row * (size_t)key_dim;
            add_heads(work, gradient->head_key_grad, h, t, key_dim, key_grad);
            turn_back(work, t, key_grad, key_grad);
            add_heads(work, gradient->head_value_grad, h, t, value_dim,
                      gradient->grads.value + row * (size_t)value_dim);
        }
}

void lowkey_gradient_attend_back(lowkey_gradient *gradient, int l)
{
    struct work work = { .gradient = gradient,
                         .layer = &gradient->config.model->geometry[l],
                         .tape = &gradient->tape[l] };
    turn_all_keys(&work);
    lowkey_threads_run(&gradient->config.n_threads, gradient->config.n_threads, back_lane, &work);
    lowkey_threads_run(&gradient->config.n_threads,
                       (gradient->n_tokens + LOWKEY_TOKEN_BLOCK - 1) / LOWKEY_TOKEN_BLOCK, gather, &work);
}
