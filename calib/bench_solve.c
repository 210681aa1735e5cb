/* bench_solve.c - lowkey bench solve: one codebook over many weighted values, made up from a seed or raw
 * f32 files; lowkey bench tables: the tables of all channels of a layer, per second. The fastest of
 * --repeat runs is told. */
#include "calib/bench_solve.h"

#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>

#include <gsl/gsl_randist.h>
#include <gsl/gsl_rng.h>
#include <jansson.h>

#include "calib/command.h"
#include "calib/kmeans.h"
#include "calib/sort.h"
#include "calib/threads.h"
#include "runtime/error.h"

struct settings {
    int64_t points, centroids, seed, repeat, channels, threads;
    const char *input, *weights;
    int json;
};

static int parse(const char *what, int argc, char **argv, struct settings *settings)
{
    enum { POINTS = 256, CENTROIDS, SEED, REPEAT, CHANNELS, THREADS, INPUT, WEIGHTS, JSON };
    static const struct option options[] = {
        { "points", required_argument, NULL, POINTS },
        { "centroids", required_argument, NULL, CENTROIDS },
        { "seed", required_argument, NULL, SEED },
        { "repeat", required_argument, NULL, REPEAT },
        { "channels", required_argument, NULL, CHANNELS },
        { "threads", required_argument, NULL, THREADS },
        { "input", required_argument, NULL, INPUT },
        { "weights", required_argument, NULL, WEIGHTS },
        { "json", no_argument, NULL, JSON },
        { 0 },
    };
    int bad = 0;
    for (int option; !bad && (option = lowkey_next_option("bench", argc, argv, options, NULL)) != -1;)
        switch (option) {
        case POINTS:
            bad = lowkey_parse_int("bench", "--points", optarg, 1, INT64_C(1) << 40, &settings->points);
            break;
        case CENTROIDS:
            bad = lowkey_parse_int("bench", "--centroids", optarg, 1, LOWKEY_MAX_CENTROIDS,
                                   &settings->centroids);
            break;
        case SEED: bad = lowkey_parse_int("bench", "--seed", optarg, 0, UINT32_MAX, &settings->seed); break;
        case REPEAT: bad = lowkey_parse_int("bench", "--repeat", optarg, 1, 1000, &settings->repeat); break;
        case CHANNELS:
            bad = lowkey_parse_int("bench", "--channels", optarg, 1, 1 << 20, &settings->channels);
            break;
        case THREADS: bad = lowkey_parse_int("bench", "--threads", optarg, 1, 256, &settings->threads); break;
        case INPUT: settings->input = optarg; break;
        case WEIGHTS: settings->weights = optarg; break;
        case JSON: settings->json = 1; break;
        default: bad = 2;
        }
    if (!bad && optind < argc) bad = lowkey_command_usage("bench", "%s takes no '%s'", what, argv[optind]);
    if (!bad && settings->weights && !settings->input)
        bad = lowkey_command_usage("bench", "--weights belongs to --input");
    return bad;
}

/* A file of f32 in this machine's byte order, whole. */
static lowkey_status read_raw(const char *path, size_t *n, float **out, lowkey_error *err)
{
    struct stat info; /* before opening: a pipe would keep us waiting for its writer */
    FILE *file = stat(path, &info) == 0 && S_ISREG(info.st_mode) ? fopen(path, "rb") : NULL;
    if (!file) return lowkey_fail(err, LOWKEY_EIO, "%s: cannot be read", path);
    const size_t bytes = (size_t)info.st_size;
    *n = bytes / sizeof(float);
    *out = bytes % sizeof(float) ? NULL : malloc(bytes + 1);
    const int good = *out && fread(*out, 1, bytes, file) == bytes;
    fclose(file);
    if (good) return LOWKEY_OK;
    free(*out);
    *out = NULL;
    return lowkey_fail(err, LOWKEY_EIO, "%s: %zu bytes, f32 values expected", path, bytes);
}

static lowkey_status read_points(const struct settings *settings, size_t *n, float **x, float **w,
                                 lowkey_error *err)
{
    LOWKEY_TRY(read_raw(settings->input, n, x, err));
    if (!settings->weights) return LOWKEY_OK;
    size_t n_weights;
    LOWKEY_TRY(read_raw(settings->weights, &n_weights, w, err));
    if (n_weights == *n) return LOWKEY_OK;
    return lowkey_fail(err, LOWKEY_EINVAL, "%s: %zu weights for %zu values", settings->weights, n_weights,
                       *n);
}

/* Normal values, lognormal weights. */
static lowkey_status make_points(size_t n, int64_t seed, float **x, float **w, lowkey_error *err)
{
    *x = malloc(n * sizeof **x);
    *w = malloc(n * sizeof **w);
    gsl_rng *rng = gsl_rng_alloc(gsl_rng_mt19937);
    if (!*x || !*w || !rng) {
        gsl_rng_free(rng);
        return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %zu points", n);
    }
    gsl_rng_set(rng, (unsigned long)seed);
    for (size_t i = 0; i < n; i++) {
        (*x)[i] = (float)gsl_ran_ugaussian(rng);
        (*w)[i] = (float)gsl_ran_lognormal(rng, 0, 1.5);
    }
    gsl_rng_free(rng);
    return LOWKEY_OK;
}

/* sum of w (x - nearest)^2, value by value: what any solver's centroids are judged by. */
static double cost_of(size_t n, const float *x, const float *w, const struct lowkey_centroids *centroids)
{
    double cost = 0;
    for (size_t i = 0; i < n; i++) {
        int c = 0;
        while (c + 1 < centroids->n && (double)x[i] > centroids->boundary[c]) c++;
        const double d = (double)x[i] - centroids->value[c];
        cost += (w ? (double)w[i] : 1) * d * d;
    }
    return cost;
}

/* Of this process, all its threads: what a busy machine disturbs less than the wall clock. */
static double cpu_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

struct timing { /* of the fastest run */
    double wall, cpu;
};

static void keep_fastest(struct timing *fastest, double wall, double cpu)
{
    if (wall < fastest->wall) *fastest = (struct timing) { wall, cpu };
}

static void print_solved(const struct settings *settings, size_t n, struct timing timing, double cost,
                         const struct lowkey_centroids *centroids)
{
    if (!settings->json) {
        printf("%zu points, %d centroids: %.4f s, %.4f s of CPU, cost %.9g\n", n, centroids->n, timing.wall,
               timing.cpu, cost);
        for (int c = 0; c < centroids->n; c++) printf("%s%.9g", c ? " " : "", centroids->value[c]);
        printf("\n");
        return;
    }
    json_t *values = json_array();
    for (int c = 0; c < centroids->n; c++) json_array_append_new(values, json_real(centroids->value[c]));
    json_t *result = json_pack("{s:I, s:i, s:f, s:f, s:f, s:o}", "points", (json_int_t)n, "centroids",
                               centroids->n, "seconds", timing.wall, "cpu_seconds", timing.cpu, "cost", cost,
                               "values", values);
    json_dumpf(result, stdout, JSON_REAL_PRECISION(17));
    printf("\n");
    json_decref(result);
}

int lowkey_bench_solve(int argc, char **argv)
{
    struct settings settings = { .points = 1 << 22, .centroids = 16, .repeat = 3 };
    const int bad = parse("solve", argc, argv, &settings);
    if (bad) return bad;
    lowkey_error err;
    size_t n = (size_t)settings.points;
    float *x = NULL, *w = NULL;
    struct lowkey_centroids centroids;
    struct timing timing = { HUGE_VAL, 0 };
    lowkey_status status = settings.input ? read_points(&settings, &n, &x, &w, &err)
                                          : make_points(n, settings.seed, &x, &w, &err);
    for (int run = 0; run < settings.repeat && status == LOWKEY_OK; run++) {
        const double start = lowkey_seconds(), start_cpu = cpu_seconds();
        status = lowkey_kmeans_points(n, x, w, (int)settings.centroids, &centroids, &err);
        keep_fastest(&timing, lowkey_seconds() - start, cpu_seconds() - start_cpu);
    }
    if (status == LOWKEY_OK) print_solved(&settings, n, timing, cost_of(n, x, w, &centroids), &centroids);
    free(x);
    free(w);
    return status == LOWKEY_OK ? 0 : lowkey_command_failed("bench", &err);
}

struct layer { /* made-up channels, a few distinct ones in turn */
    size_t n_tokens, n_distinct;
    const float *x, *w; /* [n_distinct][n_tokens] */
    int n_centroids;
    lowkey_status *status; /* [n_channels] */
};

/* As lowkey fit does it: sort the channel with its weights, then solve. */
static void solve_channel(void *arg, int channel)
{
    const struct layer *layer = arg;
    const size_t n = layer->n_tokens, at = (size_t)channel % layer->n_distinct * n;
    struct lowkey_keyed *items = malloc(2 * n * sizeof *items);
    float *x = malloc(n * sizeof *x), *w = malloc(n * sizeof *w);
    struct lowkey_centroids out;
    layer->status[channel] = LOWKEY_ENOMEM;
    if (items && x && w) {
        for (size_t i = 0; i < n; i++) {
            items[i].key = lowkey_float_key(layer->x[at + i]);
            memcpy(&items[i].load, &layer->w[at + i], sizeof(float));
        }
        lowkey_sort_keyed(n, items, items + n);
        for (size_t i = 0; i < n; i++) {
            x[i] = lowkey_key_float(items[i].key);
            memcpy(&w[i], &items[i].load, sizeof(float));
        }
        layer->status[channel] = lowkey_kmeans_sorted(n, x, w, layer->n_centroids, &out, NULL);
    }
    free(items);
    free(x);
    free(w);
}

int lowkey_bench_tables(int argc, char **argv)
{
    struct settings settings = {
        .points = 32768, .centroids = 4, .repeat = 1, .channels = 4096, .threads = 1
    };
    const int bad = parse("tables", argc, argv, &settings);
    if (bad) return bad;
    if (settings.input) return lowkey_command_usage("bench", "tables makes its own points");
    enum { DISTINCT = 64 };
    lowkey_keep_freed_memory();
    const size_t n = (size_t)settings.points;
    float *x = NULL, *w = NULL;
    lowkey_status *statuses = malloc((size_t)settings.channels * sizeof *statuses);
    lowkey_error err = { LOWKEY_OK, "a channel could not be solved" };
    int threads = (int)settings.threads;
    double seconds = HUGE_VAL;
    lowkey_status status = make_points(DISTINCT * n, settings.seed, &x, &w, &err);
    const struct layer layer = { n, DISTINCT, x, w, (int)settings.centroids, statuses };
    for (int run = 0; run < settings.repeat && status == LOWKEY_OK && statuses; run++) {
        const double start = lowkey_seconds();
        lowkey_threads_run(&threads, (int)settings.channels, solve_channel, (void *)&layer);
        seconds = fmin(seconds, lowkey_seconds() - start);
        for (int64_t c = 0; c < settings.channels; c++)
            if (statuses[c] != LOWKEY_OK) status = statuses[c];
    }
    if (!statuses) status = lowkey_fail(&err, LOWKEY_ENOMEM, "no memory");
    free(x);
    free(w);
    free(statuses);
    if (status != LOWKEY_OK) return lowkey_command_failed("bench", &err);
    printf(settings.json
               ? "{\"channels\": %lld, \"tokens\": %zu, \"centroids\": %lld, \"threads\": %d, \"seconds\": "
                 "%.6f, "
                 "\"tables_per_second\": %.1f}\n"
               : "%lld channels of %zu tokens, %lld centroids, %d threads: %.2f s, %.0f tables per second\n",
           (long long)settings.channels, n, (long long)settings.centroids, threads, seconds,
           (double)settings.channels / seconds);
    return 0;
}
