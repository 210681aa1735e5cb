/* inspect_quantizer.c - a quantizer as a person wants to see it: what it was fitted on, and for keys and
 * values of every layer the bits an element costs, how they are spent, and the error that the fit
 * reported. */
#include <stdio.h>
#include <string.h>

#include "experiments/files.h"
#include "formats/geometry.h"
#include "formats/quantizer_file.h"
#include "formats/sha256.h"

static void set(json_t *object, const char *key, json_t *value)
{
    json_object_set_new(object, key, value);
}

/* "3", or "2 (50 %), 4 (50 %)" */
static void print_widths(const lowkey_side_desc *side, size_t n, char *text, size_t size)
{
    size_t counts[17] = { 0 }, used = 0;
    for (size_t c = 0; c < n; c++) counts[side->bits[c]]++;
    text[0] = 0;
    for (int b = 1; b <= 16; b++) {
        if (!counts[b] || used >= size) continue;
        used += (size_t)(counts[b] == n ? snprintf(text + used, size - used, "%d", b)
                                        : snprintf(text + used, size - used, "%s%d (%.3g %%)",
                                                   used ? ", " : "", b, 100 * (double)counts[b] / (double)n));
    }
}

static const char *rule_name(lowkey_rule rule)
{
    static const char *const names[] = {
        [LOWKEY_RULE_NONE] = "none", [LOWKEY_RULE_F16] = "f16",   [LOWKEY_RULE_BF16] = "bf16",
        [LOWKEY_RULE_E4M3] = "e4m3", [LOWKEY_RULE_E5M2] = "e5m2", [LOWKEY_RULE_INT8] = "int8"
    };
    return names[rule];
}

/* What codes mean: "channel fitted, 8 entries", "e4m3", "f16". */
static void print_table(const lowkey_side_desc *side, const struct lowkey_side_report *report, char *text,
                        size_t size)
{
    int used = 0;
    text[0] = 0;
    if (side->table_entries)
        used = snprintf(text, size, "%s %s, %d entries", report->table_scope, report->codebook,
                        side->table_entries);
    if (side->rule_8 != LOWKEY_RULE_NONE)
        used += snprintf(text + used, size - (size_t)used, "%s%s", used ? ", " : "", rule_name(side->rule_8));
    if (side->rule_16 != LOWKEY_RULE_NONE)
        snprintf(text + used, size - (size_t)used, "%s%s", used ? ", " : "", rule_name(side->rule_16));
}

static void print_token_scale(const lowkey_side_desc *side, char *text, size_t size)
{
    if (side->token_scale == LOWKEY_SCALE_NONE)
        snprintf(text, size, "none");
    else
        snprintf(text, size, "%s per %d channels", side->token_scale == LOWKEY_SCALE_F16 ? "f16" : "f32",
                 side->scale_block);
}

static void print_outliers(const lowkey_side_desc *side, char *text, size_t size)
{
    if (side->outlier_rule == LOWKEY_OUTLIER_NONE)
        snprintf(text, size, "none");
    else if (side->outlier_rule == LOWKEY_OUTLIER_LIMIT)
        snprintf(text, size, "limit, %d a token, %d a page", side->outlier_cap, side->outlier_page_capacity);
    else
        snprintf(text, size, "rank %d, %d a token, %d a page", side->outlier_rank, side->outlier_cap,
                 side->outlier_page_capacity);
}

static void print_corrections(const lowkey_side_desc *side, const struct lowkey_side_report *report,
                              char *text, size_t size)
{
    snprintf(text, size, "%s%s%s", side->factor ? "feedback " : "", report->gain_corrected ? "gain " : "",
             report->qnorm ? "qnorm " : "");
    if (text[0])
        text[strlen(text) - 1] = 0;
    else
        snprintf(text, size, "none");
}

/* "4 constant, 2 offset-heavy" channels */
static void print_flags(const struct lowkey_side_report *report, size_t n, char *text, size_t size)
{
    static const char *const names[] = { "constant", "offset-heavy", "unused codes", "zero weights",
                                         "tiny weights" };
    size_t used = 0;
    text[0] = 0;
    for (int f = 0; f < 5; f++) {
        size_t count = 0;
        for (size_t c = 0; c < n; c++) count += report->flags[c] >> f & 1;
        if (count && used < size)
            used += (size_t)snprintf(text + used, size - used, "%s%zu %s", used ? ", " : "", count, names[f]);
    }
    if (!text[0]) snprintf(text, size, "none");
}

/* Bits an element costs: its code, its share of the token's scales and zeros, and of the outliers that the
 * fit saw. */
static double payload_bits(const lowkey_side_desc *side, const struct lowkey_side_report *report, size_t n)
{
    double bits = 0;
    for (size_t c = 0; c < n; c++) bits += side->bits[c];
    if (side->token_scale != LOWKEY_SCALE_NONE)
        bits += 2.0 * (side->token_scale == LOWKEY_SCALE_F16 ? 16 : 32) * (double)n / side->scale_block;
    if (side->outlier_rule != LOWKEY_OUTLIER_NONE && report->n_tokens)
        bits += 16 + 32 * (double)report->n_outliers / (double)report->n_tokens;
    return bits / (double)n;
}

static double mean_bits(const lowkey_side_desc *side, size_t n)
{
    size_t bits = 0;
    for (size_t c = 0; c < n; c++) bits += side->bits[c];
    return (double)bits / (double)n;
}

static double mean(const double *x, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += x[i];
    return sum / (double)n;
}

static json_t *share(double part, double whole)
{
    return whole > 0 ? json_real(part / whole) : json_null();
}

static json_t *describe_side(const lowkey_layer_desc *layer, int which,
                             const struct lowkey_side_report *report)
{
    const lowkey_side_desc *side = lowkey_side_of(layer, which);
    const size_t n = (size_t)layer->n_kv_heads * (size_t)lowkey_side_head_dim(layer, which);
    const double variance = mean(report->variance, n), elements = (double)report->n_tokens * (double)n;
    char text[160];
    json_t *to = json_pack("{s:i, s:s}", "layer", layer->index, "side", which == 0 ? "key" : "value");
    print_widths(side, n, text, sizeof text);
    set(to, "bits", json_string(text));
    set(to, "mean_bits", json_real(mean_bits(side, n)));
    set(to, "bits_payload", json_real(payload_bits(side, report, n)));
    print_table(side, report, text, sizeof text);
    set(to, "table", json_string(text));
    print_token_scale(side, text, sizeof text);
    set(to, "token_scale", json_string(text));
    print_outliers(side, text, sizeof text);
    set(to, "outlier_rule", json_string(text));
    print_corrections(side, report, text, sizeof text);
    set(to, "corrections", json_string(text));
    set(to, "relative_error", share(mean(report->mse, n), variance));
    set(to, "relative_weighted_error", share(mean(report->weighted_mse, n), variance));
    set(to, "outliers", share((double)report->n_outliers, elements));
    set(to, "clamped", share((double)report->n_clamped, elements));
    set(to, "saturated", json_integer((json_int_t)report->n_saturated));
    print_flags(report, n, text, sizeof text);
    set(to, "channels", json_string(text));
    return to;
}

static void describe_fit(json_t *to, const struct lowkey_fit_record *record)
{
    json_t *fit = json_object();
    set(fit, "text", json_string(record->text_name));
    set(fit, "samples", json_integer(record->n_samples));
    set(fit, "tokens", json_integer(record->n_tokens));
    set(fit, "sensitivity", json_string(record->sensitivity));
    set(fit, "outlier_fraction_key", json_real(record->outlier_fraction_key));
    set(fit, "outlier_fraction_value", json_real(record->outlier_fraction_value));
    set(fit, "damp", json_real(record->damp));
    if (record->budget > 0) {
        set(fit, "budget", json_real(record->budget));
        set(fit, "predicted_cost_key", json_real(record->predicted_cost_key));
        set(fit, "predicted_cost_value", json_real(record->predicted_cost_value));
    }
    if (record->tuned_steps > 0) set(fit, "tuned_steps", json_integer(record->tuned_steps));
    set(to, "fit", fit);
}

/* Of all elements together; held by one long sequence. */
static lowkey_status describe_bits(json_t *to, const lowkey_quantizer *quantizer,
                                   const struct lowkey_fit_record *record, lowkey_error *err)
{
    enum { LONG = 131072 };
    const lowkey_quantizer_desc *desc = lowkey_quantizer_describe(quantizer);
    double bits = 0, elements = 0;
    for (int i = 0; i < desc->n_layers; i++) {
        const lowkey_layer_desc *l = &desc->layers[i];
        const size_t keys = (size_t)l->n_kv_heads * (size_t)l->key_head_dim,
                     values = (size_t)l->n_kv_heads * (size_t)l->value_head_dim;
        bits += payload_bits(&l->key, &record->reports[i][0], keys) * (double)keys;
        bits += payload_bits(&l->value, &record->reports[i][1], values) * (double)values;
        elements += (double)(keys + values);
    }
    set(to, "bits_payload", json_real(bits / elements));
    const lowkey_cache_config config = { .struct_size = sizeof config,
                                         .n_pages = LONG / LOWKEY_PAGE_TOKENS,
                                         .max_sequences = 1 };
    lowkey_cache_usage usage = { .struct_size = sizeof usage };
    const lowkey_status status = lowkey_cache_estimate(quantizer, &config, 1, LONG, &usage, err);
    if (!status) set(to, "bits_held_at_131072_tokens", json_real(usage.bits_held));
    return status;
}

lowkey_status lowkey_describe_quantizer(const char *path, json_t *to, lowkey_error *err)
{
    lowkey_quantizer *quantizer;
    struct lowkey_fit_record *record;
    const lowkey_status read = lowkey_quantizer_read(path, &quantizer, &record, err);
    if (read) return read;
    const lowkey_quantizer_desc *desc = lowkey_quantizer_describe(quantizer);
    char sha256[65];
    lowkey_sha256_print(desc->model_sha256, sha256);
    set(to, "model", json_string(desc->model_name));
    set(to, "model_sha256", json_string(sha256));
    set(to, "layers_of_model", json_integer(record->n_model_layers));
    set(to, "layers_fitted", json_integer(desc->n_layers));
    set(to, "sink_tokens", json_integer(desc->n_sink_tokens));
    set(to, "sink_rule", json_string(rule_name(desc->sink_rule)));
    const lowkey_status status = describe_bits(to, quantizer, record, err);
    describe_fit(to, record);
    json_t *geometries = json_array(), *layers = json_array();
    for (int i = 0; i < desc->n_layers; i++) {
        json_array_append_new(geometries, lowkey_describe_geometry(&desc->layers[i]));
        for (int side = 0; side < 2; side++)
            json_array_append_new(layers, describe_side(&desc->layers[i], side, &record->reports[i][side]));
    }
    set(to, "geometry", geometries);
    set(to, "layers", layers);
    lowkey_fit_record_free(record);
    lowkey_quantizer_free(quantizer);
    return status;
}
