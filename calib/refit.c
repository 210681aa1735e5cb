/* refit.c - with feedback a row quantizes t = x - sum of l e, not x: tables fitted to x are not the best for it; nor are
 * they for a trellis, which does not take the nearest entry. Sums of weights and targets over the entries that packing
 * takes, and the tables they make. */
#include "calib/refit.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/element.h"
#include "runtime/error.h"

struct refit {
    const struct lowkey_side_fit *fit;
    struct lowkey_mass *sums; /* [C][E] */
};

static size_t sums_count(const struct lowkey_side_fit *fit)
{
    return fit->n_channels * (size_t)fit->n_table;
}

/* What the rows of one token quantize. value: its reconstruction by channel; x: what was packed. */
static void find_targets(const struct lowkey_head *head, int D, const float *x, const float *value, float *target)
{
    for (int r = 0; r < D; r++) target[r] = x[head->rows[r].channel];
    for (int j = D - 1; j > 0 && head->factor; j--) {
        const int c = head->rows[j].channel;
        const float error = value[c] - x[c], *factor = head->factor + (size_t)j * (size_t)D;
        for (int i = 0; i < j; i++) target[i] -= factor[i] * error;
    }
}

static void visit(void *user, void *of, const struct lowkey_packed_page *page)
{
    const struct refit *refit = user;
    const struct lowkey_side_fit *fit = refit->fit;
    const struct lowkey_side *side = page->side;
    const size_t C = fit->n_channels, D = (size_t)fit->head_dim, E = (size_t)fit->n_table;
    struct lowkey_mass *sums = of;
    float *value = (float *)(sums + sums_count(fit)), target[LOWKEY_MAX_HEAD_DIM];
    for (int h = 0; h < side->n_heads; h++) {
        const struct lowkey_head *head = &side->heads[h];
        lowkey_packed_page_read(page, h, value);
        for (int t = 0; t < page->n_tokens; t++) {
            const size_t row = (size_t)t * C + (size_t)h * D;
            find_targets(head, side->head_dim, page->x + row, value + (size_t)t * D, target);
            for (size_t r = 0; r < D; r++) {
                const size_t channel = head->rows[r].channel, c = (size_t)h * D + channel;
                if (head->rows[r].bits > 5 || !isfinite(target[r])) continue;
                const unsigned entry = lowkey_entry_get(page->pages[h], head->rows, side->head_dim, (int)r,
                                                        page->first_slot + t, side->trellis);
                const double weight = (double)lowkey_weight_made(
                    &fit->shapes[c], page->weight ? page->weight[row + channel] : 1);
                sums[c * E + entry].weight += weight;
                sums[c * E + entry].moment += weight * (double)target[r];
            }
        }
    }
}

static void fold(void *user, const void *of)
{
    const struct refit *refit = user;
    const struct lowkey_mass *from = of;
    for (size_t i = 0; i < sums_count(refit->fit); i++) {
        refit->sums[i].weight += from[i].weight;
        refit->sums[i].moment += from[i].moment;
    }
}

/* Entries of a table from the sums of its codes; an unused one stays. */
static void refit_table(struct lowkey_side_fit *fit, size_t c, const struct lowkey_mass *sums)
{
    struct lowkey_table *table = &fit->tables[c];
    const double lower = (double)fit->lower[c], upper = (double)fit->upper[c], range = upper - lower;
    double entry[LOWKEY_MAX_CENTROIDS], midpoint[LOWKEY_MAX_CENTROIDS];
    if (fit->bits[c] > 5 || table->n < 2 || table->n != fit->n_entries[c]) return; /* some fell together when stored */
    for (int k = 0; k < table->n; k++) {
        entry[k] = sums[k].weight > 0 ? sums[k].moment / sums[k].weight : table->entry[k];
        entry[k] = fmin(fmax(entry[k], lower - range), upper + range);
        if (k && entry[k] < entry[k - 1]) return; /* an unused entry lies beyond its neighbours */
    }
    lowkey_midpoints(table->n, entry, midpoint);
    lowkey_table_make(table->n, entry, midpoint, 0, 1, table);
}

lowkey_status lowkey_refit(struct lowkey_side_fit *fit, const struct lowkey_side *side, lowkey_error *err)
{
    struct refit refit = { fit, calloc(sums_count(fit) + 1, sizeof *refit.sums) };
    if (!refit.sums) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory to refit %zu tables", fit->n_channels);
    const struct lowkey_pack_pass pass = {
        .captures = fit->captures,
        .layer = fit->layer,
        .stream = fit->which ? LOWKEY_VALUE : LOWKEY_KEY,
        .side = side,
        .weights = &fit->weights,
        .n_threads = fit->options->n_threads,
        .visit = visit,
        .fold = fold,
        .sums_bytes = sums_count(fit) * sizeof *refit.sums +
                      LOWKEY_PAGE_SLOTS * (size_t)fit->head_dim * sizeof(float),
        .user = &refit,
    };
    lowkey_status status = lowkey_pack_pass(&pass, NULL, err);
    for (size_t c = 0; c < fit->n_channels && status == LOWKEY_OK; c++)
        refit_table(fit, c, refit.sums + c * (size_t)fit->n_table);
    free(refit.sums);
    return status != LOWKEY_OK ? status : lowkey_side_fit_passed(fit, (double)fit->captures->n_tokens, err);
}
