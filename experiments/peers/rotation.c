/* rotation.c - see rotation.h. */
#include "experiments/peers/rotation.h"

#include <math.h>
#include <stdlib.h>

#include <gsl/gsl_cdf.h>
#include <gsl/gsl_eigen.h>
#include <gsl/gsl_randist.h>
#include <gsl/gsl_rng.h>
#include <gsl/gsl_sf_gamma.h>

#include "runtime/error.h"

enum { MAX_LEVELS = 256 };

static double *normal_numbers(int n, unsigned long seed)
{
    const size_t count = (size_t)n * (size_t)n;
    gsl_rng *rng = gsl_rng_alloc(gsl_rng_mt19937);
    double *x = malloc(count * sizeof *x);
    if (rng && x) {
        gsl_rng_set(rng, seed);
        for (size_t i = 0; i < count; i++) x[i] = gsl_ran_ugaussian(rng);
    }
    if (!rng) free(x);
    if (rng) gsl_rng_free(rng);
    return rng ? x : NULL;
}

lowkey_status lowkey_random_matrix(int n, unsigned long seed, float *s, lowkey_error *err)
{
    double *x = normal_numbers(n, seed);
    if (!x) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for a random matrix of %d", n);
    for (size_t i = 0; i < (size_t)n * (size_t)n; i++) s[i] = (float)x[i];
    free(x);
    return LOWKEY_OK;
}

static double dot(const double *a, const double *b, size_t n)
{
    double sum = 0;
    for (size_t c = 0; c < n; c++) sum += a[c] * b[c];
    return sum;
}

static void add_to(double *x, double factor, const double *y, size_t n)
{
    for (size_t c = 0; c < n; c++) x[c] += factor * y[c];
}

lowkey_status lowkey_random_rotation(int n, unsigned long seed, float *q, lowkey_error *err)
{
    double *x = normal_numbers(n, seed);
    if (!x) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for a random rotation of %d", n);
    const size_t N = (size_t)n;
    for (size_t i = 0; i < N; i++) {
        double *row = x + i * N;
        for (int again = 0; again < 2; again++) /* twice: orthogonal to rounding */
            for (size_t j = 0; j < i; j++) add_to(row, -dot(row, x + j * N, N), x + j * N, N);
        const double norm = sqrt(dot(row, row, N));
        for (size_t c = 0; c < N; c++) row[c] /= norm;
    }
    for (size_t i = 0; i < (size_t)n * (size_t)n; i++) q[i] = (float)x[i];
    free(x);
    return LOWKEY_OK;
}

void lowkey_hadamard(int n, double *h)
{
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++)
            h[(size_t)i * (size_t)n + (size_t)j] = (__builtin_popcount((unsigned)(i & j)) & 1 ? -1 : 1) /
                                                   sqrt(n);
}

lowkey_status lowkey_eigenvectors(int n, double *a, double *value, double *v, lowkey_error *err)
{
    const size_t N = (size_t)n;
    gsl_eigen_symmv_workspace *workspace = gsl_eigen_symmv_alloc(N);
    if (!workspace) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for eigenvectors of %d", n);
    gsl_matrix_view matrix = gsl_matrix_view_array(a, N, N), vectors = gsl_matrix_view_array(v, N, N);
    gsl_vector_view values = gsl_vector_view_array(value, N);
    const int failed = gsl_eigen_symmv(&matrix.matrix, &values.vector, &vectors.matrix, workspace);
    gsl_eigen_symmv_free(workspace);
    if (failed) return lowkey_fail(err, LOWKEY_EINVAL, "no eigenvectors: %s", gsl_strerror(failed));
    gsl_eigen_symmv_sort(&values.vector, &vectors.matrix, GSL_EIGEN_SORT_VAL_DESC);
    for (size_t c = 0; c < N; c++) {
        size_t largest = 0;
        for (size_t r = 1; r < N; r++)
            if (fabs(v[r * N + c]) > fabs(v[largest * N + c])) largest = r;
        const double sign = v[largest * N + c] < 0 ? -1 : 1;
        for (size_t r = 0; r < N; r++) v[r * N + c] *= sign;
    }
    return LOWKEY_OK;
}

/* ---- Lloyd-Max ---- */

/* Of a coordinate x of a random unit vector in dim dimensions, or (dim 0) of a standard normal number: the
 * probability that it is below x, and the integral of its density times x from x on. (x + 1) / 2 is beta
 * distributed. */
static double below(int dim, double x)
{
    if (!dim) return gsl_cdf_ugaussian_P(x);
    return x <= -1 ? 0 : x >= 1 ? 1 : gsl_cdf_beta_P((x + 1) / 2, (dim - 1) / 2.0, (dim - 1) / 2.0);
}

static double tail_moment(int dim, double x)
{
    if (!dim) return isinf(x) ? 0 : gsl_ran_ugaussian_pdf(x);
    if (fabs(x) >= 1) return 0;
    const double log_density = gsl_sf_lngamma(dim / 2.0) - gsl_sf_lngamma((dim - 1) / 2.0) - log(M_PI) / 2;
    return exp(log_density + (dim - 1) / 2.0 * log1p(-x * x)) / (dim - 1);
}

static double quantile(double dim, double p)
{
    return dim != 0 ? 2 * gsl_cdf_beta_Pinv(p, (dim - 1) / 2.0, (dim - 1) / 2.0) - 1
                    : gsl_cdf_ugaussian_Pinv(p);
}

/* Values become the means of what is nearest to them until nothing moves. The distribution is symmetric and
 * its density log-concave (from 3 dimensions on), so there is one fixed point. */
void lowkey_lloyd_max(int bits, int dim, float *value, float *boundary)
{
    const int n = 1 << bits;
    const double end = dim ? 1 : INFINITY, unit = dim ? sqrt(dim) : 1;
    double entry[MAX_LEVELS], edge[MAX_LEVELS + 1];
    /* The best density of many values is the cube root of the data's. */
    for (int k = 0; k < n; k++)
        entry[k] = dim ? quantile(2 + dim / 3.0, (k + 0.5) / n) : sqrt(3) * quantile(0, (k + 0.5) / n);
    double moved = 1;
    for (int round = 0; round < (bits > 4 ? 1000 : 20000) && moved > 1e-9; round++) {
        moved = 0;
        edge[0] = -end;
        edge[n] = end;
        for (int k = 1; k < n; k++) edge[k] = (entry[k - 1] + entry[k]) / 2;
        for (int k = 0; k < n / 2; k++) {
            const double mass = below(dim, edge[k + 1]) - below(dim, edge[k]);
            if (!(mass > 0)) continue;
            const double mean = (tail_moment(dim, edge[k]) - tail_moment(dim, edge[k + 1])) / mass;
            moved = fmax(moved, fabs(mean - entry[k]));
            entry[k] = mean;
            entry[n - 1 - k] = -mean;
        }
    }
    for (int k = 0; k < n; k++) value[k] = (float)(unit * entry[k]);
    for (int k = 0; k + 1 < n; k++) boundary[k] = (float)(unit * (entry[k] + entry[k + 1]) / 2);
}

void lowkey_multiply_rows(const float *x, int n_rows, int n, const float *m, float *out)
{
    enum { COLUMNS = 8 };
    const size_t N = (size_t)n;
    for (size_t r = 0; r < (size_t)n_rows; r++)
        for (size_t first = 0; first < N; first += COLUMNS) {
            float sum[COLUMNS] = { 0 };
            for (size_t k = 0; k < N; k++)
                for (size_t c = 0; c < COLUMNS; c++) sum[c] += x[r * N + k] * m[k * N + first + c];
            for (size_t c = 0; c < COLUMNS; c++) out[r * N + first + c] = sum[c];
        }
}

void lowkey_transpose(int n, const float *m, float *out)
{
    for (size_t r = 0; r < (size_t)n; r++)
        for (size_t c = 0; c < (size_t)n; c++) out[c * (size_t)n + r] = m[r * (size_t)n + c];
}
