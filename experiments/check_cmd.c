/* check_cmd.c - lowkey check FILE...: is each of them what formats/README.md says? */
#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "calib/command.h"
#include "experiments/files.h"
#include "formats/file_h5.h"

static const char usage[] =
    "usage: lowkey check [--json] FILE...\n"
    "\n"
    "Read every file (model, tokens, activations, quantizer) whole and hold it against its schema. One line\n"
    "for each: what it holds, or on standard error what is wrong with it. Exit status 1 where anything is.\n"
    "\n"
    "  --json   an array of {file, good, message} on standard output\n";

json_t *lowkey_json_text(const char *text)
{
    json_t *string = json_string(text);
    char *ascii = string ? NULL : strdup(text);
    for (char *c = ascii; c && *c; c++)
        if (*c & 0x80) *c = '?';
    if (ascii) string = json_string(ascii);
    free(ascii);
    return string;
}

struct verdict {
    lowkey_status status;
    char summary[LOWKEY_SUMMARY_SIZE];
    lowkey_error err;
};

/* In a process of its own: a file that makes HDF5 crash is one more that is not good. */
static void check_apart(const char *path, struct verdict *verdict)
{
    int ends[2] = { -1, -1 }, status = 0;
    size_t n = 0;
    memset(verdict, 0, sizeof *verdict);
    if ((verdict->status = lowkey_h5_probe(path, &verdict->err))) return;
    fflush(NULL);
    const pid_t child = pipe(ends) == 0 ? fork() : -1;
    if (child == 0) {
        close(ends[0]);
        verdict->status = lowkey_file_check(path, verdict->summary, &verdict->err);
        _exit(write(ends[1], verdict, sizeof *verdict) != sizeof *verdict);
    }
    if (child > 0) {
        close(ends[1]);
        for (ssize_t m;
             n < sizeof *verdict && ((m = read(ends[0], (char *)verdict + n, sizeof *verdict - n)) > 0 ||
                                     (m < 0 && errno == EINTR));)
            n += m > 0 ? (size_t)m : 0;
        close(ends[0]);
        while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
        }
    }
    if (child < 0 && ends[0] >= 0) close(ends[0]), close(ends[1]);
    if (n == sizeof *verdict) return;
    verdict->status = child > 0 ? LOWKEY_EFORMAT : LOWKEY_ENOMEM;
    snprintf(verdict->err.message, sizeof verdict->err.message,
             child > 0 ? "%s: damaged: the HDF5 library crashes on it" : "%s: no process to check it in",
             path);
}

static int check_file(const char *path, json_t *results)
{
    struct verdict verdict;
    check_apart(path, &verdict);
    const int good = verdict.status == LOWKEY_OK;
    if (!good)
        lowkey_command_failed("check", &verdict.err);
    else if (!results)
        printf("%s: good: %s\n", path, verdict.summary);
    if (results)
        json_array_append_new(
            results, json_pack("{s:o, s:b, s:o}", "file", lowkey_json_text(path), "good", good, "message",
                               lowkey_json_text(good ? verdict.summary : verdict.err.message)));
    return !good;
}

int lowkey_check_cmd(int argc, char **argv)
{
    static const struct option options[] = { { "help", no_argument, NULL, 'h' },
                                             { "json", no_argument, NULL, 'j' },
                                             { 0 } };
    json_t *results = NULL;
    int failed = 0;
    optind = 1;
    for (int option; (option = lowkey_next_option("check", argc, argv, options, NULL)) != -1;) {
        if (option == 'h') return fputs(usage, stdout), 0;
        if (option != 'j') return 2;
        if (!results) results = json_array();
    }
    if (optind == argc) return lowkey_command_usage("check", "which file?");
    lowkey_catch_interrupts();
    for (int i = optind; i < argc && !lowkey_interrupted(); i++) failed |= check_file(argv[i], results);
    failed |= lowkey_interrupted();
    if (results) {
        json_dumpf(results, stdout, JSON_INDENT(2));
        putchar('\n');
        json_decref(results);
    }
    return failed;
}
