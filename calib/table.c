/* table.c - tables in original units, and their rounding. */
#include "calib/table.h"

#include <float.h>
#include <math.h>

#include "formats/half.h"

/* The largest float that is at most x: a float is above it exactly where it is above x. */
static float float_below(double x)
{
    const float nearest = (float)x;
    return (double)nearest > x ? nextafterf(nearest, -INFINITY) : nearest;
}

void lowkey_midpoints(int n, const double *codebook, double *midpoint)
{
    for (int k = 0; k + 1 < n; k++) midpoint[k] = 0.5 * codebook[k] + 0.5 * codebook[k + 1];
}

void lowkey_table_make(int n, const double *codebook, const double *midpoint, double zero, double scale,
                       struct lowkey_table *table)
{
    *table = (struct lowkey_table) { .n = n };
    for (int k = 0; k < n; k++)
        table->entry[k] = fmin(fmax(zero + scale * codebook[k], -(double)FLT_MAX), (double)FLT_MAX);
    for (int k = 0; k + 1 < n; k++) table->boundary[k] = float_below(zero + scale * midpoint[k]);
}

struct grid {
    float center;
    int exponent;
};

/* The exponent that puts the largest |entry - center| into [1, 2): f16 then keeps 2^-11 of entries down to
 * 2^-14 of it, and residuals of outliers may be 32,000 times as large (at most 2^112 is allowed). reach stands in where all entries
 * are the center. */
static struct grid grid_at(const struct lowkey_table *table, float center, double reach)
{
    double largest = 0;
    for (int k = 0; k < table->n; k++) largest = fmax(largest, fabs(table->entry[k] - (double)center));
    if (largest == 0) largest = reach > 0 ? reach : fabs((double)center);
    const int exponent = largest > 0 ? ilogb(largest) : 0;
    return (struct grid) { center, exponent < -126 ? -126 : exponent > 112 ? 112 : exponent };
}

static float round_to(struct grid grid, double entry)
{
    const double h = ldexp(entry - (double)grid.center, -grid.exponent);
    uint16_t code = lowkey_f32_to_f16_saturate((float)h, NULL);
    double value = (double)grid.center + ldexp((double)lowkey_f16_to_f32(code), grid.exponent);
    while (fabs(value) > (double)FLT_MAX) /* toward the center */
        value = (double)grid.center + ldexp((double)lowkey_f16_to_f32(--code), grid.exponent);
    return (float)value + 0.0f; /* -0 becomes 0 */
}

static int is_exact(const struct lowkey_table *table, struct grid grid)
{
    for (int k = 0; k < table->n; k++)
        if ((double)round_to(grid, table->entry[k]) != table->entry[k]) return 0;
    return 1;
}

static struct grid choose_grid(const struct lowkey_table *table, double reach)
{
    const struct grid plain = grid_at(table, 0, reach);
    const double low = table->entry[0], high = table->entry[table->n - 1];
    const double middle = 0.5 * low + 0.5 * high, half = 0.5 * high - 0.5 * low;
    int are_floats = 1; /* entries that are values of the channel, not means of many */
    for (int k = 0; k < table->n; k++) are_floats &= (double)(float)table->entry[k] == table->entry[k];
    if (are_floats && is_exact(table, plain)) return plain;
    for (int k = 0; k < table->n && are_floats; k++) {
        const struct grid centered = grid_at(table, (float)table->entry[k], reach);
        if (is_exact(table, centered)) return centered;
    }
    return fabs(middle) > 8 * half ? grid_at(table, (float)middle, reach) : plain;
}

void lowkey_table_store(const struct lowkey_table *table, double reach, struct lowkey_stored_table *out)
{
    const struct grid grid = choose_grid(table, reach);
    *out = (struct lowkey_stored_table) { .center = grid.center, .exponent = grid.exponent };
    int n = 0;
    for (int k = 0; k < table->n; k++) {
        const float entry = round_to(grid, table->entry[k]);
        if (n > 0 && entry <= out->entry[n - 1]) continue;
        if (n > 0) out->boundary[n - 1] = table->boundary[k - 1];
        out->entry[n++] = entry;
    }
    out->n_entries = n;
    for (int k = n; k < LOWKEY_MAX_CENTROIDS; k++) out->entry[k] = out->entry[n - 1];
    for (int k = n - 1; k < LOWKEY_MAX_CENTROIDS - 1; k++) out->boundary[k] = FLT_MAX;
}
