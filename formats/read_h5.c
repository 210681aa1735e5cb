/* read_h5.c - reads numbers out of datasets that dataset_h5.c opened, in slabs of bounded size, decoded by
 * number_h5.c. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/half.h"
#include "formats/parts_h5.h"
#include "runtime/error.h"

enum { SLAB_BYTES = 1 << 20 };

static lowkey_status read_raw(lowkey_h5_floats *data, const int64_t *start, const int64_t *count, void *raw,
                              lowkey_error *err)
{
    LOWKEY_QUIET;
    char reason[LOWKEY_H5_REASON];
    hsize_t n = 1;
    for (int i = 0; i < data->rank; i++) n *= (hsize_t)count[i];
    LOWKEY_CLOSED hid_t space = H5Dget_space(data->id);
    LOWKEY_CLOSED hid_t memory = H5Screate_simple(data->rank, (const hsize_t *)count,
                                                  NULL); /* another rank is slow */
    if (H5Sselect_hyperslab(space, H5S_SELECT_SET, (const hsize_t *)start, NULL, (const hsize_t *)count,
                            NULL) < 0 ||
        H5Dread(data->id, data->type, memory, space, H5P_DEFAULT, raw) < 0)
        return lowkey_fail(err, LOWKEY_EIO, "%s: %s: cannot be read, is the file damaged? (%s)",
                           data->file->path, data->name, lowkey_h5_reason(reason));
    lowkey_h5_swap(&data->number, raw, n);
    return LOWKEY_OK;
}

/* "[3, 17]" for element i of a block */
static const char *print_index(const lowkey_h5_floats *data, const int64_t *start, const int64_t *count,
                               size_t i, char text[LOWKEY_H5_SHAPE])
{
    int64_t index[LOWKEY_H5_MAX_RANK];
    for (int d = data->rank - 1; d >= 0; d--) {
        index[d] = start[d] + (int64_t)(i % (size_t)count[d]);
        i /= (size_t)count[d];
    }
    return lowkey_h5_print_shape(data->rank, index, text);
}

static lowkey_status refuse_element(const lowkey_h5_floats *data, const int64_t *start, const int64_t *count,
                                    size_t i, double value, const char *expected, lowkey_error *err)
{
    char index[LOWKEY_H5_SHAPE];
    return lowkey_h5_fail(data->file, err, "%s%s: expected %s, found %.9g", data->name,
                          print_index(data, start, count, i, index), expected, value);
}

/* What is done with a slab of raw numbers that begins at element first of the block. */
typedef lowkey_status take_fn(void *arg, const lowkey_h5_floats *data, const void *raw, size_t first,
                              size_t n, const int64_t *start, const int64_t *count, lowkey_error *err);

/* Slabs run along the outermost dimension; one holds a row of it at least. */
static lowkey_status read_slabs(lowkey_h5_floats *data, const int64_t *start, const int64_t *count,
                                take_fn *take, void *arg, lowkey_error *err)
{
    int64_t slab_start[LOWKEY_H5_MAX_RANK], slab_count[LOWKEY_H5_MAX_RANK];
    size_t row = 1;
    for (int i = 1; i < data->rank; i++) row *= (size_t)count[i];
    memcpy(slab_start, start, (size_t)data->rank * sizeof *start);
    memcpy(slab_count, count, (size_t)data->rank * sizeof *count);
    int64_t rows = (int64_t)(SLAB_BYTES / (row * (size_t)data->number.bytes));
    if (rows < 1) rows = 1;
    if (rows > count[0]) rows = count[0];
    void *raw = malloc((size_t)rows * row * (size_t)data->number.bytes);
    if (!raw) return lowkey_fail(err, LOWKEY_ENOMEM, "%s: %s: no memory", data->file->path, data->name);
    lowkey_status status = LOWKEY_OK;
    for (int64_t done = 0; done < count[0] && !status; done += slab_count[0]) {
        slab_start[0] = start[0] + done;
        slab_count[0] = count[0] - done < rows ? count[0] - done : rows;
        status = read_raw(data, slab_start, slab_count, raw, err);
        if (!status)
            status = take(arg, data, raw, (size_t)done * row, (size_t)slab_count[0] * row, slab_start,
                          slab_count, err);
    }
    free(raw);
    return status;
}

static lowkey_status take_f64_as_f32(void *arg, const lowkey_h5_floats *data, const void *raw, size_t first,
                                     size_t n, const int64_t *start, const int64_t *count, lowkey_error *err)
{
    float *out = (float *)arg + first;
    for (size_t i = 0; i < n; i++) {
        const double x = lowkey_h5_double_at(&data->number, raw, i);
        out[i] = (float)x;
        if (isinf(out[i]) && isfinite(x))
            return refuse_element(data, start, count, i, x, "a number in f32's range", err);
        if (data->flags & LOWKEY_H5_EXACT && (double)out[i] != x && !isnan(x))
            return refuse_element(data, start, count, i, x, "a number exact in f32", err);
    }
    return LOWKEY_OK;
}

/* 16-bit codes in the last half of out become floats from its beginning, block by block: no code is
 * overwritten before it is read, and the compiler sees that a block and out are apart. */
static void widen(enum lowkey_h5_kind kind, float *out, size_t n)
{
    const unsigned char *codes = (const unsigned char *)out + 2 * n;
    uint16_t block[1024];
    for (size_t begin = 0, m; begin < n; begin += m) {
        m = n - begin < 1024 ? n - begin : 1024;
        memcpy(block, codes + 2 * begin, m * sizeof *block);
        if (kind == LOWKEY_H5_F16)
            for (size_t i = 0; i < m; i++) out[begin + i] = lowkey_f16_to_f32(block[i]);
        else
            for (size_t i = 0; i < m; i++) out[begin + i] = lowkey_bf16_to_f32(block[i]);
    }
}

lowkey_status lowkey_h5_floats_read(lowkey_h5_floats *data, const int64_t *start, const int64_t *count,
                                    float *out, lowkey_error *err)
{
    size_t n = 1;
    for (int i = 0; i < data->rank; i++) {
        if (start[i] < 0 || count[i] < 1 || start[i] > data->dims[i] - count[i])
            return lowkey_fail(err, LOWKEY_EINVAL,
                               "%s: %s: dimension %d has %" PRId64 " elements, asked for %" PRId64
                               " from %" PRId64,
                               data->file->path, data->name, i, data->dims[i], count[i], start[i]);
        n *= (size_t)count[i];
    }
    if (data->number.kind == LOWKEY_H5_F64) {
        LOWKEY_TRY(read_slabs(data, start, count, take_f64_as_f32, out, err));
    } else if (data->number.bytes == 4) {
        LOWKEY_TRY(read_raw(data, start, count, out, err));
    } else {
        LOWKEY_TRY(read_raw(data, start, count, (char *)out + 2 * n, err));
        widen(data->number.kind, out, n);
    }
    if (data->flags & LOWKEY_H5_ANY) return LOWKEY_OK;
    size_t n_finite = 0;
    for (size_t i = 0; i < n; i++) n_finite += lowkey_f32_is_finite(out[i]);
    if (n_finite == n) return LOWKEY_OK;
    size_t at = 0;
    while (lowkey_f32_is_finite(out[at])) at++;
    return refuse_element(data, start, count, at, (double)out[at], "a finite number", err);
}

static const int64_t origin[LOWKEY_H5_MAX_RANK];

lowkey_status lowkey_h5_read_f32(lowkey_h5 *file, const char *dataset, int rank, const int64_t *dims,
                                 unsigned flags, float *out, lowkey_error *err)
{
    lowkey_h5_floats *data;
    LOWKEY_TRY(lowkey_h5_floats_open(file, dataset, rank, dims, flags, &data, err));
    const lowkey_status status = lowkey_h5_floats_read(data, origin, data->dims, out, err);
    lowkey_h5_floats_close(data);
    return status;
}

lowkey_status lowkey_h5_read_new_f32(lowkey_h5 *file, const char *dataset, int rank, const int64_t *dims,
                                     unsigned flags, float **out, lowkey_error *err)
{
    lowkey_h5_floats *data;
    *out = NULL;
    LOWKEY_TRY(lowkey_h5_floats_open(file, dataset, rank, dims, flags, &data, err));
    const size_t bytes = (size_t)data->bytes / (size_t)data->number.bytes * sizeof **out;
    *out = aligned_alloc(64, (bytes + 63) / 64 * 64);
    lowkey_status status = LOWKEY_OK;
    if (!*out)
        status = lowkey_fail(err, LOWKEY_ENOMEM, "%s: %s: no memory for %zu bytes", file->path, dataset,
                             bytes);
    else
        status = lowkey_h5_floats_read(data, origin, data->dims, *out, err);
    lowkey_h5_floats_close(data);
    if (status) free(*out), *out = NULL;
    return status;
}

static lowkey_status take_f64(void *arg, const lowkey_h5_floats *data, const void *raw, size_t first,
                              size_t n, const int64_t *start, const int64_t *count, lowkey_error *err)
{
    double *out = (double *)arg + first;
    for (size_t i = 0; i < n; i++) {
        out[i] = lowkey_h5_double_at(&data->number, raw, i);
        if (!isfinite(out[i])) return refuse_element(data, start, count, i, out[i], "a finite number", err);
    }
    return LOWKEY_OK;
}

lowkey_status lowkey_h5_read_f64(lowkey_h5 *file, const char *dataset, int rank, const int64_t *dims,
                                 double *out, lowkey_error *err)
{
    lowkey_h5_floats *data;
    LOWKEY_TRY(lowkey_h5_floats_open(file, dataset, rank, dims, 0, &data, err));
    const lowkey_status status = read_slabs(data, origin, data->dims, take_f64, out, err);
    lowkey_h5_floats_close(data);
    return status;
}

struct take_ints {
    int64_t low, high;
    unsigned char *out;
    size_t element_bytes;
};

static lowkey_status take_ints(void *arg, const lowkey_h5_floats *data, const void *raw, size_t first,
                               size_t n, const int64_t *start, const int64_t *count, lowkey_error *err)
{
    const struct take_ints *to = arg;
    for (size_t i = 0; i < n; i++) {
        int64_t value;
        char index[LOWKEY_H5_SHAPE];
        const int fits = lowkey_h5_int_at(&data->number, raw, i, &value);
        if (!fits || value < to->low || value > to->high)
            return lowkey_h5_fail(data->file, err,
                                  "%s%s: expected %" PRId64 "..%" PRId64 ", found %" PRId64 "%s", data->name,
                                  print_index(data, start, count, i, index), to->low, to->high,
                                  fits ? value : INT64_MAX, fits ? "" : " or more");
        memcpy(to->out + (first + i) * to->element_bytes, &value, to->element_bytes);
    }
    return LOWKEY_OK;
}

lowkey_status lowkey_h5_read_ints(lowkey_h5 *file, const char *dataset, int rank, const int64_t *dims,
                                  int64_t low, int64_t high, void *out, size_t element_bytes,
                                  lowkey_error *err)
{
    lowkey_h5_floats *data;
    int64_t found[LOWKEY_H5_MAX_RANK];
    struct take_ints to = { low, high, out, element_bytes };
    memcpy(found, dims, (size_t)rank * sizeof *dims);
    LOWKEY_TRY(lowkey_h5_data_open(file, dataset, 1, rank, found, 0, &data, err));
    const lowkey_status status = read_slabs(data, origin, data->dims, take_ints, &to, err);
    lowkey_h5_floats_close(data);
    return status;
}
