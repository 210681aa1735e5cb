/* file_h5.h - the one layer over HDF5's C API that all files of ours are read and written through:
 * formats/README.md, "Conventions". Objects are named by absolute path ("/layers/000/key"); "/" is the root
 * group.
 *
 * Reading: a file may be wrong in any way. Each call checks what it reads (kind, type, shape, range, filters,
 * storage) before it takes memory for it, and answers in one line: file, object, expected, found. Writing:
 * into a temporary file beside the target, which takes its place in lowkey_h5_commit. HDF5 prints nothing;
 * its own error printing is as before after each call. One thread at a time. */
#ifndef LOWKEY_FILE_H5_H
#define LOWKEY_FILE_H5_H

#include <stddef.h>
#include <stdint.h>

#include "runtime/lowkey.h"

/* What is read, and what is written: the least minor version that names all that our writers write (but for
 * gradient_labels of activations.h5, 1.1, budgets, trellises and tuning of quantizer.h5, 1.2 to 1.4). */
enum { LOWKEY_FORMAT_MAJOR = 1, LOWKEY_FORMAT_MINOR = 4, LOWKEY_FORMAT_WRITTEN_MINOR = 0 };
enum { LOWKEY_H5_MAX_RANK = 4, LOWKEY_H5_MAX_PATH = 64 }; /* of our objects; NUL included */

/* LOWKEY_DIMS(a, b) is the two arguments (rank, dims) of a shape [a, b]. */
#define LOWKEY_DIMS(...) \
    (int)(sizeof((const int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), (const int64_t[]){ __VA_ARGS__ }

typedef struct lowkey_h5 lowkey_h5; /* one open file, for reading or for writing */

const char *lowkey_h5_path(const lowkey_h5 *file);
/* Fail with LOWKEY_EFORMAT and "file: " before the words. */
lowkey_status lowkey_h5_fail(const lowkey_h5 *file, lowkey_error *err, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Put "file: " before the message of a call that knew no file; hands the status through. */
lowkey_status lowkey_h5_blame(const lowkey_h5 *file, lowkey_status status, lowkey_error *err);

/* ---- reading ---- */

/* HDF5 itself may crash on a damaged file, or never come to an end. In a child process, open it as its schema
 * is opened, and refuse it where that kills the child. For programs that open files of strangers; a file that
 * is no HDF5 is good here. */
lowkey_status lowkey_h5_probe(const char *path, lowkey_error *err);

/* Opens and checks schema and version. schema NULL: any of ours. */
lowkey_status lowkey_h5_open(const char *path, const char *schema, lowkey_h5 **out, lowkey_error *err);
void lowkey_h5_close(lowkey_h5 *file); /* of a reader; takes NULL */
const char *lowkey_h5_schema(const lowkey_h5 *file);
void lowkey_h5_version(const lowkey_h5 *file, int *major, int *minor);

/* Refuse objects of a group, and attributes, that the lists (ended by NULL) do not name; either list NULL:
 * not looked at. A file of a greater minor version than ours may hold others. Of the root, schema,
 * schema_version and created_by need not be named. */
lowkey_status lowkey_h5_refuse_others(lowkey_h5 *file, const char *group, const char *const *objects,
                                      const char *const *attributes, lowkey_error *err);
/* Call visit for the name of every object of a group, in no order; what it returns other than LOWKEY_OK ends
 * it. */
lowkey_status lowkey_h5_for_each(lowkey_h5 *file, const char *group,
                                 lowkey_status (*visit)(void *arg, const char *name, lowkey_error *err),
                                 void *arg, lowkey_error *err);

/* Scalar attributes, required. */
lowkey_status lowkey_h5_get_int(lowkey_h5 *file, const char *object, const char *name, int64_t low,
                                int64_t high, int64_t *out, lowkey_error *err);
/* The same into an int. */
lowkey_status lowkey_h5_get_small(lowkey_h5 *file, const char *object, const char *name, int low, int high,
                                  int *out, lowkey_error *err);
lowkey_status lowkey_h5_get_double(lowkey_h5 *file, const char *object, const char *name, double *out,
                                   lowkey_error *err); /* finite */
/* At most 64 KiB of UTF-8; *out is malloc'd. */
lowkey_status lowkey_h5_get_string(lowkey_h5 *file, const char *object, const char *name, char **out,
                                   lowkey_error *err);
/* One of the choices (ended by NULL); *out is its number. */
lowkey_status lowkey_h5_get_choice(lowkey_h5 *file, const char *object, const char *name,
                                   const char *const *choices, int *out, lowkey_error *err);
lowkey_status lowkey_h5_get_sha256(lowkey_h5 *file, const char *object, const char *name,
                                   unsigned char out[32], lowkey_error *err);

/* Check that a dataset of integers or of floats is there and has this rank and these dims; a dim of -1 is any
 * from 1 and is filled in: the file is then large enough to hold so many (deflated, at the best ratio there
 * is). */
lowkey_status lowkey_h5_get_shape(lowkey_h5 *file, const char *dataset, int is_int, int rank, int64_t *dims,
                                  lowkey_error *err);

enum {                    /* flags of float reads */
    LOWKEY_H5_EXACT = 1,  /* refuse f64 that f32 cannot hold exactly; else they are rounded */
    LOWKEY_H5_ANY = 2,    /* do not refuse NaN and infinities */
    LOWKEY_H5_NO_F16 = 4  /* refuse f16 (gradients) */
};

/* A whole dataset of exactly this shape: out has room for the product of dims. NaN and infinities are
 * refused, named by index; so are f64 beyond f32's range. */
lowkey_status lowkey_h5_read_f32(lowkey_h5 *file, const char *dataset, int rank, const int64_t *dims,
                                 unsigned flags, float *out, lowkey_error *err);
/* The same into new memory, taken after the checks, aligned to 64 bytes, for free(). */
lowkey_status lowkey_h5_read_new_f32(lowkey_h5 *file, const char *dataset, int rank, const int64_t *dims,
                                     unsigned flags, float **out, lowkey_error *err);
lowkey_status lowkey_h5_read_f64(lowkey_h5 *file, const char *dataset, int rank, const int64_t *dims,
                                 double *out, lowkey_error *err);
/* Integers of any type, each low..high, stored as two's complement of 1, 2, 4 or 8 bytes. */
lowkey_status lowkey_h5_read_ints(lowkey_h5 *file, const char *dataset, int rank, const int64_t *dims,
                                  int64_t low, int64_t high, void *out, size_t element_bytes,
                                  lowkey_error *err);

/* A float dataset kept open, read or written in blocks: start and count have its rank. */
typedef struct lowkey_h5_floats lowkey_h5_floats;

lowkey_status lowkey_h5_floats_open(lowkey_h5 *file, const char *dataset, int rank, const int64_t *dims,
                                    unsigned flags, lowkey_h5_floats **out, lowkey_error *err);
lowkey_status lowkey_h5_floats_read(lowkey_h5_floats *floats, const int64_t *start, const int64_t *count,
                                    float *out, lowkey_error *err);
const char *lowkey_h5_floats_type(const lowkey_h5_floats *floats); /* "f16", "bf16", "f32", "f64" */
void lowkey_h5_floats_close(lowkey_h5_floats *floats); /* before its file; takes NULL */

/* ---- writing ---- */

/* Begin a file of a schema. Its groups, attributes and datasets are then written in any order, but each once;
 * the same calls give the same bytes. A full disk is reported by commit at the latest. */
lowkey_status lowkey_h5_create(const char *path, const char *schema, lowkey_h5 **out, lowkey_error *err);
/* The same of another minor version: the least that names what will be written. */
lowkey_status lowkey_h5_create_minor(const char *path, const char *schema, int minor, lowkey_h5 **out, lowkey_error *err);
lowkey_status lowkey_h5_put_group(lowkey_h5 *file, const char *group, lowkey_error *err);
lowkey_status lowkey_h5_put_int(lowkey_h5 *file, const char *object, const char *name, int64_t value,
                                lowkey_error *err);
lowkey_status lowkey_h5_put_double(lowkey_h5 *file, const char *object, const char *name, double value,
                                   lowkey_error *err);
lowkey_status lowkey_h5_put_string(lowkey_h5 *file, const char *object, const char *name, const char *value,
                                   lowkey_error *err);
lowkey_status lowkey_h5_put_sha256(lowkey_h5 *file, const char *object, const char *name,
                                   const unsigned char value[32], lowkey_error *err);
lowkey_status lowkey_h5_write_f32(lowkey_h5 *file, const char *dataset, int rank, const int64_t *dims,
                                  const float *values, lowkey_error *err);
lowkey_status lowkey_h5_write_f64(lowkey_h5 *file, const char *dataset, int rank, const int64_t *dims,
                                  const double *values, lowkey_error *err);
/* Elements of 1, 2, 4 or 8 bytes, two's complement where is_signed. */
lowkey_status lowkey_h5_write_ints(lowkey_h5 *file, const char *dataset, int rank, const int64_t *dims,
                                   const void *values, size_t element_bytes, int is_signed,
                                   lowkey_error *err);
/* A dataset to be written in blocks, stored as dtype in chunks of this shape. f32 is rounded to the
 * nearest. */
lowkey_status lowkey_h5_floats_create(lowkey_h5 *file, const char *dataset, int rank, const int64_t *dims,
                                      const int64_t *chunk, lowkey_dtype dtype, lowkey_h5_floats **out,
                                      lowkey_error *err);
lowkey_status lowkey_h5_floats_write(lowkey_h5_floats *floats, const int64_t *start, const int64_t *count,
                                     const float *values, lowkey_error *err);
/* The same from numbers that are of the dataset's type already: 16-bit codes or f32. */
lowkey_status lowkey_h5_floats_write_raw(lowkey_h5_floats *floats, const int64_t *start, const int64_t *count,
                                         const void *raw, lowkey_error *err);

/* Close and synchronise the temporary file, let verify read it back (NULL: it is opened and its schema
 * checked), rename it over the target. Whatever fails: the temporary file is removed and the target is as it
 * was. Frees the file. */
lowkey_status lowkey_h5_commit(lowkey_h5 *file,
                               lowkey_status (*verify)(void *arg, const char *temporary_path,
                                                       lowkey_error *err),
                               void *arg, lowkey_error *err);
void lowkey_h5_abandon(lowkey_h5 *file); /* remove the temporary file; frees; takes NULL */

/* ---- what several schemas share ---- */

/* Offsets [n + 1] of runs of total elements: from 0 to total, strictly rising. */
lowkey_status lowkey_offsets_check(const char *name, const int64_t *offsets, int n, int64_t total,
                                   lowkey_error *err);

/* Root attributes of files with layers: n_layers, model_name (malloc'd), model_sha256. */
lowkey_status lowkey_h5_read_identity(lowkey_h5 *file, int *n_layers, char **model_name,
                                      unsigned char model_sha256[32], lowkey_error *err);
lowkey_status lowkey_h5_write_identity(lowkey_h5 *file, int n_layers, const char *model_name,
                                       const unsigned char model_sha256[32], lowkey_error *err);

/* "/layers/007" and "/layers/007/SUFFIX" (suffix NULL: the group). */
void lowkey_h5_layer_path(int layer, const char *suffix, char path[LOWKEY_H5_MAX_PATH]);

/* "Geometry" of a layer, checked whole. Fills all of layer but key and value, which become empty;
 * rope_inv_freq is malloc'd (NULL where rope_dims is 0). */
lowkey_status lowkey_h5_read_geometry(lowkey_h5 *file, int layer_index, lowkey_layer_desc *layer,
                                      lowkey_error *err);
lowkey_status lowkey_h5_write_geometry(lowkey_h5 *file, const lowkey_layer_desc *layer, lowkey_error *err);
/* Refuse objects and attributes of a layer group that are neither geometry nor named (objects, ended by
 * NULL). */
lowkey_status lowkey_h5_refuse_layer_others(lowkey_h5 *file, const lowkey_layer_desc *layer,
                                            const char *const *objects, lowkey_error *err);
/* /layer_index: strictly rising, each < n_model_layers, and /layers holds those and no others. *out is
 * malloc'd. */
lowkey_status lowkey_h5_read_layer_index(lowkey_h5 *file, int n_model_layers, int *n, int **out,
                                         lowkey_error *err);
/* Refuse groups in /layers other than those of the n layers; all of them must be there. layers NULL:
 * 0..n-1. */
lowkey_status lowkey_h5_check_layer_groups(lowkey_h5 *file, int n, const int *layers, lowkey_error *err);

#endif
