/* tune_entries.c - pages read by entry number. Threads share heads of keys and values, each of which has sums of its own. */
#include "experiments/tune_entries.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "calib/threads.h"
#include "formats/side.h"
#include "runtime/error.h"

struct walk;
/* Row (channel c of head h) of a page: entries of its tokens first..end-1, by slot. */
typedef void row_fn(const struct walk *walk, int which, int h, int c, int first, int end,
                    const uint8_t *entry);

struct walk {
    const struct lowkey_entry_layer *of;
    const struct lowkey_layer *layer;
    row_fn *row;
    double *const *sums;
    struct lowkey_side_report *reports;
    lowkey_status *statuses; /* [2 * n_heads] */
};

/* The page's tokens that are no sinks. */
static int first_token(const struct walk *walk, int page)
{
    const int n_sinks = lowkey_quantizer_describe(walk->of->quantizer)->n_sink_tokens;
    const int first = page * LOWKEY_PAGE_TOKENS;
    return first < n_sinks ? n_sinks : first;
}

/* entry [head_dim][64] of one page's rows, slots first..end-1 */
static void name_entries(const struct lowkey_side *side, int h, const uint8_t *page, int first, int end,
                         uint8_t (*entry)[LOWKEY_PAGE_TOKENS])
{
    const struct lowkey_row *rows = side->heads[h].rows;
    for (int r = 0; r < side->head_dim; r++)
        for (int s = first; s < end; s++)
            entry[rows[r].channel][s] = (uint8_t)lowkey_entry_get(page, rows, side->head_dim, r, s,
                                                                  side->trellis);
}

static lowkey_status walk_page(const struct walk *walk, int which, int h, int page,
                               uint8_t (*entry)[LOWKEY_PAGE_TOKENS])
{
    const struct lowkey_side *side = &walk->layer->side[which];
    const int first = first_token(walk, page), page_end = (page + 1) * LOWKEY_PAGE_TOKENS;
    const int end = page_end < walk->of->n_tokens ? page_end : walk->of->n_tokens;
    const int slot = first - page * LOWKEY_PAGE_TOKENS, slot_end = end - page * LOWKEY_PAGE_TOKENS;
    const void *bytes;
    size_t n_bytes;
    if (first >= end) return LOWKEY_OK;
    LOWKEY_TRY(
        lowkey_cache_page(walk->of->cache, 0, walk->of->index, page, which, h, &bytes, &n_bytes, NULL));
    name_entries(side, h, bytes, slot, slot_end, entry);
    for (int c = 0; c < side->head_dim; c++) walk->row(walk, which, h, c, first, end, entry[c]);
    return LOWKEY_OK;
}

static void walk_head(void *arg, int i)
{
    const struct walk *walk = arg;
    uint8_t entry[LOWKEY_MAX_HEAD_DIM][LOWKEY_PAGE_TOKENS];
    for (int page = 0; page * LOWKEY_PAGE_TOKENS < walk->of->n_tokens && !walk->statuses[i]; page++)
        walk->statuses[i] = walk_page(walk, i % 2, i / 2, page, entry);
}

static lowkey_status run_walk(struct walk *walk, lowkey_error *err)
{
    int n_threads = walk->of->n_threads;
    walk->layer = lowkey_quantizer_layer(walk->of->quantizer, walk->of->index);
    if (!walk->layer)
        return lowkey_fail(err, LOWKEY_EINVAL, "the quantizer has no layer %d", walk->of->index);
    const int n = 2 * walk->layer->desc->n_kv_heads;
    walk->statuses = calloc((size_t)n, sizeof *walk->statuses);
    if (!walk->statuses)
        return lowkey_fail(err, LOWKEY_ENOMEM, "no memory to read layer %d", walk->of->index);
    lowkey_threads_run(&n_threads, n, walk_head, walk);
    lowkey_status status = LOWKEY_OK;
    for (int i = 0; i < n; i++)
        if (walk->statuses[i]) status = walk->statuses[i];
    free(walk->statuses);
    return status ? lowkey_fail(err, status, "layer %d: its pages cannot be read", walk->of->index)
                  : LOWKEY_OK;
}

/* Where token t of channel c of head h is in rows. */
static size_t element(const struct walk *walk, int which, int h, int c, int t)
{
    const struct lowkey_side *side = &walk->layer->side[which];
    return ((size_t)t * (size_t)side->n_heads + (size_t)h) * (size_t)side->head_dim + (size_t)c;
}

static size_t channel_of(const struct walk *walk, int which, int h, int c)
{
    return element(walk, which, h, c, 0);
}

static void add_gradients(const struct walk *walk, int which, int h, int c, int first, int end,
                          const uint8_t *entry)
{
    double *sums = walk->sums[which] +
                   channel_of(walk, which, h, c) * (size_t)walk->layer->side[which].table_entries;
    for (int t = first; t < end; t++)
        sums[entry[t % LOWKEY_PAGE_TOKENS]] += (double)walk->of->grad[which][element(walk, which, h, c, t)];
}

lowkey_status lowkey_entry_gradients(const struct lowkey_entry_layer *layer, double *const sums[2],
                                     lowkey_error *err)
{
    struct walk walk = { .of = layer, .row = add_gradients, .sums = sums };
    return run_walk(&walk, err);
}

static void add_report(const struct walk *walk, int which, int h, int c, int first, int end,
                       const uint8_t *entry)
{
    struct lowkey_side_report *report = &walk->reports[which];
    const size_t channel = channel_of(walk, which, h, c),
                 n_table = (size_t)walk->layer->side[which].table_entries;
    for (int t = first; t < end; t++) {
        const size_t i = element(walk, which, h, c, t);
        const double x = (double)walk->of->x[which][i], e = (double)walk->of->stored[which][i] - x;
        report->mean[channel] += x;
        report->variance[channel] += x * x;
        report->mse[channel] += e * e;
        report->histogram[channel * n_table + entry[t % LOWKEY_PAGE_TOKENS]]++;
    }
}

lowkey_status lowkey_entry_reports(const struct lowkey_entry_layer *layer,
                                   struct lowkey_side_report reports[2], lowkey_error *err)
{
    struct walk walk = { .of = layer, .row = add_report, .reports = reports };
    LOWKEY_TRY(run_walk(&walk, err));
    const int n_sinks = lowkey_quantizer_describe(layer->quantizer)->n_sink_tokens;
    for (int which = 0; which < 2; which++)
        reports[which].n_tokens += (uint64_t)(layer->n_tokens > n_sinks ? layer->n_tokens - n_sinks : 0);
    return LOWKEY_OK;
}

void lowkey_entry_report_end(struct lowkey_side_report *report, size_t n_channels)
{
    const double n = (double)report->n_tokens;
    for (size_t c = 0; c < n_channels && n > 0; c++) {
        report->mean[c] /= n;
        report->variance[c] = fmax(report->variance[c] / n - report->mean[c] * report->mean[c], 0);
        report->mse[c] /= n;
        report->weighted_mse[c] = report->mse[c];
    }
}
