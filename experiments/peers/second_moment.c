/* second_moment.c - sums of squares of captured vectors, by BLAS in f64. */
#include <cblas.h>
#include <stdlib.h>

#include "experiments/peers/rotation.h"
#include "runtime/error.h"

lowkey_status lowkey_second_moment(const float *x, int n_tokens, int all_heads, int first_head, int n_heads,
                                   int dim, double *out, lowkey_error *err)
{
    enum { ROWS = 256 };
    const size_t D = (size_t)dim, n = (size_t)n_tokens * (size_t)n_heads;
    double *rows = malloc(ROWS * D * sizeof *rows);
    if (!rows) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for moments");
    for (size_t i = 0; i < D * D; i++) out[i] = 0;
    for (size_t first = 0; first < n; first += ROWS) {
        const size_t m = n - first < ROWS ? n - first : ROWS;
        for (size_t r = 0; r < m; r++) {
            const size_t token = (first + r) / (size_t)n_heads, head = (first + r) % (size_t)n_heads;
            const float *row = x + (token * (size_t)all_heads + (size_t)first_head + head) * D;
            for (size_t c = 0; c < D; c++) rows[r * D + c] = (double)row[c];
        }
        cblas_dsyrk(CblasRowMajor, CblasLower, CblasTrans, dim, (int)m, 1 / (double)n, rows, dim, 1, out,
                    dim);
    }
    for (size_t r = 0; r < D; r++)
        for (size_t c = r + 1; c < D; c++) out[r * D + c] = out[c * D + r];
    free(rows);
    return LOWKEY_OK;
}
