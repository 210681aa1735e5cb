/* drift.c - counts codes of new keys and values, channel by channel, and compares them with those of the fit. */
#include "experiments/drift.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "calib/pack_pass.h"
#include "formats/geometry.h"
#include "formats/identity.h"
#include "formats/side.h"
#include "runtime/error.h"

static const struct lowkey_side *packed_side(const lowkey_drift *drift, const struct lowkey_drift_side *side)
{
    return &lowkey_quantizer_layer(drift->quantizer, side->layer->index)->side[side->which];
}

static size_t n_channels(const struct lowkey_side *side)
{
    return (size_t)side->n_heads * (size_t)side->head_dim;
}

lowkey_status lowkey_drift_create(const lowkey_quantizer *quantizer, const struct lowkey_fit_record *record,
                                  lowkey_drift **out, lowkey_error *err)
{
    const lowkey_quantizer_desc *desc = lowkey_quantizer_describe(quantizer);
    lowkey_drift *drift = *out = calloc(1, sizeof *drift);
    if (drift) drift->sides = calloc((size_t)desc->n_layers * 2, sizeof *drift->sides);
    int good = drift && drift->sides;
    if (good) drift->quantizer = quantizer, drift->record = record, drift->n_sides = 2 * desc->n_layers;
    for (int i = 0; good && i < drift->n_sides; i++) {
        struct lowkey_drift_side *side = &drift->sides[i];
        side->layer = &desc->layers[i / 2];
        side->which = i % 2;
        const struct lowkey_side *packed = packed_side(drift, side);
        const size_t n = n_channels(packed);
        side->has_outside = packed->token_scale == LOWKEY_SCALE_NONE;
        side->outside = calloc(n, sizeof *side->outside);
        if (packed->table_entries)
            side->counts = calloc(n * (size_t)packed->table_entries, sizeof *side->counts);
        good = side->outside && (side->counts || !packed->table_entries);
    }
    if (good) return LOWKEY_OK;
    lowkey_drift_free(drift);
    *out = NULL;
    return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for code histograms");
}

void lowkey_drift_free(lowkey_drift *drift)
{
    if (!drift) return;
    for (int i = 0; i < drift->n_sides; i++) {
        free(drift->sides[i].counts);
        free(drift->sides[i].outside);
    }
    free(drift->sides);
    free(drift);
}

/* The entries that codes of slots first..end-1 stand for, of a head's page; counts: the head's, [D][E]. */
static void count_codes(const struct lowkey_side *side, int head, const uint8_t *page, int first, int end,
                        uint64_t *counts)
{
    for (int r = 0; r < side->head_dim; r++) {
        const struct lowkey_row *row = &side->heads[head].rows[r];
        uint64_t *channel = counts + (size_t)row->channel * (size_t)side->table_entries;
        if (row->bits > 5) continue;
        for (int t = first; t < end; t++)
            channel[lowkey_entry_get(page, side->heads[head].rows, side->head_dim, r, t, side->trellis)]++;
    }
}

/* ---- captures ---- */

/* sums of a run: counts, then outside */
static void visit(void *user, void *sums, const struct lowkey_packed_page *page)
{
    (void)user;
    const struct lowkey_side *side = page->side;
    const size_t C = n_channels(side), width = (size_t)side->head_dim * (size_t)side->table_entries;
    const int end = page->first_slot + page->n_tokens,
              first = page->first_slot > page->first_live_slot ? page->first_slot : page->first_live_slot;
    uint64_t *counts = sums, *outside = counts + C * (size_t)side->table_entries;
    for (int h = 0; h < side->n_heads && side->table_entries; h++)
        count_codes(side, h, page->pages[h], first, end, counts + (size_t)h * width);
    for (int t = first - page->first_slot; t < page->n_tokens; t++) {
        const float *x = page->x + (size_t)t * C;
        for (size_t c = 0; c < C; c++) outside[c] += x[c] < side->lower[c] || x[c] > side->upper[c];
    }
}

struct folding {
    struct lowkey_drift_side *side;
    size_t n_counts, n_channels;
};

static void fold(void *user, const void *sums)
{
    const struct folding *folding = user;
    const uint64_t *counts = sums, *outside = counts + folding->n_counts;
    for (size_t i = 0; i < folding->n_counts; i++) folding->side->counts[i] += counts[i];
    for (size_t c = 0; c < folding->n_channels; c++) folding->side->outside[c] += outside[c];
}

static lowkey_status add_side(lowkey_drift *drift, struct lowkey_drift_side *side,
                              const lowkey_captures *captures, int layer, int n_threads, lowkey_error *err)
{
    const struct lowkey_side *packed = packed_side(drift, side);
    struct folding folding = { side, n_channels(packed) * (size_t)packed->table_entries, n_channels(packed) };
    const struct lowkey_pack_pass pass = {
        .captures = captures,
        .layer = layer,
        .stream = side->which ? LOWKEY_VALUE : LOWKEY_KEY,
        .side = packed,
        .n_threads = n_threads,
        .visit = visit,
        .fold = fold,
        .sums_bytes = (folding.n_counts + folding.n_channels) * sizeof(uint64_t),
        .user = &folding,
    };
    struct lowkey_pack_counts counts = { 0 };
    LOWKEY_TRY(lowkey_pack_pass(&pass, &counts, err));
    side->n_tokens += (uint64_t)captures->n_tokens;
    return LOWKEY_OK;
}

static struct lowkey_drift_side *sides_of_layer(lowkey_drift *drift, int index)
{
    for (int i = 0; i < drift->n_sides; i += 2)
        if (drift->sides[i].layer->index == index) return &drift->sides[i];
    return NULL;
}

static lowkey_status add_all(lowkey_drift *drift, const char *name, const char *path,
                             const lowkey_captures *captures, int n_threads, lowkey_error *err)
{
    const struct lowkey_identity
        fitted = lowkey_identity_of_quantizer(name, lowkey_quantizer_describe(drift->quantizer)),
        given = lowkey_identity_of_activations(path, captures->info);
    LOWKEY_TRY(lowkey_identity_check(&fitted, &given, 0, err));
    for (int l = 0; l < captures->info->n_layers; l++) {
        struct lowkey_drift_side *sides = sides_of_layer(drift, captures->info->layers[l].index);
        for (int which = 0; which < 2; which++)
            LOWKEY_TRY(add_side(drift, &sides[which], captures, l, n_threads, err));
    }
    return LOWKEY_OK;
}

lowkey_status lowkey_drift_add_captures(lowkey_drift *drift, const char *name, int n_paths,
                                        const char *const *paths, int n_threads, lowkey_error *err)
{
    const int n_sinks = lowkey_quantizer_describe(drift->quantizer)->n_sink_tokens;
    lowkey_captures *captures;
    LOWKEY_TRY(lowkey_captures_open(n_paths, paths, 0, 0, n_sinks, &captures, err));
    const lowkey_status status = add_all(drift, name, paths[0], captures, n_threads, err);
    lowkey_captures_close(captures);
    return status;
}

/* ---- a live cache ---- */

static lowkey_status add_cache_side(struct lowkey_drift_side *side, const struct lowkey_side *packed,
                                    const lowkey_cache *cache, int sequence, int n_sinks, lowkey_error *err)
{
    const int index = side->layer->index, length = lowkey_cache_length(cache, sequence, index);
    if (length < 0)
        return lowkey_fail(err, LOWKEY_EINVAL, "drift: the cache has no sequence %d with a layer %d", sequence,
                           index);
    if (length <= n_sinks) return LOWKEY_OK;
    const size_t width = (size_t)packed->head_dim * (size_t)packed->table_entries;
    for (int page = 0; page * LOWKEY_PAGE_SLOTS < length && packed->table_entries; page++) {
        const int start = page * LOWKEY_PAGE_SLOTS, left = length - start;
        const int first = n_sinks > start ? n_sinks - start : 0,
                  end = left < LOWKEY_PAGE_SLOTS ? left : LOWKEY_PAGE_SLOTS;
        for (int h = 0; h < packed->n_heads && first < end; h++) {
            const void *bytes;
            size_t n_bytes;
            LOWKEY_TRY(lowkey_cache_page(cache, sequence, index, page, side->which, h, &bytes, &n_bytes, err));
            if (n_bytes != packed->heads[h].page_bytes)
                return lowkey_fail(err, LOWKEY_EINVAL, "drift: the cache is of another quantizer (layer %d)",
                                   index);
            count_codes(packed, h, bytes, first, end, side->counts + (size_t)h * width);
        }
    }
    side->n_tokens += (uint64_t)(length - n_sinks);
    side->has_outside = 0;
    return LOWKEY_OK;
}

lowkey_status lowkey_drift_add_cache(lowkey_drift *drift, const lowkey_cache *cache, int sequence,
                                     lowkey_error *err)
{
    const int n_sinks = lowkey_quantizer_describe(drift->quantizer)->n_sink_tokens;
    for (int i = 0; i < drift->n_sides; i++)
        LOWKEY_TRY(add_cache_side(&drift->sides[i], packed_side(drift, &drift->sides[i]), cache, sequence,
                                  n_sinks, err));
    return LOWKEY_OK;
}

/* ---- what it comes to ---- */

static double part(uint64_t count, double total, double other_share)
{
    const double share = (double)count / total;
    return count ? share * log2(2 * share / (share + other_share)) : 0;
}

double lowkey_divergence(const uint64_t *a, const uint64_t *b, int n)
{
    double total_a = 0, total_b = 0, sum = 0;
    for (int i = 0; i < n; i++) total_a += (double)a[i], total_b += (double)b[i];
    if (total_a == 0 || total_b == 0) return 0;
    for (int i = 0; i < n; i++)
        sum += part(a[i], total_a, (double)b[i] / total_b) + part(b[i], total_b, (double)a[i] / total_a);
    return sum > 0 ? sum / 2 : 0;
}

static double ends(const uint64_t *counts, int n_entries)
{
    double total = 0;
    for (int k = 0; k < n_entries; k++) total += (double)counts[k];
    if (total == 0) return 0;
    return (double)(counts[0] + (n_entries > 1 ? counts[n_entries - 1] : 0)) / total;
}

static struct lowkey_drift_channel describe(const lowkey_drift *drift, int i, size_t c)
{
    const struct lowkey_drift_side *side = &drift->sides[i];
    const lowkey_side_desc *desc = lowkey_side_of(side->layer, side->which);
    const size_t E = (size_t)desc->table_entries, D = (size_t)lowkey_side_head_dim(side->layer, side->which);
    const uint64_t *now = side->counts + c * E,
                   *fitted = drift->record->reports[i / 2][side->which].histogram + c * E;
    return (struct lowkey_drift_channel) {
        .layer = side->layer->index,
        .which = side->which,
        .head = (int)(c / D),
        .channel = (int)(c % D),
        .bits = desc->bits[c],
        .divergence = lowkey_divergence(now, fitted, (int)E),
        .ends = ends(now, desc->n_entries[c]),
        .ends_fit = ends(fitted, desc->n_entries[c]),
        .outside = side->has_outside ? (double)side->outside[c] / (double)side->n_tokens : (double)NAN,
    };
}

/* Channels of a side that there is something to say of: 0 where it holds no tokens or no tables. */
static size_t counted_channels(const lowkey_drift *drift, int i)
{
    const struct lowkey_drift_side *side = &drift->sides[i];
    return side->counts && side->n_tokens ? n_channels(packed_side(drift, side)) : 0;
}

struct lowkey_drift_channel lowkey_drift_mean(const lowkey_drift *drift, int i)
{
    const struct lowkey_drift_side *side = &drift->sides[i];
    struct lowkey_drift_channel mean = { .layer = side->layer->index, .which = side->which, .head = -1 };
    for (size_t c = 0; c < counted_channels(drift, i); c++) {
        const struct lowkey_drift_channel one = describe(drift, i, c);
        if (one.bits > 5) continue;
        mean.channel++;
        mean.divergence += one.divergence;
        mean.ends += one.ends;
        mean.ends_fit += one.ends_fit;
        mean.outside += one.outside;
    }
    const double n = mean.channel ? mean.channel : 1;
    mean.divergence /= n, mean.ends /= n, mean.ends_fit /= n, mean.outside /= n;
    return mean;
}

static int by_divergence(const void *a, const void *b)
{
    const struct lowkey_drift_channel *x = a, *y = b;
    if (x->divergence != y->divergence) return x->divergence < y->divergence ? 1 : -1;
    if (x->layer != y->layer) return x->layer - y->layer;
    if (x->which != y->which) return x->which - y->which;
    return x->head != y->head ? x->head - y->head : x->channel - y->channel;
}

struct lowkey_drift_channel *lowkey_drift_channels(const lowkey_drift *drift, size_t *n)
{
    size_t most = 1;
    for (int i = 0; i < drift->n_sides; i++) most += counted_channels(drift, i);
    struct lowkey_drift_channel *channels = calloc(most, sizeof *channels);
    *n = 0;
    for (int i = 0; channels && i < drift->n_sides; i++)
        for (size_t c = 0; c < counted_channels(drift, i); c++) {
            channels[*n] = describe(drift, i, c);
            *n += channels[*n].bits <= 5;
        }
    if (channels) qsort(channels, *n, sizeof *channels, by_divergence);
    return channels;
}

const char *lowkey_drift_verdict(double mean_divergence, double worst_divergence)
{
    if (mean_divergence <= 0.012 && worst_divergence <= 0.25) return "fits";
    return mean_divergence <= 0.03 ? "shifted" : "does not fit";
}
