/* decode.c - lowkey_attend. The work is cut into items: a sequence, a block of its queries, a KV head and a run of its pages.
 * An item folds its pages into a state (kernels/kernels.h); the states of a block's runs are then merged in page order.
 * How a sequence is cut depends on its own length and queries alone, so neither threads nor neighbours change a result. */
#include <math.h>

#include "formats/caller.h"
#include "formats/geometry.h"
#include "runtime/cache.h"
#include "runtime/error.h"
#include "runtime/rows.h"

enum {
    QUERY_BLOCK = 32, /* queries that share a dequantized page */
    RUN_PAGES = 16, /* of a decode step; where query blocks give enough to do, a run is the whole sequence */
    MAX_LANES = 64
};

struct split { /* of one sequence */
    int length, n_queries, n_pages;
    int n_blocks, n_runs, run_pages;
    int block_rows; /* rows of a whole block: queries times query heads of a KV head */
    int64_t n_items;
};

struct lane { /* scratch of a body */
    void *scratch; /* of the kernel */
    float *q; /* [max_rows][key_head_dim] rotated and scaled */
    int *n_visible; /* [max_rows] */
};

struct plan {
    const lowkey_cache *cache;
    const struct lowkey_cache_layer *layer;
    int layer_number, n, n_lanes;
    const int *sequences, *n_queries;
    lowkey_rows q;
    float *out, *lse;
    int64_t total_queries, total_items, total_rows; /* rows of states */
    int max_rows; /* of an item */
    /* in the workspace */
    int64_t *first_item, *first_query, *first_row; /* [n + 1] sums over the sequences before */
    struct lowkey_state states; /* [total_rows] */
    struct lane *lanes;
};

static int ceil_div(int a, int b)
{
    return a / b + (a % b != 0);
}

static struct split split_of(const struct plan *plan, int i)
{
    const lowkey_layer_desc *desc = plan->layer->layer->desc;
    struct split split = { .length = *lowkey_cache_length_at(plan->cache, plan->sequences[i],
                                                             plan->layer_number),
                           .n_queries = plan->n_queries ? plan->n_queries[i] : 1 };
    split.n_pages = (int)lowkey_pages_of(split.length);
    split.n_blocks = ceil_div(split.n_queries, QUERY_BLOCK);
    split.run_pages = split.n_blocks > 1 ? split.n_pages : RUN_PAGES;
    split.n_runs = split.n_pages ? ceil_div(split.n_pages, split.run_pages) : 0;
    split.block_rows = (split.n_queries < QUERY_BLOCK ? split.n_queries : QUERY_BLOCK) *
                       (desc->n_q_heads / desc->n_kv_heads);
    split.n_items = (int64_t)split.n_blocks * desc->n_kv_heads * split.n_runs;
    return split;
}

static lowkey_status check_sequences(const struct plan *plan, lowkey_error *err)
{
    for (int i = 0; i < plan->n; i++) {
        LOWKEY_TRY(lowkey_cache_check_sequence(plan->cache, plan->sequences[i], err));
        const struct split split = split_of(plan, i);
        if (split.n_queries < 0 || split.n_queries > split.length)
            return lowkey_fail(err, LOWKEY_EINVAL,
                               "sequence %d: expected 0 to %d queries, one a token, found %d",
                               plan->sequences[i], split.length, split.n_queries);
    }
    return LOWKEY_OK;
}

static void add_up(struct plan *plan)
{
    for (int i = 0; i < plan->n; i++) {
        const struct split split = split_of(plan, i);
        plan->total_queries += split.n_queries;
        plan->total_items += split.n_items;
        plan->total_rows += split.n_items * split.block_rows;
        if (split.block_rows > plan->max_rows) plan->max_rows = split.block_rows;
    }
    plan->n_lanes = lowkey_context_lanes(plan->cache->context, plan->total_items, MAX_LANES);
}

static lowkey_status read_args(const lowkey_cache *cache, const lowkey_attend_args *given, struct plan *plan,
                               lowkey_attend_args *args, lowkey_error *err)
{
    if (!given) return lowkey_fail(err, LOWKEY_EINVAL, "lowkey_attend: args is NULL");
    LOWKEY_TRY(lowkey_struct_read(args, sizeof *args, given, given->struct_size, "attend args", err));
    if (args->n < 0 || (args->n > 0 && !args->sequences))
        return lowkey_fail(err, LOWKEY_EINVAL, "lowkey_attend: expected n >= 0 with sequences, found %d",
                           args->n);
    *plan = (struct plan) { .cache = cache,
                            .n = args->n,
                            .sequences = args->sequences,
                            .n_queries = args->n_queries,
                            .q = args->q,
                            .out = args->out,
                            .lse = args->lse };
    LOWKEY_TRY(lowkey_cache_check_layer(cache, args->layer, &plan->layer_number, err));
    plan->layer = &cache->layers[plan->layer_number];
    LOWKEY_TRY(check_sequences(plan, err));
    add_up(plan);
    return LOWKEY_OK;
}

/* Take the plan's arrays, and when there is memory to write fill the sums. */
static void lay_out(struct lowkey_block *block, struct plan *plan)
{
    const struct lowkey_side *key = &plan->layer->layer->side[0], *value = &plan->layer->layer->side[1];
    const size_t n = (size_t)plan->n + 1, n_rows = (size_t)plan->total_rows, n_lanes = (size_t)plan->n_lanes;
    const size_t max_rows = (size_t)plan->max_rows;
    plan->first_item = lowkey_block_take(block, n, sizeof *plan->first_item);
    plan->first_query = lowkey_block_take(block, n, sizeof *plan->first_query);
    plan->first_row = lowkey_block_take(block, n, sizeof *plan->first_row);
    plan->states.out = lowkey_block_take(block, n_rows, (size_t)value->head_dim * sizeof(float));
    plan->states.max = lowkey_block_take(block, n_rows, sizeof(float));
    plan->states.sum = lowkey_block_take(block, n_rows, sizeof(float));
    plan->lanes = lowkey_block_take(block, n_lanes, sizeof *plan->lanes);
    for (size_t i = 0; i < n_lanes; i++) {
        struct lane lane = { .scratch = lowkey_block_take(block, 1,
                                                          lowkey_attend_scratch_bytes(key, value)) };
        lane.q = lowkey_block_take(block, max_rows, (size_t)key->head_dim * sizeof(float));
        lane.n_visible = lowkey_block_take(block, max_rows, sizeof(int));
        if (block->base) plan->lanes[i] = lane;
    }
    if (!block->base) return;
    int64_t item = 0, query = 0, row = 0;
    for (int i = 0; i <= plan->n; i++) {
        plan->first_item[i] = item, plan->first_query[i] = query, plan->first_row[i] = row;
        if (i == plan->n) break;
        const struct split split = split_of(plan, i);
        item += split.n_items, query += split.n_queries, row += split.n_items * split.block_rows;
    }
}

/* ---- items ---- */

struct item { /* number = ((block * n_kv_heads) + head) * n_runs + run, behind those of earlier sequences */
    int i, block, head, run; /* i: of the call's sequences */
    struct split split;
    int first_query, n_queries; /* of the sequence's, in this block */
    struct lowkey_state state; /* of its rows: query by query, the KV head's query heads of each */
};

static struct lowkey_state state_at(const struct plan *plan, int64_t row)
{
    const int value_dim = plan->layer->layer->side[1].head_dim;
    return (struct lowkey_state) { plan->states.out + row * value_dim, plan->states.max + row,
                                   plan->states.sum + row };
}

static struct item item_of(const struct plan *plan, int64_t number)
{
    int low = 0, high = plan->n - 1; /* the last sequence whose items begin at or before number */
    while (low < high) {
        const int middle = low + (high - low + 1) / 2;
        if (plan->first_item[middle] <= number)
            low = middle;
        else
            high = middle - 1;
    }
    struct item item = { .i = low, .split = split_of(plan, low) };
    const int64_t of_sequence = number - plan->first_item[low];
    const int n_heads = plan->layer->layer->desc->n_kv_heads;
    item.run = (int)(of_sequence % item.split.n_runs);
    item.head = (int)(of_sequence / item.split.n_runs % n_heads);
    item.block = (int)(of_sequence / item.split.n_runs / n_heads);
    item.first_query = item.block * QUERY_BLOCK;
    const int left = item.split.n_queries - item.first_query;
    item.n_queries = left < QUERY_BLOCK ? left : QUERY_BLOCK;
    item.state = state_at(plan, plan->first_row[low] + of_sequence * item.split.block_rows);
    return item;
}

static int position_of(const struct item *item, int j)
{
    return item->split.length - item->split.n_queries + item->first_query + j;
}

/* Rotate by the position's angle and scale, in f64, rounding once; keys carry no factor, so the query carries both. */
static void turn_query(const lowkey_layer_desc *desc, int position, float *q)
{
    const double factor = desc->rope_attention_factor, scale = desc->logit_scale * factor * factor;
    for (int i = 0; i < desc->rope_dims / 2; i++) {
        int first, second;
        lowkey_rope_pair(desc->rope_dims, desc->rope_pairing, i, &first, &second);
        const double angle = position * desc->rope_inv_freq[i], cosine = cos(angle), sine = sin(angle);
        const double x = (double)q[first], y = (double)q[second];
        q[first] = (float)(scale * (x * cosine - y * sine));
        q[second] = (float)(scale * (x * sine + y * cosine));
    }
    for (int c = desc->rope_dims; c < desc->key_head_dim; c++)
        q[c] = (float)(desc->logit_scale * (double)q[c]);
}

static void load_queries(const struct plan *plan, const struct item *item, float *q)
{
    const lowkey_layer_desc *desc = plan->layer->layer->desc;
    const int q_per_kv = desc->n_q_heads / desc->n_kv_heads, D = desc->key_head_dim;
    for (int j = 0; j < item->n_queries; j++)
        for (int g = 0; g < q_per_kv; g++, q += D) {
            lowkey_rows_read(&plan->q, plan->first_query[item->i] + item->first_query + j,
                             item->head * q_per_kv + g, D, q);
            turn_query(desc, position_of(item, j), q);
        }
}

static void attend_page(const struct plan *plan, const struct item *item, int page, const struct lane *lane)
{
    const lowkey_cache *cache = plan->cache;
    const struct lowkey_layer *layer = plan->layer->layer;
    const struct lowkey_side *key = &layer->side[0], *value = &layer->side[1];
    const struct lowkey_store *keys = &plan->layer->store[0], *values = &plan->layer->store[1];
    const struct lowkey_angles *angles = &plan->layer->angles;
    const int q_per_kv = layer->desc->n_q_heads / layer->desc->n_kv_heads,
              first_token = page * LOWKEY_PAGE_TOKENS;
    const int sequence = plan->sequences[item->i], left = item->split.length - first_token, h = item->head;
    const int n_slots = left < LOWKEY_PAGE_TOKENS ? left : LOWKEY_PAGE_TOKENS;
    const int n_sinks = lowkey_cache_sink_slots(cache, page);
    const size_t block = lowkey_cache_block(cache, sequence, page),
                 base = (size_t)page * (size_t)angles->n_pairs;
    for (int j = 0; j < item->n_queries; j++) {
        const int seen = position_of(item, j) + 1 - first_token;
        const int n_visible = seen < 0 ? 0 : seen < n_slots ? seen : n_slots;
        for (int g = 0; g < q_per_kv; g++) lane->n_visible[j * q_per_kv + g] = n_visible;
    }
    cache->context->kernels->attend_page(&(struct lowkey_attend_page_args) {
        .key = key,
        .value = value,
        .head = h,
        .key_page = lowkey_store_page(keys, key, h, block),
        .value_page = lowkey_store_page(values, value, h, block),
        .key_side_page = lowkey_store_side_page(keys, key, block),
        .value_side_page = lowkey_store_side_page(values, value, block),
        .n_slots = n_slots,
        .n_sink_slots = n_sinks < n_slots ? n_sinks : n_slots,
        .key_sinks = n_sinks ? lowkey_store_sink(cache, keys, key, sequence, 0) + h * key->head_dim : NULL,
        .value_sinks = n_sinks ? lowkey_store_sink(cache, values, value, sequence, 0) + h * value->head_dim
                               : NULL,
        .key_sink_stride = (ptrdiff_t)key->n_heads * key->head_dim,
        .value_sink_stride = (ptrdiff_t)value->n_heads * value->head_dim,
        .sink_rule = cache->desc->sink_rule,
        .rope_dims = layer->desc->rope_dims,
        .rope_pairing = layer->desc->rope_pairing,
        .base_cos = angles->n_pairs ? angles->base_cos + base : NULL,
        .base_sin = angles->n_pairs ? angles->base_sin + base : NULL,
        .slot_cos = angles->slot_cos,
        .slot_sin = angles->slot_sin,
        .n_rows = item->n_queries * q_per_kv,
        .q = lane->q,
        .n_visible = lane->n_visible,
        .state = item->state,
        .scratch = lane->scratch });
}

static void attend_lane(void *arg, int number)
{
    const struct plan *plan = arg;
    const struct lane *lane = &plan->lanes[number];
    const int value_dim = plan->layer->layer->side[1].head_dim;
    for (int64_t at = number; at < plan->total_items; at += plan->n_lanes) {
        const struct item item = item_of(plan, at);
        const int n_rows = item.split.block_rows;
        for (int j = 0; j < n_rows; j++) item.state.max[j] = -INFINITY, item.state.sum[j] = 0;
        for (int k = 0; k < n_rows * value_dim; k++) item.state.out[k] = 0;
        load_queries(plan, &item, lane->q);
        const int last_page = position_of(&item, item.n_queries - 1) / LOWKEY_PAGE_TOKENS;
        const int end = (item.run + 1) * item.split.run_pages;
        for (int page = item.run * item.split.run_pages; page < end && page <= last_page; page++)
            attend_page(plan, &item, page, lane);
    }
}

/* Merge the runs of each block and head, in page order, and write its rows where the caller wants them. */
static void merge_lane(void *arg, int number)
{
    const struct plan *plan = arg;
    const lowkey_layer_desc *desc = plan->layer->layer->desc;
    const int q_per_kv = desc->n_q_heads / desc->n_kv_heads, value_dim = desc->value_head_dim;
    for (int64_t at = number; at < plan->total_items; at += plan->n_lanes) {
        const struct item item = item_of(plan, at);
        if (item.run != 0) continue;
        const struct lowkey_state into = item.state;
        for (int run = 1; run < item.split.n_runs; run++)
            plan->cache->context->kernels->merge(item.n_queries * q_per_kv, value_dim, into,
                                                 item_of(plan, at + run).state);
        for (int j = 0; j < item.n_queries * q_per_kv; j++) {
            const int64_t query = plan->first_query[item.i] + item.first_query + j / q_per_kv;
            const int64_t row = query * desc->n_q_heads + item.head * q_per_kv + j % q_per_kv;
            for (int c = 0; c < value_dim; c++) plan->out[row * value_dim + c] = into.out[j * value_dim + c];
            if (plan->lse) plan->lse[row] = into.max[j] + logf(into.sum[j]);
        }
    }
}

/* ---- the interface ---- */

size_t lowkey_attend_workspace_bytes(const lowkey_cache *cache, const lowkey_attend_args *given)
{
    struct plan plan;
    lowkey_attend_args args;
    struct lowkey_block block = { 0 };
    if (read_args(cache, given, &plan, &args, NULL) != LOWKEY_OK) return 0;
    lay_out(&block, &plan);
    return block.overflow ? SIZE_MAX : block.used;
}

static lowkey_status check_queries(struct plan *plan, lowkey_error *err)
{
    const lowkey_layer_desc *desc = plan->layer->layer->desc;
    const struct lowkey_rows_shape shape = { plan->total_queries, desc->n_q_heads, desc->key_head_dim };
    struct lowkey_bad_element bad;
    LOWKEY_TRY(lowkey_rows_check(&plan->q, shape, "queries", err));
    if (lowkey_rows_find_bad(&plan->q, shape, &bad))
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "queries of layer %d: row %lld head %d channel %d: expected a finite number, "
                           "found %g (%lld such in all)",
                           desc->index, (long long)bad.token, bad.head, bad.channel, (double)bad.value,
                           (long long)bad.n_bad);
    return LOWKEY_OK;
}

lowkey_status lowkey_attend(const lowkey_cache *cache, const lowkey_attend_args *given, lowkey_error *err)
{
    struct plan plan;
    lowkey_attend_args args;
    struct lowkey_block block = { 0 };
    LOWKEY_TRY(read_args(cache, given, &plan, &args, err));
    if (plan.total_queries == 0) return LOWKEY_OK;
    if (!plan.out) return lowkey_fail(err, LOWKEY_EINVAL, "lowkey_attend: out is NULL");
    LOWKEY_TRY(check_queries(&plan, err));
    lay_out(&block, &plan);
    if (block.overflow || args.workspace_bytes < block.used || !args.workspace ||
        (uintptr_t)args.workspace % 64)
        return lowkey_fail(
            err, LOWKEY_EINVAL,
            "lowkey_attend: workspace: expected %zu bytes at a multiple of 64, found %zu at %p", block.used,
            args.workspace_bytes, args.workspace);
    block = (struct lowkey_block) { .base = args.workspace };
    lay_out(&block, &plan);
    lowkey_context_run(cache->context, plan.n_lanes, attend_lane, &plan);
    lowkey_context_run(cache->context, plan.n_lanes, merge_lane, &plan);
    return LOWKEY_OK;
}
