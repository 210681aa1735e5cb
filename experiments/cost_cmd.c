/* cost_cmd.c - lowkey cost: predicted loss of formats, from captured gradients. */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "calib/command.h"
#include "experiments/commands.h"
#include "experiments/cost_report.h"
#include "experiments/whole_file.h"
#include "runtime/error.h"

static const char usage[] =
    "usage: lowkey cost --activations A.h5 [OPTION]... FORMAT...\n"
    "\n"
    "What formats will cost in loss, predicted from gradients: each captured sample is stored by the format "
    "and\n"
    "the error of what it holds meets the gradients of lowkey capture --grad. Diagonal takes errors of "
    "elements to\n"
    "have nothing in common and is right for fine formats; coherent takes those of a head in a sample "
    "together,\n"
    "which is right for coarse ones and noisy with few samples. With --grad=model gradients they predict the "
    "KL\n"
    "divergence, with --grad=text the loss. Use samples that were not fitted on.\n"
    "FORMAT is a quantizer.h5, or f16 or bf16; LABEL=FORMAT names it in the table.\n"
    "\n"
    "  --activations FILE     activations.h5 with key_grad and value_grad\n"
    "  --samples FIRST:END    samples FIRST..END-1 (all); a format fitted on one of them is marked\n"
    "  --layers A,B,...       only these layers (all captured)\n"
    "  --per-layer            also rows for each layer: both sides, keys, values\n"
    "  --per-head             also a row for each layer, side and KV head\n"
    "  --per-channel          also a row for each channel of them\n"
    "  --json                 an array of rows instead of the table, every row with all its settings\n"
    "  --csv FILE             the same rows as CSV, beside what is printed\n"
    "  --threads N            (the CPUs of this process); results do not depend on it\n"
    "\n"
    "experiments/cost.h defines the figures.\n";

struct settings {
    struct lowkey_cost_options options;
    int *layers; /* owned */
    enum lowkey_cost_detail detail;
    int json;
    const char *csv;
};

static void more(struct settings *settings, enum lowkey_cost_detail detail)
{
    if (settings->detail < detail) settings->detail = detail;
}

/* 0: go on; -1: help was asked for; 2: wrong usage */
static int parse(int argc, char **argv, struct settings *settings)
{
    enum {
        ACTIVATIONS = 256,
        SAMPLES,
        LAYERS,
        PER_LAYER,
        PER_HEAD,
        PER_CHANNEL,
        JSON,
        CSV,
        THREADS,
        HELP = 'h'
    };
    static const struct option names[] = {
        { "activations", 1, NULL, ACTIVATIONS },
        { "samples", 1, NULL, SAMPLES },
        { "layers", 1, NULL, LAYERS },
        { "per-layer", 0, NULL, PER_LAYER },
        { "per-head", 0, NULL, PER_HEAD },
        { "per-channel", 0, NULL, PER_CHANNEL },
        { "json", 0, NULL, JSON },
        { "csv", 1, NULL, CSV },
        { "threads", 1, NULL, THREADS },
        { "help", 0, NULL, HELP },
        { 0 },
    };
    struct lowkey_cost_options *options = &settings->options;
    int64_t threads = lowkey_cpu_count();
    int bad = 0;
    optind = 0; /* a fresh scan: getopt is a global */
    for (int option; !bad && (option = lowkey_next_option("cost", argc, argv, names, NULL)) != -1;) {
        switch (option) {
        case ACTIVATIONS: options->activations = optarg; break;
        case SAMPLES:
            bad = lowkey_parse_range("cost", "--samples", optarg, &options->first_sample,
                                     &options->end_sample);
            break;
        case LAYERS:
            free(settings->layers);
            bad = lowkey_parse_list("cost", "--layers", optarg, &settings->layers, &options->n_layers);
            break;
        case PER_LAYER: more(settings, LOWKEY_COST_PER_LAYER); break;
        case PER_HEAD: more(settings, LOWKEY_COST_PER_HEAD); break;
        case PER_CHANNEL: more(settings, LOWKEY_COST_PER_CHANNEL); break;
        case JSON: settings->json = 1; break;
        case CSV: settings->csv = optarg; break;
        case THREADS: bad = lowkey_parse_int("cost", "--threads", optarg, 1, 1024, &threads); break;
        case HELP: fputs(usage, stdout); return -1;
        default: return 2;
        }
    }
    if (bad) return bad;
    if (!options->activations) return lowkey_command_usage("cost", "--activations FILE is missing");
    if (optind == argc) return lowkey_command_usage("cost", "no FORMAT to measure");
    options->layers = settings->layers;
    options->n_threads = (int)threads;
    options->n_formats = argc - optind;
    options->formats = (const char *const *)argv + optind;
    if (!settings->csv) return 0;
    bad = lowkey_check_output("cost", "--csv", settings->csv, 1, &options->activations);
    for (int i = optind; i < argc && !bad; i++) {
        const char *label_end = strchr(argv[i], '='), *format = label_end ? label_end + 1 : argv[i];
        bad = lowkey_check_output("cost", "--csv", settings->csv, 1, &format);
    }
    return bad;
}

static void warn_of_overlap(const struct lowkey_cost_result *result)
{
    for (int f = 0; f < result->n_formats; f++) {
        const struct lowkey_format *format = &result->formats[f].format;
        if (format->fit_overlap)
            fprintf(
                stderr,
                "lowkey cost: warning: %s was fitted on %d of the %d samples measured, which flatters it\n",
                format->path, format->fit_overlap, result->n_samples);
    }
}

/* The CSV first: where that fails, nothing is printed. */
static lowkey_status print(const struct lowkey_cost_result *result, const struct settings *settings,
                           struct lowkey_whole_file *csv, lowkey_error *err)
{
    int good = !csv->to || lowkey_cost_print_csv(result, settings->detail, csv->to);
    if (good && csv->to) LOWKEY_TRY(lowkey_whole_file_commit(csv, err));
    if (good && settings->json)
        good = lowkey_cost_print_json(result, settings->detail, stdout);
    else if (good)
        good = lowkey_cost_print_table(result, settings->detail, stdout);
    if (fflush(stdout) != 0 || ferror(stdout))
        return lowkey_fail(err, LOWKEY_EIO, "stdout: cannot write: %s", strerror(errno));
    return good ? LOWKEY_OK
                : lowkey_fail(err, LOWKEY_EINVAL,
                              "no row could be made: no memory, or a name that is not UTF-8");
}

static lowkey_status run(const struct settings *settings, lowkey_error *err)
{
    struct lowkey_whole_file csv = { 0 };
    struct lowkey_cost_result *result = NULL;
    lowkey_status status = settings->csv ? lowkey_whole_file_open(&csv, settings->csv, err) : LOWKEY_OK;
    if (status == LOWKEY_OK) status = lowkey_cost_run(&settings->options, &result, err);
    if (status == LOWKEY_OK) warn_of_overlap(result);
    if (status == LOWKEY_OK) status = print(result, settings, &csv, err);
    lowkey_whole_file_abandon(&csv);
    lowkey_cost_result_free(result);
    return status;
}

int lowkey_cost_cmd(int argc, char **argv)
{
    struct settings settings = { 0 };
    lowkey_error err = { 0 };
    int exit_status = parse(argc, argv, &settings);
    if (exit_status == 0) {
        lowkey_catch_interrupts();
        if (run(&settings, &err) != LOWKEY_OK) exit_status = lowkey_command_failed("cost", &err);
    }
    free(settings.layers);
    return exit_status < 0 ? 0 : exit_status;
}
