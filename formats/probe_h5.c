/* probe_h5.c - is a file safe to open here? HDF5 trusts some of what it reads, and a damaged file can make the library
 * itself crash or run for ever. So a child process opens it first, as its schema is opened: it may die, we may not. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "formats/activations.h"
#include "formats/model.h"
#include "formats/parts_h5.h"
#include "formats/quantizer_file.h"
#include "formats/tokens.h"
#include "runtime/error.h"

/* What is allocated ends with the process. */
static void open_by_schema(const char *path)
{
    lowkey_h5 *file;
    char schema[sizeof file->schema];
    if (lowkey_h5_open(path, NULL, &file, NULL)) return;
    memcpy(schema, file->schema, sizeof schema);
    lowkey_h5_close(file);
    if (strcmp(schema, "model") == 0) {
        lowkey_model *model;
        lowkey_model_describe(path, 0, &model, NULL);
    } else if (strcmp(schema, "tokens") == 0) {
        lowkey_tokens *tokens;
        lowkey_tokens_open(path, &tokens, NULL);
    } else if (strcmp(schema, "activations") == 0) {
        lowkey_activations *activations;
        lowkey_activations_open(path, &activations, NULL);
        lowkey_activations_close(activations);
    } else {
        lowkey_quantizer *quantizer;
        struct lowkey_fit_record *record;
        lowkey_quantizer_read(path, &quantizer, &record, NULL);
    }
}

lowkey_status lowkey_h5_probe(const char *path, lowkey_error *err)
{
    enum { CPU_SECONDS = 60 };
    int status = 0;
    if (lowkey_h5_check_regular(path, NULL)) return LOWKEY_OK; /* who opens it says what it is */
    const pid_t child = fork();
    if (child < 0) return lowkey_fail(err, LOWKEY_ENOMEM, "%s: no process to look at it", path);
    if (child == 0) {
        const struct rlimit cpu = { CPU_SECONDS, CPU_SECONDS }, no_core = { 0, 0 };
        setrlimit(RLIMIT_CPU, &cpu);
        setrlimit(RLIMIT_CORE, &no_core);
        for (int number = 1; number < 32; number++) signal(number, SIG_DFL);
        dup2(open("/dev/null", O_WRONLY), STDERR_FILENO); /* the C library's last words */
        open_by_schema(path);
        _exit(0);
    }
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    if (status == 0) return LOWKEY_OK;
    const int number = WIFSIGNALED(status) ? WTERMSIG(status) : 0; /* 0: a sanitizer ended it */
    if (number == SIGINT || number == SIGTERM || number == SIGHUP || number == SIGQUIT)
        return lowkey_fail(err, LOWKEY_ECANCELLED, "%s: interrupted", path);
    return lowkey_fail(err, LOWKEY_EFORMAT, "%s: damaged: the HDF5 library %s it", path,
                       number == SIGKILL || number == SIGXCPU ? "does not come to an end with" : "crashes on");
}
