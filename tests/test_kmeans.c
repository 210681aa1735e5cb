/* The solver against brute force in long double on few values, against Lloyd from many starts on many, and
 * on the data that breaks solvers. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include <gsl/gsl_randist.h>
#include <gsl/gsl_rng.h>
#include <gsl/gsl_sort.h>

#include "calib/kmeans.h"
#include "tests/check.h"

enum shape { NORMAL, HEAVY_TAILED, SPIKES, OFFSET, STEPS, N_SHAPES };

static float draw(gsl_rng *rng, enum shape shape)
{
    const double normal = gsl_ran_ugaussian(rng);
    switch (shape) {
    case HEAVY_TAILED: return (float)(normal / (fabs(gsl_ran_ugaussian(rng)) + 1e-5));
    case SPIKES: return (float)((double)gsl_rng_uniform_int(rng, 20) * 1000 + 1e-3 * normal);
    case OFFSET: return (float)(600 + normal);
    case STEPS: return (float)(floor(40 * normal) / 16);
    default: return (float)normal;
    }
}

static int compare_floats(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* The cost of centroids, value by value. */
static double cost_of(size_t n, const float *x, const float *w, int k, const double *centroid)
{
    long double sum = 0;
    for (size_t i = 0; i < n; i++) {
        long double least = INFINITY;
        for (int c = 0; c < k; c++) {
            const long double d = (long double)x[i] - (long double)centroid[c];
            if (d * d < least) least = d * d;
        }
        sum += (w ? (long double)w[i] : 1) * least;
    }
    return (double)sum;
}

/* The least cost over every cut of sorted values into at most k intervals: O(k n^2), costs summed value by
 * value. */
static double least_cost(size_t n, const float *x, const float *w, int k)
{
    long double *cost = malloc((n + 1) * (n + 1) * sizeof *cost), *best = malloc((n + 1) * sizeof *best);
    for (size_t i = 0; i < n; i++) {
        long double weight = 0, mean = 0, spread = 0;
        for (size_t j = i; j < n; j++) {
            const long double wj = w ? (long double)w[j] : 1, d = (long double)x[j] - mean;
            weight += wj;
            if (weight > 0) {
                mean += d * wj / weight;
                spread += wj * d * ((long double)x[j] - mean);
            }
            cost[i * (n + 1) + j + 1] = spread;
        }
    }
    for (size_t j = 0; j <= n; j++) best[j] = j ? cost[j] : 0;
    for (int c = 1; c < k; c++)
        for (size_t j = n; j > 0; j--)
            for (size_t i = 0; i < j; i++)
                if (best[i] + cost[i * (n + 1) + j] < best[j]) best[j] = best[i] + cost[i * (n + 1) + j];
    const double least = (double)best[n];
    free(cost);
    free(best);
    return least;
}

static void check_form(const struct lowkey_centroids *got, int k)
{
    assert_in_range(got->n, 1, k);
    for (int c = 0; c + 1 < got->n; c++) {
        assert_true(got->value[c] < got->value[c + 1]);
        assert_true(got->boundary[c] == 0.5 * got->value[c] + 0.5 * got->value[c + 1]);
    }
}

static void fill(gsl_rng *rng, enum shape shape, int weighted, size_t n, float *x, float *w)
{
    for (size_t i = 0; i < n; i++) {
        x[i] = draw(rng, shape);
        w[i] = weighted ? (float)gsl_ran_lognormal(rng, 0, 1.5) : 1;
        if (weighted && gsl_rng_uniform_int(rng, 10) == 0) w[i] = 0;
    }
}

static void few_values_meet_brute_force(void **state)
{
    (void)state;
    gsl_rng *rng = gsl_rng_alloc(gsl_rng_mt19937);
    float x[200], w[200];
    lowkey_error err;
    for (int trial = 0; trial < 300; trial++) {
        const enum shape shape = (enum shape)(trial % N_SHAPES);
        const size_t n = 2 + gsl_rng_uniform_int(rng, trial % 7 ? 40 : 199);
        const int k = 1 + (int)gsl_rng_uniform_int(rng, 32), weighted = trial % 3 != 0;
        fill(rng, shape, weighted, n, x, w);
        w[0] = 1;
        struct lowkey_centroids any_order, sorted;
        assert_ok(lowkey_kmeans_points(n, x, weighted ? w : NULL, k, &any_order, &err), err);
        /* sort values with their weights: insertion */
        for (size_t i = 1; i < n; i++)
            for (size_t j = i; j > 0 && x[j] < x[j - 1]; j--) {
                const float tx = x[j], tw = w[j];
                x[j] = x[j - 1], w[j] = w[j - 1];
                x[j - 1] = tx, w[j - 1] = tw;
            }
        assert_ok(lowkey_kmeans_sorted(n, x, weighted ? w : NULL, k, &sorted, &err), err);
        const int counts[3] = { 1, (k + 1) / 2, k };
        struct lowkey_centroids sizes[3];
        assert_ok(lowkey_kmeans_sizes(n, x, weighted ? w : NULL, 3, counts, sizes, &err), err);
        for (int i = 0; i < 3; i++) {
            struct lowkey_centroids alone;
            assert_ok(lowkey_kmeans_sorted(n, x, weighted ? w : NULL, counts[i], &alone, &err), err);
            check_form(&sizes[i], counts[i]);
            assert_int_equal(sizes[i].n, alone.n);
            assert_true(fabs(sizes[i].cost - alone.cost) <= 1e-12 * fmax(sizes[0].cost, 1e-18));
        }
        const double want = least_cost(n, x, w, k);
        double scale = 0;
        for (size_t i = 0; i < n; i++) scale += (double)w[i] * pow((double)x[i] - (double)x[n / 2], 2);
        for (int e = 0; e < 2; e++) {
            const struct lowkey_centroids *got = e ? &sorted : &any_order;
            check_form(got, k);
            assert_true(fabs(cost_of(n, x, w, got->n, got->value) - want) <= 1e-12 * scale + 1e-30);
            assert_true(fabs(got->cost - want) <= 1e-12 * scale + 1e-30);
        }
    }
    gsl_rng_free(rng);
}

/* Lloyd's algorithm as anyone would write it, from a start of k of the sorted values. */
static double lloyd_from(gsl_rng *rng, size_t n, const float *x, const float *w, int k)
{
    double centroid[32], weight[32], moment[32];
    for (int c = 0; c < k; c++) centroid[c] = (double)x[gsl_rng_uniform_int(rng, n)];
    gsl_sort(centroid, 1, (size_t)k);
    for (int round = 0; round < 60; round++) {
        memset(weight, 0, sizeof weight);
        memset(moment, 0, sizeof moment);
        int c = 0;
        for (size_t i = 0; i < n; i++) {
            while (c + 1 < k && (double)x[i] > 0.5 * (centroid[c] + centroid[c + 1])) c++;
            weight[c] += (double)w[i];
            moment[c] += (double)w[i] * (double)x[i];
        }
        for (c = 0; c < k; c++)
            if (weight[c] > 0) centroid[c] = moment[c] / weight[c];
    }
    return cost_of(n, x, w, k, centroid);
}

static void many_values_are_never_worse_than_lloyd(void **state)
{
    (void)state;
    enum { N = 20000 };
    gsl_rng *rng = gsl_rng_alloc(gsl_rng_mt19937);
    float *x = malloc(N * sizeof *x), *w = malloc(N * sizeof *w);
    lowkey_error err;
    for (int shape = 0; shape < N_SHAPES; shape++)
        for (int weighted = 0; weighted < 2; weighted++) {
            static const int ks[] = { 2, 3, 4, 8, 16, 32 };
            for (size_t i = 0; i < N; i++) x[i] = draw(rng, (enum shape)shape);
            qsort(x, N, sizeof *x, compare_floats);
            for (size_t i = 0; i < N; i++) w[i] = weighted ? (float)gsl_ran_lognormal(rng, 0, 1.5) : 1;
            for (size_t q = 0; q < sizeof ks / sizeof ks[0]; q++) {
                const int k = ks[q];
                struct lowkey_centroids sorted, any_order;
                assert_ok(lowkey_kmeans_sorted(N, x, w, k, &sorted, &err), err);
                assert_ok(lowkey_kmeans_points(N, x, w, k, &any_order, &err), err);
                check_form(&sorted, k);
                check_form(&any_order, k);
                const double a = cost_of(N, x, w, sorted.n, sorted.value);
                const double b = cost_of(N, x, w, any_order.n, any_order.value);
                double square = 0;
                for (size_t i = 0; i < N; i++)
                    square += (double)w[i] * pow((double)x[i] - (double)x[N / 2], 2);
                assert_true(fabs(a - sorted.cost) <= 1e-12 * square);
                assert_true(fabs(b - any_order.cost) <= 1e-12 * square);
                for (int start = 0; start < 5; start++) {
                    const double lloyd = lloyd_from(rng, N, x, w, k);
                    if (a > lloyd * (1 + 1e-12))
                        fail_msg("sorted, shape %d, k %d: %.15g > %.15g", shape, k, a, lloyd);
                    if (b > lloyd * (1 + 1e-12))
                        fail_msg("points, shape %d, k %d: %.15g > %.15g", shape, k, b, lloyd);
                }
            }
        }
    free(x);
    free(w);
    gsl_rng_free(rng);
}

static void entries_agree_on_a_million_values(void **state)
{
    (void)state;
    enum { N = 1 << 20 };
    gsl_rng *rng = gsl_rng_alloc(gsl_rng_mt19937);
    float *x = malloc(N * sizeof *x), *w = malloc(N * sizeof *w), *mixed = malloc(N * sizeof *x),
          *mixed_w = malloc(N * sizeof *w);
    lowkey_error err;
    for (int shape = 0; shape < N_SHAPES; shape++) {
        for (size_t i = 0; i < N; i++) x[i] = draw(rng, (enum shape)shape);
        qsort(x, N, sizeof *x, compare_floats);
        for (size_t i = 0; i < N; i++) w[i] = (float)gsl_ran_lognormal(rng, 0, 1.5);
        for (size_t i = 0; i < N; i++) { /* 7919 is prime to 2^20: a permutation */
            mixed[i] = x[i * 7919 % N];
            mixed_w[i] = w[i * 7919 % N];
        }
        struct lowkey_centroids sorted, any_order, again;
        assert_ok(lowkey_kmeans_sorted(N, x, w, 16, &sorted, &err), err);
        assert_ok(lowkey_kmeans_points(N, mixed, mixed_w, 16, &any_order, &err), err);
        assert_ok(lowkey_kmeans_points(N, mixed, mixed_w, 16, &again, &err), err);
        assert_memory_equal(&any_order, &again, sizeof again);
        const double a = cost_of(N, x, w, 16, sorted.value), b = cost_of(N, x, w, 16, any_order.value);
        if (fabs(a - b) > 1e-5 * a + 1e-6) fail_msg("shape %d: sorted %.12g, any order %.12g", shape, a, b);
    }
    free(x);
    free(w);
    free(mixed);
    free(mixed_w);
    gsl_rng_free(rng);
}

static void fewer_values_than_centroids_are_kept_exactly(void **state)
{
    (void)state;
    enum { N = 5000 };
    static float x[N];
    const float values[3] = { -65504.0f, 0.1f, nextafterf(0.1f, 1) };
    for (int i = 0; i < N; i++) x[i] = values[i * 3 / N];
    lowkey_error err;
    for (int entry = 0; entry < 2; entry++) {
        struct lowkey_centroids got;
        assert_ok((entry ? lowkey_kmeans_sorted : lowkey_kmeans_points)(N, x, NULL, 16, &got, &err), err);
        assert_int_equal(got.n, 3);
        for (int c = 0; c < 3; c++)
            assert_true((float)got.value[c] == values[c] && got.value[c] == (double)values[c]);
        assert_true(got.cost == 0);
        assert_true(got.boundary[1] > (double)values[1] && got.boundary[1] < (double)values[2]);
    }
}

static void constants_of_any_size_are_one_centroid(void **state)
{
    (void)state;
    const float values[] = { 0, -0.0f, 7.5f, -65504, 1e-30f, 3e38f, FLT_MAX, -FLT_MAX, 1e-45f };
    lowkey_error err;
    for (size_t v = 0; v < sizeof values / sizeof values[0]; v++)
        for (int n = 1; n < 3000; n += 1499) {
            static float x[3000];
            for (int i = 0; i < n; i++) x[i] = values[v];
            struct lowkey_centroids sorted, any_order;
            assert_ok(lowkey_kmeans_sorted((size_t)n, x, NULL, 4, &sorted, &err), err);
            assert_ok(lowkey_kmeans_points((size_t)n, x, NULL, 4, &any_order, &err), err);
            assert_true(sorted.n == 1 && sorted.value[0] == (double)values[v] && sorted.cost == 0);
            assert_true(any_order.n == 1 && any_order.value[0] == (double)values[v] && any_order.cost == 0);
        }
}

static void any_range_of_magnitudes_is_survived(void **state)
{
    (void)state;
    enum { N = 30000 };
    static float x[N], w[N];
    gsl_rng *rng = gsl_rng_alloc(gsl_rng_mt19937);
    lowkey_error err;
    for (int trial = 0; trial < 4; trial++) {
        for (int i = 0; i < N; i++) {
            const double exponent = trial < 2 ? 76 * gsl_rng_uniform(rng) - 38 : 0;
            x[i] = (float)(gsl_ran_ugaussian(rng) * pow(10, exponent) / (trial < 2 ? 3 : 1));
            if (!isfinite(x[i])) x[i] = FLT_MAX;
            w[i] = trial % 2 ? (float)pow(10, 76 * gsl_rng_uniform(rng) - 38) : 1;
        }
        struct lowkey_centroids any_order, sorted;
        assert_ok(lowkey_kmeans_points(N, x, w, 16, &any_order, &err), err);
        qsort(x, N, sizeof *x, compare_floats);
        assert_ok(lowkey_kmeans_sorted(N, x, w, 16, &sorted, &err), err);
        for (int e = 0; e < 2; e++) {
            const struct lowkey_centroids *got = e ? &sorted : &any_order;
            check_form(got, 16);
            for (int c = 0; c < got->n; c++)
                assert_true(got->value[c] >= (double)x[0] && got->value[c] <= (double)x[N - 1]);
        }
    }
    gsl_rng_free(rng);
}

static void values_without_weight_do_not_count(void **state)
{
    (void)state;
    enum { N = 4000 };
    static float x[N], w[N];
    lowkey_error err;
    for (int i = 0; i < N; i++) {
        x[i] = (float)i;
        w[i] = i == 1234 || i == 2000 ? 1 : 0;
    }
    for (int entry = 0; entry < 2; entry++) {
        struct lowkey_centroids got;
        assert_ok((entry ? lowkey_kmeans_sorted : lowkey_kmeans_points)(N, x, w, 4, &got, &err), err);
        assert_int_equal(got.n, 2);
        assert_true(got.value[0] == 1234 && got.value[1] == 2000);
    }
}

static void bad_input_is_refused_by_name(void **state)
{
    (void)state;
    enum { N = 3000 };
    static float x[N], w[N];
    struct lowkey_centroids got;
    lowkey_error err;
    for (int entry = 0; entry < 2; entry++) {
        lowkey_status (*solve)(size_t, const float *, const float *, int, struct lowkey_centroids *,
                               lowkey_error *) = entry ? lowkey_kmeans_sorted : lowkey_kmeans_points;
        const float bad_values[] = { NAN, INFINITY, -INFINITY }, bad_weights[] = { NAN, INFINITY, -1 };
        for (int b = 0; b < 3; b++)
            for (int at = 0; at < N; at += 1499) {
                for (int i = 0; i < N; i++) x[i] = (float)i, w[i] = 1;
                x[at] = bad_values[b];
                assert_refused(solve(N, x, w, 4, &got, &err), LOWKEY_EINVAL, err, "value ");
                x[at] = (float)at;
                w[at] = bad_weights[b];
                assert_refused(solve(N, x, w, 4, &got, &err), LOWKEY_EINVAL, err, "weight");
            }
        for (int i = 0; i < N; i++) x[i] = (float)i, w[i] = 0;
        assert_refused(solve(N, x, w, 4, &got, &err), LOWKEY_EINVAL, err, "no value of positive weight");
        assert_refused(solve(0, x, NULL, 4, &got, &err), LOWKEY_EINVAL, err, "no value of positive weight");
        assert_refused(solve(N, x, NULL, 0, &got, &err), LOWKEY_EINVAL, err, "1 to 64 centroids, not 0");
        assert_refused(solve(N, x, NULL, 65, &got, &err), LOWKEY_EINVAL, err, "not 65");
    }
    x[0] = 5;
    assert_refused(lowkey_kmeans_sorted(N, x, NULL, 4, &got, &err), LOWKEY_EINVAL, err, "rising");
}

static void bins_alone_give_the_best_cut_on_their_edges(void **state)
{
    (void)state;
    struct lowkey_mass bins[50] = { { 0, 0 } };
    float x[25], w[25];
    double square = 0;
    for (int i = 0; i < 25; i++) { /* every other bin is empty */
        x[i] = (float)(i * i);
        w[i] = (float)(1 + i % 4);
        bins[2 * i] = (struct lowkey_mass) { (double)w[i], (double)w[i] * (double)x[i] };
        square += (double)w[i] * (double)x[i] * (double)x[i];
    }
    struct lowkey_centroids got;
    lowkey_error err;
    assert_ok(lowkey_kmeans_bins(50, bins, square, 4, &got, &err), err);
    check_form(&got, 4);
    const double want = least_cost(25, x, w, 4);
    assert_true(fabs(got.cost - want) < 1e-9 * want);
    assert_true(fabs(cost_of(25, x, w, 4, got.value) - want) < 1e-9 * want);
    assert_refused(lowkey_kmeans_bins(1, bins + 1, 0, 4, &got, &err), LOWKEY_EINVAL, err,
                   "no value of positive weight");
}

static void codebooks_of_all_sizes_at_once_are_near_the_best(void **state)
{
    (void)state;
    enum { N = 30000 };
    static const int counts[5] = { 2, 4, 8, 16, 32 };
    gsl_rng *rng = gsl_rng_alloc(gsl_rng_mt19937);
    float *x = malloc(N * sizeof *x), *w = malloc(N * sizeof *w);
    lowkey_error err;
    for (int shape = 0; shape < N_SHAPES; shape++) {
        fill(rng, (enum shape)shape, 1, N, x, w);
        w[0] = 1;
        qsort(x, N, sizeof *x, compare_floats);
        struct lowkey_centroids sizes[5], best;
        assert_ok(lowkey_kmeans_sizes(N, x, w, 5, counts, sizes, &err), err);
        for (int i = 0; i < 5; i++) {
            assert_ok(lowkey_kmeans_sorted(N, x, w, counts[i], &best, &err), err);
            check_form(&sizes[i], counts[i]);
            assert_int_equal(sizes[i].n, best.n);
            assert_true(sizes[i].cost <= best.cost * (shape == NORMAL || counts[i] < 16 ? 1.01 : 1.3) + 1e-30);
        }
    }
    free(x);
    free(w);
    gsl_rng_free(rng);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(few_values_meet_brute_force),
        cmocka_unit_test(codebooks_of_all_sizes_at_once_are_near_the_best),
        cmocka_unit_test(many_values_are_never_worse_than_lloyd),
        cmocka_unit_test(entries_agree_on_a_million_values),
        cmocka_unit_test(fewer_values_than_centroids_are_kept_exactly),
        cmocka_unit_test(constants_of_any_size_are_one_centroid),
        cmocka_unit_test(any_range_of_magnitudes_is_survived),
        cmocka_unit_test(values_without_weight_do_not_count),
        cmocka_unit_test(bad_input_is_refused_by_name),
        cmocka_unit_test(bins_alone_give_the_best_cut_on_their_edges),
    };
    return lowkey_run_tests(tests);
}
