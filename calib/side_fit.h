/* side_fit.h - the keys or the values of one layer while they are fitted: what fit.c, columns.c, grids.c
 * and side_fit.c hand each other. */
#ifndef LOWKEY_SIDE_FIT_H
#define LOWKEY_SIDE_FIT_H

#include "calib/captures.h"
#include "calib/channel_cost.h"
#include "calib/command.h"
#include "calib/fit.h"
#include "calib/moments.h"
#include "calib/table.h"
#include "calib/weights.h"
#include "formats/pool.h"

/* Scales, zeros and outliers by rank of every kept token, as the packing kernel finds them. */
struct lowkey_grids {
    int n_blocks, scale_block, n_outliers; /* n_outliers: room for a token's, 2 * outlier_rank */
    float *scale, *zero; /* [n_tokens][n_blocks], as stored */
    uint16_t *outliers; /* [n_tokens][n_outliers] channels rising, then UINT16_MAX */
    double largest_scale;
};

struct lowkey_side_fit {
    const lowkey_captures *captures;
    const struct lowkey_fit_options *options;
    const struct lowkey_side_options *side; /* of options */
    struct lowkey_progress *progress;
    double *work_done; /* what progress has been told: tokens passed over */
    int layer, which; /* number of the layer among those captured; 0 keys, 1 values */
    int n_heads, head_dim, n_table;
    size_t n_channels; /* C = n_heads * head_dim; the arrays below are [C] */
    struct lowkey_weights weights;
    const struct lowkey_grids *grids; /* NULL without a token scale */
    const uint8_t *widths; /* [C] as allocated; NULL: those of the side's options, in turn */
    struct lowkey_width_costs *costs; /* [C] columns are to find what widths cost, and no tables; else NULL */

    uint8_t *bits, *flags;
    double *low, *high; /* smallest and largest value of all */
    double *zero, *scale; /* middle and half of the range between the limits */
    struct lowkey_weight_shape *shapes;
    struct lowkey_table *tables; /* as fitted; what is stored comes of them */
    uint32_t mantissa_bits; /* all values' bits, or'ed: which of the mantissa are in use */
    struct lowkey_side_notes notes;

    /* What the description points to. */
    uint16_t *order;
    uint8_t *n_entries;
    float *table, *boundary, *center, *lower, *upper, *rule_scale, *factor, *metric_weight;
    int16_t *exponent;
    lowkey_side_desc desc;
    struct lowkey_side_report report;
};

/* Everything but tables: arrays from the pool, bits, order, rules. */
lowkey_status lowkey_side_fit_init(struct lowkey_side_fit *fit, struct lowkey_pool *pool, lowkey_error *err);
/* Ranges, weights and tables of every channel, from its values of all tokens (columns.c). */
lowkey_status lowkey_columns_fit(struct lowkey_side_fit *fit, lowkey_error *err);
/* How much rows count in the search of a trellis: the mean weight of each channel. A feedback's factor knows better. */
void lowkey_side_fit_weigh_rows(struct lowkey_side_fit *fit);
/* Round tables into what the description points to. */
void lowkey_side_fit_store(struct lowkey_side_fit *fit);
/* Apply the side's corrections to its tables; a table that would leave the range keeps its entries. */
void lowkey_side_fit_correct(struct lowkey_side_fit *fit, const struct lowkey_moments *moments);
/* Moments of the packed tokens into the report. */
void lowkey_side_fit_report(struct lowkey_side_fit *fit, const struct lowkey_moments *moments);
/* What of the values looks wrong, into the notes: after the columns. */
lowkey_status lowkey_side_fit_suspect(struct lowkey_side_fit *fit, lowkey_error *err);
/* A pass of packing over the side, with its weights. side: the quantizer's. */
lowkey_status lowkey_side_fit_pack(struct lowkey_side_fit *fit, const struct lowkey_side *side,
                                   struct lowkey_moments *moments, struct lowkey_pool *pool,
                                   lowkey_error *err);

/* grids.c */
lowkey_status lowkey_grids_find(struct lowkey_side_fit *fit, struct lowkey_grids *grids, lowkey_error *err);
void lowkey_grids_free(struct lowkey_grids *grids);

/* Tell progress that so many tokens were passed over; LOWKEY_ECANCELLED where the user interrupted. */
lowkey_status lowkey_side_fit_passed(struct lowkey_side_fit *fit, double n_tokens, lowkey_error *err);

#endif
