/* write_h5.c - writes files: into a temporary one beside the target, through the driver of disk_h5.c, without
 * time stamps and with every property fixed, so that the same calls give the same bytes; then verified and
 * renamed. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "formats/half.h"
#include "formats/parts_h5.h"
#include "runtime/error.h"

/* ---- the file ---- */

/* A new file beside the target; its name is unique in the folder, since it must not be there yet. */
static lowkey_status open_temporary(lowkey_h5 *file, lowkey_error *err)
{
    struct stat status;
    if (stat(file->path, &status) == 0 && !S_ISREG(status.st_mode))
        return lowkey_fail(err, LOWKEY_EIO, "%s: cannot be written: it is there and is no regular file",
                           file->path);
    const size_t size = strlen(file->path) + 40;
    file->temporary = malloc(size);
    if (!file->temporary) return lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory", file->path);
    for (int attempt = 0; attempt < 100 && file->fd < 0; attempt++) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        snprintf(file->temporary, size, "%s.%ld.%09ld.tmp", file->path, (long)getpid(), now.tv_nsec);
        file->fd = open(file->temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (file->fd < 0 && errno != EEXIST) break;
    }
    if (file->fd >= 0) return LOWKEY_OK;
    const int error = errno;
    free(file->temporary);
    file->temporary = NULL;
    return lowkey_fail(err, LOWKEY_EIO, "%s: a temporary file beside it cannot be made: %s", file->path,
                       strerror(error));
}

static lowkey_status create_hdf5(lowkey_h5 *file, lowkey_error *err)
{
    char reason[LOWKEY_H5_REASON];
    LOWKEY_CLOSED hid_t creation = H5Pcreate(H5P_FILE_CREATE);
    LOWKEY_CLOSED hid_t access = H5Pcreate(H5P_FILE_ACCESS);
    LOWKEY_TRY(lowkey_h5_use_disk(file, access, err));
    H5Pset_fclose_degree(access, H5F_CLOSE_STRONG);
    H5Pset_obj_track_times(creation, 0);
    H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110); /* metadata with checksums */
    file->id = H5Fcreate(file->temporary, H5F_ACC_TRUNC, creation, access);
    lowkey_h5_reason(reason);
    LOWKEY_TRY(lowkey_h5_check_disk(file, err));
    if (file->id >= 0) return LOWKEY_OK;
    return lowkey_fail(err, LOWKEY_EIO, "%s: HDF5 cannot create it (%s)", file->path, reason);
}

lowkey_status lowkey_h5_create(const char *path, const char *schema, lowkey_h5 **out, lowkey_error *err)
{
    return lowkey_h5_create_minor(path, schema, LOWKEY_FORMAT_WRITTEN_MINOR, out, err);
}

lowkey_status lowkey_h5_create_minor(const char *path, const char *schema, int minor, lowkey_h5 **out, lowkey_error *err)
{
    LOWKEY_QUIET;
    *out = NULL;
    lowkey_h5 *file = calloc(1, sizeof *file);
    if (file) file->id = file->driver = -1, file->fd = -1, file->path = strdup(path);
    if (!file || !file->path) {
        free(file);
        return lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory", path);
    }
    snprintf(file->schema, sizeof file->schema, "%s", schema);
    char created_by[40];
    snprintf(created_by, sizeof created_by, "lowkey %s", lowkey_version());
    lowkey_status status = open_temporary(file, err);
    if (!status) status = create_hdf5(file, err);
    if (!status) status = lowkey_h5_put_string(file, "/", "schema", schema, err);
    if (!status) status = lowkey_h5_put_version(file, minor, err);
    if (!status) status = lowkey_h5_put_string(file, "/", "created_by", created_by, err);
    if (status)
        lowkey_h5_abandon(file);
    else
        *out = file;
    return status;
}

/* Closes HDF5's side; with a disk error, what was not written yet is dropped. */
static int close_hdf5(lowkey_h5 *file)
{
    const int failed = file->id >= 0 && H5Fclose(file->id) < 0;
    file->id = -1;
    if (file->driver >= 0) H5FDunregister(file->driver);
    file->driver = -1;
    return failed;
}

static lowkey_status finish(lowkey_h5 *file, lowkey_error *err)
{
    char reason[LOWKEY_H5_REASON];
    LOWKEY_TRY(lowkey_h5_check_disk(file, err));
    if (close_hdf5(file))
        return lowkey_fail(err, LOWKEY_EIO, "%s: HDF5 cannot close it (%s)", file->path,
                           lowkey_h5_reason(reason));
    if (!file->disk_error && fsync(file->fd) != 0) file->disk_error = errno;
    if (close(file->fd) != 0 && !file->disk_error) file->disk_error = errno;
    file->fd = -1;
    return lowkey_h5_check_disk(file, err);
}

static lowkey_status verify_schema(const lowkey_h5 *file, lowkey_error *err)
{
    lowkey_h5 *again;
    LOWKEY_TRY(lowkey_h5_open(file->temporary, file->schema, &again, err));
    lowkey_h5_close(again);
    return LOWKEY_OK;
}

/* The folder too must reach the disk, or a crash could undo the renaming; where that fails, the file is whole
 * still. */
static void synchronise_folder(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *folder = slash ? strndup(path, (size_t)(slash - path) + 1) : strdup(".");
    const int fd = folder ? open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
    free(folder);
}

static lowkey_status put_in_place(lowkey_h5 *file, lowkey_error *err)
{
    if (rename(file->temporary, file->path) != 0)
        return lowkey_fail(err, LOWKEY_EIO, "%s: cannot be replaced: %s", file->path, strerror(errno));
    synchronise_folder(file->path);
    free(file->temporary);
    file->temporary = NULL;
    return LOWKEY_OK;
}

lowkey_status lowkey_h5_commit(lowkey_h5 *file,
                               lowkey_status (*verify)(void *arg, const char *temporary_path,
                                                       lowkey_error *err),
                               void *arg, lowkey_error *err)
{
    LOWKEY_QUIET;
    lowkey_status status = finish(file, err);
    if (!status) status = verify ? verify(arg, file->temporary, err) : verify_schema(file, err);
    if (!status) status = put_in_place(file, err);
    lowkey_h5_abandon(file);
    return status;
}

void lowkey_h5_abandon(lowkey_h5 *file)
{
    if (!file) return;
    LOWKEY_QUIET;
    if (!file->disk_error) file->disk_error = ECANCELED; /* what HDF5 still holds need not be written */
    close_hdf5(file);
    if (file->fd >= 0) close(file->fd);
    if (file->temporary) unlink(file->temporary);
    free(file->temporary);
    free(file->path);
    free(file);
}

/* ---- groups and datasets ---- */

static lowkey_status check_written(lowkey_h5 *file, const char *object, int good, lowkey_error *err)
{
    char reason[LOWKEY_H5_REASON];
    if (!good)
        return lowkey_fail(err, LOWKEY_EIO, "%s: %s: cannot be written (%s)", file->path, object,
                           lowkey_h5_reason(reason));
    return lowkey_h5_check_disk(file, err);
}

lowkey_status lowkey_h5_put_group(lowkey_h5 *file, const char *group, lowkey_error *err)
{
    LOWKEY_QUIET;
    LOWKEY_CLOSED hid_t creation = H5Pcreate(H5P_GROUP_CREATE);
    H5Pset_obj_track_times(creation, 0);
    LOWKEY_CLOSED hid_t id = H5Gcreate2(file->id, group, H5P_DEFAULT, creation, H5P_DEFAULT);
    return check_written(file, group, id >= 0, err);
}

/* chunk NULL: contiguous. All its space is allocated now and never filled: every element is written by us. */
static hid_t create_dataset(lowkey_h5 *file, const char *dataset, int rank, const int64_t *dims,
                            const int64_t *chunk, hid_t type)
{
    LOWKEY_CLOSED hid_t creation = H5Pcreate(H5P_DATASET_CREATE);
    LOWKEY_CLOSED hid_t access = H5Pcreate(H5P_DATASET_ACCESS);
    LOWKEY_CLOSED hid_t space = H5Screate_simple(rank, (const hsize_t *)dims, NULL);
    H5Pset_obj_track_times(creation, 0);
    H5Pset_alloc_time(creation, H5D_ALLOC_TIME_EARLY);
    H5Pset_fill_time(creation, H5D_FILL_TIME_NEVER);
    if (chunk && H5Pset_chunk(creation, rank, (const hsize_t *)chunk) < 0) return -1;
    if (chunk) H5Pset_chunk_cache(access, 1, 0, 1); /* blocks go straight to the file */
    return H5Dcreate2(file->id, dataset, type, space, H5P_DEFAULT, creation, access);
}

static lowkey_status write_dataset(lowkey_h5 *file, const char *dataset, int rank, const int64_t *dims,
                                   hid_t type, const void *values, lowkey_error *err)
{
    LOWKEY_QUIET;
    LOWKEY_CLOSED hid_t id = create_dataset(file, dataset, rank, dims, NULL, type);
    return check_written(file, dataset,
                         id >= 0 && H5Dwrite(id, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values) >= 0, err);
}

lowkey_status lowkey_h5_write_f32(lowkey_h5 *file, const char *dataset, int rank, const int64_t *dims,
                                  const float *values, lowkey_error *err)
{
    return write_dataset(file, dataset, rank, dims, H5T_IEEE_F32LE, values, err);
}

lowkey_status lowkey_h5_write_f64(lowkey_h5 *file, const char *dataset, int rank, const int64_t *dims,
                                  const double *values, lowkey_error *err)
{
    return write_dataset(file, dataset, rank, dims, H5T_IEEE_F64LE, values, err);
}

lowkey_status lowkey_h5_write_ints(lowkey_h5 *file, const char *dataset, int rank, const int64_t *dims,
                                   const void *values, size_t element_bytes, int is_signed, lowkey_error *err)
{
    const hid_t type = element_bytes == 1   ? is_signed ? H5T_STD_I8LE : H5T_STD_U8LE
                       : element_bytes == 2 ? is_signed ? H5T_STD_I16LE : H5T_STD_U16LE
                       : element_bytes == 4 ? is_signed ? H5T_STD_I32LE : H5T_STD_U32LE
                       : is_signed          ? H5T_STD_I64LE
                                            : H5T_STD_U64LE;
    return write_dataset(file, dataset, rank, dims, type, values, err);
}

/* ---- floats in blocks ---- */

static hid_t float_type(lowkey_dtype dtype)
{
    const hid_t type = H5Tcopy(H5T_IEEE_F32LE);
    if (dtype == LOWKEY_F32) return type;
    const int is_f16 = dtype == LOWKEY_F16;
    H5Tset_fields(type, 15, is_f16 ? 10 : 7, is_f16 ? 5 : 8, 0, is_f16 ? 10 : 7);
    H5Tset_size(type, 2);
    H5Tset_ebias(type, is_f16 ? 15 : 127);
    return type;
}

lowkey_status lowkey_h5_floats_create(lowkey_h5 *file, const char *dataset, int rank, const int64_t *dims,
                                      const int64_t *chunk, lowkey_dtype dtype, lowkey_h5_floats **out,
                                      lowkey_error *err)
{
    LOWKEY_QUIET;
    *out = NULL;
    lowkey_h5_floats *data = lowkey_h5_data_new(file, dataset, err);
    if (!data) return LOWKEY_ENOMEM;
    data->rank = rank;
    memcpy(data->dims, dims, (size_t)rank * sizeof *dims);
    data->number.kind = dtype == LOWKEY_F32   ? LOWKEY_H5_F32
                        : dtype == LOWKEY_F16 ? LOWKEY_H5_F16
                                              : LOWKEY_H5_BF16;
    data->number.bytes = dtype == LOWKEY_F32 ? 4 : 2;
    data->type = float_type(dtype);
    data->id = create_dataset(file, dataset, rank, dims, chunk, data->type);
    const lowkey_status status = check_written(file, dataset, data->id >= 0, err);
    if (status)
        lowkey_h5_floats_close(data);
    else
        *out = data;
    return status;
}

lowkey_status lowkey_h5_floats_write_raw(lowkey_h5_floats *data, const int64_t *start, const int64_t *count,
                                         const void *raw, lowkey_error *err)
{
    LOWKEY_QUIET;
    LOWKEY_CLOSED hid_t space = H5Dget_space(data->id);
    LOWKEY_CLOSED hid_t memory = H5Screate_simple(data->rank, (const hsize_t *)count,
                                                  NULL); /* another rank is slow */
    const int good = H5Sselect_hyperslab(space, H5S_SELECT_SET, (const hsize_t *)start, NULL,
                                         (const hsize_t *)count, NULL) >= 0 &&
                     H5Dwrite(data->id, data->type, memory, space, H5P_DEFAULT, raw) >= 0;
    return check_written(data->file, data->name, good, err);
}

lowkey_status lowkey_h5_floats_write(lowkey_h5_floats *data, const int64_t *start, const int64_t *count,
                                     const float *values, lowkey_error *err)
{
    if (data->number.bytes == 4) return lowkey_h5_floats_write_raw(data, start, count, values, err);
    size_t n = 1;
    for (int i = 0; i < data->rank; i++) n *= (size_t)count[i];
    uint16_t *codes = malloc(n * sizeof *codes);
    if (!codes) return lowkey_fail(err, LOWKEY_ENOMEM, "%s: %s: no memory", data->file->path, data->name);
    for (size_t i = 0; i < n; i++)
        codes[i] = data->number.kind == LOWKEY_H5_F16 ? lowkey_f32_to_f16(values[i])
                                                      : lowkey_f32_to_bf16(values[i]);
    const lowkey_status status = lowkey_h5_floats_write_raw(data, start, count, codes, err);
    free(codes);
    return status;
}
