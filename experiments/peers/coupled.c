/* coupled.c - coupled quantization, CQ (arXiv 2405.03917): groups of contiguous channels of a head share a
 * code of 8 bits, which names one of 256 centroids that k-means fitted on captured keys (before RoPE) and
 * values; each vector weighs as much as the sum of its squared gradients where the captures have them,
 * else 1. Nothing but codes is stored.
 *
 * K-means is seeded by k-means++ and iterates until it gains less than a thousandth, at most 12 times, on
 * 2,048 captured tokens for each channel of a group, evenly spread; the authors take 32,768 tokens and 100
 * iterations. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <gsl/gsl_rng.h>

#include "calib/command.h"
#include "calib/threads.h"
#include "experiments/peers/nearest.h"
#include "experiments/peers/peer_parts.h"
#include "runtime/error.h"

enum { RUN = LOWKEY_NEAREST_RUN, N_CENTROIDS = 256, MAX_ROUNDS = 12, TOKENS_PER_CHANNEL = 2048 };

struct fit { /* of one layer and side */
    const struct lowkey_peer_side *side;
    const float *x, *gradient; /* [n * stride][row]; gradient may be NULL */
    int n, stride, row, dim; /* every stride-th token is taken */
    struct lowkey_points *points; /* [row / dim] */
    unsigned char *failed; /* [row / dim] */
};

struct cloud { /* one group's vectors, padded to runs of 64 */
    int n, n_runs, dim;
    float *x; /* [n_runs][dim][RUN] */
    double *weight; /* [n_runs * RUN]; 0 in the padding */
    float *distance; /* squared, to the nearest centroid drawn so far */
    double *mass, *run_mass; /* weight times distance; its sum over a run: [n_runs] */
    int *index;
};

static int gather(const struct fit *fit, int group, struct cloud *cloud)
{
    const int dim = fit->dim;
    *cloud = (struct cloud) { .n = fit->n, .n_runs = (fit->n + RUN - 1) / RUN, .dim = dim };
    const size_t n = (size_t)cloud->n_runs * RUN;
    cloud->x = calloc(n * (size_t)dim, sizeof *cloud->x);
    cloud->weight = calloc(n, sizeof *cloud->weight);
    cloud->distance = calloc(n, sizeof *cloud->distance);
    cloud->mass = calloc(n, sizeof *cloud->mass);
    cloud->run_mass = calloc((size_t)cloud->n_runs, sizeof *cloud->run_mass);
    cloud->index = calloc(n, sizeof *cloud->index);
    if (!cloud->x || !cloud->weight || !cloud->distance || !cloud->mass || !cloud->run_mass || !cloud->index)
        return 0;
    double total = 0;
    for (int i = 0; i < fit->n; i++) {
        const size_t at = (size_t)i * (size_t)fit->stride * (size_t)fit->row + (size_t)(group * dim);
        for (int c = 0; c < dim; c++) {
            cloud->x[((size_t)(i / RUN) * (size_t)dim + (size_t)c) * RUN + (size_t)(i % RUN)] =
                fit->x[at + (size_t)c];
            const double g = fit->gradient ? (double)fit->gradient[at + (size_t)c] : 0;
            cloud->weight[i] += g * g;
        }
        total += cloud->weight[i];
    }
    for (int i = 0; !(total > 0) && i < fit->n; i++) cloud->weight[i] = 1;
    return 1;
}

static void release(struct cloud *cloud)
{
    free(cloud->x);
    free(cloud->weight);
    free(cloud->distance);
    free(cloud->mass);
    free(cloud->run_mass);
    free(cloud->index);
}

static float element(const struct cloud *cloud, int i, int c)
{
    return cloud->x[((size_t)(i / RUN) * (size_t)cloud->dim + (size_t)c) * RUN + (size_t)(i % RUN)];
}

static void set_point(struct lowkey_points *points, int k, const double *point)
{
    double square = 0;
    for (int c = 0; c < points->dim; c++) {
        const float p = points->point[k * points->dim + c] = (float)point[c];
        square += (double)p * (double)p;
    }
    points->half[k] = (float)(square / 2);
}

/* A number below the total of n masses picks one of them; -1: all are 0. */
static int pick(const double *mass, int n, double *left)
{
    int picked = -1;
    for (int i = 0; i < n; i++) {
        if (!(mass[i] > 0)) continue;
        picked = i;
        if (*left < mass[i]) break;
        *left -= mass[i];
    }
    return picked;
}

/* Squared distances of a run to the newest centroid, where they are less than those known; the run's weight
 * times distance. */
static double approach(const struct cloud *cloud, int run, const double *point)
{
    double *mass = cloud->mass + run * RUN, total = 0;
    float *distance = cloud->distance + run * RUN, square[RUN] = { 0 };
    for (int c = 0; c < cloud->dim; c++) {
        const float *x = cloud->x + ((size_t)run * (size_t)cloud->dim + (size_t)c) * RUN, p = (float)point[c];
        for (int i = 0; i < RUN; i++) square[i] += (x[i] - p) * (x[i] - p);
    }
    for (int i = 0; i < RUN; i++) distance[i] = square[i] < distance[i] ? square[i] : distance[i];
    for (int i = 0; i < RUN; i++) mass[i] = cloud->weight[run * RUN + i] * (double)distance[i];
    for (int i = 0; i < RUN; i++) total += mass[i];
    return total;
}

/* k-means++: each centroid is a vector drawn with probability as weight times squared distance to those drawn
 * before. */
static void seed(const struct cloud *cloud, unsigned long number, gsl_rng *rng, struct lowkey_points *points)
{
    gsl_rng_set(rng, number);
    points->n_points = 0;
    for (int i = 0; i < cloud->n_runs * RUN; i++) {
        cloud->distance[i] = FLT_MAX;
        cloud->mass[i] = cloud->weight[i];
    }
    for (int run = 0; run < cloud->n_runs; run++) {
        cloud->run_mass[run] = 0;
        for (int i = 0; i < RUN; i++) cloud->run_mass[run] += cloud->weight[run * RUN + i];
    }
    for (int k = 0; k < N_CENTROIDS; k++) {
        double total = 0, point[LOWKEY_NEAREST_MAX_DIM];
        for (int run = 0; run < cloud->n_runs; run++) total += cloud->run_mass[run];
        double left = gsl_rng_uniform(rng) * total;
        const int run = pick(cloud->run_mass, cloud->n_runs, &left);
        if (run < 0) return; /* fewer distinct vectors than centroids */
        const int drawn = run * RUN + pick(cloud->mass + run * RUN, RUN, &left);
        for (int c = 0; c < cloud->dim; c++) point[c] = (double)element(cloud, drawn, c);
        set_point(points, points->n_points++, point);
        for (int r = 0; r < cloud->n_runs; r++) cloud->run_mass[r] = approach(cloud, r, point);
    }
}

/* Each vector to its nearest centroid; the weighted squared distance is returned. Centroids then become the
 * weighted means of their vectors; one without any stays. */
static double improve(const struct cloud *cloud, struct lowkey_points *points)
{
    const size_t D = LOWKEY_NEAREST_MAX_DIM;
    double sum[N_CENTROIDS * LOWKEY_NEAREST_MAX_DIM] = { 0 }, mass[N_CENTROIDS] = { 0 }, cost = 0;
    for (int run = 0; run < cloud->n_runs; run++)
        lowkey_nearest_points(points, cloud->x + (size_t)run * RUN * (size_t)cloud->dim,
                              cloud->index + run * RUN);
    for (int i = 0; i < cloud->n; i++) {
        const size_t k = (size_t)cloud->index[i];
        for (int c = 0; c < cloud->dim; c++) {
            const double x = (double)element(cloud, i, c);
            const double e = x - (double)points->point[k * (size_t)cloud->dim + (size_t)c];
            sum[k * D + (size_t)c] += cloud->weight[i] * x;
            cost += cloud->weight[i] * e * e;
        }
        mass[k] += cloud->weight[i];
    }
    for (int k = 0; k < points->n_points; k++) {
        for (int c = 0; mass[k] > 0 && c < cloud->dim; c++) sum[(size_t)k * D + (size_t)c] /= mass[k];
        if (mass[k] > 0) set_point(points, k, sum + (size_t)k * D);
    }
    return cost;
}

static void fit_group(void *arg, int group)
{
    const struct fit *fit = arg;
    struct lowkey_points *points = &fit->points[group];
    struct cloud cloud;
    gsl_rng *rng = gsl_rng_alloc(gsl_rng_mt19937);
    points->dim = fit->dim;
    fit->failed[group] = !gather(fit, group, &cloud) || !rng;
    if (!fit->failed[group] && !lowkey_interrupted()) {
        const unsigned long layer = (unsigned long)fit->side->layer->index;
        seed(&cloud, 1 + (unsigned long)group + 65536 * (2 * layer + (unsigned long)fit->side->which), rng,
             points);
        double cost = INFINITY;
        for (int round = 0; round < MAX_ROUNDS; round++) {
            const double before = cost;
            cost = improve(&cloud, points);
            if (!(cost < 0.999 * before)) break;
        }
    }
    release(&cloud);
    if (rng) gsl_rng_free(rng);
}

static lowkey_status prepare(struct lowkey_peer_side *side, const struct lowkey_peer_sample *sample,
                             int n_threads, lowkey_error *err)
{
    const int is_key = side->which == LOWKEY_STORE_KEY, dim = side->setting.group;
    const int row = side->n_heads * side->head_dim, n_groups = row / dim;
    if (side->head_dim % dim != 0)
        return lowkey_peer_refuse(side, err, "groups of %d channels do not divide a head of %d", dim,
                                  side->head_dim);
    const int most = TOKENS_PER_CHANNEL * dim, stride = (sample->n_tokens + most - 1) / most;
    side->bits = 8.0 / dim;
    struct fit fit = {
        .side = side,
        .x = is_key ? sample->key : sample->value,
        .gradient = is_key ? sample->key_grad : sample->value_grad,
        .n = (sample->n_tokens + stride - 1) / stride,
        .stride = stride,
        .row = row,
        .dim = dim,
        .points = side->fitted = calloc((size_t)n_groups, sizeof *fit.points),
        .failed = calloc((size_t)n_groups, 1),
    };
    int failed = !fit.points || !fit.failed;
    if (!failed) lowkey_threads_run(&n_threads, n_groups, fit_group, &fit);
    for (int i = 0; !failed && i < n_groups; i++) failed |= fit.failed[i];
    free(fit.failed);
    if (failed) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for centroids");
    if (lowkey_interrupted()) return lowkey_fail(err, LOWKEY_ECANCELLED, "interrupted");
    return LOWKEY_OK;
}

static void quantize(const struct lowkey_peer_side *side, float *x, int n_tokens)
{
    const struct lowkey_points *points = side->fitted;
    const int dim = side->setting.group, row = side->n_heads * side->head_dim;
    float vectors[LOWKEY_NEAREST_MAX_DIM * RUN] = { 0 };
    int index[RUN];
    for (int group = 0; group < row / dim; group++) {
        float *first = x + (size_t)group * (size_t)dim;
        for (int t = 0; t < n_tokens; t++)
            for (int c = 0; c < dim; c++) vectors[c * RUN + t] = first[(size_t)t * (size_t)row + (size_t)c];
        lowkey_nearest_points(&points[group], vectors, index);
        for (int t = 0; t < n_tokens; t++)
            memcpy(first + (size_t)t * (size_t)row, points[group].point + (size_t)index[t] * (size_t)dim,
                   (size_t)dim * sizeof *first);
    }
}

const struct lowkey_peer_method lowkey_peer_coupled = { prepare, NULL, quantize };
