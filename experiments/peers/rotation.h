/* rotation.h - rotations and scalar tables that need no data, or a covariance: random (Haar), Hadamard,
 * eigenvectors; Lloyd-Max tables of a normal distribution and of a coordinate of a random unit vector. All
 * deterministic. */
#ifndef LOWKEY_ROTATION_H
#define LOWKEY_ROTATION_H

#include "runtime/lowkey.h"

/* q[n][n], orthogonal, uniformly distributed: the Q of the QR of normal numbers, R's diagonal positive. */
lowkey_status lowkey_random_rotation(int n, unsigned long seed, float *q, lowkey_error *err);

/* s[n][n], independent normal numbers of variance 1. */
lowkey_status lowkey_random_matrix(int n, unsigned long seed, float *s, lowkey_error *err);

/* h[n][n], entries +-1 / sqrt(n) by Sylvester's construction; n a power of 2. */
void lowkey_hadamard(int n, double *h);

/* Of symmetric a[n][n] (overwritten): eigenvalues falling, and their vectors as the columns of v[n][n], the
 * largest component of each positive. */
lowkey_status lowkey_eigenvectors(int n, double *a, double *value, double *v, lowkey_error *err);

/* out[dim][dim] = the mean of x x' over n_tokens x n_heads vectors: heads first_head.. of
 * x[n_tokens][all_heads][dim]. */
lowkey_status lowkey_second_moment(const float *x, int n_tokens, int all_heads, int first_head, int n_heads,
                                   int dim, double *out, lowkey_error *err);

/* The 2^bits values, rising, that lose least of a coordinate of a random unit vector in dim dimensions, times
 * sqrt(dim): density (1 - x^2)^((dim - 3) / 2). dim 0: of a normal distribution, the limit. bits 1 to 8.
 * boundary: [2^bits - 1] midpoints. */
void lowkey_lloyd_max(int bits, int dim, float *value, float *boundary);

/* out[n_rows][n] = x[n_rows][n] m[n][n], not in place; n a multiple of 8. A row's result depends on that row
 * alone, which BLAS does not promise. */
void lowkey_multiply_rows(const float *x, int n_rows, int n, const float *m, float *out);

/* out[n][n] = the transpose of m[n][n]. */
void lowkey_transpose(int n, const float *m, float *out);

#endif
