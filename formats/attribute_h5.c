/* attribute_h5.c - scalar attributes: reads them with their type, range and size checked, and writes them. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/parts_h5.h"
#include "formats/sha256.h"
#include "runtime/error.h"

enum { MAX_STRING = 65536 };

/* Opens an attribute that has the given number of values (1: a scalar). */
static lowkey_status open_attribute(lowkey_h5 *file, const char *object, const char *name, int n,
                                    const char *expected, hid_t *out, lowkey_error *err)
{
    LOWKEY_CLOSED hid_t id = -1;
    char reason[LOWKEY_H5_REASON];
    *out = -1;
    LOWKEY_TRY(lowkey_h5_find(file, object, H5I_BADID, "an object with attributes", &id, err));
    const htri_t there = H5Aexists(id, name);
    if (there == 0)
        return lowkey_h5_fail(file, err, "%s: attribute %s: missing: expected %s", object, name, expected);
    LOWKEY_CLOSED hid_t attribute = there > 0 ? H5Aopen(id, name, H5P_DEFAULT) : -1;
    if (attribute < 0)
        return lowkey_h5_fail(file, err, "%s: attribute %s: cannot be opened (%s)", object, name,
                              lowkey_h5_reason(reason));
    LOWKEY_CLOSED hid_t space = H5Aget_space(attribute);
    hsize_t dims[32] = { 0 };
    const int rank = H5Sget_simple_extent_type(space) == H5S_NULL
                         ? -1
                         : H5Sget_simple_extent_dims(space, dims, NULL);
    if (n == 1 ? rank != 0 : rank != 1 || dims[0] != (hsize_t)n) {
        char shape[40] = "a scalar";
        if (n != 1) snprintf(shape, sizeof shape, "shape [%d]", n);
        return rank == 0 ? lowkey_h5_fail(file, err, "%s: attribute %s: expected %s, found a scalar", object,
                                          name, shape)
               : rank == 1 ? lowkey_h5_fail(file, err, "%s: attribute %s: expected %s, found shape [%llu]",
                                            object, name, shape, (unsigned long long)dims[0])
                           : lowkey_h5_fail(file, err, "%s: attribute %s: expected %s, found rank %d", object,
                                            name, shape, rank);
    }
    *out = attribute;
    attribute = -1;
    return LOWKEY_OK;
}

/* n numbers of an attribute, as they lie in the file but little-endian. */
static lowkey_status read_numbers(lowkey_h5 *file, const char *object, const char *name, int n, int want_int,
                                  void *raw, struct lowkey_h5_number *number, lowkey_error *err)
{
    LOWKEY_QUIET;
    const char *expected = want_int ? "an integer" : "a float";
    char words[LOWKEY_H5_WORDS], reason[LOWKEY_H5_REASON];
    LOWKEY_CLOSED hid_t attribute = -1;
    LOWKEY_TRY(open_attribute(file, object, name, n, expected, &attribute, err));
    LOWKEY_CLOSED hid_t type = H5Aget_type(attribute);
    *number = lowkey_h5_classify(type, words);
    if (number->kind == LOWKEY_H5_OTHER || (number->kind == LOWKEY_H5_INT) != want_int)
        return lowkey_h5_fail(file, err, "%s: attribute %s: expected %s, found %s", object, name, expected,
                              words);
    if (H5Aread(attribute, type, raw) < 0)
        return lowkey_h5_fail(file, err, "%s: attribute %s: cannot be read (%s)", object, name,
                              lowkey_h5_reason(reason));
    lowkey_h5_swap(number, raw, (size_t)n);
    return LOWKEY_OK;
}

lowkey_status lowkey_h5_get_int(lowkey_h5 *file, const char *object, const char *name, int64_t low,
                                int64_t high, int64_t *out, lowkey_error *err)
{
    uint64_t raw;
    struct lowkey_h5_number number;
    LOWKEY_TRY(read_numbers(file, object, name, 1, 1, &raw, &number, err));
    const int fits = lowkey_h5_int_at(&number, &raw, 0, out);
    if (fits && *out >= low && *out <= high) return LOWKEY_OK;
    return lowkey_h5_fail(file, err,
                          "%s: attribute %s: expected %" PRId64 "..%" PRId64 ", found %" PRId64 "%s", object,
                          name, low, high, fits ? *out : INT64_MAX, fits ? "" : " or more");
}

lowkey_status lowkey_h5_get_small(lowkey_h5 *file, const char *object, const char *name, int low, int high,
                                  int *out, lowkey_error *err)
{
    int64_t value;
    LOWKEY_TRY(lowkey_h5_get_int(file, object, name, low, high, &value, err));
    *out = (int)value;
    return LOWKEY_OK;
}

lowkey_status lowkey_h5_get_double(lowkey_h5 *file, const char *object, const char *name, double *out,
                                   lowkey_error *err)
{
    double raw;
    struct lowkey_h5_number number;
    LOWKEY_TRY(read_numbers(file, object, name, 1, 0, &raw, &number, err));
    *out = lowkey_h5_double_at(&number, &raw, 0);
    if (isfinite(*out)) return LOWKEY_OK;
    return lowkey_h5_fail(file, err, "%s: attribute %s: expected a finite number, found %g", object, name,
                          *out);
}

lowkey_status lowkey_h5_check_version(lowkey_h5 *file, lowkey_error *err)
{
    uint64_t raw[2];
    struct lowkey_h5_number number;
    int64_t major = -1, minor = -1;
    LOWKEY_TRY(read_numbers(file, "/", "schema_version", 2, 1, raw, &number, err));
    if (!lowkey_h5_int_at(&number, raw, 0, &major)) major = INT64_MAX;
    if (!lowkey_h5_int_at(&number, raw, 1, &minor)) minor = INT64_MAX;
    if (major < 1 || minor < 0)
        return lowkey_h5_fail(
            file, err, "/: attribute schema_version: expected [%d, %d], found [%" PRId64 ", %" PRId64 "]",
            LOWKEY_FORMAT_MAJOR, LOWKEY_FORMAT_MINOR, major, minor);
    if (major > LOWKEY_FORMAT_MAJOR)
        return lowkey_h5_fail(file, err,
                              "/: %s version %" PRId64 ".%" PRId64
                              " is newer than %d.%d, which this program reads; "
                              "a newer lowkey is needed",
                              file->schema, major, minor, LOWKEY_FORMAT_MAJOR, LOWKEY_FORMAT_MINOR);
    file->major = (int)major;
    file->minor = minor > INT32_MAX ? INT32_MAX : (int)minor;
    file->ignores_unknown = minor > LOWKEY_FORMAT_MINOR;
    char *created_by;
    LOWKEY_TRY(lowkey_h5_get_string(file, "/", "created_by", &created_by, err));
    free(created_by);
    return LOWKEY_OK;
}

/* ---- strings ---- */

static int is_utf8(const char *text)
{
    for (const unsigned char *c = (const unsigned char *)text; *c;) {
        const int more = *c < 0x80                 ? 0
                         : *c >= 0xc2 && *c < 0xe0 ? 1
                         : (*c & 0xf0) == 0xe0     ? 2
                         : *c >= 0xf0 && *c < 0xf5 ? 3
                                                   : -1;
        if (more < 0) return 0;
        const unsigned first = *c++, second = more ? *c : 0;
        for (int i = 0; i < more; i++, c++)
            if ((*c & 0xc0) != 0x80) return 0;
        if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
            (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f))
            return 0; /* overlong, a surrogate, beyond U+10FFFF */
    }
    return 1;
}

/* The memory type is made anew, since a file's fixed string may lack the final NUL. The reason of a failure
 * is taken here: closing that type would forget it. */
static herr_t read_text(hid_t attribute, hid_t type, char **out, char reason[LOWKEY_H5_REASON])
{
    LOWKEY_CLOSED hid_t memory = H5Tcopy(H5T_C_S1);
    H5Tset_cset(memory, H5Tget_cset(type));
    if (H5Tis_variable_str(type) > 0) {
        char *text = NULL;
        if (H5Tset_size(memory, H5T_VARIABLE) < 0 || H5Aread(attribute, memory, &text) < 0)
            return lowkey_h5_reason(reason), -1;
        *out = strndup(text ? text : "", MAX_STRING + 1);
        H5free_memory(text);
        return 0;
    }
    const size_t size = H5Tget_size(type);
    *out = size <= MAX_STRING ? calloc(1, size + 1) : NULL;
    if (!*out) return 0;
    if (H5Tset_size(memory, size + 1) >= 0 && H5Aread(attribute, memory, *out) >= 0) {
        size_t end = strlen(*out);
        if (H5Tget_strpad(type) == H5T_STR_SPACEPAD)
            while (end > 0 && (*out)[end - 1] == ' ') (*out)[--end] = 0;
        return 0;
    }
    lowkey_h5_reason(reason);
    free(*out);
    *out = NULL;
    return -1;
}

lowkey_status lowkey_h5_get_string(lowkey_h5 *file, const char *object, const char *name, char **out,
                                   lowkey_error *err)
{
    LOWKEY_QUIET;
    char words[LOWKEY_H5_WORDS], reason[LOWKEY_H5_REASON];
    LOWKEY_CLOSED hid_t attribute = -1;
    *out = NULL;
    LOWKEY_TRY(open_attribute(file, object, name, 1, "a string", &attribute, err));
    LOWKEY_CLOSED hid_t type = H5Aget_type(attribute);
    lowkey_h5_classify(type, words);
    if (H5Tget_class(type) != H5T_STRING)
        return lowkey_h5_fail(file, err, "%s: attribute %s: expected a string, found %s", object, name,
                              words);
    if (H5Tis_variable_str(type) <= 0 && H5Tget_size(type) > MAX_STRING)
        return lowkey_h5_fail(file, err, "%s: attribute %s: expected a string of at most %d bytes, found %zu",
                              object, name, MAX_STRING, H5Tget_size(type));
    if (read_text(attribute, type, out, reason) < 0)
        return lowkey_h5_fail(file, err, "%s: attribute %s: cannot be read (%s)", object, name, reason);
    if (!*out)
        return lowkey_fail(err, LOWKEY_ENOMEM, "%s: %s: attribute %s: no memory", file->path, object, name);
    const int too_long = strlen(*out) > MAX_STRING;
    if (!too_long && is_utf8(*out)) return LOWKEY_OK;
    free(*out);
    *out = NULL;
    return lowkey_h5_fail(file, err, "%s: attribute %s: expected UTF-8 of at most %d bytes, found %s", object,
                          name, MAX_STRING, too_long ? "more" : "other bytes");
}

lowkey_status lowkey_h5_get_choice(lowkey_h5 *file, const char *object, const char *name,
                                   const char *const *choices, int *out, lowkey_error *err)
{
    char *text, expected[160] = "";
    size_t used = 0;
    LOWKEY_TRY(lowkey_h5_get_string(file, object, name, &text, err));
    for (*out = 0; choices[*out] && strcmp(choices[*out], text) != 0;) ++*out;
    lowkey_status status = LOWKEY_OK;
    if (!choices[*out]) {
        for (int i = 0; choices[i] && used < sizeof expected; i++)
            used += (size_t)snprintf(expected + used, sizeof expected - used, "%s%s",
                                     !i               ? ""
                                     : choices[i + 1] ? ", "
                                                      : " or ",
                                     choices[i]);
        status = lowkey_h5_fail(file, err, "%s: attribute %s: expected %s, found '%.80s'", object, name,
                                expected, text);
    }
    free(text);
    return status;
}

lowkey_status lowkey_h5_get_sha256(lowkey_h5 *file, const char *object, const char *name,
                                   unsigned char out[32], lowkey_error *err)
{
    static const char digits[] = "0123456789abcdef";
    char *text;
    LOWKEY_TRY(lowkey_h5_get_string(file, object, name, &text, err));
    lowkey_status status = LOWKEY_OK;
    if (strlen(text) != 64 || strspn(text, digits) != 64)
        status = lowkey_h5_fail(file, err,
                                "%s: attribute %s: expected 64 lower-case hexadecimal digits, found '%.80s'",
                                object, name, text);
    else
        for (int i = 0; i < 32; i++)
            out[i] = (unsigned char)((strchr(digits, text[2 * i]) - digits) << 4 |
                                     (strchr(digits, text[2 * i + 1]) - digits));
    free(text);
    return status;
}

/* ---- writing ---- */

static lowkey_status put(lowkey_h5 *file, const char *object, const char *name, int n, hid_t type,
                         const void *value, lowkey_error *err)
{
    char reason[LOWKEY_H5_REASON];
    LOWKEY_CLOSED hid_t id = H5Oopen(file->id, object, H5P_DEFAULT);
    const hsize_t dims = (hsize_t)n;
    LOWKEY_CLOSED hid_t space = n == 1 ? H5Screate(H5S_SCALAR) : H5Screate_simple(1, &dims, NULL);
    LOWKEY_CLOSED hid_t attribute = H5Acreate2(id, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
    if (attribute < 0 || H5Awrite(attribute, type, value) < 0)
        return lowkey_fail(err, LOWKEY_EIO, "%s: %s: attribute %s: cannot be written (%s)", file->path,
                           object, name, lowkey_h5_reason(reason));
    return lowkey_h5_check_disk(file, err);
}

lowkey_status lowkey_h5_put_int(lowkey_h5 *file, const char *object, const char *name, int64_t value,
                                lowkey_error *err)
{
    LOWKEY_QUIET;
    return put(file, object, name, 1, H5T_STD_I64LE, &value, err);
}

lowkey_status lowkey_h5_put_version(lowkey_h5 *file, int minor, lowkey_error *err)
{
    LOWKEY_QUIET;
    const int64_t version[2] = { LOWKEY_FORMAT_MAJOR, minor };
    file->major = LOWKEY_FORMAT_MAJOR;
    file->minor = minor;
    return put(file, "/", "schema_version", 2, H5T_STD_I64LE, version, err);
}

lowkey_status lowkey_h5_put_double(lowkey_h5 *file, const char *object, const char *name, double value,
                                   lowkey_error *err)
{
    LOWKEY_QUIET;
    return put(file, object, name, 1, H5T_IEEE_F64LE, &value, err);
}

lowkey_status lowkey_h5_put_string(lowkey_h5 *file, const char *object, const char *name, const char *value,
                                   lowkey_error *err)
{
    LOWKEY_QUIET;
    if (strlen(value) > MAX_STRING || !is_utf8(value))
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: %s: attribute %s: not UTF-8 of at most %d bytes",
                           file->path, object, name, MAX_STRING);
    /* Of fixed length: those of variable length lie in a heap without checksums. */
    const size_t length = strlen(value);
    LOWKEY_CLOSED hid_t type = H5Tcopy(H5T_C_S1);
    H5Tset_size(type, length ? length : 1);
    H5Tset_strpad(type, H5T_STR_NULLPAD);
    H5Tset_cset(type, H5T_CSET_UTF8);
    return put(file, object, name, 1, type, value, err);
}

lowkey_status lowkey_h5_put_sha256(lowkey_h5 *file, const char *object, const char *name,
                                   const unsigned char value[32], lowkey_error *err)
{
    char text[65];
    lowkey_sha256_print(value, text);
    return lowkey_h5_put_string(file, object, name, text, err);
}
