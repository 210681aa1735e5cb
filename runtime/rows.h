/* rows.h - the caller's rows of keys, values or queries, of any number type and stride, read as f32. */
#ifndef LOWKEY_ROWS_H
#define LOWKEY_ROWS_H

#include <stdint.h>

#include "runtime/lowkey.h"

struct lowkey_rows_shape {
    int64_t n_tokens;
    int n_heads, head_dim;
};

/* Check what can be checked without reading, and put in the dense strides that zeros stand for. what: "keys" ... */
lowkey_status lowkey_rows_check(lowkey_rows *rows, struct lowkey_rows_shape shape, const char *what,
                                lowkey_error *err);

/* A row that holds a NaN or an infinity: where the first is, and how many there are in all; 0: none. */
struct lowkey_bad_element {
    int64_t token, n_bad;
    int head, channel;
    float value;
};
int lowkey_rows_find_bad(const lowkey_rows *rows, struct lowkey_rows_shape shape,
                         struct lowkey_bad_element *bad);

/* One row: a head of a token. out: [head_dim]. */
void lowkey_rows_read(const lowkey_rows *rows, int64_t token, int head, int head_dim, float *out);

#endif
