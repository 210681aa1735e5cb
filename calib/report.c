/* report.c - what a calibration found, for people and for scripts: a line, or an object, for the keys and
 * the values of each layer. Errors are relative: summed over channels, over the summed variance. */
#include <stdio.h>
#include <string.h>

#include <jansson.h>

#include "calib/fit.h"
#include "formats/geometry.h"

struct summary {
    int layer, which;
    double bits; /* of codes, mean over channels */
    size_t n_channels, n_constant, n_offset, n_unused, n_zero_weights, n_tiny_weights;
    double error, weighted_error; /* relative */
    const struct lowkey_side_report *report;
    const struct lowkey_side_notes *notes;
};

static struct summary summarise(const struct lowkey_fit_result *result, int i, int which)
{
    const lowkey_layer_desc *layer = &result->desc->layers[i];
    const lowkey_side_desc *side = lowkey_side_of(layer, which);
    const struct lowkey_side_report *report = &result->record->reports[i][which];
    struct summary s = {
        .layer = layer->index, .which = which, .report = report, .notes = &result->notes[i][which]
    };
    s.n_channels = (size_t)layer->n_kv_heads * (size_t)lowkey_side_head_dim(layer, which);
    double error = 0, weighted_error = 0, variance = 0;
    for (size_t c = 0; c < s.n_channels; c++) {
        s.bits += side->bits[c] / (double)s.n_channels;
        s.n_constant += !!(report->flags[c] & LOWKEY_FLAG_CONSTANT);
        s.n_offset += !!(report->flags[c] & LOWKEY_FLAG_OFFSET);
        s.n_unused += !!(report->flags[c] & LOWKEY_FLAG_UNUSED_CODES);
        s.n_zero_weights += !!(report->flags[c] & LOWKEY_FLAG_ZERO_WEIGHTS);
        s.n_tiny_weights += !!(report->flags[c] & LOWKEY_FLAG_TINY_WEIGHTS);
        error += report->mse[c];
        weighted_error += report->weighted_mse[c];
        variance += report->variance[c];
    }
    s.error = variance > 0 ? error / variance : 0;
    s.weighted_error = variance > 0 ? weighted_error / variance : 0;
    return s;
}

static const struct {
    unsigned bit;
    const char *name, *words;
} suspicions[] = {
    { LOWKEY_SUSPECT_BF16_AS_F16, "bf16_as_f16",
      "suspicious: channels stored as f16 whose values use no more than bf16's 7 bits of mantissa" },
    { LOWKEY_SUSPECT_ALL_EQUAL, "all_equal", "suspicious: channels of layers whose values are all equal" },
    { LOWKEY_SUSPECT_OFFSETS, "offset_heavy",
      "suspicious: channels of layers where more than a tenth have an offset far above their spread" },
};
enum { N_SUSPICIONS = sizeof suspicions / sizeof suspicions[0] };

static const char *side_name(int which)
{
    return which ? "value" : "key";
}

/* One line for all sides that the same is to be said of: what, how many channels or heads of it, where. */
static void print_note(const struct lowkey_fit_result *result, const char *what,
                       size_t (*count)(const struct summary *, int), int argument)
{
    enum { NAMED = 6 };
    size_t total = 0, n_sides = 0;
    for (int i = 0; i < 2 * result->desc->n_layers; i++) {
        const struct summary s = summarise(result, i / 2, i % 2);
        const size_t n = count(&s, argument);
        total += n;
        n_sides += n > 0;
    }
    if (total == 0) return;
    printf("note: %s: %zu in", what, total);
    for (int i = 0, n = 0; i < 2 * result->desc->n_layers && n < NAMED; i++) {
        const struct summary s = summarise(result, i / 2, i % 2);
        if (count(&s, argument)) printf("%s layer %d %s", n++ ? "," : "", s.layer, side_name(s.which));
    }
    printf(n_sides > NAMED ? " and %zu more\n" : "\n", n_sides - NAMED);
}

static size_t count_suspicion(const struct summary *s, int i)
{
    return s->notes->suspicions & suspicions[i].bit ? s->n_channels : 0;
}

static size_t count_note(const struct summary *s, int i)
{
    const size_t counts[] = { s->n_zero_weights, s->n_tiny_weights, (size_t)s->notes->zero_feedback,
                              (size_t)s->notes->tables_clamped_to_range };
    return counts[i];
}

static void print_notes(const struct lowkey_fit_result *result)
{
    static const char *const notes[] = {
        "channels whose weights are all zero: 1 was taken",
        "channels with weights below 2^-40 of their largest, taken as 0",
        "heads whose feedback matrix is zero",
        "channels left uncorrected, as their tables would have left the range"
    };
    for (int i = 0; i < N_SUSPICIONS; i++) print_note(result, suspicions[i].words, count_suspicion, i);
    for (int i = 0; i < (int)(sizeof notes / sizeof notes[0]); i++)
        print_note(result, notes[i], count_note, i);
}

/* Mean bits of all keys, of all values. */
static void mean_bits(const struct lowkey_fit_result *result, double bits[2])
{
    double n[2] = { 0 };
    bits[0] = bits[1] = 0;
    for (int i = 0; i < 2 * result->desc->n_layers; i++) {
        const struct summary s = summarise(result, i / 2, i % 2);
        bits[i % 2] += s.bits * (double)s.n_channels;
        n[i % 2] += (double)s.n_channels;
    }
    for (int which = 0; which < 2; which++) bits[which] /= n[which];
}

static void print_bits(const struct lowkey_fit_result *result)
{
    const struct lowkey_fit_record *record = result->record;
    double bits[2];
    mean_bits(result, bits);
    printf("bits: keys %.3f, values %.3f on average", bits[0], bits[1]);
    if (record->budget > 0)
        printf(", of a budget of %g; predicted cost: keys %.4g, values %.4g, both %.4g%s", record->budget,
               record->predicted_cost_key, record->predicted_cost_value,
               record->predicted_cost_key + record->predicted_cost_value,
               strcmp(record->sensitivity, "fisher") == 0 ? " nats per token" : " in units of the weights");
    printf("\n");
}

static void print_table(const struct lowkey_fit_result *result)
{
    const struct lowkey_fit_record *record = result->record;
    printf("%s: %d layers, %d samples, %lld tokens without %d sinks each, sensitivity %s, %.1f s\n",
           result->desc->model_name, result->desc->n_layers, record->n_samples, (long long)record->n_tokens,
           result->desc->n_sink_tokens, record->sensitivity, result->seconds);
    print_bits(result);
    printf("%5s %-5s %5s %8s %8s %6s %6s %10s %8s %9s %9s %9s\n", "layer", "side", "bits", "channels",
           "constant", "offset", "unused", "outliers", "clamped", "saturated", "error", "weighted");
    for (int i = 0; i < result->desc->n_layers; i++)
        for (int which = 0; which < 2; which++) {
            const struct summary s = summarise(result, i, which);
            const struct lowkey_side_report *r = s.report;
            printf("%5d %-5s %5.2f %8zu %8zu %6zu %6zu %10llu %8llu %9llu %9.3g %9.3g\n", s.layer,
                   side_name(which), s.bits, s.n_channels, s.n_constant, s.n_offset, s.n_unused,
                   (unsigned long long)r->n_outliers, (unsigned long long)r->n_clamped,
                   (unsigned long long)r->n_saturated, s.error, s.weighted_error);
        }
    print_notes(result);
}

static json_t *summary_json(const struct summary *s)
{
    const struct lowkey_side_report *r = s->report;
    json_t *notes = json_array();
    for (int i = 0; i < N_SUSPICIONS; i++)
        if (s->notes->suspicions & suspicions[i].bit)
            json_array_append_new(notes, json_string(suspicions[i].name));
    return json_pack("{s:i, s:s, s:f, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:i, s:i, "
                     "s:f, s:f, s:o}",
                     "layer", s->layer, "side", side_name(s->which), "bits", s->bits, "codebook", r->codebook,
                     "scope", r->table_scope, "channels", (json_int_t)s->n_channels, "tokens",
                     (json_int_t)r->n_tokens, "constant_channels", (json_int_t)s->n_constant,
                     "offset_channels", (json_int_t)s->n_offset, "unused_codes_channels",
                     (json_int_t)s->n_unused, "zero_weight_channels", (json_int_t)s->n_zero_weights,
                     "tiny_weight_channels", (json_int_t)s->n_tiny_weights, "outliers",
                     (json_int_t)r->n_outliers, "clamped", (json_int_t)r->n_clamped, "saturated",
                     (json_int_t)r->n_saturated, "zero_feedback_heads", s->notes->zero_feedback,
                     "uncorrected_channels", s->notes->tables_clamped_to_range, "error", s->error,
                     "weighted_error", s->weighted_error, "suspicions", notes);
}

static void print_json(const struct lowkey_fit_result *result)
{
    json_t *sides = json_array();
    for (int i = 0; i < result->desc->n_layers; i++)
        for (int which = 0; which < 2; which++) {
            const struct summary s = summarise(result, i, which);
            json_array_append_new(sides, summary_json(&s));
        }
    double bits[2];
    mean_bits(result, bits);
    json_t *root = json_pack("{s:s, s:i, s:i, s:I, s:i, s:s, s:f, s:f, s:f, s:f, s:f, s:f, s:o}", "model", result->desc->model_name,
                             "layers", result->desc->n_layers, "samples", result->record->n_samples, "tokens",
                             (json_int_t)result->record->n_tokens, "sinks", result->desc->n_sink_tokens,
                             "sensitivity", result->record->sensitivity, "key_bits", bits[0], "value_bits", bits[1],
                             "budget", result->record->budget, "predicted_cost_key",
                             result->record->predicted_cost_key, "predicted_cost_value",
                             result->record->predicted_cost_value, "seconds", result->seconds, "sides", sides);
    json_dumpf(root, stdout, JSON_INDENT(1));
    printf("\n");
    json_decref(root);
}

void lowkey_fit_report(const struct lowkey_fit_result *result, int json)
{
    if (json)
        print_json(result);
    else
        print_table(result);
}
