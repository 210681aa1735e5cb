/* pack_pass.c - streams the tokens of one side of a layer through the packing kernel: codes, scales and
 * outliers are those that a cache would hold, sinks in their dead slots included. Runs of tokens are read
 * by one thread, packed by many. */
#include "calib/pack_pass.h"

#include <stdlib.h>
#include <string.h>

#include "calib/command.h"
#include "calib/threads.h"
#include "runtime/error.h"

struct run {
    const struct lowkey_pack_pass *pass;
    int sample;
    int64_t first, n_tokens; /* position of its first token in the sample; ends where a page does */
    float *x, *weight;
    void *sums;
    char *memory; /* pages, side page, the kernel's scratch */
    struct lowkey_pack_counts counts;
};

void lowkey_packed_page_read(const struct lowkey_packed_page *page, int head, float *value)
{
    const struct lowkey_unpack_args args = { .side = page->side,
                                             .head = head,
                                             .page = page->pages[head],
                                             .side_page = page->side_page,
                                             .first_slot = page->first_slot,
                                             .n_slots = page->n_tokens,
                                             .first_live_slot = page->first_live_slot,
                                             .out = value,
                                             .out_stride = page->side->head_dim };
    lowkey_unpack_scalar(&args);
}

/* Tokens of a run: whole pages, at most 1,024 tokens or 8 Mi numbers. A run does not depend on threads or
 * on files. */
static int64_t run_tokens(const struct lowkey_side *side)
{
    const int64_t page = LOWKEY_PAGE_SLOTS,
                  fit = (INT64_C(8) << 20) / ((int64_t)side->n_heads * side->head_dim) / page * page;
    return fit < page ? page : fit > 1024 ? 1024 : fit;
}

static size_t pages_bytes(const struct lowkey_side *side)
{
    size_t bytes = 0;
    for (int h = 0; h < side->n_heads; h++) bytes += side->heads[h].page_bytes;
    return bytes;
}

static size_t memory_bytes(const struct lowkey_side *side)
{
    const size_t bytes = pages_bytes(side) + side->layout.bytes + lowkey_pack_scratch_bytes(side);
    return (bytes + 63) / 64 * 64;
}

static void pack_run(void *arg, int i)
{
    struct run *run = (struct run *)arg + i;
    const struct lowkey_pack_pass *pass = run->pass;
    const struct lowkey_side *side = pass->side;
    const struct lowkey_sample *sample = &pass->captures->samples[run->sample];
    const ptrdiff_t C = (ptrdiff_t)side->n_heads * side->head_dim;
    uint8_t **pages = malloc((size_t)side->n_heads * sizeof *pages);
    if (!pages) {
        run->n_tokens = -1;
        return;
    }
    char *at = run->memory;
    for (int h = 0; h < side->n_heads; at += side->heads[h++].page_bytes) pages[h] = (uint8_t *)at;
    memset(run->memory, 0, memory_bytes(side));
    for (int64_t done = 0; done < run->n_tokens;) {
        const int64_t position = run->first + done, left = run->n_tokens - done;
        const int slot = (int)(position % LOWKEY_PAGE_SLOTS), room = LOWKEY_PAGE_SLOTS - slot;
        const int n = left < room ? (int)left : room;
        const int first_live = position - slot < sample->n_sinks ? (int)(sample->n_sinks - (position - slot))
                                                                 : 0;
        const struct lowkey_pack_args args = {
            .side = side,
            .x = run->x + done * C,
            .token_stride = C,
            .head_stride = side->head_dim,
            .n_tokens = n,
            .first_slot = slot,
            .first_live_slot = first_live,
            .pages = pages,
            .side_page = side->layout.bytes ? (uint8_t *)at : NULL,
            .scratch = at + side->layout.bytes,
            .counts = &run->counts,
        };
        lowkey_pack_scalar(&args);
        const struct lowkey_packed_page page = {
            .side = side,
            .x = args.x,
            .weight = run->weight ? run->weight + done * C : NULL,
            .n_tokens = n,
            .first_slot = slot,
            .first_live_slot = first_live,
            .start = sample->start + position - sample->n_sinks,
            .pages = pages,
            .side_page = args.side_page,
        };
        pass->visit(pass->user, run->sums, &page);
        done += n;
    }
    free(pages);
}

static int run_alloc(struct run *run, const struct lowkey_pack_pass *pass)
{
    const size_t C = (size_t)pass->side->n_heads * (size_t)pass->side->head_dim,
                 n = (size_t)run_tokens(pass->side);
    const int has_weights = pass->weights && pass->weights->source != LOWKEY_WEIGHTS_NONE;
    *run = (struct run) { .pass = pass,
                          .x = malloc(n * C * sizeof(float)),
                          .weight = has_weights ? malloc(n * C * sizeof(float)) : NULL,
                          .sums = malloc(pass->sums_bytes + 1),
                          .memory = aligned_alloc(64, memory_bytes(pass->side)) };
    return run->x && (run->weight || !has_weights) && run->sums && run->memory;
}

static lowkey_status run_load(struct run *run, int sample, int64_t first, lowkey_error *err)
{
    const struct lowkey_pack_pass *pass = run->pass;
    const int64_t length = run_tokens(pass->side), end = pass->captures->samples[sample].n_tokens;
    const int64_t stop = (first / length + 1) * length < end ? (first / length + 1) * length : end;
    run->sample = sample;
    run->first = first;
    run->n_tokens = stop - first;
    memset(run->sums, 0, pass->sums_bytes);
    LOWKEY_TRY(lowkey_captures_read(pass->captures, pass->layer, pass->stream, sample, first, run->n_tokens,
                                    0, pass->side->n_heads, run->x, err));
    return run->weight ? lowkey_weights_read(pass->weights, sample, first, run->n_tokens, 0,
                                             pass->side->n_heads, run->weight, err)
                       : LOWKEY_OK;
}

/* Load as many runs as there is room for, from sample *sample and position *first on; both move on. */
static lowkey_status load_batch(struct run *runs, int n_runs, const lowkey_captures *captures, int *sample,
                                int64_t *first, int *n, lowkey_error *err)
{
    for (*n = 0; *n < n_runs && *sample < captures->n_samples;) {
        const struct lowkey_sample *s = &captures->samples[*sample];
        if (*first < s->n_sinks) *first = s->n_sinks;
        if (*first >= s->n_tokens) {
            ++*sample;
            *first = 0;
            continue;
        }
        LOWKEY_TRY(run_load(&runs[*n], *sample, *first, err));
        *first += runs[*n].n_tokens;
        ++*n;
    }
    return LOWKEY_OK;
}

lowkey_status lowkey_pack_pass(const struct lowkey_pack_pass *pass, struct lowkey_pack_counts *counts,
                               lowkey_error *err)
{
    enum { MOST = 32 };
    const int64_t bytes_at_once = INT64_C(160) << 20;
    const int64_t run_bytes = run_tokens(pass->side) * pass->side->n_heads * pass->side->head_dim * 8 +
                              (int64_t)pass->sums_bytes;
    int n_runs = pass->n_threads * 2 < MOST ? pass->n_threads * 2 : MOST, n_made = 0,
        threads = pass->n_threads;
    while (n_runs > 1 && n_runs * run_bytes > bytes_at_once) n_runs--;
    struct run runs[MOST];
    lowkey_status status = LOWKEY_OK;
    for (; n_made < n_runs && status == LOWKEY_OK; n_made++)
        if (!run_alloc(&runs[n_made], pass))
            status = lowkey_fail(err, LOWKEY_ENOMEM, "no memory to pack %d runs", n_runs);
    int sample = 0, n = 1;
    int64_t first = 0;
    while (status == LOWKEY_OK && n > 0) {
        status = load_batch(runs, n_runs, pass->captures, &sample, &first, &n, err);
        if (status != LOWKEY_OK) break;
        lowkey_threads_run(&threads, n, pack_run, runs);
        for (int r = 0; r < n; r++) {
            if (runs[r].n_tokens < 0) status = lowkey_fail(err, LOWKEY_ENOMEM, "no memory to pack a run");
            if (pass->fold) pass->fold(pass->user, runs[r].sums);
        }
        if (lowkey_interrupted()) status = lowkey_fail(err, LOWKEY_ECANCELLED, "interrupted");
    }
    for (int r = 0; r < n_made; r++) {
        if (counts) {
            counts->outliers += runs[r].counts.outliers;
            counts->clamped += runs[r].counts.clamped;
            counts->saturated += runs[r].counts.saturated;
        }
        free(runs[r].x);
        free(runs[r].weight);
        free(runs[r].sums);
        free(runs[r].memory);
    }
    return status;
}
