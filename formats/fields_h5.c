/* fields_h5.c - walks a table of fields: shape, path and type of each, then one call of file_h5. */
#include "formats/fields_h5.h"

#include <stdio.h>
#include <string.h>

#include "runtime/error.h"

enum { MAX_FIELDS = 32, MAX_PATH = 2 * LOWKEY_H5_MAX_PATH };

static const size_t element_bytes[] = {
    [LOWKEY_FIELD_U8] = 1,  [LOWKEY_FIELD_U16] = 2, [LOWKEY_FIELD_I16] = 2, [LOWKEY_FIELD_U64] = 8,
    [LOWKEY_FIELD_F16] = 4, [LOWKEY_FIELD_F32] = 4, [LOWKEY_FIELD_F64] = 8,
};

/* A field's dataset. */
struct place {
    char path[MAX_PATH];
    int rank;
    int64_t dims[3];
    size_t n_elements;
};

static void locate(const char *group, const struct lowkey_field *field,
                   const struct lowkey_field_sizes *sizes, struct place *place)
{
    const int64_t inner[] = {
        [LOWKEY_FIELD_HD] = 1,
        [LOWKEY_FIELD_HDE] = sizes->n_table,
        [LOWKEY_FIELD_HDE_1] = sizes->n_table - 1,
        [LOWKEY_FIELD_HDD] = sizes->head_dim,
    };
    snprintf(place->path, sizeof place->path, "%s/%s", group, field->name);
    place->rank = field->shape == LOWKEY_FIELD_HD ? 2 : 3;
    place->dims[0] = sizes->n_heads;
    place->dims[1] = sizes->head_dim;
    place->dims[2] = inner[field->shape];
    place->n_elements = (size_t)sizes->n_heads * (size_t)sizes->head_dim * (size_t)inner[field->shape];
}

static void *array_of(const struct lowkey_field *field, const void *object)
{
    void *array;
    memcpy(&array, (const char *)object + field->offset, sizeof array);
    return array;
}

static lowkey_status read_array(lowkey_h5 *file, const struct lowkey_field *field, const struct place *place,
                                void *array, lowkey_error *err)
{
    switch (field->type) {
    case LOWKEY_FIELD_F16:
    case LOWKEY_FIELD_F32:
        return lowkey_h5_read_f32(file, place->path, place->rank, place->dims, LOWKEY_H5_EXACT, array, err);
    case LOWKEY_FIELD_F64: return lowkey_h5_read_f64(file, place->path, place->rank, place->dims, array, err);
    default:
        return lowkey_h5_read_ints(file, place->path, place->rank, place->dims, field->low, field->high,
                                   array, element_bytes[field->type], err);
    }
}

lowkey_status lowkey_fields_read(lowkey_h5 *file, const char *group, const struct lowkey_field *fields,
                                 const struct lowkey_field_sizes *sizes, void *object,
                                 struct lowkey_pool *pool, lowkey_error *err)
{
    for (const struct lowkey_field *field = fields; field->name; field++) {
        if (!(sizes->has & field->when)) continue;
        struct place place;
        void *array;
        const int is_int = field->type < LOWKEY_FIELD_F16;
        locate(group, field, sizes, &place);
        LOWKEY_TRY(lowkey_h5_get_shape(file, place.path, is_int, place.rank, place.dims,
                                       err)); /* before taking memory */
        LOWKEY_TRY(lowkey_pool_take(pool, place.n_elements, element_bytes[field->type], &array, err));
        LOWKEY_TRY(read_array(file, field, &place, array, err));
        memcpy((char *)object + field->offset, &array, sizeof array);
    }
    return LOWKEY_OK;
}

static lowkey_status write_f16(lowkey_h5 *file, const struct place *place, const float *values,
                               lowkey_error *err)
{
    static const int64_t start[3] = { 0 };
    const int64_t chunk[3] = { 1, place->dims[1], place->dims[2] };
    lowkey_h5_floats *floats;
    LOWKEY_TRY(lowkey_h5_floats_create(file, place->path, place->rank, place->dims, chunk, LOWKEY_F16,
                                       &floats, err));
    const lowkey_status status = lowkey_h5_floats_write(floats, start, place->dims, values, err);
    lowkey_h5_floats_close(floats);
    return status;
}

lowkey_status lowkey_fields_write(lowkey_h5 *file, const char *group, const struct lowkey_field *fields,
                                  const struct lowkey_field_sizes *sizes, const void *object,
                                  lowkey_error *err)
{
    for (const struct lowkey_field *field = fields; field->name; field++) {
        if (!(sizes->has & field->when)) continue;
        struct place place;
        locate(group, field, sizes, &place);
        const void *array = array_of(field, object);
        const int is_signed = field->type == LOWKEY_FIELD_I16;
        if (!array) return lowkey_fail(err, LOWKEY_EINVAL, "%s: expected an array, found none", place.path);
        LOWKEY_TRY(field->type == LOWKEY_FIELD_F16 ? write_f16(file, &place, array, err)
                   : field->type == LOWKEY_FIELD_F32
                       ? lowkey_h5_write_f32(file, place.path, place.rank, place.dims, array, err)
                   : field->type == LOWKEY_FIELD_F64
                       ? lowkey_h5_write_f64(file, place.path, place.rank, place.dims, array, err)
                       : lowkey_h5_write_ints(file, place.path, place.rank, place.dims, array,
                                              element_bytes[field->type], is_signed, err));
    }
    return LOWKEY_OK;
}

const char *lowkey_fields_differ(const struct lowkey_field *fields, const struct lowkey_field_sizes *sizes,
                                 const void *a, const void *b)
{
    for (const struct lowkey_field *field = fields; field->name; field++) {
        if (!(sizes->has & field->when)) continue;
        struct place place;
        locate("", field, sizes, &place);
        if (memcmp(array_of(field, a), array_of(field, b), place.n_elements * element_bytes[field->type]) !=
            0)
            return field->name;
    }
    return NULL;
}

lowkey_status lowkey_fields_refuse_others(lowkey_h5 *file, const char *group,
                                          const struct lowkey_field *fields,
                                          const struct lowkey_field_sizes *sizes, const char *const *others,
                                          const char *const *attributes, lowkey_error *err)
{
    const char *names[MAX_FIELDS + 1];
    int n = 0;
    for (const struct lowkey_field *field = fields; field->name && n < MAX_FIELDS; field++)
        if (sizes->has & field->when) names[n++] = field->name;
    for (; *others && n < MAX_FIELDS; others++) names[n++] = *others;
    names[n] = NULL;
    return lowkey_h5_refuse_others(file, group, names, attributes, err);
}
