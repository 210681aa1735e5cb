/* moments.c - statistics of packed pages, and the corrections that follow from them. */
#include "calib/moments.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/element.h"
#include "runtime/error.h"

struct page_view { /* what a page's channels are read through */
    const struct lowkey_packed_page *page;
    const struct lowkey_moments *moments;
    const uint8_t *is_outlier; /* [n_tokens][C] */
    const float *value; /* [n_tokens][head_dim] of one head, reconstructed */
    int head;
};

static void add_table_units(const struct page_view *view, int row, struct lowkey_channel_moments *sum,
                            uint64_t *histogram)
{
    const struct lowkey_packed_page *page = view->page;
    const struct lowkey_side *side = page->side;
    const struct lowkey_head *head = &side->heads[view->head];
    const size_t C = (size_t)view->moments->n_channels;
    const int c = view->head * side->head_dim + head->rows[row].channel;
    const float *table = head->table + (size_t)row * (size_t)side->table_entries;
    const double shift = view->moments->shift[c];
    struct lowkey_channel_moments m = { 0 };
    for (int t = 0; t < page->n_tokens; t++) {
        const unsigned entry = lowkey_entry_get(page->pages[view->head], head->rows, side->head_dim, row,
                                                page->first_slot + t, side->trellis);
        const float x = page->x[(size_t)t * C + (size_t)c];
        histogram[entry]++;
        if (view->is_outlier[(size_t)t * C + (size_t)c]) continue;
        if (side->outlier_rule == LOWKEY_OUTLIER_LIMIT && !(x >= side->lower[c] && x <= side->upper[c]))
            continue;
        const struct lowkey_grid grid = lowkey_grid_of(side, page->side_page, page->first_slot + t, c);
        if (grid.scale == 0) continue;
        const double u = ((double)x - (double)grid.zero) / (double)grid.scale - shift,
                     v = (double)table[entry] - shift;
        m.n += 1;
        m.u += u;
        m.uu += u * u;
        m.v += v;
        m.vv += v * v;
        m.uv += u * v;
    }
    sum->n += m.n;
    sum->u += m.u;
    sum->uu += m.uu;
    sum->v += m.v;
    sum->vv += m.vv;
    sum->uv += m.uv;
}

static void add_errors(const struct page_view *view, int channel, struct lowkey_channel_moments *sum)
{
    const struct lowkey_packed_page *page = view->page;
    const size_t C = (size_t)view->moments->n_channels, D = (size_t)page->side->head_dim;
    const size_t c = (size_t)view->head * D + (size_t)channel;
    const struct lowkey_weight_shape *shape = view->moments->shapes ? &view->moments->shapes[c] : NULL;
    const double shift = view->moments->shift_x[c];
    struct lowkey_channel_moments m = { 0 };
    for (size_t t = 0; t < (size_t)page->n_tokens; t++) {
        const double x = (double)page->x[t * C + c], e = (double)view->value[t * D + (size_t)channel] - x;
        const double w = shape ? (double)lowkey_weight_made(shape, page->weight ? page->weight[t * C + c] : 1)
                               : 1;
        m.x += x - shift;
        m.xx += (x - shift) * (x - shift);
        m.error += e * e;
        m.weighted_error += w * e * e;
        m.weight += w;
    }
    sum->x += m.x;
    sum->xx += m.xx;
    sum->error += m.error;
    sum->weighted_error += m.weighted_error;
    sum->weight += m.weight;
}

static void mark_outliers(const struct lowkey_packed_page *page, size_t C, uint8_t *is_outlier)
{
    memset(is_outlier, 0, (size_t)page->n_tokens * C);
    if (page->side->outlier_rule == LOWKEY_OUTLIER_NONE) return;
    const struct lowkey_side *side = page->side;
    for (int t = 0; t < page->n_tokens; t++) {
        const int slot = page->first_slot + t;
        const int first = lowkey_first_outlier(side, page->side_page, slot, page->first_live_slot);
        const int end = lowkey_end_outlier(side, page->side_page, slot);
        for (int e = first; e < end; e++)
            is_outlier[(size_t)t * C + lowkey_get_outlier(side, page->side_page, e).channel] = 1;
    }
}

/* The sums of a run: channel moments, histogram, then the page's scratch. */
static size_t channels_bytes(const struct lowkey_moments *moments)
{
    return (size_t)moments->n_channels * sizeof(struct lowkey_channel_moments);
}

static size_t histogram_bytes(const struct lowkey_moments *moments)
{
    return (size_t)moments->n_channels * (size_t)moments->n_table * sizeof(uint64_t);
}

static void visit(void *user, void *sums, const struct lowkey_packed_page *page)
{
    const struct lowkey_moments *moments = user;
    const struct lowkey_side *side = page->side;
    const size_t C = (size_t)moments->n_channels, E = (size_t)moments->n_table;
    struct lowkey_channel_moments *channel = sums;
    uint64_t *histogram = (uint64_t *)((char *)sums + channels_bytes(moments));
    float *value = (float *)((char *)histogram + histogram_bytes(moments));
    uint8_t *is_outlier = (uint8_t *)(value + (size_t)LOWKEY_PAGE_SLOTS * (size_t)side->head_dim);
    mark_outliers(page, C, is_outlier);
    for (int h = 0; h < side->n_heads; h++) {
        lowkey_packed_page_read(page, h, value);
        const struct page_view view = { page, moments, is_outlier, value, h };
        for (int r = 0; r < side->head_dim; r++) {
            const size_t c = (size_t)h * (size_t)side->head_dim + side->heads[h].rows[r].channel;
            if (side->heads[h].rows[r].bits <= 5) add_table_units(&view, r, &channel[c], histogram + c * E);
            add_errors(&view, side->heads[h].rows[r].channel, &channel[c]);
        }
    }
}

static void fold(void *user, const void *sums)
{
    struct lowkey_moments *moments = user;
    const struct lowkey_channel_moments *channel = sums;
    const uint64_t *histogram = (const uint64_t *)((const char *)sums + channels_bytes(moments));
    for (int c = 0; c < moments->n_channels; c++) {
        const double *from = &channel[c].n; /* all its members are f64 */
        double *to = &moments->channel[c].n;
        for (size_t i = 0; i < sizeof channel[c] / sizeof(double); i++) to[i] += from[i];
    }
    for (size_t i = 0; i < (size_t)moments->n_channels * (size_t)moments->n_table; i++)
        moments->histogram[i] += histogram[i];
}

lowkey_status lowkey_moments_run(const struct lowkey_pack_pass *pass, struct lowkey_moments *moments,
                                 lowkey_error *err)
{
    struct lowkey_pack_pass mine = *pass;
    memset(moments->channel, 0, channels_bytes(moments));
    if (moments->n_table) memset(moments->histogram, 0, histogram_bytes(moments));
    moments->counts = (struct lowkey_pack_counts) { 0 };
    mine.visit = visit;
    mine.fold = fold;
    mine.user = moments;
    mine.sums_bytes = channels_bytes(moments) + histogram_bytes(moments) +
                      LOWKEY_PAGE_SLOTS *
                          ((size_t)pass->side->head_dim * sizeof(float) + (size_t)moments->n_channels);
    return lowkey_pack_pass(&mine, &moments->counts, err);
}

struct lowkey_correction lowkey_gain_correction(const struct lowkey_channel_moments *m, double shift)
{
    const double mean_u = m->u / m->n, mean_v = m->v / m->n;
    const double variance = m->uu / m->n - mean_u * mean_u, covariance = m->uv / m->n - mean_u * mean_v;
    if (!(m->n > 0 && variance > 0 && covariance > 0)) return (struct lowkey_correction) { 1, 0, 0 };
    return (struct lowkey_correction) { variance / covariance, shift + mean_v, shift + mean_u };
}

struct lowkey_correction lowkey_qnorm_correction(int n, const struct lowkey_channel_moments *m,
                                                 const double *shift, const double *zero, const double *scale)
{
    double count = 0, u = 0, uu = 0, v = 0, vv = 0;
    for (int c = 0; c < n; c++) {
        if (!(scale[c] > 0)) continue;
        const double by = 1 / scale[c],
                     add = (shift[c] - zero[c]) / scale[c]; /* normalised = by * (x - shift) + add */
        count += m[c].n;
        u += by * m[c].u + add * m[c].n;
        uu += by * by * m[c].uu + 2 * by * add * m[c].u + add * add * m[c].n;
        v += by * m[c].v + add * m[c].n;
        vv += by * by * m[c].vv + 2 * by * add * m[c].v + add * add * m[c].n;
    }
    const double mean_u = u / count, mean_v = v / count;
    const double variance_u = uu / count - mean_u * mean_u, variance_v = vv / count - mean_v * mean_v;
    if (!(count > 0 && variance_u > 0 && variance_v > 0)) return (struct lowkey_correction) { 1, 0, 0 };
    return (struct lowkey_correction) { sqrt(variance_u / variance_v), mean_v, mean_u };
}
