/* parts_h5.h - what the sources behind file_h5.h share: identifiers that close themselves, number types,
 * look-up. */
#ifndef LOWKEY_PARTS_H5_H
#define LOWKEY_PARTS_H5_H

#define H5_USE_110_API /* for later versions of HDF5 */
#include <hdf5.h>

#include "formats/file_h5.h"

struct lowkey_h5 {
    hid_t id;
    char *path;          /* as the caller named it: the target of a writer */
    char schema[16];
    int major, minor;    /* schema_version */
    int ignores_unknown; /* a reader, and the file's minor version is greater than ours */
    /* writer */
    char *temporary;     /* path of what is written; NULL: a reader */
    int fd;              /* of it */
    int disk_error;      /* errno of the first write that failed; what came after was dropped */
    hid_t driver;
};

/* Silence HDF5's error printing to the end of the block, and then restore it. Declare it before any
 * LOWKEY_CLOSED. */
struct lowkey_h5_quiet {
    H5E_auto2_t print;
    void *data;
    int saved;
};
struct lowkey_h5_quiet lowkey_h5_hush(void);
void lowkey_h5_unhush(struct lowkey_h5_quiet *quiet);
#define LOWKEY_QUIET \
    struct lowkey_h5_quiet quiet_ __attribute__((cleanup(lowkey_h5_unhush), unused)) = lowkey_h5_hush()

/* An identifier that is given up at the end of the block: LOWKEY_CLOSED hid_t id = H5...; */
void lowkey_h5_give_up(const hid_t *id);
#define LOWKEY_CLOSED __attribute__((cleanup(lowkey_h5_give_up)))

/* What HDF5 gave as the innermost reason of its last failure. Call it before any other call of HDF5. */
enum { LOWKEY_H5_REASON = 160 };
const char *lowkey_h5_reason(char reason[LOWKEY_H5_REASON]);

enum lowkey_h5_kind {
    LOWKEY_H5_INT,
    LOWKEY_H5_F16,
    LOWKEY_H5_BF16,
    LOWKEY_H5_F32,
    LOWKEY_H5_F64,
    LOWKEY_H5_OTHER
};

struct lowkey_h5_number { /* a number type of a file, one that we decode */
    enum lowkey_h5_kind kind;
    int bytes;            /* 1, 2, 4, 8 */
    int is_signed;        /* of an integer */
    int is_big_endian;
};
/* OTHER for all that is no number of a width and layout that we know; words says in words what it is. */
enum { LOWKEY_H5_WORDS = 96 };
struct lowkey_h5_number lowkey_h5_classify(hid_t type, char words[LOWKEY_H5_WORDS]);
/* Put n numbers into little-endian order, in place. */
void lowkey_h5_swap(const struct lowkey_h5_number *number, void *raw, size_t n);
/* Element i of little-endian raw numbers. Integers: 0 where an unsigned one is beyond int64's range. */
int lowkey_h5_int_at(const struct lowkey_h5_number *number, const void *raw, size_t i, int64_t *out);
double lowkey_h5_double_at(const struct lowkey_h5_number *number, const void *raw, size_t i);

/* Open an object by absolute path, through hard links alone. expected says what should be there. */
lowkey_status lowkey_h5_find(lowkey_h5 *file, const char *path, H5I_type_t type, const char *expected,
                             hid_t *out, lowkey_error *err);
struct lowkey_h5_floats {    /* an open dataset, of integers too */
    lowkey_h5 *file;
    hid_t id, type;          /* type: of the file */
    char name[LOWKEY_H5_MAX_PATH];
    int rank;
    int64_t dims[32];        /* HDF5 has no more; ours at most LOWKEY_H5_MAX_RANK */
    struct lowkey_h5_number number;
    unsigned flags;          /* of the reading */
    uint64_t bytes;          /* of all its numbers */
    uint64_t chunk_row_bytes; /* of all chunks that share the first's rows; 0: no chunks */
};
lowkey_h5_floats *lowkey_h5_data_new(lowkey_h5 *file, const char *dataset, lowkey_error *err);
/* dims of -1 are filled in. */
lowkey_status lowkey_h5_data_open(lowkey_h5 *file, const char *dataset, int want_int, int rank, int64_t *dims,
                                  unsigned flags, lowkey_h5_floats **out, lowkey_error *err);

/* Is this a regular file that begins as HDF5 files do? */
lowkey_status lowkey_h5_check_regular(const char *path, lowkey_error *err);

/* Checks schema_version and created_by; writes schema_version. */
lowkey_status lowkey_h5_check_version(lowkey_h5 *file, lowkey_error *err);
lowkey_status lowkey_h5_put_version(lowkey_h5 *file, int minor, lowkey_error *err);

/* "[2, 3]" */
enum { LOWKEY_H5_SHAPE = 96 };
const char *lowkey_h5_print_shape(int rank, const int64_t *dims, char text[LOWKEY_H5_SHAPE]);

/* Open the disk driver of a writer (disk_h5.c): its file access property list is set to it. */
lowkey_status lowkey_h5_use_disk(lowkey_h5 *file, hid_t access, lowkey_error *err);
/* What is wrong with a writer so far. */
lowkey_status lowkey_h5_check_disk(const lowkey_h5 *file, lowkey_error *err);

#endif
