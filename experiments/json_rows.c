/* json_rows.c - cells of rows, and rows as JSON and CSV. */
#include "experiments/json_rows.h"

#include <math.h>
#include <string.h>

#include "formats/sha256.h"

void lowkey_cells_put(struct lowkey_cells *cells, const char *name, json_t *value)
{
    if (json_object_set_new(cells->object, name, value) != 0) cells->failed = 1;
}

json_t *lowkey_cells_finish(struct lowkey_cells *cells)
{
    if (!cells->failed) return cells->object;
    json_decref(cells->object);
    return NULL;
}

json_t *lowkey_cell_number(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

json_t *lowkey_cell_sha256(const unsigned char sha256[32])
{
    char text[65];
    lowkey_sha256_print(sha256, text);
    return json_string(text);
}

json_t *lowkey_cell_index(int index)
{
    return index < 0 ? json_null() : json_integer(index);
}

int lowkey_rows_print_json(const json_t *rows, FILE *to)
{
    const int good = json_dumpf(rows, to, JSON_INDENT(1) | JSON_REAL_PRECISION(12)) == 0;
    fputc('\n', to);
    return good;
}

static void print_csv_cell(const json_t *value, FILE *to)
{
    if (json_is_real(value)) fprintf(to, "%.12g", json_real_value(value));
    if (json_is_integer(value)) fprintf(to, "%lld", (long long)json_integer_value(value));
    if (json_is_boolean(value)) fputs(json_is_true(value) ? "true" : "false", to);
    if (!json_is_string(value)) return;
    const char *text = json_string_value(value);
    if (!strpbrk(text, ",\"\r\n")) {
        fputs(text, to);
        return;
    }
    fputc('"', to);
    for (; *text; text++) {
        if (*text == '"') fputc('"', to);
        fputc(*text, to);
    }
    fputc('"', to);
}

static int is_cell(const json_t *value)
{
    return !json_is_array(value) && !json_is_object(value);
}

void lowkey_json_csv_line(const json_t *object, int with_names, FILE *to)
{
    const char *name, *comma = "";
    json_t *value, *of = (json_t *)object; /* the macro wants it so, and changes nothing */
    if (with_names) {
        json_object_foreach(of, name, value)
        {
            if (!is_cell(value)) continue;
            fprintf(to, "%s%s", comma, name);
            comma = ",";
        }
        fputc('\n', to);
    }
    comma = "";
    json_object_foreach(of, name, value)
    {
        if (!is_cell(value)) continue;
        fputs(comma, to);
        print_csv_cell(value, to);
        comma = ",";
    }
    fputc('\n', to);
}
