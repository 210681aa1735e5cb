/* test_file_h5.c - the layer over HDF5: what it writes it reads, byte for byte the same each time, and a
 * write that fails leaves nothing behind. Files that others write are in test_h5py_files.py. */
#include "formats/file_h5.h"

#include <dirent.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "formats/parts_h5.h"
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

/* A killed writer leaves its temporary file. */
static void remove_leftovers(void)
{
    DIR *stream = opendir(folder);
    for (const struct dirent *entry; (entry = readdir(stream));) {
        char name[512];
        snprintf(name, sizeof name, "%s/%s", folder, entry->d_name);
        if (strstr(entry->d_name, ".tmp")) unlink(name);
    }
    closedir(stream);
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
    assert_refused(lowkey_h5_open(path, "tokens", &file, &err), LOWKEY_EFORMAT, err,
                   "expected tokens, found model");
    assert_refused(lowkey_h5_open("/nowhere/x.h5", NULL, &file, &err), LOWKEY_EIO, err,
                   "/nowhere/x.h5: No such file");
    assert_refused(lowkey_h5_open(folder, NULL, &file, &err), LOWKEY_EIO, err, "found a directory");
    assert_ok(lowkey_h5_open(path, NULL, &file, &err), err);
    assert_string_equal(lowkey_h5_schema(file), "model");
    assert_refused(lowkey_h5_read_f32(file, "/floats", LOWKEY_DIMS(3, 2), 0, f, &err), LOWKEY_EFORMAT, err,
                   "file.h5: /floats: expected float [3, 2], found [2, 3]");
    assert_refused(lowkey_h5_read_f32(file, "/floats", LOWKEY_DIMS(6), 0, f, &err), LOWKEY_EFORMAT, err,
                   "expected float [6]");
    assert_refused(lowkey_h5_read_f32(file, "/group", LOWKEY_DIMS(6), 0, f, &err), LOWKEY_EFORMAT, err,
                   "found a group");
    assert_refused(lowkey_h5_read_f32(file, "/flaots", LOWKEY_DIMS(6), 0, f, &err), LOWKEY_EFORMAT, err,
                   "/flaots: missing: expected float [6], found group, floats there");
    assert_refused(lowkey_h5_read_f32(file, "/group/shorts", LOWKEY_DIMS(4), 0, f, &err), LOWKEY_EFORMAT, err,
                   "found int16");
    assert_refused(lowkey_h5_read_f32(file, "/group/doubles", LOWKEY_DIMS(2), LOWKEY_H5_EXACT, f, &err),
                   LOWKEY_EFORMAT, err, "/group/doubles[0]: expected a number exact in f32, found 0.1");
    assert_refused(lowkey_h5_read_f32(file, "/group/doubles", LOWKEY_DIMS(2), 0, f, &err), LOWKEY_EFORMAT,
                   err, "/group/doubles[1]: expected a number in f32's range, found 1e+300");
    assert_refused(lowkey_h5_read_ints(file, "/group/shorts", LOWKEY_DIMS(4), -32768, 9, f, 2, &err),
                   LOWKEY_EFORMAT, err, "/group/shorts[1]: expected -32768..9, found 32767");
    assert_refused(lowkey_h5_read_ints(file, "/floats", LOWKEY_DIMS(2, 3), 0, 9, f, 2, &err), LOWKEY_EFORMAT,
                   err, "expected int [2, 3], found f32");
    assert_refused(lowkey_h5_get_int(file, "/", "name", 0, 1, &value, &err), LOWKEY_EFORMAT, err,
                   "expected an integer, found string");
    assert_refused(lowkey_h5_get_string(file, "/group", "int", &text, &err), LOWKEY_EFORMAT, err,
                   "expected a string, found int64");
    assert_refused(lowkey_h5_get_string(file, "/group", "none", &text, &err), LOWKEY_EFORMAT, err,
                   "/group: attribute none: missing");
    assert_refused(lowkey_h5_get_sha256(file, "/", "name", sha, &err), LOWKEY_EFORMAT, err, "64 lower-case");
    assert_refused(
        lowkey_h5_refuse_others(file, "/group", (const char *const[]) { "shorts", NULL }, NULL, &err),
        LOWKEY_EFORMAT, err, "/group: unknown object doubles; expected shorts");
    assert_refused(
        lowkey_h5_refuse_others(file, "/", NULL, (const char *const[]) { "name", "sha", NULL }, &err),
        LOWKEY_EFORMAT, err, "/: unknown attribute empty; expected name, sha");
    assert_ok(lowkey_h5_get_shape(file, "/floats", 0, 2, dims, &err), err);
    assert_int_equal(dims[0], 2);
    lowkey_h5_close(file);
}

/* ---- faults ---- */

/* What a child process does; how it ended; whether it printed anything. */
static int run_child(int (*child)(int arg), int arg, int *printed)
{
    FILE *log = tmpfile();
    assert_non_null(log);
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) {
        dup2(fileno(log), STDERR_FILENO);
        dup2(fileno(log), STDOUT_FILENO);
        exit(child(arg)); /* through HDF5's own end */
    }
    int status = -1;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    fseek(log, 0, SEEK_END);
    *printed = ftell(log) != 0;
    fclose(log);
    return status;
}

static const char *expected_words;

/* Exit status: 0 written, 10 refused as it should be, others: not. */
static int write_limited(int limit)
{
    lowkey_error err = { 0 };
    const struct rlimit size = { (rlim_t)limit, (rlim_t)limit };
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &size);
    const lowkey_status status = write_all(&err);
    if (!status) return 0;
    return status == LOWKEY_EIO && strstr(err.message, expected_words) ? 10 : 11;
}

static void a_file_that_finds_no_room_leaves_the_old_one_whole(void **state)
{
    (void)state;
    lowkey_error err;
    assert_ok(write_all(&err), err);
    size_t size, size_now;
    unsigned char *old = slurp(path, &size);
    expected_words = "file.h5: cannot be written: File too large";
    for (int limit = 0; limit < (int)size + 700; limit += 97) {
        int printed;
        const int status = run_child(write_limited, limit, &printed);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != (limit < (int)size ? 10 : 0) || printed)
            fail_msg("limit %d of %d: status %x, printed %d", limit, (int)size, (unsigned)status, printed);
        assert_int_equal(count_files(), 1);
        unsigned char *now = slurp(path, &size_now);
        assert_int_equal(size_now, size);
        assert_memory_equal(now, old, size);
        free(now);
    }
    free(old);
}

/* In a file system of 64 KiB that is this process's own. Exit status 20: there can be none here. */
static int fill_disk(int arg)
{
    (void)arg;
    static float values[64][1024];
    lowkey_error err = { 0 };
    lowkey_h5 *file;
    if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
        mount("tmpfs", folder, "tmpfs", 0, "size=65536"))
        return 20;
    if (write_all(&err)) return 21;
    size_t size, size_now;
    unsigned char *old = slurp(path, &size);
    if (lowkey_h5_create(path, "model", &file, &err)) return 22;
    lowkey_status status = lowkey_h5_write_f32(file, "/large", LOWKEY_DIMS(64, 1024), &values[0][0], &err);
    if (!status)
        status = lowkey_h5_commit(file, NULL, NULL, &err);
    else
        lowkey_h5_abandon(file);
    if (status != LOWKEY_EIO || !strstr(err.message, "cannot be written: No space left on device")) return 23;
    unsigned char *now = slurp(path, &size_now);
    const int is_whole = size == size_now && memcmp(old, now, size) == 0;
    free(old);
    free(now);
    return is_whole && count_files() == 1 ? 0 : 24;
}

static void a_full_disk_is_one_error_and_leaves_the_old_file_whole(void **state)
{
    (void)state;
    int printed;
    const int status = run_child(fill_disk, 0, &printed);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 20) lowkey_skip("no file system can be mounted here");
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_false(printed);
}

/* Killed after so many calls. */
static int write_and_die(int n_calls)
{
    lowkey_error err;
    lowkey_h5 *file;
    lowkey_h5_floats *block;
    static const float zeros[1000];
    if (n_calls-- == 0 || lowkey_h5_create(path, "model", &file, &err)) raise(SIGKILL);
    if (n_calls-- == 0 || lowkey_h5_put_int(file, "/", "int", 3, &err)) raise(SIGKILL);
    if (n_calls-- == 0 || lowkey_h5_write_f32(file, "/floats", LOWKEY_DIMS(2, 3), floats, &err))
        raise(SIGKILL);
    if (n_calls-- == 0 || lowkey_h5_floats_create(file, "/block", LOWKEY_DIMS(1000, 100),
                                                  (const int64_t[]) { 10, 100 }, LOWKEY_F16, &block, &err))
        raise(SIGKILL);
    for (int64_t i = 0; i < 1000; i += 10)
        if (n_calls-- == 0 || lowkey_h5_floats_write(block, (const int64_t[]) { i, 0 },
                                                     (const int64_t[]) { 10, 100 }, zeros, &err))
            raise(SIGKILL);
    lowkey_h5_floats_close(block);
    return lowkey_h5_commit(file, NULL, NULL, &err);
}

static void a_killed_writer_leaves_the_old_file_whole_and_the_next_one_writes(void **state)
{
    (void)state;
    lowkey_error err;
    assert_ok(write_all(&err), err);
    size_t size, size_now;
    unsigned char *old = slurp(path, &size);
    for (int n_calls = 0; n_calls < 105; n_calls += n_calls < 5 ? 1 : 33) {
        int printed;
        const int status = run_child(write_and_die, n_calls, &printed);
        const int finished = WIFEXITED(status) && WEXITSTATUS(status) == 0;
        if (!finished && !(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL))
            fail_msg("status %x", (unsigned)status);
        assert_int_equal(finished, n_calls >= 104);
        unsigned char *now = slurp(path, &size_now);
        if (!finished) assert_true(size_now == size && memcmp(now, old, size) == 0);
        free(now);
    }
    assert_ok(write_all(&err), err);
    unsigned char *now = slurp(path, &size_now);
    assert_true(size_now == size && memcmp(now, old, size) == 0);
    free(now);
    free(old);
    remove_leftovers();
}

static lowkey_status find_fault(void *arg, const char *temporary_path, lowkey_error *err)
{
    *(int *)arg = access(temporary_path, F_OK) == 0;
    snprintf(err->message, sizeof err->message, "found a fault");
    return err->status = LOWKEY_EIO;
}

static void a_file_that_does_not_read_back_takes_no_place(void **state)
{
    (void)state;
    lowkey_error err;
    lowkey_h5 *file;
    int was_there = 0;
    assert_ok(lowkey_h5_create(path, "model", &file, &err), err);
    assert_refused(lowkey_h5_commit(file, find_fault, &was_there, &err), LOWKEY_EIO, err, "found a fault");
    assert_true(was_there);
    assert_int_equal(count_files(), 0);
}

static void a_target_that_cannot_be_written_is_refused_at_once(void **state)
{
    (void)state;
    lowkey_error err;
    lowkey_h5 *file;
    assert_refused(lowkey_h5_create("/nowhere/x.h5", "model", &file, &err), LOWKEY_EIO, err,
                   "/nowhere/x.h5: a temporary file beside it");
    assert_refused(lowkey_h5_create(folder, "model", &file, &err), LOWKEY_EIO, err, "no regular file");
    assert_refused(lowkey_h5_create("/proc/x.h5", "model", &file, &err), LOWKEY_EIO, err,
                   "a temporary file beside it cannot be made");
    assert_ok(lowkey_h5_create(path, "model", &file, &err), err);
    lowkey_h5_abandon(file);
    lowkey_h5_abandon(NULL);
    assert_int_equal(count_files(), 0);
}

/* HDF5's own printing is as the program had it, before and after. */
static void errors_of_hdf5_are_printed_again_afterwards(void **state)
{
    (void)state;
    lowkey_error err;
    lowkey_h5 *file;
    struct lowkey_h5_quiet before = lowkey_h5_hush(), after;
    lowkey_h5_unhush(&before);
    assert_non_null(before.print);
    assert_refused(lowkey_h5_open("/dev/null", NULL, &file, &err), LOWKEY_EIO, err, "no regular file");
    assert_ok(write_all(&err), err);
    assert_ok(lowkey_h5_open(path, NULL, &file, &err), err);
    lowkey_h5_close(file);
    after = lowkey_h5_hush();
    lowkey_h5_unhush(&after);
    assert_true(before.print == after.print && before.data == after.data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(what_is_written_is_read, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(the_same_calls_give_the_same_bytes, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(what_is_wrong_is_said_with_file_and_object, make_folder,
                                        remove_folder),
        cmocka_unit_test_setup_teardown(a_file_that_finds_no_room_leaves_the_old_one_whole, make_folder,
                                        remove_folder),
        cmocka_unit_test_setup_teardown(a_full_disk_is_one_error_and_leaves_the_old_file_whole, make_folder,
                                        remove_folder),
        cmocka_unit_test_setup_teardown(a_killed_writer_leaves_the_old_file_whole_and_the_next_one_writes,
                                        make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(a_file_that_does_not_read_back_takes_no_place, make_folder,
                                        remove_folder),
        cmocka_unit_test_setup_teardown(a_target_that_cannot_be_written_is_refused_at_once, make_folder,
                                        remove_folder),
        cmocka_unit_test_setup_teardown(errors_of_hdf5_are_printed_again_afterwards, make_folder,
                                        remove_folder),
    };
    return lowkey_run_tests(tests);
}
