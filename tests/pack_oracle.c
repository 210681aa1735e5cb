/* pack_oracle.c - packing as the document says, one element after the other. Numbers are rounded by searching the
 * neighbouring representable ones in double, so that nothing of formats/half.h is used. */
#include "tests/pack_oracle.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "tests/trellis_oracle.h"

struct format { /* a small float: mantissa bits, exponent of its smallest normal number, largest number */
    int mantissa, smallest;
    double largest, overflow; /* what lies beyond overflow (or at it, where ties go up) saturates */
    int tie_overflows;
};
static const struct format F16 = { 10, -14, 65504, 65520, 1 }, BF16 = { 7, -126, 0x1.fep127, 0x1.ffp127, 1 };
static const struct format E4M3 = { 3, -6, 448, 464, 0 }, E5M2 = { 2, -14, 57344, 61440, 1 };

static double rounded(double x, const struct format *format, long *saturated)
{
    const double size = fabs(x);
    if (size > format->overflow || (size == format->overflow && format->tie_overflows)) {
        ++*saturated;
        return copysign(format->largest, x);
    }
    int exponent = size == 0 ? format->smallest : ilogb(size);
    if (exponent < format->smallest) exponent = format->smallest;
    const double step = ldexp(1, exponent - format->mantissa);
    return copysign(fmin(rint(size / step) * step, format->largest), x);
}

static unsigned bits_of(double x, const struct format *format, int sign_bit)
{
    const unsigned sign = signbit(x) ? 1u << sign_bit : 0;
    const double size = fabs(x);
    if (size < ldexp(1, format->smallest))
        return sign | (unsigned)ldexp(size, format->mantissa - format->smallest);
    const int exponent = ilogb(size);
    const unsigned mantissa = (unsigned)ldexp(size, format->mantissa - exponent) - (1u << format->mantissa);
    return sign | (unsigned)(exponent - format->smallest + 1) << format->mantissa | mantissa;
}

static double number_of(unsigned bits, const struct format *format, int sign_bit)
{
    const double sign = bits >> sign_bit & 1 ? -1 : 1;
    const int exponent = (int)((bits & ((1u << sign_bit) - 1)) >> format->mantissa);
    const double mantissa = bits & ((1u << format->mantissa) - 1);
    if (exponent == 0) return sign * ldexp(mantissa, format->smallest - format->mantissa);
    return sign *
           ldexp(mantissa + ldexp(1, format->mantissa), format->smallest + exponent - 1 - format->mantissa);
}

static const struct format *format_of(lowkey_rule rule)
{
    return rule == LOWKEY_RULE_F16    ? &F16
           : rule == LOWKEY_RULE_BF16 ? &BF16
           : rule == LOWKEY_RULE_E4M3 ? &E4M3
                                      : &E5M2;
}

struct lowkey_oracle_token *lowkey_oracle_token_new(int n_channels)
{
    const size_t n = (size_t)n_channels;
    struct lowkey_oracle_token *token = malloc(sizeof *token);
    *token = (struct lowkey_oracle_token) {
        .codes = calloc(n, sizeof(unsigned)),
        .values = calloc(n, sizeof(float)),
        .scales = calloc(n, sizeof(float)),
        .zeros = calloc(n, sizeof(float)),
        .outliers = calloc(n, sizeof(struct lowkey_oracle_outlier)),
    };
    return token;
}

void lowkey_oracle_token_free(struct lowkey_oracle_token *token)
{
    free(token->codes), free(token->values), free(token->scales), free(token->zeros), free(token->outliers);
    free(token);
}

/* ---- outliers: a channel's kind is 0 ordinary, 1 by rank without room, 2 stored ---- */

struct ranked {
    double key; /* the greatest first */
    int channel;
};

static int compare_ranked(const void *a, const void *b)
{
    const struct ranked *x = a, *y = b;
    if (x->key != y->key) return x->key < y->key ? 1 : -1;
    return x->channel - y->channel;
}

static void choose_outliers(const lowkey_side_desc *side, int n, const float *x, int room, int *kinds,
                            long *clamped)
{
    struct ranked *ranked = calloc((size_t)n, sizeof *ranked);
    for (int c = 0; c < n; c++) kinds[c] = 0;
    if (side->outlier_rule != LOWKEY_OUTLIER_NONE && room > side->outlier_cap) room = side->outlier_cap;
    if (side->outlier_rule == LOWKEY_OUTLIER_RANK) {
        int n_chosen = 0;
        for (int sign = 1; sign >= -1; sign -= 2) {
            int m = 0;
            for (int c = 0; c < n; c++)
                if (side->bits[c] != 16 && kinds[c] == 0)
                    ranked[m++] = (struct ranked) { sign * (double)x[c], c };
            qsort(ranked, (size_t)m, sizeof *ranked, compare_ranked);
            for (int i = 0; i < m && i < side->outlier_rank; i++) kinds[ranked[i].channel] = 1, n_chosen++;
        }
        *clamped += n_chosen > room ? n_chosen - room : 0;
        for (int c = 0; c < n; c++)
            if (kinds[c] == 1 && room > 0) kinds[c] = 2, room--;
    }
    if (side->outlier_rule == LOWKEY_OUTLIER_LIMIT) {
        int m = 0;
        for (int c = 0; c < n; c++) {
            const float range = side->upper[c] - side->lower[c];
            float distance = -1;
            if (x[c] > side->upper[c]) distance = x[c] - side->upper[c];
            if (x[c] < side->lower[c]) distance = side->lower[c] - x[c];
            if (distance < 0 || side->bits[c] == 16) continue;
            const float relative = range == 0 ? INFINITY : distance / range;
            ranked[m++] = (struct ranked) { (double)relative, c };
        }
        qsort(ranked, (size_t)m, sizeof *ranked, compare_ranked);
        for (int i = 0; i < m; i++)
            if (i < room)
                kinds[ranked[i].channel] = 2;
            else
                ++*clamped;
    }
    free(ranked);
}

static void find_scales(const lowkey_side_desc *side, int n, const float *x, const int *kinds,
                        struct lowkey_oracle_token *token)
{
    for (int b = 0; side->token_scale != LOWKEY_SCALE_NONE && b < n / side->scale_block; b++) {
        int any = 0;
        float high = 0, low = 0;
        for (int c = b * side->scale_block; c < (b + 1) * side->scale_block; c++) {
            if (kinds[c] != 0 || side->bits[c] > 5) continue;
            const float value = x[c] == 0 ? 0 : x[c];
            if (!any || value > high) high = value;
            if (!any || value < low) low = value;
            any = 1;
        }
        const float half_high = 0.5f * high, half_low = 0.5f * low;
        float zero = half_high + half_low, scale = half_high - half_low;
        if (!any) zero = scale = 0;
        if (side->token_scale == LOWKEY_SCALE_F16) {
            zero = (float)rounded((double)zero, &F16, &token->saturated);
            scale = (float)rounded((double)scale, &F16, &token->saturated);
        }
        float largest = 0;
        for (int i = 0; i < n * side->table_entries; i++) largest = fmaxf(largest, fabsf(side->table[i]));
        for (int halvings = 0;; halvings++) {
            const float product = scale * largest;
            if (fabsf(zero) + product <= FLT_MAX) break;
            token->saturated += halvings == 0;
            scale = scale / 2;
            if (side->token_scale == LOWKEY_SCALE_F16)
                scale = (float)rounded((double)scale, &F16, &token->saturated);
        }
        token->zeros[b] = zero, token->scales[b] = scale;
    }
}

/* ---- one element ---- */

/* The code of t; *value becomes what it decodes to. */
static unsigned find_code(const lowkey_side_desc *side, int c, float t,
                          const struct lowkey_oracle_token *token, float *value, long *saturated)
{
    const int bits = side->bits[c],
              block = side->token_scale != LOWKEY_SCALE_NONE ? c / side->scale_block : -1;
    if (bits == 16) {
        const struct format *format = format_of(side->rule_16);
        *value = (float)rounded((double)t, format, saturated);
        return bits_of((double)*value, format, 15);
    }
    if (bits == 8 && side->rule_8 == LOWKEY_RULE_INT8) {
        const float u = t / side->rule_scale[c];
        const double integer = rint((double)u), clamped = fmax(-127, fmin(127, integer)) + 0.0; /* no -0 */
        *saturated += integer != clamped;
        *value = side->rule_scale[c] * (float)clamped;
        return (unsigned)(int)clamped & 255;
    }
    if (bits == 8) {
        const struct format *format = format_of(side->rule_8);
        const float u = t / side->rule_scale[c];
        const double small = rounded((double)u, format, saturated);
        *value = side->rule_scale[c] * (float)small;
        return bits_of(small, format, 7);
    }
    unsigned code = 0;
    for (int k = 0; k < side->n_entries[c] - 1; k++) {
        float boundary = side->boundary[c * (side->table_entries - 1) + k];
        if (block >= 0) {
            const float product = token->scales[block] * boundary;
            boundary = token->zeros[block] + product;
        }
        if (boundary < t) code++;
    }
    if (block >= 0 && token->scales[block] == 0) code = 0;
    *value = side->table[c * side->table_entries + (int)code];
    if (block >= 0) {
        const float product = token->scales[block] * *value;
        *value = token->zeros[block] + product;
    }
    return code;
}

void lowkey_oracle_pack(const lowkey_side_desc *side, int n_heads, int head_dim, const float *x, int room,
                        struct lowkey_oracle_token *token)
{
    const int n = n_heads * head_dim, d = head_dim;
    int *kinds = calloc((size_t)n, sizeof *kinds);
    float *errors = calloc((size_t)d, sizeof *errors);
    double *residuals = calloc((size_t)n, sizeof *residuals);
    token->clamped = token->saturated = 0;
    choose_outliers(side, n, x, room, kinds, &token->clamped);
    find_scales(side, n, x, kinds, token);
    for (int h = 0; h < n_heads && side->trellis; h++)
        lowkey_oracle_trellis(side, h, d, x + h * d, token->codes + h * d, token->values + h * d);
    for (int h = 0; h < n_heads && !side->trellis; h++)
        for (int j = d - 1; j >= 0; j--) {
            const int c = h * d + side->order[h * d + j];
            float t = x[c];
            for (int i = d - 1; i > j && side->factor; i--)
                t = fmaf(-side->factor[(h * d + i) * d + j], errors[i], t);
            if (!isfinite(t)) t = x[c];
            token->codes[c] = find_code(side, c, t, token, &token->values[c], &token->saturated);
            if (kinds[c] == 2) {
                const float missing = x[c] - token->values[c];
                const float quotient = missing / ldexpf(1, side->exponent[c]);
                residuals[c] = rounded((double)quotient, &F16, &token->saturated);
                float added = (float)ldexp(residuals[c], side->exponent[c]);
                if (fabsf(token->values[c] + added) > FLT_MAX) { /* the next number toward zero */
                    residuals[c] = number_of(bits_of(residuals[c], &F16, 15) - 1, &F16, 15);
                    added = (float)ldexp(residuals[c], side->exponent[c]);
                }
                token->values[c] = token->values[c] + added;
            }
            errors[j] = token->values[c] - x[c];
        }
    token->n_outliers = 0;
    for (int c = 0; c < n; c++)
        if (kinds[c] == 2)
            token->outliers[token->n_outliers++] = (struct lowkey_oracle_outlier) { c, residuals[c] };
    free(kinds), free(errors), free(residuals);
}

/* ---- bytes ---- */

static int has_row(int bits, int plane)
{
    return bits == 3 ? plane == 2 || plane == 1 : bits == 5 ? plane == 4 || plane == 1 : bits == plane;
}

/* Byte offset of the channel's row in that plane (-1: the page's end); *bytes: of the whole page. */
static size_t row_offset(const lowkey_side_desc *side, int head_dim, int head, int channel, int wanted_plane)
{
    static const int planes[] = { 16, 8, 4, 2, 1 };
    size_t offset = 0;
    for (int p = 0; p < 5; p++) {
        for (int r = 0; r < head_dim; r++) {
            const int c = side->order[head * head_dim + r];
            if (!has_row(side->bits[head * head_dim + c], planes[p])) continue;
            if (c == channel && planes[p] == wanted_plane) return offset;
            offset += 8 * (size_t)planes[p];
        }
        while (offset % 64) offset++;
    }
    return offset;
}

size_t lowkey_oracle_page_bytes(const lowkey_side_desc *side, int head_dim, int head)
{
    return row_offset(side, head_dim, head, -1, 0);
}

unsigned lowkey_oracle_code(const lowkey_side_desc *side, int head_dim, int head, const uint8_t *page,
                            int channel, int slot)
{
    static const int planes[] = { 16, 8, 4, 2, 1 };
    const int bits = side->bits[head * head_dim + channel];
    unsigned code = 0;
    int filled = 0; /* low bits come from the wider plane */
    for (int i = 0; i < 5; i++) {
        const int p = planes[i];
        if (!has_row(bits, p)) continue;
        const uint8_t *row = page + row_offset(side, head_dim, head, channel, p);
        const unsigned part = p == 16 ? row[2 * slot] + 256u * row[2 * slot + 1]
                                      : row[slot % (8 * p)] >> (p * (slot / (8 * p))) & ((1u << p) - 1);
        code |= part << filled;
        filled += p;
    }
    return code;
}

static size_t padded(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static size_t scale_section(const lowkey_side_desc *side, int n_channels)
{
    if (side->token_scale == LOWKEY_SCALE_NONE) return 0;
    return padded(64 * (size_t)(n_channels / side->scale_block) *
                  (side->token_scale == LOWKEY_SCALE_F32 ? 4 : 2));
}

float lowkey_oracle_scale(const lowkey_side_desc *side, int n_channels, const uint8_t *side_page, int slot,
                          int block, int want_zero)
{
    const size_t i = (size_t)(slot * (n_channels / side->scale_block) + block);
    const uint8_t *section = side_page + (want_zero ? scale_section(side, n_channels) : 0);
    if (side->token_scale == LOWKEY_SCALE_F16)
        return (float)number_of(section[2 * i] + 256u * section[2 * i + 1], &F16, 15);
    const struct format f32 = { 23, -126, (double)FLT_MAX, 0, 0 };
    const uint8_t *at = section + 4 * i;
    return (float)number_of(at[0] | (unsigned)at[1] << 8 | (unsigned)at[2] << 16 | (unsigned)at[3] << 24,
                            &f32, 31);
}

int lowkey_oracle_outliers(const lowkey_side_desc *side, int n_channels, const uint8_t *side_page, int slot,
                           int first_live_slot, struct lowkey_oracle_outlier *out)
{
    const uint8_t *ends = side_page + 2 * scale_section(side, n_channels), *entries = ends + padded(128);
    const int first = slot == first_live_slot ? 0 : ends[2 * slot - 2] + 256 * ends[2 * slot - 1];
    const int n = ends[2 * slot] + 256 * ends[2 * slot + 1] - first;
    for (int i = 0; i < n; i++) {
        const uint8_t *entry = entries + 4 * (size_t)(first + i);
        out[i] = (struct lowkey_oracle_outlier) { entry[0] + 256 * entry[1],
                                                  number_of(entry[2] + 256u * entry[3], &F16, 15) };
    }
    return n;
}

size_t lowkey_oracle_side_page_bytes(const lowkey_side_desc *side, int n_channels)
{
    const size_t outliers = side->outlier_rule == LOWKEY_OUTLIER_NONE
                                ? 0
                                : 128 + padded(4 * (size_t)side->outlier_page_capacity);
    return 2 * scale_section(side, n_channels) + outliers;
}
