/* error_cmd.c - lowkey error: attention damage of formats, from captures alone. */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "calib/command.h"
#include "experiments/commands.h"
#include "experiments/damage_report.h"
#include "experiments/whole_file.h"
#include "runtime/error.h"

static const char usage[] =
    "usage: lowkey error --activations A.h5 [OPTION]... FORMAT...\n"
    "\n"
    "What formats do to attention: each captured sample is appended to a cache of the format, captured "
    "queries attend\n"
    "over it, and scores, softmax and outputs are compared with those of the captured keys and values in "
    "f64.\n"
    "FORMAT is a quantizer.h5, or f16 or bf16; LABEL=FORMAT names it in the table.\n"
    "\n"
    "  --activations FILE     activations.h5 with keys, values and queries\n"
    "  --samples FIRST:END    samples FIRST..END-1 (all); a format fitted on one of them is marked\n"
    "  --queries N            queries of a sample, evenly spaced, the last token among them (64)\n"
    "  --layers A,B,...       only these layers (all captured)\n"
    "  --per-layer            also a row for each layer\n"
    "  --per-head             also a row for each layer and query head\n"
    "  --json                 an array of rows instead of the table, every row with all its settings\n"
    "  --csv FILE             the same rows as CSV, beside what is printed\n"
    "  --threads N            (the CPUs of this process); results do not depend on it\n"
    "\n"
    "experiments/measure.h defines the figures.\n";

struct settings {
    struct lowkey_damage_options options;
    int *layers; /* owned */
    enum lowkey_damage_detail detail;
    int json;
    const char *csv;
};

/* 0: go on; -1: help was asked for; 2: wrong usage */
static int parse(int argc, char **argv, struct settings *settings)
{
    enum { ACTIVATIONS = 256, SAMPLES, QUERIES, LAYERS, PER_LAYER, PER_HEAD, JSON, CSV, THREADS, HELP = 'h' };
    static const struct option names[] = {
        { "activations", 1, NULL, ACTIVATIONS },
        { "samples", 1, NULL, SAMPLES },
        { "queries", 1, NULL, QUERIES },
        { "layers", 1, NULL, LAYERS },
        { "per-layer", 0, NULL, PER_LAYER },
        { "per-head", 0, NULL, PER_HEAD },
        { "json", 0, NULL, JSON },
        { "csv", 1, NULL, CSV },
        { "threads", 1, NULL, THREADS },
        { "help", 0, NULL, HELP },
        { 0 },
    };
    struct lowkey_damage_options *options = &settings->options;
    int64_t queries = 64, threads = lowkey_cpu_count();
    int bad = 0;
    optind = 0; /* a fresh scan: getopt is a global */
    for (int option; !bad && (option = lowkey_next_option("error", argc, argv, names, NULL)) != -1;) {
        switch (option) {
        case ACTIVATIONS: options->activations = optarg; break;
        case SAMPLES:
            bad = lowkey_parse_range("error", "--samples", optarg, &options->first_sample,
                                     &options->end_sample);
            break;
        case QUERIES: bad = lowkey_parse_int("error", "--queries", optarg, 1, 1 << 24, &queries); break;
        case LAYERS:
            free(settings->layers);
            bad = lowkey_parse_list("error", "--layers", optarg, &settings->layers, &options->n_layers);
            break;
        case PER_LAYER:
            if (settings->detail < LOWKEY_DAMAGE_PER_LAYER) settings->detail = LOWKEY_DAMAGE_PER_LAYER;
            break;
        case PER_HEAD: settings->detail = LOWKEY_DAMAGE_PER_HEAD; break;
        case JSON: settings->json = 1; break;
        case CSV: settings->csv = optarg; break;
        case THREADS: bad = lowkey_parse_int("error", "--threads", optarg, 1, 1024, &threads); break;
        case HELP: fputs(usage, stdout); return -1;
        default: return 2;
        }
    }
    if (bad) return bad;
    if (!options->activations) return lowkey_command_usage("error", "--activations FILE is missing");
    if (optind == argc) return lowkey_command_usage("error", "no FORMAT to measure");
    options->layers = settings->layers;
    options->n_queries = (int)queries;
    options->n_threads = (int)threads;
    options->n_formats = argc - optind;
    options->formats = (const char *const *)argv + optind;
    if (!settings->csv) return 0;
    bad = lowkey_check_output("error", "--csv", settings->csv, 1, &options->activations);
    for (int i = optind; i < argc && !bad; i++) {
        const char *label_end = strchr(argv[i], '='), *format = label_end ? label_end + 1 : argv[i];
        bad = lowkey_check_output("error", "--csv", settings->csv, 1, &format);
    }
    return bad;
}

static void warn_of_overlap(const struct lowkey_damage_result *result)
{
    for (int f = 0; f < result->n_formats; f++) {
        const struct lowkey_format_damage *format = &result->formats[f];
        if (format->fit_overlap)
            fprintf(
                stderr,
                "lowkey error: warning: %s was fitted on %d of the %d samples measured, which flatters it\n",
                format->path, format->fit_overlap, result->options.end_sample - result->options.first_sample);
    }
}

/* The CSV first: where that fails, nothing is printed. */
static lowkey_status print(const struct lowkey_damage_result *result, const struct settings *settings,
                           struct lowkey_whole_file *csv, lowkey_error *err)
{
    int good = !csv->to || lowkey_damage_print_csv(result, settings->detail, csv->to);
    if (good && csv->to) LOWKEY_TRY(lowkey_whole_file_commit(csv, err));
    if (good && settings->json)
        good = lowkey_damage_print_json(result, settings->detail, stdout);
    else if (good)
        lowkey_damage_print_table(result, settings->detail, stdout);
    if (fflush(stdout) != 0 || ferror(stdout))
        return lowkey_fail(err, LOWKEY_EIO, "stdout: cannot write: %s", strerror(errno));
    return good ? LOWKEY_OK
                : lowkey_fail(err, LOWKEY_EINVAL,
                              "no row could be made: no memory, or a name that is not UTF-8");
}

static lowkey_status run(const struct settings *settings, lowkey_error *err)
{
    struct lowkey_whole_file csv = { 0 };
    struct lowkey_damage_result *result = NULL;
    lowkey_status status = settings->csv ? lowkey_whole_file_open(&csv, settings->csv, err) : LOWKEY_OK;
    if (status == LOWKEY_OK) status = lowkey_damage_run(&settings->options, &result, err);
    if (status == LOWKEY_OK) warn_of_overlap(result);
    if (status == LOWKEY_OK) status = print(result, settings, &csv, err);
    lowkey_whole_file_abandon(&csv);
    lowkey_damage_result_free(result);
    return status;
}

int lowkey_error_cmd(int argc, char **argv)
{
    struct settings settings = { 0 };
    lowkey_error err = { 0 };
    int exit_status = parse(argc, argv, &settings);
    if (exit_status == 0) {
        lowkey_catch_interrupts();
        if (run(&settings, &err) != LOWKEY_OK) exit_status = lowkey_command_failed("error", &err);
    }
    free(settings.layers);
    return exit_status < 0 ? 0 : exit_status;
}
