/* json_rows.h - flat JSON objects as lines of CSV: the same rows for scripts of either kind. */
#ifndef LOWKEY_JSON_ROWS_H
#define LOWKEY_JSON_ROWS_H

#include <jansson.h>
#include <stdio.h>

/* A line of the object's numbers and strings in their order; null is empty, arrays and objects are left out. with_names: a
 * line of names before it. Write errors stay in the stream. */
void lowkey_json_csv_line(const json_t *object, int with_names, FILE *to);

#endif
