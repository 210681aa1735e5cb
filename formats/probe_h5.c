/* probe_h5.c - is a file safe to open here? HDF5 trusts some of what it reads, and a damaged file can make
 * the library itself crash or run for ever. So a child process opens it first, as its schema is opened: it
 * may die, we may not. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "formats/activations.h"
#include "formats/model.h"
#include "formats/parts_h5.h"
#include "formats/quantizer_file.h"
#include "formats/tokens.h"
#include "runtime/error.h"

/* What is allocated ends with the process. */
static lowkey_status open_by_schema(const char *path, lowkey_error *err)
{
    lowkey_h5 *file;
    char schema[sizeof file->schema];
    LOWKEY_TRY(lowkey_h5_open(path, NULL, &file, err));
    memcpy(schema, file->schema, sizeof schema);
    lowkey_h5_close(file);
    if (strcmp(schema, "model") == 0) {
        lowkey_model *model;
        return lowkey_model_describe(path, 0, &model, err);
    }
    if (strcmp(schema, "tokens") == 0) {
        lowkey_tokens *tokens;
        return lowkey_tokens_open(path, &tokens, err);
    }
    if (strcmp(schema, "activations") == 0) {
        lowkey_activations *activations;
        LOWKEY_TRY(lowkey_activations_open(path, &activations, err));
        lowkey_activations_close(activations);
        return LOWKEY_OK;
    }
    lowkey_quantizer *quantizer;
    struct lowkey_fit_record *record;
    return lowkey_quantizer_read(path, &quantizer, &record, err);
}

/* Seconds of CPU; and memory, as much again as a file of that size may be worth: HDF5 believes lengths of
 * strings. */
static void set_limits(const char *path)
{
    enum { CPU_SECONDS = 60 };
    const struct rlimit cpu = { CPU_SECONDS, CPU_SECONDS }, no_core = { 0, 0 };
    setrlimit(RLIMIT_CPU, &cpu);
    setrlimit(RLIMIT_CORE, &no_core);
#if !defined(__SANITIZE_ADDRESS__) /* which maps terabytes */
    struct stat status;
    unsigned long pages = 0;
    FILE *stream = fopen("/proc/self/statm", "r");
    if (stream && stat(path, &status) == 0 && fscanf(stream, "%lu", &pages) == 1) {
        const rlim_t bytes = (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE) + ((rlim_t)1 << 30) +
                             4 * (rlim_t)status.st_size;
        const struct rlimit space = { bytes, bytes };
        setrlimit(RLIMIT_AS, &space);
    }
#else
    (void)path;
#endif
}

enum { TOO_MUCH_MEMORY = 3 }; /* exit status */

static _Noreturn void be_child(const char *path)
{
    lowkey_error err = { 0 };
    set_limits(path);
    for (int number = 1; number < 32; number++) signal(number, SIG_DFL);
    dup2(open("/dev/null", O_WRONLY), STDERR_FILENO); /* the C library's last words */
    const lowkey_status status = open_by_schema(path, &err);
    _exit(status == LOWKEY_ENOMEM || (status && strstr(err.message, "allocat")) ? TOO_MUCH_MEMORY : 0);
}

lowkey_status lowkey_h5_probe(const char *path, lowkey_error *err)
{
    int status = 0;
    if (lowkey_h5_check_regular(path, NULL)) return LOWKEY_OK; /* who opens it says what it is */
    const pid_t child = fork();
    if (child < 0) return lowkey_fail(err, LOWKEY_ENOMEM, "%s: no process to look at it", path);
    if (child == 0) be_child(path);
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    if (status == 0) return LOWKEY_OK;
    if (WIFEXITED(status) && WEXITSTATUS(status) == TOO_MUCH_MEMORY)
        return lowkey_fail(err, LOWKEY_EFORMAT,
                           "%s: opening it takes more memory than a file of its size needs; is it damaged?",
                           path);
    const int number = WIFSIGNALED(status) ? WTERMSIG(status) : 0; /* 0: a sanitizer ended it */
    if (number == SIGINT || number == SIGTERM || number == SIGHUP || number == SIGQUIT)
        return lowkey_fail(err, LOWKEY_ECANCELLED, "%s: interrupted", path);
    return lowkey_fail(err, LOWKEY_EFORMAT, "%s: damaged: the HDF5 library %s it", path,
                       number == SIGKILL || number == SIGXCPU ? "does not come to an end with"
                                                              : "crashes on");
}
