/* fields_h5.h - arrays of a struct as datasets of a group, and its words and counts as attributes, by one table that
 * reading, writing and comparing share. For what quantizer.h5 says per layer and side. */
#ifndef LOWKEY_FIELDS_H5_H
#define LOWKEY_FIELDS_H5_H

#include "formats/file_h5.h"
#include "formats/pool.h"

enum lowkey_field_type {
    LOWKEY_FIELD_U8, LOWKEY_FIELD_U16, LOWKEY_FIELD_I16, LOWKEY_FIELD_U64,
    LOWKEY_FIELD_F16, /* f32 in memory, values exact in f16 */
    LOWKEY_FIELD_F32, LOWKEY_FIELD_F64
};
enum lowkey_field_shape { LOWKEY_FIELD_HD, LOWKEY_FIELD_HDE, LOWKEY_FIELD_HDE_1, LOWKEY_FIELD_HDD }; /* [H, D, E - 1] .. */

/* H heads, D channels, E table entries; which of the optional fields are there. */
struct lowkey_field_sizes {
    int n_heads, head_dim, n_table;
    unsigned has; /* bits of lowkey_field_when */
};
enum lowkey_field_when { LOWKEY_FIELD_ALWAYS = 1, LOWKEY_FIELD_TABLE = 2, LOWKEY_FIELD_RULE_8 = 4, LOWKEY_FIELD_FACTOR = 8,
                         LOWKEY_FIELD_BOUNDARY = 16, LOWKEY_FIELD_TRELLIS = 32 };

struct lowkey_field {
    const char *name;  /* of the dataset */
    size_t offset;     /* in the struct, of a pointer to the array */
    enum lowkey_field_type type;
    enum lowkey_field_shape shape;
    enum lowkey_field_when when;
    int64_t low, high; /* of integers */
};

/* Tables end with a field whose name is NULL. A field that is not there is NULL in the struct. */
lowkey_status lowkey_fields_read(lowkey_h5 *file, const char *group, const struct lowkey_field *fields,
                                 const struct lowkey_field_sizes *sizes, void *object, struct lowkey_pool *pool, lowkey_error *err);
lowkey_status lowkey_fields_write(lowkey_h5 *file, const char *group, const struct lowkey_field *fields,
                                  const struct lowkey_field_sizes *sizes, const void *object, lowkey_error *err);
/* The name of the first field whose arrays differ in any byte, or NULL. */
const char *lowkey_fields_differ(const struct lowkey_field *fields, const struct lowkey_field_sizes *sizes, const void *a,
                                 const void *b);
/* Refuse objects of a group beside the fields that are there and others (ended by NULL), and attributes that are not named. */
lowkey_status lowkey_fields_refuse_others(lowkey_h5 *file, const char *group, const struct lowkey_field *fields,
                                          const struct lowkey_field_sizes *sizes, const char *const *others,
                                          const char *const *attributes, lowkey_error *err);

#endif
