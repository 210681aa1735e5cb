/* damage_report.c - rows of a result: a format as a whole, then by layer, then by query head, as detailed as
 * asked. A row is made once (struct row); the table, JSON and CSV are ways to print it. */
#include "experiments/damage_report.h"

#include <math.h>

#include "experiments/json_rows.h"

struct row {
    const struct lowkey_damage_result *result;
    const struct lowkey_format_damage *format;
    int layer, head; /* numbers in the model; -1: all */
    struct lowkey_damage damage;
    struct lowkey_distortion key, value;
    lowkey_cache_usage payload; /* as measured; no elements: a head alone has none of its own */
    lowkey_cache_usage stated; /* at the stated length, without outliers */
};

typedef int row_fn(void *arg, const struct row *row); /* 0: stop, it failed */

/* ---- making rows ---- */

static void add_layer(struct row *row, const struct lowkey_layer_damage *layer, int n_q_heads, int n_kv_heads)
{
    for (int h = 0; h < n_q_heads; h++) lowkey_damage_merge(&row->damage, &layer->heads[h]);
    for (int h = 0; h < n_kv_heads; h++) {
        lowkey_distortion_merge(&row->key, &layer->key[h]);
        lowkey_distortion_merge(&row->value, &layer->value[h]);
    }
    lowkey_payload_add(&row->payload, &layer->payload);
}

static int layer_rows(const struct lowkey_damage_result *result, const struct lowkey_format_damage *format,
                      int l, enum lowkey_damage_detail detail, row_fn *give, void *arg)
{
    const lowkey_layer_desc *geometry = &result->info->layers[result->layers[l]];
    const struct lowkey_layer_damage *layer = &format->layers[l];
    const int q_per_kv = geometry->n_q_heads / geometry->n_kv_heads;
    struct row row = { .result = result,
                       .format = format,
                       .layer = geometry->index,
                       .head = -1,
                       .stated = format->layer_stated[l] };
    add_layer(&row, layer, geometry->n_q_heads, geometry->n_kv_heads);
    if (!give(arg, &row)) return 0;
    for (int h = 0; detail == LOWKEY_DAMAGE_PER_HEAD && h < geometry->n_q_heads; h++) {
        const struct row head = { .result = result,
                                  .format = format,
                                  .layer = geometry->index,
                                  .head = h,
                                  .damage = layer->heads[h],
                                  .key = layer->key[h / q_per_kv],
                                  .value = layer->value[h / q_per_kv] };
        if (!give(arg, &head)) return 0;
    }
    return 1;
}

/* First every format as a whole, then, where asked, format by format its layers and their heads. */
static int each_row(const struct lowkey_damage_result *result, enum lowkey_damage_detail detail, row_fn *give,
                    void *arg)
{
    for (int f = 0; f < result->n_formats; f++) {
        struct row row = { .result = result,
                           .format = &result->formats[f],
                           .layer = -1,
                           .head = -1,
                           .stated = result->formats[f].stated };
        for (int l = 0; l < result->n_layers; l++) {
            const lowkey_layer_desc *geometry = &result->info->layers[result->layers[l]];
            add_layer(&row, &row.format->layers[l], geometry->n_q_heads, geometry->n_kv_heads);
        }
        if (!give(arg, &row)) return 0;
    }
    for (int f = 0; detail != LOWKEY_DAMAGE_SUMMARY && f < result->n_formats; f++)
        for (int l = 0; l < result->n_layers; l++)
            if (!layer_rows(result, &result->formats[f], l, detail, give, arg)) return 0;
    return 1;
}

/* At the stated length. Outliers are as frequent there among packed tokens, which sinks are not, as they were
 * measured. */
static double bits_payload(const struct row *row)
{
    const lowkey_cache_usage *stated = &row->stated, *measured = &row->payload;
    if (!stated->elements) return (double)NAN;
    const double packed = (double)measured->elements - (double)measured->sinks_bytes / 2;
    const double stated_packed = (double)stated->elements - (double)stated->sinks_bytes / 2;
    const double outliers = packed > 0 ? (double)measured->outliers / packed * stated_packed : 0;
    const uint64_t bytes = stated->codes_bytes + stated->scales_bytes + stated->outliers_bytes +
                           stated->sinks_bytes;
    return 8 * ((double)bytes + 4 * outliers) / (double)stated->elements;
}

static double bits_held(const struct row *row)
{
    return row->stated.elements ? row->stated.bits_held : (double)NAN;
}

/* ---- the table ---- */

static int table_line(void *arg, const struct row *row)
{
    FILE *to = arg;
    const double kl = lowkey_softmax_kl(&row->damage), held = bits_held(row);
    fprintf(to, "%-20s ", row->format->label);
    char layer[12] = "", head[12] = "";
    if (row->layer >= 0) snprintf(layer, sizeof layer, "%d", row->layer);
    if (row->head >= 0) snprintf(head, sizeof head, "%d", row->head);
    fprintf(to, "%-4s %-3s ", layer, head);
    if (row->head < 0)
        fprintf(to, "%7.2f %6.2f %6.2fx ", bits_payload(row), held, 16 / held);
    else
        fprintf(to, "%7s %6s %7s ", "", "", "");
    fprintf(to, "%11.3g %10.3g %8.1g %10.3g %7.2f%% %9.3g %9.3g%s\n",
            lowkey_relative_logit_error(&row->damage), kl, lowkey_softmax_kl_stderr(&row->damage),
            lowkey_relative_output_error(&row->damage), 100 * lowkey_flip_rate(&row->damage),
            lowkey_relative_mse(&row->key), lowkey_relative_mse(&row->value),
            row->format->fit_overlap ? "  *" : "");
    return 1;
}

void lowkey_damage_print_table(const struct lowkey_damage_result *result, enum lowkey_damage_detail detail,
                               FILE *to)
{
    const struct lowkey_damage_options *options = &result->options;
    const int64_t *offsets = result->info->sample_offsets;
    uint64_t n_rows = 0;
    int overlap = 0;
    for (int l = 0; l < result->n_layers; l++) {
        const struct lowkey_layer_damage *layer = &result->formats[0].layers[l];
        for (int h = 0; h < result->info->layers[result->layers[l]].n_q_heads; h++)
            n_rows += layer->heads[h].n_rows;
    }
    fprintf(to, "%s, %d of %d layers; samples %d:%d of %s, %lld tokens; %llu rows, each a query of a head\n",
            result->info->model_name, result->n_layers, result->info->n_model_layers, options->first_sample,
            options->end_sample, result->info->text_name,
            (long long)(offsets[options->end_sample] - offsets[options->first_sample]),
            (unsigned long long)n_rows);
    fprintf(to, "%-20s %8s %7s %6s %7s %11s %10s %8s %10s %8s %9s %9s\n", "", "", "bits", "bits", "16 bits",
            "relative", "softmax", "standard", "relative", "top-1", "K rel.", "V rel.");
    fprintf(to, "%-20s %-8s %7s %6s %7s %11s %10s %8s %10s %8s %9s %9s\n", "format",
            detail == LOWKEY_DAMAGE_SUMMARY ? "" : "layer hd", "payload", "held", "/ held", "logit error",
            "KL, nats", "error", "out. error", "flips", "MSE", "MSE");
    each_row(result, detail, table_line, to);
    for (int f = 0; f < result->n_formats; f++) overlap |= result->formats[f].fit_overlap;
    fprintf(to, "bits: of an element at %d tokens, %d sequence; outliers as frequent as here\n",
            LOWKEY_STATED_TOKENS, LOWKEY_STATED_SEQUENCES);
    if (overlap) fprintf(to, "* fitted on some of these samples\n");
}

/* ---- JSON and CSV ---- */

static json_t *count(uint64_t value)
{
    return json_integer((json_int_t)value);
}

static json_t *layer_list(const struct lowkey_damage_result *result)
{
    json_t *list = json_string("");
    for (int l = 0; l < result->n_layers; l++) {
        json_t *longer = json_sprintf("%s%s%d", json_string_value(list), l ? " " : "",
                                      result->info->layers[result->layers[l]].index);
        json_decref(list);
        list = longer;
    }
    return list;
}

static void settings_cells(struct lowkey_cells *cells, const struct row *row)
{
    const struct lowkey_damage_options *options = &row->result->options;
    const struct lowkey_activations_info *info = row->result->info;
    const int64_t *offsets = info->sample_offsets;
    lowkey_cells_put(cells, "command", json_string("error"));
    lowkey_cells_put(cells, "version", json_string(lowkey_version()));
    lowkey_cells_put(cells, "isa", json_string(row->result->isa));
    lowkey_cells_put(cells, "activations", json_string(options->activations));
    lowkey_cells_put(cells, "model_name", json_string(info->model_name));
    lowkey_cells_put(cells, "model_sha256", lowkey_cell_sha256(info->model_sha256));
    lowkey_cells_put(cells, "text_name", json_string(info->text_name));
    lowkey_cells_put(cells, "text_sha256", lowkey_cell_sha256(info->text_sha256));
    lowkey_cells_put(cells, "layers", layer_list(row->result));
    lowkey_cells_put(cells, "first_sample", json_integer(options->first_sample));
    lowkey_cells_put(cells, "end_sample", json_integer(options->end_sample));
    lowkey_cells_put(cells, "n_tokens",
                     json_integer(offsets[options->end_sample] - offsets[options->first_sample]));
    lowkey_cells_put(cells, "queries_per_sample", json_integer(options->n_queries));
    lowkey_cells_put(cells, "stated_tokens", json_integer(LOWKEY_STATED_TOKENS));
    lowkey_cells_put(cells, "stated_sequences", json_integer(LOWKEY_STATED_SEQUENCES));
}

static void result_cells(struct lowkey_cells *cells, const struct row *row)
{
    const lowkey_cache_usage *payload = &row->payload;
    const int has_payload = payload->elements != 0;
    lowkey_cells_put(cells, "format", json_string(row->format->label));
    lowkey_cells_put(cells, "path", json_string(row->format->path));
    lowkey_cells_put(cells, "fit_samples", json_integer(row->format->n_fit_samples));
    lowkey_cells_put(cells, "fit_overlap", json_integer(row->format->fit_overlap));
    lowkey_cells_put(cells, "layer", lowkey_cell_index(row->layer));
    lowkey_cells_put(cells, "head", lowkey_cell_index(row->head));
    lowkey_cells_put(cells, "bits_payload", lowkey_cell_number(bits_payload(row)));
    lowkey_cells_put(cells, "bits_held", lowkey_cell_number(bits_held(row)));
    lowkey_cells_put(cells, "compression", lowkey_cell_number(16 / bits_held(row)));
    lowkey_cells_put(cells, "n_rows", count(row->damage.n_rows));
    lowkey_cells_put(cells, "relative_logit_error",
                     lowkey_cell_number(lowkey_relative_logit_error(&row->damage)));
    lowkey_cells_put(cells, "softmax_kl", lowkey_cell_number(lowkey_softmax_kl(&row->damage)));
    lowkey_cells_put(cells, "softmax_kl_stderr", lowkey_cell_number(lowkey_softmax_kl_stderr(&row->damage)));
    lowkey_cells_put(cells, "relative_output_error",
                     lowkey_cell_number(lowkey_relative_output_error(&row->damage)));
    lowkey_cells_put(cells, "top1_flips", lowkey_cell_number(lowkey_flip_rate(&row->damage)));
    lowkey_cells_put(cells, "key_relative_mse", lowkey_cell_number(lowkey_relative_mse(&row->key)));
    lowkey_cells_put(cells, "value_relative_mse", lowkey_cell_number(lowkey_relative_mse(&row->value)));
    lowkey_cells_put(cells, "elements", has_payload ? count(payload->elements) : json_null());
    lowkey_cells_put(cells, "outliers", has_payload ? count(payload->outliers) : json_null());
    lowkey_cells_put(cells, "clamped", has_payload ? count(payload->clamped) : json_null());
    lowkey_cells_put(cells, "saturated", has_payload ? count(payload->saturated) : json_null());
}

static json_t *make_cells(const struct row *row)
{
    struct lowkey_cells cells = { .object = json_object() };
    settings_cells(&cells, row);
    result_cells(&cells, row);
    return lowkey_cells_finish(&cells);
}

static int append_row(void *array, const struct row *row)
{
    return json_array_append_new(array, make_cells(row)) == 0;
}

int lowkey_damage_print_json(const struct lowkey_damage_result *result, enum lowkey_damage_detail detail,
                             FILE *to)
{
    json_t *rows = json_array();
    const int good = rows && each_row(result, detail, append_row, rows) && lowkey_rows_print_json(rows, to);
    json_decref(rows);
    return good;
}

struct csv {
    FILE *to;
    int has_names;
};

static int csv_line(void *arg, const struct row *row)
{
    struct csv *csv = arg;
    json_t *cells = make_cells(row);
    if (!cells) return 0;
    lowkey_json_csv_line(cells, !csv->has_names, csv->to);
    csv->has_names = 1;
    json_decref(cells);
    return 1;
}

int lowkey_damage_print_csv(const struct lowkey_damage_result *result, enum lowkey_damage_detail detail,
                            FILE *to)
{
    struct csv csv = { .to = to };
    return each_row(result, detail, csv_line, &csv);
}
