/* test_file_h5.c - the layer over HDF5: what it writes it reads, byte for byte the same each time, and a write that fails
 * leaves nothing behind. Files that others write are in test_h5py_files.py. */
#include "formats/file_h5.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/check.h"

static char folder[64], path[96];

static int make_folder(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/lowkey_file_h5_XXXXXX");
    if (!mkdtemp(folder)) return -1;
    snprintf(path, sizeof path, "%s/file.h5", folder);
    return 0;
}

static int count_files(void)
{
    int n = 0;
    DIR *stream = opendir(folder);
    for (const struct dirent *entry; (entry = readdir(stream));) n += entry->d_name[0] != '.';
    closedir(stream);
    return n;
}

static int remove_folder(void **state)
{
    (void)state;
    unlink(path);
    return rmdir(folder);
}

/* The whole of a file, in memory. */
static unsigned char *slurp(const char *name, size_t *size)
{
    FILE *stream = fopen(name, "rb");
    assert_non_null(stream);
    fseek(stream, 0, SEEK_END);
    *size = (size_t)ftell(stream);
    rewind(stream);
    unsigned char *bytes = malloc(*size);
    assert_int_equal(fread(bytes, 1, *size, stream), *size);
    fclose(stream);
    return bytes;
}

static const float floats[6] = { 0, -1.5f, 3e38f, 1e-42f, 65504, -0.0f };
static const double doubles[2] = { 0.1, 1e300 };
static const int16_t shorts[4] = { -32768, 32767, 0, -1 };
static const uint64_t longs[2] = { 0, INT64_MAX };
static const unsigned char digest[32] = { 0, 1, 0xab, 0xff };

static lowkey_status write_all(lowkey_error *err)
{
    lowkey_h5 *file;
    if (lowkey_h5_create(path, "model", &file, err)) return err->status;
    lowkey_status status = lowkey_h5_put_group(file, "/group", err);
    if (!status) status = lowkey_h5_put_int(file, "/group", "int", -7, err);
    if (!status) status = lowkey_h5_put_double(file, "/group", "double", 0.25, err);
    if (!status) status = lowkey_h5_put_string(file, "/", "name", "größe", err);
    if (!status) status = lowkey_h5_put_string(file, "/", "empty", "", err);
    if (!status) status = lowkey_h5_put_sha256(file, "/", "sha", digest, err);
    if (!status) status = lowkey_h5_write_f32(file, "/floats", LOWKEY_DIMS(2, 3), floats, err);
    if (!status) status = lowkey_h5_write_f64(file, "/group/doubles", LOWKEY_DIMS(2), doubles, err);
    if (!status) status = lowkey_h5_write_ints(file, "/group/shorts", LOWKEY_DIMS(4), shorts, 2, 1, err);
    if (!status) status = lowkey_h5_write_ints(file, "/group/longs", LOWKEY_DIMS(2), longs, 8, 0, err);
    if (!status) return lowkey_h5_commit(file, NULL, NULL, err);
    lowkey_h5_abandon(file);
    return status;
}

static void what_is_written_is_read(void **state)
{
    (void)state;
    lowkey_error err;
    lowkey_h5 *file;
    assert_ok(write_all(&err), err);
    assert_ok(lowkey_h5_open(path, "model", &file, &err), err);
    int64_t value;
    double real;
    char *text;
    unsigned char sha[32];
    assert_ok(lowkey_h5_get_int(file, "/group", "int", -7, -7, &value, &err), err);
    assert_int_equal(value, -7);
    assert_refused(lowkey_h5_get_int(file, "/group", "int", -6, 9, &value, &err), LOWKEY_EFORMAT, err,
                   "/group: attribute int: expected -6..9, found -7");
    assert_ok(lowkey_h5_get_double(file, "/group", "double", &real, &err), err);
    assert_true(real == 0.25);
    assert_ok(lowkey_h5_get_string(file, "/", "name", &text, &err), err);
    assert_string_equal(text, "größe");
    free(text);
    assert_ok(lowkey_h5_get_string(file, "/", "empty", &text, &err), err);
    assert_string_equal(text, "");
    free(text);
    assert_ok(lowkey_h5_get_sha256(file, "/", "sha", sha, &err), err);
    assert_memory_equal(sha, digest, 32);
    float f[6];
    double d[2];
    int16_t s[4];
    uint64_t l[2];
    assert_ok(lowkey_h5_read_f32(file, "/floats", LOWKEY_DIMS(2, 3), LOWKEY_H5_EXACT, f, &err), err);
    assert_memory_equal(f, floats, sizeof f);
    assert_ok(lowkey_h5_read_f64(file, "/group/doubles", LOWKEY_DIMS(2), d, &err), err);
    assert_memory_equal(d, doubles, sizeof d);
    assert_ok(lowkey_h5_read_ints(file, "/group/shorts", LOWKEY_DIMS(4), -32768, 32767, s, 2, &err), err);
    assert_memory_equal(s, shorts, sizeof s);
    assert_ok(lowkey_h5_read_ints(file, "/group/longs", LOWKEY_DIMS(2), 0, INT64_MAX, l, 8, &err), err);
    assert_memory_equal(l, longs, sizeof l);
    lowkey_h5_close(file);
}

static void the_same_calls_give_the_same_bytes(void **state)
{
    (void)state;
    lowkey_error err;
    size_t n[2];
    unsigned char *bytes[2];
    for (int i = 0; i < 2; i++) {
        assert_ok(write_all(&err), err);
        bytes[i] = slurp(path, &n[i]);
        if (i == 0) sleep(1); /* a time stamp would show */
    }
    assert_int_equal(n[0], n[1]);
    assert_memory_equal(bytes[0], bytes[1], n[0]);
    assert_int_equal(count_files(), 1);
    free(bytes[0]);
    free(bytes[1]);
}

static void what_is_wrong_is_said_with_file_and_object(void **state)
{
    (void)state;
    lowkey_error err;
    lowkey_h5 *file;
    float f[6];
    char *text;
    unsigned char sha[32];
    int64_t value, dims[2] = { -1, 3 };
    assert_ok(write_all(&err), err);
    assert_refused(lowkey_h5_open(path, "tokens", &file, &err), LOWKEY_EFORMAT, err, "expected tokens, found model");
    assert_refused(lowkey_h5_open("/nowhere/x.h5", NULL, &file, &err), LOWKEY_EIO, err, "/nowhere/x.h5: No such file");
    assert_refused(lowkey_h5_open(folder, NULL, &file, &err), LOWKEY_EIO, err, "found a directory");
    assert_ok(lowkey_h5_open(path, NULL, &file, &err), err);
    assert_string_equal(lowkey_h5_schema(file), "model");
    assert_refused(lowkey_h5_read_f32(file, "/floats", LOWKEY_DIMS(3, 2), 0, f, &err), LOWKEY_EFORMAT, err,
                   "file.h5: /floats: expected float [3, 2], found [2, 3]");
    assert_refused(lowkey_h5_read_f32(file, "/floats", LOWKEY_DIMS(6), 0, f, &err), LOWKEY_EFORMAT, err, "expected float [6]");
    assert_refused(lowkey_h5_read_f32(file, "/group", LOWKEY_DIMS(6), 0, f, &err), LOWKEY_EFORMAT, err, "found a group");
    assert_refused(lowkey_h5_read_f32(file, "/flaots", LOWKEY_DIMS(6), 0, f, &err), LOWKEY_EFORMAT, err,
                   "/flaots: missing: expected float [6], found group, floats there");
    assert_refused(lowkey_h5_read_f32(file, "/group/shorts", LOWKEY_DIMS(4), 0, f, &err), LOWKEY_EFORMAT, err, "found int16");
    assert_refused(lowkey_h5_read_f32(file, "/group/doubles", LOWKEY_DIMS(2), LOWKEY_H5_EXACT, f, &err), LOWKEY_EFORMAT, err,
                   "/group/doubles[0]: expected a number exact in f32, found 0.1");
    assert_refused(lowkey_h5_read_f32(file, "/group/doubles", LOWKEY_DIMS(2), 0, f, &err), LOWKEY_EFORMAT, err,
                   "/group/doubles[1]: expected a number in f32's range, found 1e+300");
    assert_refused(lowkey_h5_read_ints(file, "/group/shorts", LOWKEY_DIMS(4), -32768, 9, f, 2, &err), LOWKEY_EFORMAT, err,
                   "/group/shorts[1]: expected -32768..9, found 32767");
    assert_refused(lowkey_h5_read_ints(file, "/floats", LOWKEY_DIMS(2, 3), 0, 9, f, 2, &err), LOWKEY_EFORMAT, err, "expected int [2, 3], found f32");
    assert_refused(lowkey_h5_get_int(file, "/", "name", 0, 1, &value, &err), LOWKEY_EFORMAT, err, "expected an integer, found string");
    assert_refused(lowkey_h5_get_string(file, "/group", "int", &text, &err), LOWKEY_EFORMAT, err, "expected a string, found int64");
    assert_refused(lowkey_h5_get_string(file, "/group", "none", &text, &err), LOWKEY_EFORMAT, err, "/group: attribute none: missing");
    assert_refused(lowkey_h5_get_sha256(file, "/", "name", sha, &err), LOWKEY_EFORMAT, err, "64 lower-case");
    assert_refused(lowkey_h5_refuse_others(file, "/group", (const char *const[]){ "shorts", NULL }, NULL, &err), LOWKEY_EFORMAT,
                   err, "/group: unknown object doubles; expected shorts");
    assert_refused(lowkey_h5_refuse_others(file, "/", NULL, (const char *const[]){ "name", "sha", NULL }, &err), LOWKEY_EFORMAT,
                   err, "/: unknown attribute empty; expected name, sha");
    assert_ok(lowkey_h5_get_shape(file, "/floats", 0, 2, dims, &err), err);
    assert_int_equal(dims[0], 2);
    lowkey_h5_close(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(what_is_written_is_read, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(the_same_calls_give_the_same_bytes, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(what_is_wrong_is_said_with_file_and_object, make_folder, remove_folder),
    };
    return lowkey_run_tests(tests);
}
