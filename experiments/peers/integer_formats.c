/* integer_formats.c - formats that share a scale and a zero: per token (int, NormalFloat), KIVI's groups
 * (arXiv 2402.02750: keys by channel over tokens, values by token over channels) and Kitty's keys (arXiv
 * 2511.18643: KIVI's groups of 128 tokens, the channels of largest mean magnitude of each page and head with
 * twice the bits). */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "calib/codebooks.h"
#include "experiments/peers/minmax.h"
#include "experiments/peers/peer_parts.h"
#include "formats/codes.h"
#include "runtime/error.h"

enum { SCALE_BITS = 32 }; /* of a scale and a zero, f16 each */

static int row_of(const struct lowkey_peer_side *side)
{
    return side->n_heads * side->head_dim;
}

/* ---- per token: the whole vector of a token shares a scale ---- */

static lowkey_status prepare_int(struct lowkey_peer_side *side, const struct lowkey_peer_sample *sample,
                                 int n_threads, lowkey_error *err)
{
    (void)sample, (void)n_threads, (void)err;
    side->bits = side->setting.bits + (double)SCALE_BITS / row_of(side);
    return LOWKEY_OK;
}

static void quantize_int(const struct lowkey_peer_side *side, float *x, int n_tokens)
{
    const int n = row_of(side);
    for (int t = 0; t < n_tokens; t++) lowkey_minmax_row(x + (size_t)t * (size_t)n, n, side->setting.bits);
}

const struct lowkey_peer_method lowkey_peer_int = { prepare_int, NULL, quantize_int };

struct table { /* on [-1, 1] */
    float entry[LOWKEY_MAX_TABLE], boundary[LOWKEY_MAX_TABLE];
};

static lowkey_status prepare_nf(struct lowkey_peer_side *side, const struct lowkey_peer_sample *sample,
                                int n_threads, lowkey_error *err)
{
    struct table *table = side->fitted = malloc(sizeof *table);
    if (!table) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for a table");
    double values[LOWKEY_MAX_TABLE];
    const int n = 1 << side->setting.bits;
    lowkey_normal_float_codebook(side->setting.bits, values);
    for (int k = 0; k < n; k++) table->entry[k] = (float)values[k];
    for (int k = 0; k + 1 < n; k++) table->boundary[k] = (float)((values[k] + values[k + 1]) / 2);
    return prepare_int(side, sample, n_threads, err);
}

static void quantize_nf(const struct lowkey_peer_side *side, float *x, int n_tokens)
{
    const struct table *table = side->fitted;
    const int n = row_of(side);
    for (int t = 0; t < n_tokens; t++) {
        float *row = x + (size_t)t * (size_t)n, low = row[0], high = row[0];
        for (int c = 1; c < n; c++) {
            low = row[c] < low ? row[c] : low;
            high = row[c] > high ? row[c] : high;
        }
        /* [-1, 1] is stretched to the range: the zero is its middle, the scale one step from there to its
         * top. */
        const struct lowkey_group_scale range = lowkey_minmax_scale(low / 2 + high / 2, high, 1);
        const float scale = range.scale, zero = range.zero;
        for (int c = 0; c < n; c++) row[c] = scale > 0 ? (row[c] - zero) / scale : 0;
        lowkey_nearest_entries(row, n, table->entry, table->boundary, 1 << side->setting.bits);
        for (int c = 0; c < n; c++) row[c] = zero + scale * row[c];
    }
}

const struct lowkey_peer_method lowkey_peer_nf = { prepare_nf, NULL, quantize_nf };

/* ---- KIVI ---- */

static lowkey_status prepare_channel_groups(struct lowkey_peer_side *side,
                                            const struct lowkey_peer_sample *sample, int n_threads,
                                            lowkey_error *err)
{
    (void)sample, (void)n_threads, (void)err;
    side->bits = side->setting.bits + (double)SCALE_BITS / side->setting.group;
    return LOWKEY_OK;
}

/* The tokens are one group: the last one of a sequence may be short. */
static void quantize_channel_groups(const struct lowkey_peer_side *side, float *x, int n_tokens)
{
    lowkey_minmax_columns(x, n_tokens, (size_t)row_of(side), row_of(side), NULL, side->setting.bits);
}

const struct lowkey_peer_method lowkey_peer_channel_groups = { prepare_channel_groups, NULL,
                                                               quantize_channel_groups };

static lowkey_status prepare_token_groups(struct lowkey_peer_side *side,
                                          const struct lowkey_peer_sample *sample, int n_threads,
                                          lowkey_error *err)
{
    if (side->setting.group > side->head_dim) side->setting.group = side->head_dim;
    if (side->head_dim % side->setting.group != 0)
        return lowkey_peer_refuse(side, err, "groups of %d channels do not divide a head of %d",
                                  side->setting.group, side->head_dim);
    return prepare_channel_groups(side, sample, n_threads, err);
}

static void quantize_token_groups(const struct lowkey_peer_side *side, float *x, int n_tokens)
{
    const int group = side->setting.group;
    const size_t n = (size_t)n_tokens * (size_t)row_of(side);
    for (size_t i = 0; i < n; i += (size_t)group) lowkey_minmax_row(x + i, group, side->setting.bits);
}

const struct lowkey_peer_method lowkey_peer_token_groups = { prepare_token_groups, NULL,
                                                             quantize_token_groups };

/* ---- Kitty ---- */

static int n_boosted(const struct lowkey_peer_side *side)
{
    return (int)(side->head_dim * side->setting.rate + 1e-6);
}

static lowkey_status prepare_kitty(struct lowkey_peer_side *side, const struct lowkey_peer_sample *sample,
                                   int n_threads, lowkey_error *err)
{
    (void)sample, (void)n_threads, (void)err;
    const double share = (double)n_boosted(side) / side->head_dim;
    /* A byte per channel and page says where its upper bits are. */
    side->bits = side->setting.bits * (1 + share) + (SCALE_BITS + 8.0) / side->setting.group;
    return LOWKEY_OK;
}

static void quantize_kitty(const struct lowkey_peer_side *side, float *x, int n_tokens)
{
    const int D = side->head_dim;
    const size_t row = (size_t)row_of(side);
    for (int h = 0; h < side->n_heads; h++) {
        float *head = x + (size_t)h * (size_t)D;
        double magnitude[LOWKEY_MAX_HEAD_DIM] = { 0 };
        unsigned char bits[LOWKEY_MAX_HEAD_DIM];
        for (int t = 0; t < n_tokens; t++)
            for (int c = 0; c < D; c++) magnitude[c] += fabs((double)head[(size_t)t * row + (size_t)c]);
        memset(bits, side->setting.bits, sizeof bits);
        for (int i = 0; i < n_boosted(side); i++) {
            int best = 0;
            for (int c = 1; c < D; c++)
                if (magnitude[c] > magnitude[best]) best = c;
            bits[best] = (unsigned char)(2 * side->setting.bits);
            magnitude[best] = -1;
        }
        lowkey_minmax_columns(head, n_tokens, row, D, bits, 0);
    }
}

const struct lowkey_peer_method lowkey_peer_kitty_keys = { prepare_kitty, NULL, quantize_kitty };
