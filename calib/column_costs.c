/* column_costs.c - what each width would cost in one channel: its values are sorted once, codebooks of all widths come
 * of one dynamic programme, and each is tried on the values in the order of tokens. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "calib/channel_cost.h"
#include "calib/column.h"
#include "runtime/error.h"

static lowkey_status solve_widths(struct lowkey_column *column, int is_sorted, int n_widths, const int *counts,
                                  struct lowkey_centroids *out)
{
    const size_t n = (size_t)column->n;
    if (is_sorted) return lowkey_kmeans_sizes(n, column->x, column->w, n_widths, counts, out, &column->err);
    for (int i = 0; i < n_widths; i++)
        LOWKEY_TRY(lowkey_kmeans_points(n, column->x, column->w, counts[i], &out[i], &column->err));
    return LOWKEY_OK;
}

/* One over the variance: where nothing says what an error costs, it counts relative to the channel's spread. */
static double reciprocal_variance(int64_t n, const float *x)
{
    double mean = 0, square = 0;
    for (int64_t i = 0; i < n; i++) mean += (double)x[i] / (double)n;
    for (int64_t i = 0; i < n; i++) square += ((double)x[i] - mean) * ((double)x[i] - mean);
    return square > 0 ? (double)n / square : 0;
}

/* x, raw: the values and raw weights in the order of tokens; the column's own are sorted, and changed. */
static lowkey_status try_widths(struct lowkey_column *column, const float *x, const float *raw)
{
    struct lowkey_side_fit *fit = column->fit;
    const size_t c = column->channel;
    const int low = fit->options->low_width, n_widths = fit->options->high_width - low + 1;
    const int is_sorted = column->n <= LOWKEY_SORTED;
    struct lowkey_centroids centroids[LOWKEY_WIDEST_TABLE];
    int counts[LOWKEY_WIDEST_TABLE];
    const double middle = 0.5 * fit->low[c] + 0.5 * fit->high[c];
    const double each = raw ? 0 : reciprocal_variance(column->n, x);
    lowkey_column_tame(column);
    if (fit->low[c] == fit->high[c]) return LOWKEY_OK; /* a constant costs nothing */
    if (is_sorted) LOWKEY_TRY(lowkey_column_sort(column));
    for (int i = 0; i < n_widths; i++) counts[i] = 1 << (low + i);
    LOWKEY_TRY(solve_widths(column, is_sorted, n_widths, counts, centroids));
    for (int i = 0; i < n_widths; i++) {
        struct lowkey_table table;
        struct lowkey_stored_table stored;
        lowkey_table_make(centroids[i].n, centroids[i].value, centroids[i].boundary, 0, 1, &table);
        lowkey_table_store(&table, fit->high[c] - middle, &stored);
        fit->costs[c].at[low + i] = lowkey_channel_cost(fit->captures, &stored, x, raw, each,
                                                        fit->weights.source == LOWKEY_WEIGHTS_GRADIENT);
    }
    return LOWKEY_OK;
}

static float *copy_of(const float *from, int64_t n)
{
    float *to = malloc((size_t)n * sizeof *to);
    if (to) memcpy(to, from, (size_t)n * sizeof *to);
    return to;
}

lowkey_status lowkey_column_costs(struct lowkey_column *column)
{
    const int sorts = column->n <= LOWKEY_SORTED; /* else the values stay as they are */
    float *x = sorts ? copy_of(column->x, column->n) : NULL, *raw = column->w ? copy_of(column->w, column->n) : NULL;
    lowkey_status status;
    if ((sorts && !x) || (column->w && !raw))
        status = lowkey_fail(&column->err, LOWKEY_ENOMEM, "no memory for %lld values", (long long)column->n);
    else
        status = try_widths(column, sorts ? x : column->x, raw);
    free(x);
    free(raw);
    return status;
}
