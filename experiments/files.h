/* files.h - lowkey check and lowkey inspect: any of our files, validated or shown. */
#ifndef LOWKEY_FILES_H
#define LOWKEY_FILES_H

#include <jansson.h>

#include "runtime/lowkey.h"

int lowkey_check_cmd(int argc, char **argv);
int lowkey_inspect_cmd(int argc, char **argv);

/* A string; one that is not UTF-8 (a path may be anything) has '?' for every byte beyond ASCII. */
json_t *lowkey_json_text(const char *text);

/* Read all of a file and hold it against its schema: every attribute, shape and number, hashes too. summary:
 * a line of what it holds. */
enum { LOWKEY_SUMMARY_SIZE = 200 };
lowkey_status lowkey_file_check(const char *path, char summary[LOWKEY_SUMMARY_SIZE], lowkey_error *err);

/* What a file holds, without reading rows or weights: an object of numbers and strings, of which "layers" is
 * an array of objects with the same keys. The caller gives it up with json_decref. */
lowkey_status lowkey_file_describe(const char *path, json_t **out, lowkey_error *err);

/* Parts of it. */
lowkey_status lowkey_describe_quantizer(const char *path, json_t *to, lowkey_error *err);
json_t *lowkey_describe_geometry(const lowkey_layer_desc *layer);

/* The same for people: numbers and strings a line each, arrays of objects as tables. Rows that differ in the
 * first column alone, a running number, become one; columns that are the same in all rows are one line
 * above. */
void lowkey_print_description(const json_t *description);

#endif
