/* dataset_h5.c - opens datasets of a file that is read, with type, shape, filters and storage checked. Before
 * anything is sized after a file's word, the file must be large enough to hold that much. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "formats/parts_h5.h"
#include "runtime/error.h"

enum {
    MAX_CHUNK_BYTES = 1 << 28, /* HDF5 takes memory for a whole chunk */
    MIN_CACHE_BYTES = 1 << 20,
    MAX_CACHE_BYTES = 1 << 25,
    DEFLATE_RATIO = 1100 /* deflate reaches 1032 */
};

const char *lowkey_h5_print_shape(int rank, const int64_t *dims, char text[LOWKEY_H5_SHAPE])
{
    size_t used = (size_t)snprintf(text, LOWKEY_H5_SHAPE, "[");
    for (int i = 0; i < rank && used < LOWKEY_H5_SHAPE; i++) {
        const char *comma = i ? ", " : "";
        const size_t room = LOWKEY_H5_SHAPE - used;
        used += (size_t)(dims[i] == -1 ? snprintf(text + used, room, "%sn", comma)
                                       : snprintf(text + used, room, "%s%" PRIu64, comma, (uint64_t)dims[i]));
    }
    if (used < LOWKEY_H5_SHAPE - 1) strcpy(text + used, "]");
    return text;
}

static lowkey_status check_shape(lowkey_h5_floats *data, const char *expected, int rank, int64_t *dims,
                                 lowkey_error *err)
{
    int64_t found[32] = { 0 }; /* the most that HDF5 has */
    char shape[LOWKEY_H5_SHAPE];
    LOWKEY_CLOSED hid_t space = H5Dget_space(data->id);
    const H5S_class_t class = H5Sget_simple_extent_type(space);
    const int n = class == H5S_SIMPLE ? H5Sget_simple_extent_dims(space, (hsize_t *)found, NULL) : 0;
    int same = class == H5S_SIMPLE && n == rank;
    for (int i = 0; same && i < n; i++) same = dims[i] == -1 ? found[i] >= 1 : found[i] == dims[i];
    if (!same)
        return lowkey_h5_fail(data->file, err, "%s: expected %s, found %s", data->name, expected,
                              class == H5S_NULL     ? "an empty dataset"
                              : class == H5S_SCALAR ? "a scalar"
                                                    : lowkey_h5_print_shape(n, found, shape));
    uint64_t bytes = (uint64_t)data->number.bytes;
    for (int i = 0; i < rank; i++) {
        dims[i] = data->dims[i] = found[i];
        if (__builtin_mul_overflow(bytes, (uint64_t)found[i], &bytes) || bytes > (uint64_t)1 << 60)
            return lowkey_h5_fail(data->file, err, "%s: expected %s, found %s, which no machine can hold",
                                  data->name, expected, lowkey_h5_print_shape(rank, found, shape));
    }
    data->rank = rank;
    data->bytes = bytes;
    return LOWKEY_OK;
}

static const char *filter_name(H5Z_filter_t filter, const char *in_file)
{
    static const struct {
        H5Z_filter_t filter;
        const char *name;
    } known[] = {
        { H5Z_FILTER_SZIP, "szip" },
        { H5Z_FILTER_NBIT, "nbit" },
        { H5Z_FILTER_SCALEOFFSET, "scaleoffset" },
        { 307, "bzip2" },
        { 32000, "lzf" },
        { 32001, "blosc" },
        { 32004, "lz4" },
        { 32008, "bitshuffle" },
        { 32013, "zfp" },
        { 32015, "zstd" },
        { 32026, "blosc2" },
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (known[i].filter == filter) return known[i].name;
    return in_file[0] ? in_file : "without a name";
}

static lowkey_status check_filters(lowkey_h5_floats *data, hid_t creation, int *is_deflated,
                                   lowkey_error *err)
{
    const int n = H5Pget_nfilters(creation);
    *is_deflated = 0;
    for (int i = 0; i < n; i++) {
        char name[40] = "";
        unsigned flags, config;
        size_t n_values = 0;
        const H5Z_filter_t filter = H5Pget_filter2(creation, (unsigned)i, &flags, &n_values, NULL,
                                                   sizeof name, name, &config);
        name[sizeof name - 1] = 0;
        if (filter != H5Z_FILTER_DEFLATE && filter != H5Z_FILTER_SHUFFLE && filter != H5Z_FILTER_FLETCHER32)
            return lowkey_h5_fail(
                data->file, err,
                "%s: expected no filters but deflate, shuffle and Fletcher-32, found filter %s "
                "(number %d); h5repack can rewrite the file",
                data->name, filter_name(filter, name), filter);
        if (H5Zfilter_avail(filter) <= 0)
            return lowkey_fail(err, LOWKEY_EUNSUPPORTED, "%s: %s: the HDF5 library here lacks the filter %s",
                               data->file->path, data->name, filter == H5Z_FILTER_DEFLATE ? "deflate" : name);
        if (filter == H5Z_FILTER_DEFLATE) *is_deflated = 1;
    }
    return LOWKEY_OK;
}

/* Chunks: none too large, none missing. */
static lowkey_status check_chunks(lowkey_h5_floats *data, hid_t creation, lowkey_error *err)
{
    hsize_t chunk[32] = { 0 }, found = 0;
    uint64_t bytes = (uint64_t)data->number.bytes, expected = 1;
    const int rank = H5Pget_chunk(creation, 32, chunk);
    int good = rank == data->rank;
    for (int i = 0; good && i < rank; i++) {
        good = chunk[i] > 0 && !__builtin_mul_overflow(bytes, chunk[i], &bytes) && bytes <= MAX_CHUNK_BYTES;
        if (good)
            expected *= ((uint64_t)data->dims[i] + chunk[i] - 1) /
                        chunk[i]; /* <= elements: cannot overflow */
    }
    if (!good)
        return lowkey_h5_fail(data->file, err, "%s: expected chunks of at most %d MiB, found larger ones",
                              data->name, MAX_CHUNK_BYTES >> 20);
    LOWKEY_CLOSED hid_t space = H5Dget_space(data->id); /* H5S_ALL is refused by HDF5 1.10 */
    if (H5Dget_num_chunks(data->id, space, &found) < 0 || found != expected)
        return lowkey_h5_fail(data->file, err,
                              "%s: expected %" PRIu64 " chunks, found %" PRIu64 ": not all of it was written",
                              data->name, expected, (uint64_t)found);
    data->chunk_row_bytes = bytes;
    for (int i = 1; i < rank; i++)
        data->chunk_row_bytes *= ((uint64_t)data->dims[i] + chunk[i] - 1) / chunk[i];
    return LOWKEY_OK;
}

static lowkey_status check_storage(lowkey_h5_floats *data, lowkey_error *err)
{
    struct stat status;
    int is_deflated = 0;
    LOWKEY_CLOSED hid_t creation = H5Dget_create_plist(data->id);
    const H5D_layout_t layout = H5Pget_layout(creation);
    if (layout == H5D_VIRTUAL || H5Pget_external_count(creation) > 0)
        return lowkey_h5_fail(data->file, err, "%s: expected data in this file, found %s", data->name,
                              layout == H5D_VIRTUAL ? "a virtual dataset" : "a reference to another file");
    LOWKEY_TRY(check_filters(data, creation, &is_deflated, err));
    if (layout == H5D_CHUNKED) LOWKEY_TRY(check_chunks(data, creation, err));
    const uint64_t stored = H5Dget_storage_size(data->id);
    const uint64_t file_bytes = stat(data->file->path, &status) == 0 ? (uint64_t)status.st_size : 0;
    const int fits = layout == H5D_CHUNKED ? data->bytes / (is_deflated ? DEFLATE_RATIO : 1) <= file_bytes
                                           : stored == data->bytes && stored <= file_bytes;
    if (fits) return LOWKEY_OK;
    return lowkey_h5_fail(data->file, err,
                          "%s: expected %" PRIu64 " bytes of data, found %" PRIu64 " in a file of %" PRIu64,
                          data->name, data->bytes, stored, file_bytes);
}

/* Floats: also uint16 with the attribute dtype = bf16. */
static lowkey_status check_type(lowkey_h5_floats *data, int want_int, const char *expected, lowkey_error *err)
{
    static const char *const only_dtype[] = { "dtype", NULL }, *const none[] = { NULL };
    char words[LOWKEY_H5_WORDS];
    data->number = lowkey_h5_classify(data->type, words);
    const int may_be_bf16 = !want_int && data->number.kind == LOWKEY_H5_INT && data->number.bytes == 2 &&
                            !data->number.is_signed;
    LOWKEY_TRY(lowkey_h5_refuse_others(data->file, data->name, NULL, may_be_bf16 ? only_dtype : none, err));
    if (may_be_bf16) {
        static const char *const bf16[] = { "bf16", NULL };
        int which;
        if (H5Aexists(data->id, "dtype") == 0)
            return lowkey_h5_fail(
                data->file, err,
                "%s: expected %s, found uint16 without attribute dtype; bf16 in uint16 needs "
                "dtype = 'bf16'",
                data->name, expected);
        LOWKEY_TRY(lowkey_h5_get_choice(data->file, data->name, "dtype", bf16, &which, err));
        data->number.kind = LOWKEY_H5_BF16;
    }
    if (data->number.kind == LOWKEY_H5_OTHER || (data->number.kind == LOWKEY_H5_INT) != want_int)
        return lowkey_h5_fail(data->file, err, "%s: expected %s, found %s", data->name, expected, words);
    if (data->flags & LOWKEY_H5_NO_F16 && data->number.kind == LOWKEY_H5_F16)
        return lowkey_h5_fail(data->file, err, "%s: expected bf16, f32 or f64, found f16, which underflows",
                              data->name);
    return LOWKEY_OK;
}

/* A cache that holds a row of chunks: HDF5 reads chunks that fit in whole, and others in pieces as small as a
 * head's channels, a system call each. */
static lowkey_status reopen_with_cache(lowkey_h5_floats *data, lowkey_error *err)
{
    char reason[LOWKEY_H5_REASON];
    uint64_t bytes = data->chunk_row_bytes;
    if (!bytes) return LOWKEY_OK;
    if (bytes < MIN_CACHE_BYTES) bytes = MIN_CACHE_BYTES;
    if (bytes > MAX_CACHE_BYTES) bytes = MAX_CACHE_BYTES;
    LOWKEY_CLOSED hid_t access = H5Pcreate(H5P_DATASET_ACCESS);
    H5Pset_chunk_cache(access, 1009, (size_t)bytes, 1);
    H5Idec_ref(data->id);
    data->id = H5Dopen2(data->file->id, data->name, access);
    if (data->id >= 0) return LOWKEY_OK;
    return lowkey_h5_fail(data->file, err, "%s: cannot be opened (%s)", data->name, lowkey_h5_reason(reason));
}

static lowkey_status open_checked(lowkey_h5_floats *data, int want_int, int rank, int64_t *dims,
                                  lowkey_error *err)
{
    char shape[LOWKEY_H5_SHAPE], expected[LOWKEY_H5_SHAPE + 16];
    snprintf(expected, sizeof expected, "%s %s", want_int ? "int" : "float",
             lowkey_h5_print_shape(rank, dims, shape));
    LOWKEY_TRY(lowkey_h5_find(data->file, data->name, H5I_DATASET, expected, &data->id, err));
    data->type = H5Dget_type(data->id);
    LOWKEY_TRY(check_type(data, want_int, expected, err));
    LOWKEY_TRY(check_shape(data, expected, rank, dims, err));
    LOWKEY_TRY(check_storage(data, err));
    return reopen_with_cache(data, err);
}

lowkey_status lowkey_h5_data_open(lowkey_h5 *file, const char *dataset, int want_int, int rank, int64_t *dims,
                                  unsigned flags, lowkey_h5_floats **out, lowkey_error *err)
{
    LOWKEY_QUIET;
    *out = NULL;
    lowkey_h5_floats *data = lowkey_h5_data_new(file, dataset, err);
    if (!data) return LOWKEY_ENOMEM;
    data->flags = flags;
    const lowkey_status status = open_checked(data, want_int, rank, dims, err);
    if (status)
        lowkey_h5_floats_close(data);
    else
        *out = data;
    return status;
}

lowkey_h5_floats *lowkey_h5_data_new(lowkey_h5 *file, const char *dataset, lowkey_error *err)
{
    lowkey_h5_floats *data = calloc(1, sizeof *data);
    if (!data || strlen(dataset) >= sizeof data->name) {
        free(data);
        lowkey_fail(err, LOWKEY_ENOMEM, "%s: %s: no memory", file->path, dataset);
        return NULL;
    }
    data->file = file;
    data->id = data->type = -1;
    strcpy(data->name, dataset);
    return data;
}

void lowkey_h5_floats_close(lowkey_h5_floats *data)
{
    if (!data) return;
    LOWKEY_QUIET;
    lowkey_h5_give_up(&data->type);
    lowkey_h5_give_up(&data->id);
    free(data);
}

const char *lowkey_h5_floats_type(const lowkey_h5_floats *data)
{
    const enum lowkey_h5_kind kind = data->number.kind;
    return kind == LOWKEY_H5_F16    ? "f16"
           : kind == LOWKEY_H5_BF16 ? "bf16"
           : kind == LOWKEY_H5_F32  ? "f32"
                                    : "f64";
}

lowkey_status lowkey_h5_get_shape(lowkey_h5 *file, const char *dataset, int is_int, int rank, int64_t *dims,
                                  lowkey_error *err)
{
    lowkey_h5_floats *data;
    LOWKEY_TRY(lowkey_h5_data_open(file, dataset, is_int, rank, dims, 0, &data, err));
    lowkey_h5_floats_close(data);
    return LOWKEY_OK;
}

lowkey_status lowkey_h5_floats_open(lowkey_h5 *file, const char *dataset, int rank, const int64_t *dims,
                                    unsigned flags, lowkey_h5_floats **out, lowkey_error *err)
{
    int64_t found[LOWKEY_H5_MAX_RANK];
    memcpy(found, dims, (size_t)rank * sizeof *dims);
    return lowkey_h5_data_open(file, dataset, 0, rank, found, flags, out, err);
}
