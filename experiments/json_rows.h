/* json_rows.h - rows of results for scripts: flat JSON objects, as one array or as lines of CSV. */
#ifndef LOWKEY_JSON_ROWS_H
#define LOWKEY_JSON_ROWS_H

#include <jansson.h>
#include <stdio.h>

struct lowkey_cells { /* of a row: columns in the order of the calls of put */
    json_t *object;
    int failed; /* no memory, or a name that is not UTF-8 */
};

void lowkey_cells_put(struct lowkey_cells *cells, const char *name, json_t *value); /* takes value */
/* The object, or NULL where putting failed. */
json_t *lowkey_cells_finish(struct lowkey_cells *cells);

json_t *lowkey_cell_number(double value); /* null where it is not finite */
json_t *lowkey_cell_sha256(const unsigned char sha256[32]);
json_t *lowkey_cell_index(int index); /* null where it is negative: all */

/* 0: it could not be written as JSON. Write errors stay in the stream. */
int lowkey_rows_print_json(const json_t *rows, FILE *to);

/* A line of the object's numbers and strings in their order; null is empty, arrays and objects are left out. with_names: a
 * line of names before it. Write errors stay in the stream. */
void lowkey_json_csv_line(const json_t *object, int with_names, FILE *to);

#endif
