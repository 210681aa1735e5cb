/* damage.c - captured keys, values and queries through exact attention (f64, OpenBLAS) and through a cache of
 * liblowkey; what differs goes to measure.c. The scores of both sides are made by the same products here,
 * from captured and from stored keys; the outputs of the stored side are lowkey_attend's own. */
#include "experiments/damage.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>

#include "calib/threads.h"
#include "runtime/error.h"

/* Queries of one product: few, so that little is computed of what a query does not see. */
enum { QUERY_BLOCK = 16 };

void *lowkey_take(int64_t a, int64_t b, int64_t c, size_t size)
{
    size_t n;
    if (__builtin_mul_overflow(a, b, &n) || __builtin_mul_overflow(n, c, &n)) return NULL;
    return calloc(n ? n : 1, size);
}

static int q_per_kv(const struct lowkey_capture *capture)
{
    return capture->layer->n_q_heads / capture->layer->n_kv_heads;
}

/* ---- RoPE, f64 ---- */

static void make_angles(const struct lowkey_exact *exact)
{
    const lowkey_layer_desc *layer = exact->capture.layer;
    const int n_pairs = layer->rope_dims / 2;
    for (int t = 0; t < exact->capture.n_tokens; t++) {
        for (int i = 0; i < n_pairs; i++) {
            const double angle = t * layer->rope_inv_freq[i];
            exact->cosine[(size_t)t * n_pairs + i] = cos(angle) * layer->rope_attention_factor;
            exact->sine[(size_t)t * n_pairs + i] = sin(angle) * layer->rope_attention_factor;
        }
    }
}

/* out = factor * RoPE(x) at a position; both [key_head_dim] */
static void rotate(const struct lowkey_exact *exact, int position, const float *x, double factor, double *out)
{
    const lowkey_layer_desc *layer = exact->capture.layer;
    const int n_pairs = layer->rope_dims / 2, interleaved = layer->rope_pairing == LOWKEY_PAIR_INTERLEAVED;
    const double *cosine = exact->cosine + (size_t)position * n_pairs,
                 *sine = exact->sine + (size_t)position * n_pairs;
    for (int c = 2 * n_pairs; c < layer->key_head_dim; c++) out[c] = factor * (double)x[c];
    for (int i = 0; i < n_pairs; i++) {
        const int a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + n_pairs;
        const double x_a = factor * (double)x[a], x_b = factor * (double)x[b];
        out[a] = x_a * cosine[i] - x_b * sine[i];
        out[b] = x_a * sine[i] + x_b * cosine[i];
    }
}

/* Keys of KV head h out of [n_tokens][n_kv_heads][key_head_dim], rotated: out[n_tokens][key_head_dim] */
static void rotate_keys(const struct lowkey_exact *exact, const float *keys, int h, double *out)
{
    const size_t dim = (size_t)exact->capture.layer->key_head_dim,
                 n_heads = (size_t)exact->capture.layer->n_kv_heads;
    for (int t = 0; t < exact->capture.n_tokens; t++)
        rotate(exact, t, keys + ((size_t)t * n_heads + (size_t)h) * dim, 1, out + (size_t)t * dim);
}

/* ---- the exact side ---- */

/* Scores of queries first..first+n-1 of KV head h against rotated keys: the rows from `scores` on, n_tokens
 * apart, up to what the last of these queries sees. Returns how many tokens that is. */
static int score_block(const struct lowkey_exact *exact, int h, int first, int n, const double *keys,
                       double *scores)
{
    const struct lowkey_capture *capture = &exact->capture;
    const int group = q_per_kv(capture), dim = capture->layer->key_head_dim;
    const int n_visible = capture->positions[first + n - 1] + 1;
    const double *query = exact->query + (((size_t)h * capture->n_queries + first) * group) * dim;
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n * group, n_visible, dim, 1, query, dim, keys, dim,
                0, scores, capture->n_tokens);
    return n_visible;
}

/* p[n_visible] = softmax of the first n_seen scores, 0 beyond */
static void softmax(int n_seen, int n_visible, const double *scores, double *p)
{
    double most = scores[0], sum = 0;
    for (int t = 1; t < n_seen; t++) most = fmax(most, scores[t]);
    for (int t = 0; t < n_seen; t++) sum += p[t] = exp(scores[t] - most);
    for (int t = 0; t < n_seen; t++) p[t] /= sum;
    for (int t = n_seen; t < n_visible; t++) p[t] = 0;
}

/* One KV head, into exact->query, scores and out. keys, values: room for [n_tokens][head_dim]; p: for a
 * block's scores. */
static void attend_exactly(const struct lowkey_exact *exact, int h, double *keys, double *values, double *p)
{
    const struct lowkey_capture *capture = &exact->capture;
    const lowkey_layer_desc *layer = capture->layer;
    const int group = q_per_kv(capture), n_tokens = capture->n_tokens, value_dim = layer->value_head_dim;
    rotate_keys(exact, capture->key, h, keys);
    for (int t = 0; t < n_tokens; t++)
        for (int c = 0; c < value_dim; c++)
            values[(size_t)t * value_dim + c] =
                (double)capture->value[((size_t)t * layer->n_kv_heads + h) * value_dim + c];
    for (int j = 0; j < capture->n_queries; j += QUERY_BLOCK) {
        const int n = capture->n_queries - j < QUERY_BLOCK ? capture->n_queries - j : QUERY_BLOCK;
        const size_t row = ((size_t)h * capture->n_queries + j) * group;
        for (int r = 0; r < n * group; r++) {
            const size_t source = (size_t)(j + r / group) * layer->n_q_heads + (size_t)h * group + r % group;
            rotate(exact, capture->positions[j + r / group], capture->query + source * layer->key_head_dim,
                   layer->logit_scale, exact->query + (row + r) * layer->key_head_dim);
        }
        double *scores = exact->scores + row * n_tokens;
        const int n_visible = score_block(exact, h, j, n, keys, scores);
        for (int r = 0; r < n * group; r++)
            softmax(capture->positions[j + r / group] + 1, n_visible, scores + (size_t)r * n_tokens,
                    p + (size_t)r * n_tokens);
        cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n * group, value_dim, n_visible, 1, p,
                    n_tokens, values, value_dim, 0, exact->out + row * value_dim, value_dim);
    }
}

struct exact_job {
    const struct lowkey_exact *exact;
    lowkey_status *status; /* [n_kv_heads] */
};

static void exact_head(void *of, int h)
{
    const struct exact_job *job = of;
    const struct lowkey_capture *capture = &job->exact->capture;
    double *keys = lowkey_take(capture->n_tokens, capture->layer->key_head_dim, 1, sizeof *keys);
    double *values = lowkey_take(capture->n_tokens, capture->layer->value_head_dim, 1, sizeof *values);
    double *p = lowkey_take(QUERY_BLOCK, q_per_kv(capture), capture->n_tokens, sizeof *p);
    job->status[h] = keys && values && p ? LOWKEY_OK : LOWKEY_ENOMEM;
    if (job->status[h] == LOWKEY_OK) attend_exactly(job->exact, h, keys, values, p);
    free(keys);
    free(values);
    free(p);
}

static lowkey_status no_memory(lowkey_error *err, const struct lowkey_capture *capture)
{
    return lowkey_fail(err, LOWKEY_ENOMEM, "layer %d: no memory for %d tokens and %d queries",
                       capture->layer->index, capture->n_tokens, capture->n_queries);
}

lowkey_status lowkey_exact_create(const struct lowkey_capture *capture, int n_threads,
                                  struct lowkey_exact **out, lowkey_error *err)
{
    *out = NULL;
    const lowkey_layer_desc *layer = capture->layer;
    const int64_t n_rows = (int64_t)capture->n_queries * q_per_kv(capture);
    struct lowkey_exact *exact = calloc(1, sizeof *exact);
    lowkey_status *status = lowkey_take(layer->n_kv_heads, 1, 1, sizeof *status);
    if (exact) {
        exact->capture = *capture;
        exact->cosine = lowkey_take(capture->n_tokens, layer->rope_dims / 2, 1, sizeof *exact->cosine);
        exact->sine = lowkey_take(capture->n_tokens, layer->rope_dims / 2, 1, sizeof *exact->sine);
        exact->query = lowkey_take(layer->n_kv_heads, n_rows, layer->key_head_dim, sizeof *exact->query);
        exact->scores = lowkey_take(layer->n_kv_heads, n_rows, capture->n_tokens, sizeof *exact->scores);
        exact->out = lowkey_take(layer->n_kv_heads, n_rows, layer->value_head_dim, sizeof *exact->out);
    }
    lowkey_status all = LOWKEY_OK;
    if (!exact || !status || !exact->cosine || !exact->sine || !exact->query || !exact->scores ||
        !exact->out) {
        all = LOWKEY_ENOMEM;
    } else {
        make_angles(exact);
        lowkey_threads_run(&n_threads, layer->n_kv_heads, exact_head, &(struct exact_job) { exact, status });
        for (int h = 0; h < layer->n_kv_heads; h++) all = all ? all : status[h];
    }
    free(status);
    if (all) {
        lowkey_exact_free(exact);
        return no_memory(err, capture);
    }
    *out = exact;
    return LOWKEY_OK;
}

void lowkey_exact_free(struct lowkey_exact *exact)
{
    if (!exact) return;
    free(exact->cosine);
    free(exact->sine);
    free(exact->query);
    free(exact->scores);
    free(exact->out);
    free(exact);
}

/* ---- the stored side ---- */

struct stored { /* what a cache made of the sample */
    float *key, *value; /* [n_tokens][n_kv_heads][head_dim], before RoPE */
    float *out; /* [n_queries][n_q_heads][value_head_dim] */
    double *rotated; /* [n_tokens][key_head_dim], one head's keys */
    double *scores; /* [QUERY_BLOCK * q_per_kv][n_tokens] */
};

void lowkey_payload_add(lowkey_cache_usage *into, const lowkey_cache_usage *from)
{
    into->elements += from->elements;
    into->codes_bytes += from->codes_bytes;
    into->scales_bytes += from->scales_bytes;
    into->outliers_bytes += from->outliers_bytes;
    into->sinks_bytes += from->sinks_bytes;
    into->outliers += from->outliers;
    into->clamped += from->clamped;
    into->saturated += from->saturated;
}

/* Between two queries the tokens that the second sees are appended; then it attends as a decode step does. */
static lowkey_status attend_queries(const struct lowkey_capture *capture, lowkey_cache *cache, float *out,
                                    lowkey_error *err)
{
    const lowkey_layer_desc *layer = capture->layer;
    const size_t key_row = (size_t)layer->n_kv_heads * (size_t)layer->key_head_dim;
    const size_t value_row = (size_t)layer->n_kv_heads * (size_t)layer->value_head_dim;
    const int sequence = 0;
    void *workspace = NULL;
    size_t workspace_bytes = 0;
    lowkey_status status = lowkey_cache_reserve(cache, sequence, capture->n_tokens, err);
    for (int j = 0, n_held = 0; status == LOWKEY_OK && j < capture->n_queries; j++) {
        const int n_new = capture->positions[j] + 1 - n_held;
        status = lowkey_cache_append(cache, layer->index, 1, &sequence, &n_new,
                                     (lowkey_rows) { .data = capture->key + (size_t)n_held * key_row },
                                     (lowkey_rows) { .data = capture->value + (size_t)n_held * value_row },
                                     err);
        n_held += n_new;
        lowkey_attend_args args = {
            .struct_size = sizeof args,
            .layer = layer->index,
            .n = 1,
            .sequences = &sequence,
            .q = { .data = capture->query + (size_t)j * layer->n_q_heads * layer->key_head_dim },
            .out = out + (size_t)j * layer->n_q_heads * layer->value_head_dim,
        };
        const size_t wanted = (lowkey_attend_workspace_bytes(cache, &args) + 63) / 64 * 64;
        if (status == LOWKEY_OK && wanted > workspace_bytes) {
            free(workspace);
            workspace = aligned_alloc(64, workspace_bytes = wanted);
            if (!workspace) status = no_memory(err, capture);
        }
        args.workspace = workspace;
        args.workspace_bytes = workspace_bytes;
        if (status == LOWKEY_OK) status = lowkey_attend(cache, &args, err);
    }
    free(workspace);
    return status;
}

/* Pack, attend, read back, measure the bytes: everything that is asked of the library. */
static lowkey_status use_cache(const struct lowkey_capture *capture, const lowkey_quantizer *quantizer,
                               int n_threads, struct stored *stored, lowkey_cache_usage *payload,
                               lowkey_error *err)
{
    lowkey_context *context = NULL;
    lowkey_cache *cache = NULL;
    lowkey_cache_usage usage = { .struct_size = sizeof usage };
    const lowkey_context_config config = { .struct_size = sizeof config,
                                           .parallel_for = lowkey_threads_run,
                                           .parallel_user = &n_threads };
    const lowkey_cache_config size = { .struct_size = sizeof size,
                                       .max_sequences = 1,
                                       .n_pages = (capture->n_tokens - 1) / LOWKEY_PAGE_TOKENS + 1 };
    lowkey_status status = lowkey_context_create(&config, &context, err);
    if (status == LOWKEY_OK) status = lowkey_cache_create(context, quantizer, &size, &cache, err);
    if (status == LOWKEY_OK) status = attend_queries(capture, cache, stored->out, err);
    if (status == LOWKEY_OK)
        status = lowkey_cache_read(cache, 0, capture->layer->index, 0, capture->n_tokens, stored->key,
                                   stored->value, err);
    if (status == LOWKEY_OK) status = lowkey_cache_measure(cache, &usage, err);
    if (status == LOWKEY_OK) lowkey_payload_add(payload, &usage);
    lowkey_cache_free(cache);
    lowkey_context_free(context);
    return status;
}

static void compare_head(const struct lowkey_exact *exact, struct stored *stored, int h,
                         struct lowkey_layer_damage *damage)
{
    const struct lowkey_capture *capture = &exact->capture;
    const lowkey_layer_desc *layer = capture->layer;
    const int group = q_per_kv(capture), n_tokens = capture->n_tokens, value_dim = layer->value_head_dim;
    rotate_keys(exact, stored->key, h, stored->rotated);
    for (int j = 0; j < capture->n_queries; j++) {
        if (j % QUERY_BLOCK == 0) {
            const int n = capture->n_queries - j < QUERY_BLOCK ? capture->n_queries - j : QUERY_BLOCK;
            score_block(exact, h, j, n, stored->rotated, stored->scores);
        }
        for (int g = 0; g < group; g++) {
            const size_t row = ((size_t)h * capture->n_queries + j) * group + g;
            const int head = h * group + g;
            lowkey_damage_add(&damage->heads[head], capture->positions[j] + 1, exact->scores + row * n_tokens,
                              stored->scores + ((size_t)(j % QUERY_BLOCK) * group + g) * n_tokens, value_dim,
                              exact->out + row * value_dim,
                              stored->out + ((size_t)j * layer->n_q_heads + head) * value_dim);
        }
    }
    const ptrdiff_t key_stride = (ptrdiff_t)layer->n_kv_heads * layer->key_head_dim;
    const ptrdiff_t value_stride = (ptrdiff_t)layer->n_kv_heads * value_dim;
    lowkey_distortion_add(&damage->key[h], n_tokens, layer->key_head_dim,
                          capture->key + h * layer->key_head_dim, stored->key + h * layer->key_head_dim,
                          key_stride);
    lowkey_distortion_add(&damage->value[h], n_tokens, value_dim, capture->value + h * value_dim,
                          stored->value + h * value_dim, value_stride);
}

lowkey_status lowkey_damage_measure(const struct lowkey_exact *exact, const lowkey_quantizer *quantizer,
                                    int n_threads, struct lowkey_layer_damage *damage, lowkey_error *err)
{
    const struct lowkey_capture *capture = &exact->capture;
    const lowkey_layer_desc *layer = capture->layer;
    struct stored stored = {
        .key = lowkey_take(capture->n_tokens, layer->n_kv_heads, layer->key_head_dim, sizeof *stored.key),
        .value = lowkey_take(capture->n_tokens, layer->n_kv_heads, layer->value_head_dim,
                             sizeof *stored.value),
        .out = lowkey_take(capture->n_queries, layer->n_q_heads, layer->value_head_dim, sizeof *stored.out),
        .rotated = lowkey_take(capture->n_tokens, layer->key_head_dim, 1, sizeof *stored.rotated),
        .scores = lowkey_take(QUERY_BLOCK, q_per_kv(capture), capture->n_tokens, sizeof *stored.scores),
    };
    lowkey_status status = LOWKEY_OK;
    if (!stored.key || !stored.value || !stored.out || !stored.rotated || !stored.scores)
        status = no_memory(err, capture);
    if (status == LOWKEY_OK)
        status = use_cache(capture, quantizer, n_threads, &stored, &damage->payload, err);
    for (int h = 0; status == LOWKEY_OK && h < layer->n_kv_heads; h++)
        compare_head(exact, &stored, h, damage);
    free(stored.key);
    free(stored.value);
    free(stored.out);
    free(stored.rotated);
    free(stored.scores);
    return status;
}
