/* description.c - prints a description for people: values a line each, arrays of objects as tables. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "experiments/files.h"

enum { CELL = 200 };

static void print_integer(int64_t value, char text[CELL])
{
    char digits[32];
    snprintf(digits, sizeof digits, "%" PRId64, value);
    const int sign = digits[0] == '-', n = (int)strlen(digits) - sign;
    char *to = text;
    for (int i = 0; i < n + sign; i++) {
        if (i > sign && (n + sign - i) % 3 == 0 && n > 4) *to++ = ',';
        *to++ = digits[i];
    }
    *to = 0;
}

static const char *print_value(const json_t *value, char text[CELL])
{
    if (json_is_integer(value))
        print_integer(json_integer_value(value), text);
    else if (json_is_real(value))
        snprintf(text, CELL, "%.4g", json_real_value(value));
    else if (json_is_boolean(value))
        snprintf(text, CELL, "%s", json_is_true(value) ? "yes" : "no");
    else
        snprintf(text, CELL, "%s", json_is_string(value) ? json_string_value(value) : "-");
    return text;
}

/* "key_head_dim" -> "key head dim" */
static const char *print_key(const char *key, char text[CELL])
{
    snprintf(text, CELL, "%s", key);
    for (char *c = text; *c; c++)
        if (*c == '_') *c = ' ';
    return text;
}

/* Columns that people see: a string's are counted without the bytes that continue a character. */
static int width_of(const char *text)
{
    int n = 0;
    for (; *text; text++) n += (*text & 0xc0) != 0x80;
    return n;
}

static void print_padded(const char *text, int width, int right)
{
    const int padding = width - width_of(text);
    printf("%*s%s%*s", right && padding > 0 ? padding : 0, "", text, !right && padding > 0 ? padding : 0, "");
}

/* ---- tables ---- */

/* Do two rows differ in the first column alone? */
static int same_but_first(json_t *a, json_t *b)
{
    const char *first = json_object_iter_key(json_object_iter(a)), *key;
    json_t *value;
    json_object_foreach(a, key, value)
    {
        if (strcmp(key, first) != 0 && !json_equal(value, json_object_get(b, key))) return 0;
    }
    return 1;
}

/* Rows first..last as one, the first column as a range. */
static const char *print_cell(json_t *table, size_t first, size_t last, const char *key, char text[CELL])
{
    json_t *row = json_array_get(table, first);
    print_value(json_object_get(row, key), text);
    if (last > first && strcmp(key, json_object_iter_key(json_object_iter(row))) == 0) {
        char end[CELL];
        print_value(json_object_get(json_array_get(table, last), key), end);
        if (strlen(text) + strlen(end) + 2 < CELL) strcat(strcat(text, "-"), end);
    }
    return text;
}

static int64_t running_number(json_t *row)
{
    return json_integer_value(json_object_iter_value(json_object_iter(row)));
}

static size_t last_alike(json_t *table, size_t first)
{
    size_t last = first;
    for (const size_t n = json_array_size(table); last + 1 < n; last++) {
        json_t *next = json_array_get(table, last + 1);
        if (!same_but_first(json_array_get(table, first), next)) break;
        if (running_number(next) != running_number(json_array_get(table, last)) + 1) break;
    }
    return last;
}

/* Is a column the same in all of several rows? It then is said once, above. */
static int is_common(json_t *table, const char *key)
{
    size_t i = 1;
    const size_t n = json_array_size(table);
    while (i < n && json_equal(json_object_get(json_array_get(table, 0), key),
                               json_object_get(json_array_get(table, i), key)))
        i++;
    return n > 1 && i == n;
}

enum { MAX_COLUMNS = 32 };
struct columns {
    int n;
    const char *keys[MAX_COLUMNS];
    int widths[MAX_COLUMNS];
};

/* The columns that are shown, as wide as they need. */
static struct columns choose_columns(json_t *table)
{
    struct columns columns = { 0 };
    const char *key;
    json_t *value;
    char text[CELL];
    json_object_foreach(json_array_get(table, 0), key, value)
    {
        if (columns.n == MAX_COLUMNS || (columns.n > 0 && is_common(table, key))) continue;
        int width = width_of(print_key(key, text));
        for (size_t first = 0; first < json_array_size(table); first = last_alike(table, first) + 1) {
            const int found = width_of(print_cell(table, first, last_alike(table, first), key, text));
            if (found > width) width = found;
        }
        columns.keys[columns.n] = key;
        columns.widths[columns.n++] = width;
    }
    return columns;
}

static void print_common(json_t *table, const struct columns *columns)
{
    const char *key, *before = "  all: ";
    json_t *value;
    char name[CELL], text[CELL];
    json_object_foreach(json_array_get(table, 0), key, value)
    {
        int shown = 0;
        for (int i = 0; i < columns->n; i++) shown |= columns->keys[i] == key;
        if (shown) continue;
        printf("%s%s %s", before, print_key(key, name), print_value(value, text));
        before = "; ";
    }
    if (before[0] == ';') putchar('\n');
}

static void print_row(json_t *table, const struct columns *columns, size_t first, size_t last)
{
    char text[CELL];
    for (int i = 0; i < columns->n; i++) {
        const int right = json_is_number(json_object_get(json_array_get(table, first), columns->keys[i]));
        printf("  ");
        print_padded(print_cell(table, first, last, columns->keys[i], text),
                     i < columns->n - 1 || right ? columns->widths[i] : 0, right);
    }
    putchar('\n');
}

static void print_headings(json_t *table, const struct columns *columns)
{
    char text[CELL];
    for (int i = 0; i < columns->n; i++) {
        const int right = json_is_number(json_object_get(json_array_get(table, 0), columns->keys[i]));
        printf("  ");
        print_padded(print_key(columns->keys[i], text), i < columns->n - 1 || right ? columns->widths[i] : 0,
                     right);
    }
    putchar('\n');
}

/* "layer: 0-9, 20" */
static void print_list(json_t *table, const char *key)
{
    char text[CELL];
    printf("  %s:", print_key(key, text));
    for (size_t first = 0, last; first < json_array_size(table); first = last + 1) {
        last = last_alike(table, first);
        printf("%s %s", first ? "," : "", print_cell(table, first, last, key, text));
    }
    putchar('\n');
}

static void print_table(json_t *table)
{
    if (json_array_size(table) == 0) return;
    const struct columns columns = choose_columns(table);
    putchar('\n');
    print_common(table, &columns);
    if (columns.n == 1) {
        print_list(table, columns.keys[0]);
        return;
    }
    print_headings(table, &columns);
    for (size_t first = 0, last; first < json_array_size(table); first = last + 1) {
        last = last_alike(table, first);
        print_row(table, &columns, first, last);
    }
}

/* ---- the whole ---- */

static void print_values(const json_t *object, const char *prefix)
{
    const char *key;
    json_t *value;
    char name[CELL], text[CELL], label[2 * CELL];
    json_object_foreach((json_t *)(uintptr_t)object, key, value)
    {
        if (json_is_array(value)) continue;
        snprintf(label, sizeof label, "%s%s%s", prefix, print_key(key, name),
                 json_is_object(value) ? " " : "");
        if (json_is_object(value)) {
            print_values(value, label);
            continue;
        }
        print_padded(label, 34, 0);
        printf("  %s\n", print_value(value, text));
    }
}

void lowkey_print_description(const json_t *description)
{
    const char *key;
    json_t *value;
    print_values(description, "");
    json_object_foreach((json_t *)(uintptr_t)description, key, value)
    {
        if (json_is_array(value)) print_table(value);
    }
}
