/* check_cmd.c - lowkey check FILE...: is each of them what formats/README.md says? With --drift: does a quantizer still
 * fit these activations? */
#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "calib/command.h"
#include "experiments/drift_report.h"
#include "experiments/files.h"
#include "formats/file_h5.h"

static const char usage[] =
    "usage: lowkey check [--json] FILE...\n"
    "       lowkey check --drift QUANTIZER.h5 [OPTION]... ACTIVATIONS.h5...\n"
    "\n"
    "Read every file (model, tokens, activations, quantizer) whole and hold it against its schema. One line\n"
    "for each: what it holds, or on standard error what is wrong with it. Exit status 1 where anything is.\n"
    "\n"
    "  --json   an array of {file, good, message} on standard output\n"
    "\n"
    "--drift: pack new activations of the model as the runtime would, and compare how often each code is\n"
    "used with how often it was when the quantizer was fitted: per layer, for keys and values, the\n"
    "Jensen-Shannon divergence in bits (0: the same, 1: nothing in common), mean and worst over channels; the\n"
    "share of first and last codes, now and at the fit; the share of values outside the fitted range.\n"
    "\n"
    "  --fail-above X           exit status 1 where the mean of a layer's keys or values is above X\n"
    "  --fail-channel-above X   exit status 1 where any channel is above X\n"
    "  --worst N                name the N most divergent channels (10)\n"
    "  --json                   the same as one object\n";

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

static int check_drift(struct lowkey_drift_options *drift, int n_paths, char **paths)
{
    lowkey_error err;
    int failed;
    drift->n_paths = n_paths;
    drift->paths = (const char *const *)paths;
    if (lowkey_h5_probe(drift->quantizer, &err)) return lowkey_command_failed("check", &err);
    for (int i = 0; i < n_paths; i++)
        if (lowkey_h5_probe(paths[i], &err)) return lowkey_command_failed("check", &err);
    const lowkey_status status = lowkey_drift_run(drift, &failed, &err);
    return status == LOWKEY_OK ? failed : lowkey_command_failed("check", &err);
}

/* 0: go on; -1: help was asked for; 2: wrong usage */
static int parse(int argc, char **argv, struct lowkey_drift_options *drift)
{
    static const struct option options[] = {
        { "help", no_argument, NULL, 'h' },        { "json", no_argument, NULL, 'j' },
        { "drift", required_argument, NULL, 'd' }, { "fail-above", required_argument, NULL, 'f' },
        { "worst", required_argument, NULL, 'w' }, { "fail-channel-above", required_argument, NULL, 'c' },
        { 0 },
    };
    const char *of_drift = NULL;
    int64_t n_worst = 10;
    optind = 1;
    for (int option, index; (option = lowkey_next_option("check", argc, argv, options, &index)) != -1;) {
        int wrong = 0;
        switch (option) {
        case 'h': return fputs(usage, stdout), -1;
        case 'j': drift->json = 1; continue;
        case 'd': drift->quantizer = optarg; continue;
        case 'f': wrong = lowkey_parse_double("check", "--fail-above", optarg, 0, 1, &drift->fail_above); break;
        case 'c':
            wrong = lowkey_parse_double("check", "--fail-channel-above", optarg, 0, 1,
                                        &drift->fail_channel_above);
            break;
        case 'w': wrong = lowkey_parse_int("check", "--worst", optarg, 0, 1 << 20, &n_worst); break;
        default: return 2;
        }
        if (wrong) return 2;
        of_drift = options[index].name;
    }
    drift->n_worst = (int)n_worst;
    if (of_drift && !drift->quantizer) return lowkey_command_usage("check", "--%s needs --drift", of_drift);
    if (optind == argc) return lowkey_command_usage("check", "which file?");
    return 0;
}

int lowkey_check_cmd(int argc, char **argv)
{
    struct lowkey_drift_options drift = { .fail_above = INFINITY, .fail_channel_above = INFINITY };
    const int wrong = parse(argc, argv, &drift);
    if (wrong) return wrong < 0 ? 0 : wrong;
    lowkey_catch_interrupts();
    if (drift.quantizer) return check_drift(&drift, argc - optind, argv + optind);
    json_t *results = drift.json ? json_array() : NULL;
    int failed = 0;
    for (int i = optind; i < argc && !lowkey_interrupted(); i++) failed |= check_file(argv[i], results);
    failed |= lowkey_interrupted();
    if (results) {
        json_dumpf(results, stdout, JSON_INDENT(2));
        putchar('\n');
        json_decref(results);
    }
    return failed;
}
