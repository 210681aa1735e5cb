/* attention.c - sensitivity from queries and keys captured together: how much an error on a key, or a
 * value, moves what attention gives. One job is one KV head of one sample; matrices are [rows][columns],
 * products by BLAS on one thread. */
#include "calib/attention.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "calib/command.h"
#include "calib/threads.h"
#include "formats/codes.h"
#include "formats/geometry.h"
#include "runtime/error.h"

enum { BATCH = 32, PAIR_ROWS = 256 };

struct job {
    const lowkey_layer_desc *desc;
    const lowkey_captures *captures;
    const struct lowkey_attention *out;
    int sample, head, n_queries;
    float *key, *value, *query; /* [T][D], [T][V], [n_queries * q_per_kv][D] by query head, then query */
    const int64_t *position; /* [n_queries] of the queries */
    double *moments; /* [D][D] lower triangle, of this job alone; NULL: not wanted */
    lowkey_status status;
    lowkey_error err;
};

/* Arrays of a job while it runs: T tokens, B = BATCH queries, F features of a query: its squares and its
 * pairs' products. */
struct work {
    float *cosine, *sine; /* [T][R / 2] */
    float *turned; /* [T][D] keys after RoPE */
    float *norm; /* [T] |v|^2 */
    float *p, *a; /* [B][T] weights; p^2 |v - o|^2 */
    float *o; /* [B][V] */
    float *features, *sums; /* [B][F], [T][F] */
    double *value_sums; /* [T] */
    double *pairs; /* [PAIR_ROWS][D] */
};

static void work_free(struct work *w)
{
    float *const arrays[] = {
        w->cosine, w->sine, w->turned, w->norm, w->p, w->a, w->o, w->features, w->sums
    };
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) free(arrays[i]);
    free(w->value_sums);
    free(w->pairs);
}

static size_t feature_count(const lowkey_layer_desc *desc)
{
    return (size_t)desc->key_head_dim + (size_t)desc->rope_dims / 2;
}

static int work_alloc(struct work *w, size_t T, const lowkey_layer_desc *desc)
{
    const size_t D = (size_t)desc->key_head_dim, V = (size_t)desc->value_head_dim,
                 half = (size_t)desc->rope_dims / 2;
    const size_t F = feature_count(desc);
    *w = (struct work) {
        .cosine = malloc((T * half + 1) * sizeof(float)),
        .sine = malloc((T * half + 1) * sizeof(float)),
        .turned = malloc(T * D * sizeof(float)),
        .norm = malloc(T * sizeof(float)),
        .p = malloc(BATCH * T * sizeof(float)),
        .a = malloc(BATCH * T * sizeof(float)),
        .o = malloc(BATCH * V * sizeof(float)),
        .features = malloc(BATCH * F * sizeof(float)),
        .sums = calloc(T * F, sizeof(float)),
        .value_sums = calloc(T, sizeof(double)),
        .pairs = malloc(PAIR_ROWS * D * sizeof(double)),
    };
    return w->cosine && w->sine && w->turned && w->norm && w->p && w->a && w->o && w->features && w->sums &&
           w->value_sums && w->pairs;
}

static void turn(const lowkey_layer_desc *desc, const float *cosine, const float *sine, float sign, float *x)
{
    for (int i = 0; i < desc->rope_dims / 2; i++) {
        int first, second;
        lowkey_rope_pair(desc->rope_dims, desc->rope_pairing, i, &first, &second);
        const float a = x[first], b = x[second], c = cosine[i], s = sign * sine[i];
        x[first] = a * c - b * s;
        x[second] = a * s + b * c;
    }
}

/* Angles of all positions, keys and queries turned by theirs, |v|^2. */
static void prepare(struct job *job, struct work *w, size_t T)
{
    const lowkey_layer_desc *desc = job->desc;
    const size_t D = (size_t)desc->key_head_dim, V = (size_t)desc->value_head_dim,
                 half = (size_t)desc->rope_dims / 2;
    memcpy(w->turned, job->key, T * D * sizeof(float));
    for (size_t t = 0; t < T; t++) {
        for (size_t i = 0; i < half; i++) {
            w->cosine[t * half + i] = (float)cos((double)t * desc->rope_inv_freq[i]);
            w->sine[t * half + i] = (float)sin((double)t * desc->rope_inv_freq[i]);
        }
        turn(desc, w->cosine + t * half, w->sine + t * half, 1, w->turned + t * D);
        w->norm[t] = 0;
        for (size_t c = 0; c < V; c++) w->norm[t] += job->value[t * V + c] * job->value[t * V + c];
    }
    const size_t q_per_kv = (size_t)(desc->n_q_heads / desc->n_kv_heads);
    for (size_t g = 0; g < q_per_kv; g++)
        for (size_t m = 0; m < (size_t)job->n_queries; m++) {
            const size_t at = (size_t)job->position[m] * half;
            turn(desc, w->cosine + at, w->sine + at, 1, job->query + (g * (size_t)job->n_queries + m) * D);
        }
}

/* Softmax of a row of scores over its first n entries, the rest 0. */
static void softmax(float *p, size_t n, size_t T)
{
    float max = p[0];
    for (size_t t = 1; t < n; t++) max = p[t] > max ? p[t] : max;
    double sum = 0;
    for (size_t t = 0; t < n; t++) {
        p[t] = expf(p[t] - max);
        sum += (double)p[t];
    }
    const float inverse = (float)(1 / sum);
    for (size_t t = 0; t < n; t++) p[t] *= inverse;
    memset(p + n, 0, (T - n) * sizeof *p);
}

/* Squares and products of a turned query, the numbers of which every token's diagonal is made. */
static void make_features(const lowkey_layer_desc *desc, const float *q, float *features)
{
    const size_t D = (size_t)desc->key_head_dim;
    for (size_t c = 0; c < D; c++) features[c] = q[c] * q[c];
    for (int i = 0; i < desc->rope_dims / 2; i++) {
        int first, second;
        lowkey_rope_pair(desc->rope_dims, desc->rope_pairing, i, &first, &second);
        features[D + (size_t)i] = q[first] * q[second];
    }
}

/* Add a u u' for the tokens that query q matters to: rows sqrt(a) u, a few hundred at a time. */
static void add_pairs(const struct job *job, struct work *w, const float *q, const float *a, size_t n)
{
    const lowkey_layer_desc *desc = job->desc;
    const size_t D = (size_t)desc->key_head_dim, half = (size_t)desc->rope_dims / 2;
    const size_t first = (size_t)job->captures->samples[job->sample].n_sinks;
    float largest = 0, u[LOWKEY_MAX_HEAD_DIM];
    for (size_t t = first; t < n; t++) largest = a[t] > largest ? a[t] : largest;
    size_t n_rows = 0;
    for (size_t t = first; t < n; t++) {
        if (largest > 0 && a[t] >= largest * 0x1p-20f) {
            memcpy(u, q, D * sizeof *u);
            turn(desc, w->cosine + t * half, w->sine + t * half, -1, u);
            const double root = sqrt((double)a[t]);
            for (size_t c = 0; c < D; c++) w->pairs[n_rows * D + c] = root * (double)u[c];
            n_rows++;
        }
        if (n_rows == PAIR_ROWS || (n_rows > 0 && t + 1 == n)) {
            cblas_dsyrk(CblasRowMajor, CblasLower, CblasTrans, (int)D, (int)n_rows, 1, w->pairs, (int)D, 1,
                        job->moments, (int)D);
            n_rows = 0;
        }
    }
}

static size_t visible_to(const struct job *job, size_t row)
{
    return (size_t)job->position[row % (size_t)job->n_queries] + 1;
}

/* From p, the weights of query q (number j of the batch) on n tokens: a = p^2 |v - o|^2 scale^2, w->a
 * holding -2 v.o. */
static void weigh_row(const struct job *job, struct work *w, size_t j, const float *q, float scale, size_t n,
                      size_t visible)
{
    const size_t D = (size_t)job->desc->key_head_dim, V = (size_t)job->desc->value_head_dim;
    float *a = w->a + j * n, norm = 0;
    for (size_t c = 0; c < V; c++) norm += w->o[j * V + c] * w->o[j * V + c];
    for (size_t t = 0; t < n; t++) {
        const float p = w->p[j * n + t] * scale, sum = w->norm[t] + norm;
        float distance = sum + a[t];
        if (!(distance >
              0x1p-8f * sum)) { /* a token that the query sees almost alone: the sum has cancelled */
            distance = 0;
            for (size_t c = 0; c < V; c++) {
                const float d = job->value[t * V + c] - w->o[j * V + c];
                distance += d * d;
            }
        }
        a[t] = p * p * distance;
    }
    make_features(job->desc, q + j * D, w->features + j * feature_count(job->desc));
    if (job->moments) add_pairs(job, w, q + j * D, a, visible);
}

/* Queries first..first+n-1 (of all rows of the job): their weights on the T tokens that any of them sees,
 * and what follows. */
static void attend_batch(struct job *job, struct work *w, size_t first, size_t n)
{
    const lowkey_layer_desc *desc = job->desc;
    const size_t D = (size_t)desc->key_head_dim, V = (size_t)desc->value_head_dim, F = feature_count(desc);
    const float scale = (float)(desc->logit_scale * desc->rope_attention_factor *
                                desc->rope_attention_factor);
    const float *q = job->query + first * D;
    size_t T = 0;
    for (size_t j = 0; j < n; j++) T = visible_to(job, first + j) > T ? visible_to(job, first + j) : T;
    const int iT = (int)T, in = (int)n, iD = (int)D, iV = (int)V, iF = (int)F;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, in, iT, iD, scale, q, iD, w->turned, iD, 0, w->p,
                iT);
    for (size_t j = 0; j < n; j++) softmax(w->p + j * T, visible_to(job, first + j), T);
    for (size_t j = 0; j < n; j++)
        for (size_t t = 0; t < T; t++) w->value_sums[t] += (double)w->p[j * T + t] * (double)w->p[j * T + t];
    if (!job->out->key && !job->moments) return;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, in, iV, iT, 1, w->p, iT, job->value, iV, 0, w->o,
                iV);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, in, iT, iV, -2, w->o, iV, job->value, iV, 0, w->a,
                iT);
    for (size_t j = 0; j < n; j++) weigh_row(job, w, j, q, scale, T, visible_to(job, first + j));
    if (job->out->key) /* sums += a' features */
        cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, iT, iF, in, 1, w->a, iT, w->features, iF, 1,
                    w->sums, iF);
}

/* A token's diagonal from the sums of features: u is q turned back by the token's position. */
static void diagonal(const lowkey_layer_desc *desc, const float *sums, const float *cosine, const float *sine,
                     float *out)
{
    const size_t D = (size_t)desc->key_head_dim;
    memcpy(out, sums, D * sizeof *out);
    for (int i = 0; i < desc->rope_dims / 2; i++) {
        int first, second;
        lowkey_rope_pair(desc->rope_dims, desc->rope_pairing, i, &first, &second);
        const float c = cosine[i], s = sine[i], cross = 2 * c * s * sums[D + (size_t)i];
        out[first] = sums[first] * c * c + sums[second] * s * s + cross;
        out[second] = sums[first] * s * s + sums[second] * c * c - cross;
        if (out[first] < 0) out[first] = 0;
        if (out[second] < 0) out[second] = 0;
    }
}

static lowkey_status store(struct job *job, struct work *w, size_t T)
{
    const lowkey_layer_desc *desc = job->desc;
    const struct lowkey_sample *sample = &job->captures->samples[job->sample];
    const size_t D = (size_t)desc->key_head_dim, half = (size_t)desc->rope_dims / 2, F = feature_count(desc);
    const size_t first = (size_t)sample->n_sinks;
    const int64_t n = (int64_t)(T - first);
    float *rows = w->turned; /* no longer needed */
    double total = 0; /* products of numbers near the end of f32 overflow, and only those */
    for (size_t t = first; t < T; t++) {
        total += w->value_sums[t];
        for (size_t i = 0; i < F; i++) total += (double)w->sums[t * F + i];
    }
    for (size_t i = 0; job->moments && i < D * D; i++) total += job->moments[i];
    if (!isfinite(total))
        return lowkey_fail(&job->err, LOWKEY_EINVAL,
                           "layer %d, KV head %d: attention of the queries over the keys overflows; "
                           "sensitivity needs other means",
                           desc->index, job->head);
    if (job->out->key) {
        for (size_t t = first; t < T; t++)
            diagonal(desc, w->sums + t * F, w->cosine + t * half, w->sine + t * half, rows + (t - first) * D);
        LOWKEY_TRY(lowkey_store_write(job->out->key, job->head, sample->start, n, rows, &job->err));
    }
    for (size_t t = first; job->out->value && t < T; t++) rows[t - first] = (float)w->value_sums[t];
    return job->out->value ? lowkey_store_write(job->out->value, job->head, sample->start, n, rows, &job->err)
                           : LOWKEY_OK;
}

static void run_job(void *arg, int i)
{
    struct job *job = (struct job *)arg + i;
    const size_t T = (size_t)job->captures->samples[job->sample].n_tokens;
    const size_t n_rows = (size_t)job->n_queries * (size_t)(job->desc->n_q_heads / job->desc->n_kv_heads);
    struct work work;
    if (!work_alloc(&work, T, job->desc)) {
        job->status = lowkey_fail(&job->err, LOWKEY_ENOMEM, "no memory for attention over %zu tokens", T);
    } else {
        prepare(job, &work, T);
        for (size_t first = 0; first < n_rows; first += BATCH)
            attend_batch(job, &work, first, n_rows - first < BATCH ? n_rows - first : BATCH);
        job->status = store(job, &work, T);
    }
    work_free(&work);
}

/* The rows of the sampled queries of a KV head's group, read a run of tokens at a time. */
static lowkey_status read_queries(struct job *job, int layer, float *run, lowkey_error *err)
{
    enum { RUN = 256 };
    const lowkey_layer_desc *desc = job->desc;
    const int group = desc->n_q_heads / desc->n_kv_heads, D = desc->key_head_dim;
    const int64_t T = job->captures->samples[job->sample].n_tokens;
    for (int64_t first = 0, m = 0; first < T; first += RUN) {
        const int64_t n = T - first < RUN ? T - first : RUN;
        if (m == job->n_queries || job->position[m] >= first + n) continue;
        LOWKEY_TRY(lowkey_captures_read(job->captures, layer, LOWKEY_QUERY, job->sample, first, n,
                                        job->head * group, group, run, err));
        for (; m < job->n_queries && job->position[m] < first + n; m++)
            for (int g = 0; g < group; g++)
                memcpy(job->query + ((size_t)g * (size_t)job->n_queries + (size_t)m) * (size_t)D,
                       run + ((size_t)(job->position[m] - first) * (size_t)group + (size_t)g) * (size_t)D,
                       (size_t)D * sizeof(float));
    }
    return LOWKEY_OK;
}

static void job_free(struct job *job)
{
    free(job->key);
    free(job->value);
    free(job->query);
    free((void *)job->position);
    free(job->moments);
    memset(job, 0, sizeof *job);
}

static lowkey_status job_load(struct job *job, int layer, int n_queries, lowkey_error *err)
{
    const lowkey_layer_desc *desc = job->desc;
    const int64_t T = job->captures->samples[job->sample].n_tokens;
    const size_t D = (size_t)desc->key_head_dim, V = (size_t)desc->value_head_dim;
    const size_t group = (size_t)(desc->n_q_heads / desc->n_kv_heads);
    job->n_queries = T < n_queries ? (int)T : n_queries;
    int64_t *position = malloc((size_t)job->n_queries * sizeof *position);
    float *run = malloc(256 * group * D * sizeof *run);
    job->position = position;
    job->key = malloc((size_t)T * D * sizeof *job->key);
    job->value = malloc((size_t)T * V * sizeof *job->value);
    job->query = malloc((size_t)job->n_queries * group * D * sizeof *job->query);
    if (job->out->moments) job->moments = calloc(D * D, sizeof *job->moments);
    lowkey_status status = LOWKEY_OK;
    if (!position || !run || !job->key || !job->value || !job->query || (job->out->moments && !job->moments))
        status = lowkey_fail(err, LOWKEY_ENOMEM, "no memory for attention over %lld tokens", (long long)T);
    for (int64_t m = 0; status == LOWKEY_OK && m < job->n_queries; m++)
        position[m] = (m + 1) * T / job->n_queries - 1;
    if (status == LOWKEY_OK)
        status = lowkey_captures_read(job->captures, layer, LOWKEY_KEY, job->sample, 0, T, job->head, 1,
                                      job->key, err);
    if (status == LOWKEY_OK)
        status = lowkey_captures_read(job->captures, layer, LOWKEY_VALUE, job->sample, 0, T, job->head, 1,
                                      job->value, err);
    if (status == LOWKEY_OK) status = read_queries(job, layer, run, err);
    free(run);
    return status;
}

/* Add the lower triangle of a job to its head's matrix. */
static void fold(const struct job *job)
{
    const size_t D = (size_t)job->desc->key_head_dim;
    double *H = job->out->moments ? job->out->moments + (size_t)job->head * D * D : NULL;
    for (size_t i = 0; H && i < D; i++)
        for (size_t j = 0; j <= i; j++) {
            H[i * D + j] += job->moments[i * D + j];
            if (j < i) H[j * D + i] += job->moments[i * D + j];
        }
}

lowkey_status lowkey_attention_sensitivity(const lowkey_captures *captures, int layer, int n_queries,
                                           int n_threads, const struct lowkey_attention *out,
                                           lowkey_error *err)
{
    enum { MOST = 64 };
    const int64_t bytes_at_once = INT64_C(256) << 20, most_bytes = INT64_C(768) << 20;
    const lowkey_layer_desc *desc = &captures->info->layers[layer];
    /* a job's bytes a token */
    const int64_t row = 4 * (5 * desc->key_head_dim + 2 * desc->value_head_dim + 2 * BATCH + 4);
    const int64_t n_jobs = (int64_t)captures->n_samples * desc->n_kv_heads;
    const int most = n_threads * 2 < MOST ? n_threads * 2 : MOST;
    struct job jobs[MOST];
    lowkey_status status = LOWKEY_OK;
    for (int s = 0; s < captures->n_samples; s++)
        if (captures->samples[s].n_tokens > most_bytes / row)
            return lowkey_fail(
                err, LOWKEY_EUNSUPPORTED,
                "layer %d: a sample of %lld tokens: attention over it fits into memory up to %lld",
                desc->index, (long long)captures->samples[s].n_tokens, (long long)(most_bytes / row));
    if (out->moments)
        memset(out->moments, 0,
               (size_t)desc->n_kv_heads * (size_t)desc->key_head_dim * (size_t)desc->key_head_dim *
                   sizeof *out->moments);
    for (int64_t done = 0; done < n_jobs && status == LOWKEY_OK;) {
        int n = 0;
        for (int64_t bytes = 0; n < most && done + n < n_jobs && status == LOWKEY_OK; n++) {
            const int sample = (int)((done + n) / desc->n_kv_heads),
                      head = (int)((done + n) % desc->n_kv_heads);
            bytes += row * captures->samples[sample].n_tokens;
            if (n > 0 && bytes > bytes_at_once) break;
            jobs[n] = (struct job) {
                .desc = desc, .captures = captures, .out = out, .sample = sample, .head = head
            };
            status = job_load(&jobs[n], layer, n_queries, err);
        }
        if (status == LOWKEY_OK) lowkey_threads_run(&n_threads, n, run_job, jobs);
        for (int i = 0; i < n; i++) {
            if (status == LOWKEY_OK && jobs[i].status != LOWKEY_OK)
                status = lowkey_fail(err, jobs[i].status, "%s", jobs[i].err.message);
            if (status == LOWKEY_OK) fold(&jobs[i]);
            job_free(&jobs[i]);
        }
        done += n;
        if (status == LOWKEY_OK && lowkey_interrupted())
            status = lowkey_fail(err, LOWKEY_ECANCELLED, "interrupted");
    }
    return status;
}
