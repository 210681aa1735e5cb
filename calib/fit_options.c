/* fit_options.c - the defaults of lowkey fit, the presets, and which options go together. */
#include "calib/fit_options.h"

#include <stdio.h>
#include <string.h>

#include "formats/codes.h"
#include "runtime/error.h"

struct lowkey_fit_options lowkey_fit_defaults(void)
{
    const struct lowkey_side_options side = {
        .n_widths = 1,
        .widths = { 4 },
        .rule_8 = LOWKEY_RULE_E4M3,
        .rule_16 = LOWKEY_RULE_F16,
        .refit = LOWKEY_REFIT_AUTO,
    };
    return (struct lowkey_fit_options) {
        .side = { side, side },
        .sink_rule = LOWKEY_RULE_F16,
        .n_queries = 128,
        .weight_clip = 50,
        .weight_floor = 1e-3,
        .damp = 0.05,
        .n_threads = 1,
    };
}

struct preset {
    const char *name;
    double budget; /* mean bits; 0: bits for every channel */
    uint8_t bits;
    enum lowkey_scope scope;
    lowkey_token_scale value_scale;
    double outliers;
    int trellis; /* survivors of a state */
    int key_feedback;
    double weight_clip, weight_floor;
    int normalised_units;
};

/* Ours: bits shared out by cost, tables per channel, rows coded by a trellis, keys' errors fed back (where the files have
 * what that takes). KVQuant's: keys have one codebook
 * a layer and each channel's range, values a scale a token; weights as they are, on normalised values. All leave out
 * the first token, the sink. */
#define OURS(bits_name, mean_bits)                                                                           \
    {                                                                                                        \
        .name = bits_name, .budget = mean_bits, .bits = 4, .scope = LOWKEY_SCOPE_CHANNEL, .trellis = 4,      \
        .key_feedback = LOWKEY_FEEDBACK_IF_POSSIBLE, .weight_clip = 50, .weight_floor = 1e-3                 \
    }
#define KVQUANT(bits_name, n_bits, fraction)                                                                 \
    {                                                                                                        \
        .name = bits_name, .bits = n_bits, .scope = LOWKEY_SCOPE_LAYER, .value_scale = LOWKEY_SCALE_F16,     \
        .outliers = fraction, .normalised_units = 1                                                          \
    }
static const struct preset presets[] = {
    OURS("2", 2),
    OURS("3", 3),
    OURS("4", 4),
    KVQUANT("kvquant-nuq2", 2, 0),
    KVQUANT("kvquant-nuq3", 3, 0),
    KVQUANT("kvquant-nuq4", 4, 0),
    KVQUANT("kvquant-nuq2-1%", 2, 0.01),
    KVQUANT("kvquant-nuq3-1%", 3, 0.01),
    KVQUANT("kvquant-nuq4-1%", 4, 0.01),
};

int lowkey_fit_preset(const char *name, struct lowkey_fit_options *options)
{
    const struct preset *preset = NULL;
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++)
        if (strcmp(presets[i].name, name) == 0) preset = &presets[i];
    if (!preset) return 0;
    for (int which = 0; which < 2; which++) {
        struct lowkey_side_options *side = &options->side[which];
        side->n_widths = 1;
        side->widths[0] = preset->bits;
        side->codebook = LOWKEY_CODEBOOK_FITTED;
        side->scope = preset->scope;
        side->outlier_fraction = preset->outliers;
        side->trellis = preset->trellis;
    }
    options->side[0].feedback = preset->key_feedback;
    options->side[1].token_scale = preset->value_scale;
    options->budget = preset->budget;
    options->n_sinks = 1;
    options->weight_clip = preset->weight_clip;
    options->weight_floor = preset->weight_floor;
    options->normalised_units = preset->normalised_units;
    return 1;
}

int lowkey_has_plain_tables(const struct lowkey_side_options *side)
{
    return side->codebook == LOWKEY_CODEBOOK_FITTED && side->scope == LOWKEY_SCOPE_CHANNEL &&
           side->token_scale == LOWKEY_SCALE_NONE && side->outlier_fraction == 0;
}

static lowkey_status check_side(const struct lowkey_side_options *side, const char *name, lowkey_error *err)
{
    int any_table = 0, any_one = 0, any_packed = 0, any_16_or_8 = 0;
    for (int i = 0; i < side->n_widths; i++) {
        if (!lowkey_wide_bits(side->widths[i]))
            return lowkey_fail(err, LOWKEY_EINVAL, "%s: a width is 1 to 5, 8 or 16 bits, not %d", name,
                               side->widths[i]);
        any_table |= side->widths[i] <= 5;
        any_16_or_8 |= side->widths[i] > 5;
        any_packed |= side->widths[i] <= 8;
        any_one |= side->widths[i] == 1;
    }
    if (side->n_widths < 1) return lowkey_fail(err, LOWKEY_EINVAL, "%s: no width is given", name);
    if (side->codebook == LOWKEY_CODEBOOK_NORMAL_FLOAT && any_one)
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: a NormalFloat codebook has 2 to 5 bits, not 1", name);
    if (!(side->outlier_fraction >= 0 && side->outlier_fraction <= 1))
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: a fraction of outliers is 0 to 1, not %g", name,
                           side->outlier_fraction);
    if (!any_table && side->token_scale != LOWKEY_SCALE_NONE)
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: a token scale belongs to widths of 1 to 5 bits", name);
    if (side->token_scale == LOWKEY_SCALE_NONE && side->scale_block != 0)
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: a scale block belongs to a token scale", name);
    if (side->outlier_fraction == 0 && (side->outlier_cap != 0 || side->outlier_page_capacity != 0))
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "%s: a cap or a page of outliers belongs to a fraction of outliers", name);
    if (!any_packed && side->outlier_fraction > 0)
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: 16 bits have no outliers", name);
    if (!any_table && (side->gain || side->qnorm))
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: a correction belongs to widths of 1 to 5 bits", name);
    if (side->trellis < 0 || side->trellis > 4 || side->trellis == 3)
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: a trellis keeps 1, 2 or 4 survivors of a state, not %d",
                           name, side->trellis);
    if (side->trellis && (!lowkey_has_plain_tables(side) || any_16_or_8))
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "%s: a trellis goes with fitted tables per channel of 1 to 5 bits, without token "
                           "scales and outliers",
                           name);
    if (side->refit > 0 && side->feedback && !lowkey_has_plain_tables(side))
        return lowkey_fail(
            err, LOWKEY_EINVAL,
            "%s: refitting goes with fitted tables per channel, without token scales and outliers", name);
    if (side->gain && side->qnorm)
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: gain and Q-Norm correct the same spread: choose one",
                           name);
    return LOWKEY_OK;
}

/* A budget is shared out in tables of each channel's own. */
static lowkey_status check_budget(const struct lowkey_fit_options *options, lowkey_error *err)
{
    const int is_chosen = options->low_width != 0 || options->high_width != 0;
    const int low = is_chosen ? options->low_width : 1, high = is_chosen ? options->high_width : 5;
    if (low < 1 || high > 5 || low > high)
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "widths that a budget is shared out in are within 1:5, not %d:%d", low, high);
    if (options->budget == 0) return LOWKEY_OK;
    if (!(options->budget >= low && options->budget <= high))
        return lowkey_fail(err, LOWKEY_EINVAL, "a budget is a mean of its widths, %d to %d bits, not %g", low,
                           high, options->budget);
    for (int which = 0; which < 2; which++)
        if (!lowkey_has_plain_tables(&options->side[which]))
            return lowkey_fail(err, LOWKEY_EINVAL,
                               "%s: a budget goes with fitted tables per channel, without token scales and "
                               "outliers: give their bits instead",
                               which ? "values" : "keys");
    return LOWKEY_OK;
}

lowkey_status lowkey_fit_options_check(const struct lowkey_fit_options *options, lowkey_error *err)
{
    LOWKEY_TRY(check_side(&options->side[0], "keys", err));
    LOWKEY_TRY(check_side(&options->side[1], "values", err));
    LOWKEY_TRY(check_budget(options, err));
    if (options->n_sinks < 0 || options->n_sinks > 64)
        return lowkey_fail(err, LOWKEY_EINVAL, "0 to 64 sinks, not %d", options->n_sinks);
    if (options->n_queries < 1)
        return lowkey_fail(err, LOWKEY_EINVAL, "at least one query a sample, not %d", options->n_queries);
    if (!(options->damp > 0) || !(options->weight_clip >= 0) || !(options->weight_floor >= 0))
        return lowkey_fail(err, LOWKEY_EINVAL, "damp is above 0, clip and floor of weights are not below it");
    return LOWKEY_OK;
}

#define HAS(streams, s) ((streams) >> (s)&1)

static int has_both(unsigned contents, enum lowkey_stream key, enum lowkey_stream value)
{
    return HAS(contents, key) && HAS(contents, value);
}

lowkey_status lowkey_choose_sensitivity(enum lowkey_sensitivity asked, unsigned contents,
                                        unsigned some_contents, enum lowkey_sensitivity *out,
                                        lowkey_error *err)
{
    const int any[] = {
        [LOWKEY_SENSITIVITY_FISHER] = has_both(contents, LOWKEY_KEY_GRAD, LOWKEY_VALUE_GRAD),
        [LOWKEY_SENSITIVITY_WEIGHT] = has_both(contents, LOWKEY_KEY_WEIGHT, LOWKEY_VALUE_WEIGHT),
        [LOWKEY_SENSITIVITY_ATTENTION] = HAS(contents, LOWKEY_QUERY),
        [LOWKEY_SENSITIVITY_NONE] = 1,
    };
    static const char *const needs[] = {
        [LOWKEY_SENSITIVITY_FISHER] = "fisher needs key_grad and value_grad",
        [LOWKEY_SENSITIVITY_WEIGHT] = "weight needs key_weight and value_weight",
        [LOWKEY_SENSITIVITY_ATTENTION] = "attention needs query",
    };
    *out = asked;
    if (asked == LOWKEY_SENSITIVITY_AUTO)
        *out = any[LOWKEY_SENSITIVITY_FISHER]      ? LOWKEY_SENSITIVITY_FISHER
               : any[LOWKEY_SENSITIVITY_WEIGHT]    ? LOWKEY_SENSITIVITY_WEIGHT
               : any[LOWKEY_SENSITIVITY_ATTENTION] ? LOWKEY_SENSITIVITY_ATTENTION
                                                   : LOWKEY_SENSITIVITY_NONE;
    if (!any[*out])
        return lowkey_fail(err, LOWKEY_EINVAL, "sensitivity %s, which the files do not all have",
                           needs[*out]);
    if (asked == LOWKEY_SENSITIVITY_AUTO && contents != some_contents)
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "the files do not have the same contents: say which --sensitivity is meant");
    return LOWKEY_OK;
}
