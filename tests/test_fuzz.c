/* test_fuzz.c - the fuzz target of quantizer.h5 on a sample of mutations of good files, each in a child process. HDF5
 * itself crashes and hangs on some of them; that is counted, and told apart from faults of ours, which
 * fail. With arguments: replays those files instead, in this process (what libFuzzer found, say). */
#include <dlfcn.h>
#include <execinfo.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "formats/quantizer_file.h"
#include "tests/check.h"
#include "tests/fuzz_quantizer.h"
#include "tests/quantizers.h"

#if defined(__SANITIZE_ADDRESS__)
__attribute__((visibility("default"))) const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "abort_on_error=1"; /* so that on_fault sees whose it is */
}
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

/* ---- good files ---- */

/* Written by h5py, with metadata of the oldest kind, which has no checksums: mutations get farther. */
#define GOLDEN "tests/golden/quantizer-1.0.h5"
#define GOLDEN_TRELLIS "tests/golden/quantizer-1.3.h5"
static char folder[64], path[96];
static lowkey_error err;

static void make_good_file(struct lowkey_test_spec spec)
{
    spec.key_head_dim = spec.value_head_dim = spec.rope_dims = 8;
    static double numbers[16];
    static float gains[16];
    static uint8_t flags[16];
    static uint64_t histogram[16 * 64];
    static const unsigned char hashes[1][32] = { { 1 } };
    struct lowkey_side_report reports[2][2];
    for (int i = 0; i < 4; i++)
        reports[i / 2][i % 2] = (struct lowkey_side_report) { .table_scope = "head",
                                                              .codebook = "fitted",
                                                              .mean = numbers,
                                                              .variance = numbers,
                                                              .mse = numbers,
                                                              .weighted_mse = numbers,
                                                              .gain = gains,
                                                              .histogram = histogram,
                                                              .flags = flags };
    const struct lowkey_fit_record record = {
        .n_model_layers = 6,
        .sensitivity = "none",
        .n_tokens = 1,
        .text_name = "t",
        .n_samples = 1,
        .sample_sha256 = hashes,
        .reports = reports,
        .text_sha256 = "0000000000000000000000000000000000000000000000000000000000000000",
    };
    lowkey_quantizer_desc *desc = lowkey_test_desc_make(&spec);
    assert_ok(lowkey_quantizer_write(path, desc, &record, &err), err);
    lowkey_test_desc_free(desc);
}

static uint8_t *contents(const char *name, size_t *n)
{
    FILE *file = fopen(name, "rb");
    if (!file || fseek(file, 0, SEEK_END)) return NULL;
    *n = (size_t)ftell(file);
    rewind(file);
    uint8_t *bytes = malloc(*n + 1);
    if (bytes && fread(bytes, 1, *n, file) != *n) *n = 0;
    fclose(file);
    return bytes;
}

/* ---- mutations ---- */

static unsigned next(unsigned *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

/* A few bits or bytes anywhere, a run of one byte, or a cut; half of them in the part before the raw data. */
static size_t mutate(uint8_t *bytes, size_t n, unsigned seed)
{
    static const uint8_t extremes[] = { 0, 0xff, 0x7f, 0x80, 1, 0xfe };
    const int changes = 1 + (int)(next(&seed) % 4);
    for (int i = 0; i < changes; i++) {
        const size_t at = next(&seed) % (next(&seed) % 2 ? n : n < 4096 ? n : 4096);
        const unsigned kind = next(&seed) % 8;
        if (kind < 4)
            bytes[at] ^= (uint8_t)(1u << next(&seed) % 8);
        else if (kind < 6)
            bytes[at] = extremes[next(&seed) % sizeof extremes];
        else if (kind == 6)
            for (size_t j = at; j < n && j < at + 8; j++) bytes[j] = extremes[next(&seed) % 2];
        else if (i == 0 && next(&seed) % 4 == 0)
            return at;
    }
    return n;
}

/* ---- children ---- */

enum { FINE = 0, HDF5_CRASHED = 77, HDF5_HUNG = 78 }; /* exit statuses of a child that has an excuse */

/* Whose fault? The innermost frame outside the C library and the sanitizers says: HDF5's own, or ours. Called in a
 * process that is lost anyway, so that what is unsafe in a signal handler does not matter. */
static int in_hdf5(void)
{
    void *frames[64];
    const int n = backtrace(frames, 64);
    int below_signal = 0; /* first come our own frames, then the C library's that called the handler */
    for (int i = 0; i < n; i++) {
        Dl_info where;
        if (!dladdr(frames[i], &where) || !where.dli_fname) continue;
        const int in_libc = strstr(where.dli_fname, "/libc.so") != NULL;
        below_signal |= in_libc;
        if (!below_signal || in_libc || strstr(where.dli_fname, "san.so")) continue;
        return strstr(where.dli_fname, "hdf5") != NULL;
    }
    return 0;
}

static void on_fault(int number)
{
    signal(number, SIG_DFL);
    if (in_hdf5()) _exit(number == SIGXCPU ? HDF5_HUNG : HDF5_CRASHED);
    raise(number);
}

static void child(const uint8_t *good, uint8_t *bytes, size_t n, unsigned seed)
{
    static const int faults[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGXCPU };
    for (int f = 0; f < 6; f++) signal(faults[f], on_fault); /* cmocka's would go on with the next test */
    const struct rlimit memory = { (rlim_t)4 << 30, (rlim_t)4 << 30 }, no_core = { 0, 0 },
                        seconds = { 1 + SANITIZED, 6 };
    if (!SANITIZED) setrlimit(RLIMIT_AS, &memory); /* a size from the file must not be believed */
    setrlimit(RLIMIT_CORE, &no_core);
    setrlimit(RLIMIT_CPU, &seconds);
    memcpy(bytes, good, n);
    lowkey_fuzz_quantizer(bytes, mutate(bytes, n, seed));
    _exit(FINE);
}

static void every_mutation_is_opened_or_refused(const char *name, int n_mutations, unsigned first_seed)
{
    size_t n;
    int n_crashed = 0, n_hung = 0;
    uint8_t *good = contents(name, &n), *bytes = malloc(n);
    assert_int_equal(lowkey_fuzz_quantizer(good, n), LOWKEY_OK); /* what is mutated is good */
    for (int i = 0; i < n_mutations; i++) {
        fflush(NULL);
        const unsigned seed = first_seed + (unsigned)i;
        const pid_t pid = fork();
        if (pid == 0) child(good, bytes, n, seed);
        int status = 0;
        assert_true(pid > 0 && waitpid(pid, &status, 0) == pid);
        if (WIFSIGNALED(status)) fail_msg("%s: signal %d with seed %u", name, WTERMSIG(status), seed);
        n_crashed += WEXITSTATUS(status) == HDF5_CRASHED;
        n_hung += WEXITSTATUS(status) == HDF5_HUNG;
        if (WEXITSTATUS(status) != FINE && WEXITSTATUS(status) < HDF5_CRASHED)
            fail_msg("%s: exit %d with seed %u", name, WEXITSTATUS(status), seed);
    }
    printf("# %s: of %d mutations HDF5 itself crashed on %d and hung on %d\n", name, n_mutations, n_crashed,
           n_hung);
    free(good);
    free(bytes);
}

static int how_many(void)
{
    const char *full = getenv("FULL");
    return full && *full == '1' ? 5000 : 200;
}

static void mutations_of_our_own_files_never_crash(void **state)
{
    (void)state;
    make_good_file(lowkey_test_spec_rich());
    every_mutation_is_opened_or_refused(path, how_many(), 1);
}

static void mutations_of_our_own_files_of_trellises_never_crash(void **state)
{
    (void)state;
    make_good_file(lowkey_test_spec_trellis());
    every_mutation_is_opened_or_refused(path, how_many(), 500009);
}

static void mutations_of_files_without_checksums_never_crash(void **state)
{
    (void)state;
    every_mutation_is_opened_or_refused(GOLDEN, how_many(), 1000003);
}

static void mutations_of_files_of_trellises_without_checksums_never_crash(void **state)
{
    (void)state;
    every_mutation_is_opened_or_refused(GOLDEN_TRELLIS, how_many(), 1500007);
}

static int make_folder(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/lowkey-test-XXXXXX");
    if (!mkdtemp(folder)) return 1;
    snprintf(path, sizeof path, "%s/good.h5", folder);
    setenv("TMPDIR", folder, 1);
    return 0;
}

static int remove_folder(void **state)
{
    (void)state;
    char command[100];
    snprintf(command, sizeof command, "rm -r %s", folder); /* children that crashed left theirs */
    return system(command);
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        size_t n = 0;
        uint8_t *bytes = contents(argv[i], &n);
        if (!bytes) return fprintf(stderr, "%s: cannot be read\n", argv[i]), 1;
        printf("%s\n", argv[i]);
        lowkey_fuzz_quantizer(bytes, n);
        free(bytes);
    }
    if (argc > 1) return 0;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mutations_of_our_own_files_never_crash),
        cmocka_unit_test(mutations_of_our_own_files_of_trellises_never_crash),
        cmocka_unit_test(mutations_of_files_without_checksums_never_crash),
        cmocka_unit_test(mutations_of_files_of_trellises_without_checksums_never_crash),
    };
    return cmocka_run_group_tests_name(__FILE__, tests, make_folder, remove_folder);
}
