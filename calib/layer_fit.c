/* layer_fit.c - one layer while it is fitted: what its keys and values are weighed by, their tables, the feedback, the
 * corrections, and a last pass of packing that says what it costs; or, before that, what each width would cost. */
#include "calib/layer_fit.h"

#include <stdlib.h>
#include <string.h>

#include "calib/feedback.h"
#include "calib/refit.h"
#include "runtime/error.h"

static int has(const lowkey_captures *captures, enum lowkey_stream stream)
{
    return (int)(captures->contents >> stream & 1);
}

void lowkey_layer_fit_side(struct lowkey_layer_fit *fit, int which, const uint8_t *widths,
                           struct lowkey_progress *progress, double *work_done)
{
    fit->side[which] = (struct lowkey_side_fit) { .captures = fit->captures,
                                                  .options = fit->options,
                                                  .layer = fit->layer,
                                                  .which = which,
                                                  .side = &fit->options->side[which],
                                                  .widths = widths,
                                                  .progress = progress,
                                                  .work_done = work_done };
}

int lowkey_feeds_from_queries(const lowkey_captures *captures, const struct lowkey_fit_options *options)
{
    return options->side[0].feedback && !has(captures, LOWKEY_KEY_GRAD);
}

/* Weights, and the matrix of keys, from queries: one run for whatever of them is wanted. */
static lowkey_status attend(struct lowkey_layer_fit *fit, lowkey_error *err)
{
    const lowkey_layer_desc *desc = &fit->captures->info->layers[fit->layer];
    const int weighs = fit->sensitivity == LOWKEY_SENSITIVITY_ATTENTION;
    const int feeds = lowkey_feeds_from_queries(fit->captures, fit->options);
    if (!weighs && !feeds) return LOWKEY_OK;
    const int64_t n = fit->captures->n_tokens;
    const size_t H = (size_t)desc->n_kv_heads, D = (size_t)desc->key_head_dim;
    if (weighs) LOWKEY_TRY(lowkey_store_open(fit->out, n, (int)H, (int)D, &fit->store[0], err));
    if (weighs) LOWKEY_TRY(lowkey_store_open(fit->out, n, (int)H, 1, &fit->store[1], err));
    if (feeds) fit->moments = malloc(H * D * D * sizeof *fit->moments);
    if (feeds && !fit->moments)
        return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %zu matrices of %zu channels", H, D);
    const struct lowkey_attention wanted = { weighs ? &fit->store[0] : NULL, weighs ? &fit->store[1] : NULL,
                                             fit->moments };
    LOWKEY_TRY(lowkey_attention_sensitivity(fit->captures, fit->layer, fit->options->n_queries,
                                            fit->options->n_threads, &wanted, err));
    return lowkey_side_fit_passed(&fit->side[0], (double)n, err);
}

static struct lowkey_weights weights_of(const struct lowkey_layer_fit *fit, int which)
{
    struct lowkey_weights weights = { .captures = fit->captures,
                                      .layer = fit->layer,
                                      .head_dim = fit->side[which].head_dim };
    switch (fit->sensitivity) {
    case LOWKEY_SENSITIVITY_FISHER:
        weights.source = LOWKEY_WEIGHTS_GRADIENT;
        weights.stream = which ? LOWKEY_VALUE_GRAD : LOWKEY_KEY_GRAD;
        break;
    case LOWKEY_SENSITIVITY_WEIGHT:
        weights.source = LOWKEY_WEIGHTS_FILE;
        weights.stream = which ? LOWKEY_VALUE_WEIGHT : LOWKEY_KEY_WEIGHT;
        break;
    case LOWKEY_SENSITIVITY_ATTENTION:
        weights.source = LOWKEY_WEIGHTS_STORE;
        weights.store = &fit->store[which];
        break;
    default: break;
    }
    return weights;
}

/* The matrix of a side's feedback; *mine is to be freed, where it is not that of attention. */
static lowkey_status feedback_matrix(struct lowkey_layer_fit *fit, int which, double **mine,
                                     const double **moments, lowkey_error *err)
{
    const struct lowkey_side_fit *side = &fit->side[which];
    const size_t H = (size_t)side->n_heads, D = (size_t)side->head_dim;
    *mine = NULL;
    *moments = fit->moments;
    if (!which && !has(fit->captures, LOWKEY_KEY_GRAD)) return LOWKEY_OK;
    *moments = *mine = malloc(H * D * D * sizeof **mine);
    if (!*mine) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %zu matrices of %zu channels", H, D);
    return lowkey_gradient_moments(fit->captures, fit->layer, which ? LOWKEY_VALUE_GRAD : LOWKEY_KEY_GRAD,
                                   fit->options->n_threads, *mine, err);
}

static lowkey_status fit_feedback(struct lowkey_layer_fit *fit, int which, lowkey_error *err)
{
    struct lowkey_side_fit *side = &fit->side[which];
    if (!side->factor) return LOWKEY_OK;
    const size_t H = (size_t)side->n_heads, D = (size_t)side->head_dim;
    double *mine;
    const double *moments;
    lowkey_status status = feedback_matrix(fit, which, &mine, &moments, err);
    for (size_t h = 0; h < H && status == LOWKEY_OK; h++) {
        int is_zero;
        status = lowkey_feedback_factor((int)D, moments + h * D * D, side->order + h * D, fit->options->damp,
                                        side->factor + h * D * D,
                                        side->metric_weight ? side->metric_weight + h * D : NULL, &is_zero, err);
        side->notes.zero_feedback += is_zero;
    }
    free(mine);
    return status;
}

/* Costs less what the feedback of a side makes up for. */
static lowkey_status lower_costs(struct lowkey_layer_fit *fit, int which, struct lowkey_width_costs *costs,
                                 lowkey_error *err)
{
    const struct lowkey_side_fit *side = &fit->side[which];
    const size_t H = (size_t)side->n_heads, D = (size_t)side->head_dim;
    if (!side->factor) return LOWKEY_OK;
    double *mine;
    const double *moments;
    lowkey_status status = feedback_matrix(fit, which, &mine, &moments, err);
    for (size_t h = 0; h < H && status == LOWKEY_OK; h++) {
        double left[LOWKEY_MAX_HEAD_DIM];
        status = lowkey_feedback_left((int)D, moments + h * D * D, side->order + h * D, fit->options->damp,
                                      left, err);
        for (size_t c = 0; c < D && status == LOWKEY_OK; c++)
            for (int b = 0; b <= LOWKEY_WIDEST_TABLE; b++) costs[h * D + c].at[b] *= left[c];
    }
    free(mine);
    return status;
}

static lowkey_status fit_side(struct lowkey_layer_fit *fit, int which, struct lowkey_pool *pool, lowkey_error *err)
{
    struct lowkey_side_fit *side = &fit->side[which];
    LOWKEY_TRY(lowkey_side_fit_init(side, pool, err));
    side->weights = weights_of(fit, which);
    if (side->desc.token_scale != LOWKEY_SCALE_NONE) {
        LOWKEY_TRY(lowkey_grids_find(side, &fit->grids[which], err));
        side->grids = &fit->grids[which];
    }
    LOWKEY_TRY(lowkey_columns_fit(side, err));
    lowkey_grids_free(&fit->grids[which]);
    LOWKEY_TRY(lowkey_side_fit_suspect(side, err));
    if (side->metric_weight) lowkey_side_fit_weigh_rows(side);
    LOWKEY_TRY(fit_feedback(fit, which, err));
    lowkey_side_fit_store(side);
    return LOWKEY_OK;
}

enum purpose { REFIT, CORRECT, REPORT };

/* Is a pass of packing for that of any use to the side? round: of refits, from 0. */
static int wants(const struct lowkey_side_fit *side, enum purpose purpose, int round)
{
    if (purpose == REFIT) return side->n_table && round < side->side->refit;
    return purpose == REPORT || (side->n_table && (side->side->gain || side->side->qnorm));
}

static lowkey_status pack_side(struct lowkey_side_fit *side, enum purpose purpose,
                               const struct lowkey_side *packed, lowkey_error *err)
{
    struct lowkey_pool pool = { 0 };
    struct lowkey_moments moments;
    lowkey_status status;
    if (purpose == REFIT)
        status = lowkey_refit(side, packed, err);
    else
        status = lowkey_side_fit_pack(side, packed, &moments, &pool, err);
    if (status == LOWKEY_OK && purpose == CORRECT) lowkey_side_fit_correct(side, &moments);
    if (status == LOWKEY_OK && purpose == REPORT) lowkey_side_fit_report(side, &moments);
    if (status == LOWKEY_OK && purpose != REPORT) lowkey_side_fit_store(side);
    lowkey_pool_free(&pool);
    return status;
}

/* Pack the sides that want it with the tables as they are. */
static lowkey_status pack_layer(struct lowkey_layer_fit *fit, lowkey_layer_desc *layer, enum purpose purpose,
                                int round, lowkey_error *err)
{
    layer->key = fit->side[0].desc;
    layer->value = fit->side[1].desc;
    const lowkey_quantizer_desc desc = { .struct_size = sizeof desc,
                                         .n_layers = 1,
                                         .layers = layer,
                                         .n_sink_tokens = fit->options->n_sinks,
                                         .sink_rule = fit->options->sink_rule };
    lowkey_quantizer *quantizer;
    LOWKEY_TRY(lowkey_quantizer_create(&desc, NULL, &quantizer, err));
    lowkey_status status = LOWKEY_OK;
    for (int which = 0; which < 2 && status == LOWKEY_OK; which++)
        if (wants(&fit->side[which], purpose, round))
            status = pack_side(&fit->side[which], purpose, &lowkey_quantizer_layer_at(quantizer, 0)->side[which], err);
    lowkey_quantizer_free(quantizer);
    return status;
}

static void end(struct lowkey_layer_fit *fit)
{
    for (int which = 0; which < 2; which++) {
        lowkey_grids_free(&fit->grids[which]);
        lowkey_store_close(&fit->store[which]);
    }
    free(fit->moments);
    fit->moments = NULL;
}

lowkey_status lowkey_layer_fit_run(struct lowkey_layer_fit *fit, lowkey_layer_desc *layer,
                                   struct lowkey_pool *pool, lowkey_error *err)
{
    fit->store[0].fd = fit->store[1].fd = -1;
    lowkey_status status = attend(fit, err);
    for (int which = 0; which < 2 && status == LOWKEY_OK; which++) status = fit_side(fit, which, pool, err);
    for (int round = 0; status == LOWKEY_OK && (wants(&fit->side[0], REFIT, round) || wants(&fit->side[1], REFIT, round));
         round++)
        status = pack_layer(fit, layer, REFIT, round, err);
    if (status == LOWKEY_OK) status = pack_layer(fit, layer, CORRECT, 0, err);
    if (status == LOWKEY_OK) status = pack_layer(fit, layer, REPORT, 0, err);
    end(fit);
    return status;
}

static lowkey_status cost_side(struct lowkey_layer_fit *fit, int which, struct lowkey_width_costs *costs,
                               struct lowkey_pool *pool, lowkey_error *err)
{
    struct lowkey_side_fit *side = &fit->side[which];
    LOWKEY_TRY(lowkey_side_fit_init(side, pool, err));
    side->weights = weights_of(fit, which);
    side->costs = costs;
    LOWKEY_TRY(lowkey_columns_fit(side, err));
    return lower_costs(fit, which, costs, err);
}

lowkey_status lowkey_layer_fit_costs(struct lowkey_layer_fit *fit, struct lowkey_width_costs *const costs[2],
                                     lowkey_error *err)
{
    struct lowkey_pool pool = { 0 };
    fit->store[0].fd = fit->store[1].fd = -1;
    lowkey_status status = attend(fit, err);
    for (int which = 0; which < 2 && status == LOWKEY_OK; which++)
        status = cost_side(fit, which, costs[which], &pool, err);
    end(fit);
    lowkey_pool_free(&pool);
    return status;
}
