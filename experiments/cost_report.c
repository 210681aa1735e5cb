/* cost_report.c - rows of costs: a format as a whole and its keys and values, then by layer, by KV head, by channel, as
 * detailed as asked. A row is made once (struct row); the table, JSON and CSV are ways to print it. */
#include "experiments/cost_report.h"

#include <math.h>
#include <stdlib.h>

#include "experiments/json_rows.h"

struct row {
    const struct lowkey_cost_result *result;
    const struct lowkey_format_cost *format;
    int layer, side, head, channel; /* numbers in the model; -1: all */
    struct lowkey_cost cost;
};

typedef int row_fn(void *arg, const struct row *row); /* 0: stop, it failed */

struct walk { /* through all rows */
    const struct lowkey_cost_result *result;
    enum lowkey_cost_detail detail;
    row_fn *give;
    void *arg;
    double *first, *scratch; /* [n_samples] */
};

static const lowkey_layer_desc *geometry(const struct lowkey_cost_result *result, int l)
{
    return &result->measured.info->layers[result->measured.layers[l]];
}

static int head_dim(const lowkey_layer_desc *layer, int side)
{
    return side ? layer->value_head_dim : layer->key_head_dim;
}

static struct lowkey_cost_total empty(const struct walk *walk)
{
    for (int s = 0; s < walk->result->n_samples; s++) walk->first[s] = 0;
    return (struct lowkey_cost_total) { .n_samples = walk->result->n_samples, .first = walk->first };
}

/* Channels first..first+n-1 of a layer's side, acting together. */
static void add_unit(const struct walk *walk, const struct lowkey_format_cost *format, int l, int side,
                     int first, int n, struct lowkey_cost_total *total)
{
    const struct lowkey_cost_sums *sums = &format->layers[l][side];
    lowkey_cost_add_unit(total, n, sums->sums + (size_t)first * (size_t)walk->result->n_samples,
                         sums->squares + first, walk->scratch);
}

static void add_side(const struct walk *walk, const struct lowkey_format_cost *format, int l, int side,
                     struct lowkey_cost_total *total)
{
    const lowkey_layer_desc *layer = geometry(walk->result, l);
    const int dim = head_dim(layer, side);
    for (int h = 0; h < layer->n_kv_heads; h++) add_unit(walk, format, l, side, h * dim, dim, total);
}

static int give(const struct walk *walk, struct row row, const struct lowkey_cost_total *total)
{
    row.cost = lowkey_cost_of(total, (double)lowkey_measured_tokens(&walk->result->measured));
    return walk->give(walk->arg, &row);
}

/* All layers or one (l >= 0): both sides together, then each. */
static int side_rows(const struct walk *walk, struct row row, int l)
{
    const int first = l < 0 ? 0 : l, end = l < 0 ? walk->result->measured.n_layers : l + 1;
    for (row.side = -1; row.side < 2; row.side++) {
        struct lowkey_cost_total total = empty(walk);
        for (int i = first; i < end; i++)
            for (int side = 0; side < 2; side++)
                if (row.side < 0 || row.side == side) add_side(walk, row.format, i, side, &total);
        if (!give(walk, row, &total)) return 0;
    }
    return 1;
}

static int channel_rows(const struct walk *walk, struct row row, int l, int dim)
{
    for (row.channel = 0; row.channel < dim; row.channel++) {
        struct lowkey_cost_total total = empty(walk);
        add_unit(walk, row.format, l, row.side, row.head * dim + row.channel, 1, &total);
        if (!give(walk, row, &total)) return 0;
    }
    return 1;
}

static int head_rows(const struct walk *walk, struct row row, int l)
{
    const lowkey_layer_desc *layer = geometry(walk->result, l);
    for (row.side = 0; row.side < 2; row.side++)
        for (row.head = 0; row.head < layer->n_kv_heads; row.head++) {
            const int dim = head_dim(layer, row.side);
            struct lowkey_cost_total total = empty(walk);
            add_unit(walk, row.format, l, row.side, row.head * dim, dim, &total);
            if (!give(walk, row, &total)) return 0;
            if (walk->detail == LOWKEY_COST_PER_CHANNEL && !channel_rows(walk, row, l, dim)) return 0;
        }
    return 1;
}

static int walk_rows(const struct walk *walk)
{
    const struct lowkey_cost_result *result = walk->result;
    struct row row = { .result = result, .layer = -1, .side = -1, .head = -1, .channel = -1 };
    for (int f = 0; f < result->n_formats; f++) {
        row.format = &result->formats[f];
        if (!side_rows(walk, row, -1)) return 0;
    }
    for (int f = 0; walk->detail >= LOWKEY_COST_PER_LAYER && f < result->n_formats; f++)
        for (int l = 0; l < result->measured.n_layers; l++) {
            row.format = &result->formats[f];
            row.layer = geometry(result, l)->index;
            if (!side_rows(walk, row, l)) return 0;
            if (walk->detail >= LOWKEY_COST_PER_HEAD && !head_rows(walk, row, l)) return 0;
        }
    return 1;
}

static int each_row(const struct lowkey_cost_result *result, enum lowkey_cost_detail detail, row_fn *on_row,
                    void *arg)
{
    const struct walk walk = { .result = result,
                               .detail = detail,
                               .give = on_row,
                               .arg = arg,
                               .first = calloc((size_t)result->n_samples, sizeof *walk.first),
                               .scratch = calloc((size_t)result->n_samples, sizeof *walk.scratch) };
    const int good = walk.first && walk.scratch && walk_rows(&walk);
    free(walk.first);
    free(walk.scratch);
    return good;
}

/* ---- the table ---- */

static const char *side_name(int side)
{
    return side < 0 ? "K+V" : side ? "V" : "K";
}

static int table_line(void *arg, const struct row *row)
{
    FILE *to = arg;
    char place[3][12] = { "", "", "" };
    const int numbers[3] = { row->layer, row->head, row->channel };
    for (int i = 0; i < 3; i++)
        if (numbers[i] >= 0) snprintf(place[i], sizeof place[i], "%d", numbers[i]);
    fprintf(to, "%-20s %-5s %-4s %-4s %-4s %10.4g %10.4g %10.4g %11.3g %9.2g%s\n", row->format->format.label,
            place[0], side_name(row->side), place[1], place[2], row->cost.diagonal, row->cost.coherent,
            (row->cost.diagonal + row->cost.coherent) / 2, row->cost.first_order, row->cost.standard_error,
            row->format->format.fit_overlap ? "  *" : "");
    return 1;
}

int lowkey_cost_print_table(const struct lowkey_cost_result *result, enum lowkey_cost_detail detail, FILE *to)
{
    const struct lowkey_measured *measured = &result->measured;
    int overlap = 0;
    fprintf(
        to,
        "%s, %d of %d layers; samples %d:%d of %s, %lld tokens; gradients of labels: %s; nats per token\n",
        measured->info->model_name, measured->n_layers, measured->info->n_model_layers,
        measured->first_sample, measured->end_sample, measured->info->text_name,
        (long long)lowkey_measured_tokens(measured),
        lowkey_gradient_labels_names[measured->info->gradient_labels]);
    fprintf(to, "%-20s %-5s %-4s %-4s %-4s %10s %10s %10s %11s %9s\n", "format", "layer", "side", "head",
            "chan", "diagonal", "coherent", "their mean", "first order", "+- error");
    if (!each_row(result, detail, table_line, to)) return 0;
    for (int f = 0; f < result->n_formats; f++) overlap |= result->formats[f].format.fit_overlap;
    if (overlap) fprintf(to, "* fitted on some of these samples\n");
    return 1;
}

/* ---- JSON and CSV ---- */

static json_t *make_cells(const struct row *row)
{
    const struct lowkey_measured *measured = &row->result->measured;
    const struct lowkey_activations_info *info = measured->info;
    const struct lowkey_format *format = &row->format->format;
    struct lowkey_cells cells = { .object = json_object() };
    lowkey_cells_put(&cells, "command", json_string("cost"));
    lowkey_cells_put(&cells, "version", json_string(lowkey_version()));
    lowkey_cells_put(&cells, "activations", json_string(measured->activations));
    lowkey_cells_put(&cells, "model_name", json_string(info->model_name));
    lowkey_cells_put(&cells, "model_sha256", lowkey_cell_sha256(info->model_sha256));
    lowkey_cells_put(&cells, "text_name", json_string(info->text_name));
    lowkey_cells_put(&cells, "text_sha256", lowkey_cell_sha256(info->text_sha256));
    lowkey_cells_put(&cells, "gradient_labels",
                     json_string(lowkey_gradient_labels_names[info->gradient_labels]));
    lowkey_cells_put(&cells, "gradient_seed", json_integer(info->gradient_seed));
    lowkey_cells_put(&cells, "n_layers", json_integer(measured->n_layers));
    lowkey_cells_put(&cells, "first_sample", json_integer(measured->first_sample));
    lowkey_cells_put(&cells, "end_sample", json_integer(measured->end_sample));
    lowkey_cells_put(&cells, "n_tokens", json_integer(lowkey_measured_tokens(measured)));
    lowkey_cells_put(&cells, "format", json_string(format->label));
    lowkey_cells_put(&cells, "path", json_string(format->path));
    lowkey_cells_put(&cells, "fit_samples", json_integer(format->n_fit_samples));
    lowkey_cells_put(&cells, "fit_overlap", json_integer(format->fit_overlap));
    lowkey_cells_put(&cells, "layer", lowkey_cell_index(row->layer));
    lowkey_cells_put(&cells, "side", row->side < 0 ? json_null() : json_string(row->side ? "value" : "key"));
    lowkey_cells_put(&cells, "head", lowkey_cell_index(row->head));
    lowkey_cells_put(&cells, "channel", lowkey_cell_index(row->channel));
    lowkey_cells_put(&cells, "diagonal", lowkey_cell_number(row->cost.diagonal));
    lowkey_cells_put(&cells, "coherent", lowkey_cell_number(row->cost.coherent));
    lowkey_cells_put(&cells, "first_order", lowkey_cell_number(row->cost.first_order));
    lowkey_cells_put(&cells, "first_order_stderr", lowkey_cell_number(row->cost.standard_error));
    return lowkey_cells_finish(&cells);
}

static int append_row(void *array, const struct row *row)
{
    return json_array_append_new(array, make_cells(row)) == 0;
}

int lowkey_cost_print_json(const struct lowkey_cost_result *result, enum lowkey_cost_detail detail, FILE *to)
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

int lowkey_cost_print_csv(const struct lowkey_cost_result *result, enum lowkey_cost_detail detail, FILE *to)
{
    struct csv csv = { .to = to };
    return each_row(result, detail, csv_line, &csv);
}
