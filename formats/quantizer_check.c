/* quantizer_check.c - every MUST of formats/README.md, "quantizer.h5", on one layer of a description, whether it came
 * from a file or from memory. A message names layer, side, array, head, channel, what was expected and found. */
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>

#include "formats/geometry.h"
#include "formats/quantizer_parts.h"
#include "runtime/error.h"

/* A side under check: what messages begin with, and its sizes. */
struct subject {
    const lowkey_layer_desc *layer;
    const lowkey_side_desc *side;
    int which; /* 0 key, 1 value */
    int n_heads, head_dim, n_table;
    size_t n_channels; /* n_heads * head_dim */
    lowkey_error *err;
};

__attribute__((format(printf, 2, 3))) static lowkey_status refuse(const struct subject *s, const char *format,
                                                                  ...)
{
    char text[sizeof s->err->message];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return lowkey_fail(s->err, LOWKEY_EFORMAT, "layer %d %s: %s", s->layer->index, s->which ? "value" : "key",
                       text);
}

/* The same about one channel, c counted over all heads: "layer 3 key: NAME head 0 channel 5: ..." */
__attribute__((format(printf, 4, 5))) static lowkey_status
refuse_channel(const struct subject *s, const char *name, size_t c, const char *format, ...)
{
    char text[sizeof s->err->message];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    const size_t d = (size_t)s->head_dim;
    return refuse(s, "%s head %zu channel %zu: %s", name, c / d, c % d, text);
}

static struct subject subject_of(const lowkey_layer_desc *layer, int which, lowkey_error *err)
{
    const lowkey_side_desc *side = lowkey_side_of(layer, which);
    const int head_dim = lowkey_side_head_dim(layer, which);
    return (struct subject) { .layer = layer,
                              .side = side,
                              .which = which,
                              .n_heads = layer->n_kv_heads,
                              .head_dim = head_dim,
                              .n_table = side->table_entries,
                              .n_channels = (size_t)layer->n_kv_heads * (size_t)head_dim,
                              .err = err };
}

/* ---- scalars ---- */

static lowkey_status check_arrays_given(const struct subject *s)
{
    const lowkey_side_desc *side = s->side;
    const int low = side->trellis ? 4 : 2, high = side->trellis ? LOWKEY_MAX_TABLE : LOWKEY_MAX_TABLE / 2;
    if ((s->n_table != 0 || side->trellis) && (s->n_table < low || s->n_table > high))
        return refuse(s, "table_entries: expected %s%d to %d, found %d", side->trellis ? "" : "0 or ", low, high,
                      s->n_table);
    const struct {
        const char *name;
        const void *array;
        int wanted;
    } arrays[] = {
        { "bits", side->bits, 1 },
        { "lower", side->lower, 1 },
        { "upper", side->upper, 1 },
        { "table", side->table, s->n_table > 0 },
        { "boundary", side->boundary, s->n_table > 0 && !side->trellis },
        { "metric_weight", side->metric_weight, side->trellis > 0 },
    };
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++)
        if (!arrays[i].array != !arrays[i].wanted)
            return refuse(s, "%s: expected %s, as table_entries is %d and trellis %d", arrays[i].name,
                          arrays[i].wanted ? "an array, found none" : "none, found an array", s->n_table,
                          side->trellis);
    return LOWKEY_OK;
}

static lowkey_status check_token_scale(const struct subject *s)
{
    const lowkey_side_desc *side = s->side;
    const int n = (int)s->n_channels, block = side->scale_block;
    if ((unsigned)side->token_scale > LOWKEY_SCALE_F32)
        return refuse(s, "token_scale: expected none, f16 or f32, found number %d", (int)side->token_scale);
    if (side->token_scale == LOWKEY_SCALE_NONE)
        return block == 0 ? LOWKEY_OK
                          : refuse(s, "scale_block: expected 0 where token_scale is none, found %d", block);
    if (block < 8 || block % 8 || n % block)
        return refuse(s, "scale_block: expected a multiple of 8 that divides %d channels, found %d", n,
                      block);
    return LOWKEY_OK;
}

/* Before all else: what a trellis leaves out, and how it is packed. */
static lowkey_status check_trellis(const struct subject *s)
{
    const lowkey_side_desc *side = s->side;
    if (side->trellis < 0 || side->trellis > 4 || side->trellis == 3)
        return refuse(s, "trellis: expected 0, 1, 2 or 4 survivors of a state, found %d", side->trellis);
    if (side->reserved != 0) return refuse(s, "reserved: expected 0, found %d", side->reserved);
    if (!side->trellis) return LOWKEY_OK;
    if (side->token_scale != LOWKEY_SCALE_NONE)
        return refuse(s, "token_scale: expected none with a trellis, found number %d", (int)side->token_scale);
    if (side->outlier_rule != LOWKEY_OUTLIER_NONE)
        return refuse(s, "outlier_rule: expected none with a trellis, found number %d", (int)side->outlier_rule);
    return LOWKEY_OK;
}

static lowkey_status check_outliers(const struct subject *s)
{
    const lowkey_side_desc *side = s->side;
    const int n = (int)s->n_channels, rule = (int)side->outlier_rule;
    if ((unsigned)rule > LOWKEY_OUTLIER_RANK)
        return refuse(s, "outlier_rule: expected none, limit or rank, found number %d", rule);
    if (rule == LOWKEY_OUTLIER_LIMIT && side->token_scale != LOWKEY_SCALE_NONE)
        return refuse(s, "outlier_rule: expected none or rank with a token_scale, found limit, whose limits "
                         "know no token");
    const int any = rule != LOWKEY_OUTLIER_NONE;
    const struct {
        const char *name;
        int value, low, high;
    } counts[] = {
        { "outlier_rank", side->outlier_rank, rule == LOWKEY_OUTLIER_RANK,
          rule == LOWKEY_OUTLIER_RANK ? n / 2 : 0 },
        { "outlier_cap", side->outlier_cap, any, any ? n : 0 },
        { "outlier_page_capacity", side->outlier_page_capacity, any, any ? UINT16_MAX : 0 },
    };
    static const char *const rules[] = { "none", "limit", "rank" };
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
        if (counts[i].value < counts[i].low || counts[i].value > counts[i].high)
            return refuse(s, "%s: expected %d to %d with outlier_rule %s and %d channels, found %d",
                          counts[i].name, counts[i].low, counts[i].high, rules[rule], n, counts[i].value);
    return LOWKEY_OK;
}

lowkey_status lowkey_layer_check_shape(const lowkey_layer_desc *layer, lowkey_error *err)
{
    for (int which = 0; which < 2; which++) {
        const struct subject s = subject_of(layer, which, err);
        LOWKEY_TRY(check_trellis(&s));
        LOWKEY_TRY(check_arrays_given(&s));
        LOWKEY_TRY(check_token_scale(&s));
        LOWKEY_TRY(check_outliers(&s));
    }
    return LOWKEY_OK;
}

/* ---- arrays ---- */

static lowkey_status check_bits(const struct subject *s)
{
    const lowkey_side_desc *side = s->side;
    int any_table = 0, any_8 = 0, any_16 = 0;
    for (size_t c = 0; c < s->n_channels; c++) {
        const int bits = side->bits[c];
        if (!lowkey_wide_bits(bits))
            return refuse_channel(s, "bits", c, "expected 1 to 5, 8 or 16, found %d", bits);
        if (side->trellis && bits > 5)
            return refuse_channel(s, "bits", c, "expected 1 to 5 with a trellis, found %d", bits);
        any_8 |= bits == 8;
        any_16 |= bits == 16;
        if (bits > 5) continue;
        any_table = 1;
        if (s->n_table < lowkey_most_entries(side->trellis, bits))
            return refuse_channel(s, "table", c, "%d bits%s need %d entries, found %d entries", bits,
                                  side->trellis ? " with a trellis" : "",
                                  lowkey_most_entries(side->trellis, bits), s->n_table);
    }
    if (!any_table && s->n_table)
        return refuse(s, "table_entries: expected 0, as no channel has a table, found %d", s->n_table);
    const int rule_8 = (int)side->rule_8, rule_16 = (int)side->rule_16;
    const int is_8 = rule_8 == LOWKEY_RULE_E4M3 || rule_8 == LOWKEY_RULE_E5M2 || rule_8 == LOWKEY_RULE_INT8;
    const int is_16 = rule_16 == LOWKEY_RULE_F16 || rule_16 == LOWKEY_RULE_BF16;
    if (any_8 ? !is_8 : rule_8 != LOWKEY_RULE_NONE)
        return refuse(s, "rule_8: expected %s, found number %d",
                      any_8 ? "e4m3, e5m2 or int8, as some channel has 8 bits"
                            : "none, as no channel has 8 bits",
                      rule_8);
    if (any_16 ? !is_16 : rule_16 != LOWKEY_RULE_NONE)
        return refuse(s, "rule_16: expected %s, found number %d",
                      any_16 ? "f16 or bf16, as some channel has 16 bits" : "none, as no channel has 16 bits",
                      rule_16);
    return LOWKEY_OK;
}

static lowkey_status check_order(const struct subject *s)
{
    const int d = s->head_dim;
    for (int h = 0; h < s->n_heads; h++) {
        const uint16_t *order = s->side->order + (size_t)h * (size_t)d;
        int row_of[LOWKEY_MAX_HEAD_DIM];
        for (int c = 0; c < d; c++) row_of[c] = -1;
        for (int r = 0; r < d; r++) {
            if (order[r] >= d)
                return refuse(s, "order head %d row %d: expected a channel from 0 to %d, found %d", h, r,
                              d - 1, order[r]);
            if (row_of[order[r]] >= 0)
                return refuse(
                    s, "order head %d row %d: channel %d is at row %d already, so it is no permutation", h, r,
                    order[r], row_of[order[r]]);
            row_of[order[r]] = r;
        }
        for (int i = 0; i < s->layer->rope_dims / 2 && s->which == 0; i++) {
            int first, second;
            lowkey_rope_pair(s->layer->rope_dims, s->layer->rope_pairing, i, &first, &second);
            if (row_of[first] % 2 || row_of[second] != row_of[first] + 1)
                return refuse(s,
                              "order head %d: expected RoPE partners %d and %d at rows 2i and 2i + 1, found "
                              "rows %d and %d",
                              h, first, second, row_of[first], row_of[second]);
        }
    }
    return LOWKEY_OK;
}

/* Finite numbers, n_inner a channel. */
static lowkey_status check_finite(const struct subject *s, const char *name, const float *values,
                                  size_t n_inner)
{
    for (size_t i = 0; i < s->n_channels * n_inner; i++) {
        const double value = (double)values[i];
        if (isfinite(value)) continue;
        if (n_inner == 1) return refuse_channel(s, name, i, "expected a finite number, found %g", value);
        return refuse_channel(s, name, i / n_inner, "entry %zu: expected a finite number, found %g",
                              i % n_inner, value);
    }
    return LOWKEY_OK;
}

static lowkey_status check_ranges(const struct subject *s)
{
    const lowkey_side_desc *side = s->side;
    const float largest = side->rule_8 == LOWKEY_RULE_INT8   ? 127
                          : side->rule_8 == LOWKEY_RULE_E4M3 ? 448
                                                             : 57344;
    LOWKEY_TRY(check_finite(s, "lower", side->lower, 1));
    LOWKEY_TRY(check_finite(s, "upper", side->upper, 1));
    LOWKEY_TRY(check_finite(s, "center", side->center, 1));
    LOWKEY_TRY(check_finite(s, "rule_scale", side->rule_scale, 1));
    if (side->metric_weight) LOWKEY_TRY(check_finite(s, "metric_weight", side->metric_weight, 1));
    for (size_t c = 0; c < s->n_channels; c++) {
        if (!(side->lower[c] <= side->upper[c]))
            return refuse_channel(s, "lower", c, "expected at most upper %.9g, found %.9g",
                                  (double)side->upper[c], (double)side->lower[c]);
        if (side->metric_weight && !(side->metric_weight[c] > 0))
            return refuse_channel(s, "metric_weight", c, "expected > 0, found %.9g", (double)side->metric_weight[c]);
        if (side->exponent[c] < -126 || side->exponent[c] > 112) /* 65504 * 2^112 is finite */
            return refuse_channel(s, "exponent", c, "expected -126 to 112, found %d", side->exponent[c]);
        if (side->bits[c] == 8 ? !(side->rule_scale[c] > 0) : side->rule_scale[c] != 1.0f)
            return refuse_channel(s, "rule_scale", c, "expected %s at %d bits, found %.9g",
                                  side->bits[c] == 8 ? "> 0" : "1", side->bits[c],
                                  (double)side->rule_scale[c]);
        if (side->bits[c] == 8 && !isfinite(side->rule_scale[c] * largest))
            return refuse_channel(s, "rule_scale", c, "expected a finite number times %g, found %.9g",
                                  (double)largest, (double)side->rule_scale[c]);
    }
    return LOWKEY_OK;
}

/* The finite f16 next to x on either side, x itself if it is one; infinite where there is none. Exact. */
static double f16_beside(double x, int above)
{
    int exponent; /* 2^(exponent-1) <= |x| < 2^exponent; an f16 there is a multiple of 2^(exponent-11), of 2^-24 at least */
    frexp(x, &exponent);
    const double step = ldexp(1, exponent > -13 ? exponent - 11 : -24);
    const double h = (above ? ceil(x / step) : floor(x / step)) * step;
    return fabs(h) <= 65504 ? h : HUGE_VAL;
}

static int exact_in_f16(double x)
{
    return fabs(x) <= 65504 && x == f16_beside(x, 0);
}

/* Is value the f32 nearest to center + h * 2^exponent for some finite f16 h? Rounding is monotone, so if any h does,
 * one of the two beside (value - center) / 2^exponent does. Sums in f64 are exact wherever the f32 result could be in
 * doubt: bits more than 2^-47 of the larger operand apart cannot reach a midpoint of f32. */
static int on_grid(float value, float center, int exponent)
{
    const double h = ldexp((double)value - (double)center, -exponent);
    for (int above = 0; above < 2; above++) {
        const double beside = f16_beside(h, above);
        if (isfinite(beside) && (float)((double)center + ldexp(beside, exponent)) == value) return 1;
    }
    return 0;
}

static lowkey_status check_entries(const struct subject *s, size_t c, int n_used)
{
    const float *table = s->side->table + c * (size_t)s->n_table;
    const double lower = (double)s->side->lower[c], upper = (double)s->side->upper[c],
                 reach = 2 * (upper - lower);
    for (int k = 0; k < s->n_table; k++) {
        const double entry = (double)table[k], last = n_used > 0 ? (double)table[n_used - 1] : 0;
        if (k >= n_used && entry != last)
            return refuse_channel(s, "table", c, "entry %d is not in use: expected %.9g, found %.9g", k, last,
                                  entry);
        if (k >= n_used) continue;
        if (k > 0 && !(entry > (double)table[k - 1]))
            return refuse_channel(s, "table", c, "entry %d (%.9g) is not above entry %d (%.9g)", k, entry,
                                  k - 1, (double)table[k - 1]);
        if (entry < lower - reach || entry > upper + reach)
            return refuse_channel(s, "table", c,
                                  "entry %d (%.9g) is farther outside [%.9g, %.9g] than twice that range", k,
                                  entry, lower, upper);
        if (!on_grid(table[k], s->side->center[c], s->side->exponent[c]))
            return refuse_channel(s, "table", c,
                                  "entry %d (%.9g) is not the f32 nearest to center %.9g + an f16 * 2^%d", k,
                                  entry, (double)s->side->center[c], s->side->exponent[c]);
    }
    return LOWKEY_OK;
}

static lowkey_status check_boundaries(const struct subject *s, size_t c, int n_used)
{
    const int n = s->n_table - 1;
    const float *boundary = s->side->boundary + c * (size_t)n;
    for (int k = 0; k < n; k++) {
        if (k >= n_used - 1 && boundary[k] != FLT_MAX)
            return refuse_channel(s, "boundary", c, "entry %d is not in use: expected %.9g, found %.9g", k,
                                  (double)FLT_MAX, (double)boundary[k]);
        if (k < n_used - 1 && boundary[k] == FLT_MAX)
            return refuse_channel(s, "boundary", c, "entry %d is in use: expected less than %.9g, found that",
                                  k, (double)FLT_MAX);
        if (k > 0 && boundary[k] < boundary[k - 1])
            return refuse_channel(s, "boundary", c, "entry %d (%.9g) is below entry %d (%.9g)", k,
                                  (double)boundary[k], k - 1, (double)boundary[k - 1]);
    }
    return LOWKEY_OK;
}

static lowkey_status check_tables(const struct subject *s)
{
    if (s->n_table == 0) return LOWKEY_OK;
    LOWKEY_TRY(check_finite(s, "table", s->side->table, (size_t)s->n_table));
    if (s->side->boundary) LOWKEY_TRY(check_finite(s, "boundary", s->side->boundary, (size_t)s->n_table - 1));
    for (size_t c = 0; c < s->n_channels; c++) {
        const int bits = s->side->bits[c], n_used = s->side->n_entries[c],
                  most = lowkey_most_entries(s->side->trellis, bits);
        if (n_used < (most > 0) || n_used > most)
            return refuse_channel(s, "n_entries", c, "expected %d to %d at %d bits, found %d", most > 0, most,
                                  bits, n_used);
        LOWKEY_TRY(check_entries(s, c, n_used));
        if (s->side->boundary) LOWKEY_TRY(check_boundaries(s, c, n_used));
    }
    return LOWKEY_OK;
}

static lowkey_status check_factor(const struct subject *s)
{
    const size_t d = (size_t)s->head_dim;
    for (size_t n = 0; s->side->factor && n < s->n_channels * d; n++) {
        const size_t h = n / (d * d), i = n / d % d, j = n % d;
        const double value = (double)s->side->factor[n];
        if (!exact_in_f16(value))
            return refuse(s, "factor head %zu row %zu column %zu: expected a number exact in f16, found %.9g",
                          h, i, j, value);
        if (i <= j && value != 0)
            return refuse(
                s, "factor head %zu row %zu column %zu: expected 0 on and above the diagonal, found %.9g", h,
                i, j, value);
    }
    return LOWKEY_OK;
}

lowkey_status lowkey_layer_check_values(const lowkey_layer_desc *layer, lowkey_error *err)
{
    for (int which = 0; which < 2; which++) {
        const struct subject s = subject_of(layer, which, err);
        LOWKEY_TRY(check_bits(&s));
        LOWKEY_TRY(check_order(&s));
        LOWKEY_TRY(check_ranges(&s));
        LOWKEY_TRY(check_tables(&s));
        LOWKEY_TRY(check_factor(&s));
    }
    return LOWKEY_OK;
}
