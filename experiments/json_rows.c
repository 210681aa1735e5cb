/* json_rows.c - see json_rows.h. */
#include "experiments/json_rows.h"

#include <string.h>

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
