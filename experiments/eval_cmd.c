/* eval_cmd.c - lowkey eval: what formats of the cache do to a model's predictions of a text. */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "calib/command.h"
#include "experiments/commands.h"
#include "experiments/eval_report.h"
#include "experiments/eval_windows.h"
#include "experiments/samples.h"
#include "experiments/whole_file.h"
#include "runtime/error.h"

static const char usage[] =
    "usage: lowkey eval --model MODEL.h5 --tokens TOKENS.h5 [OPTION]... [FORMAT]...\n\n"
    "What formats of the KV cache do to a model's predictions. The text is cut into windows without\n"
    "overlap; each is read on its own, once with keys and values in f32 and once over each FORMAT:\n"
    "perplexity, added nats per token, KL over the whole vocabulary and top-1 agreement, with intervals\n"
    "of 95 % by bootstrap over windows, and bits per element. Everything but a format's sinks and\n"
    "recent window is quantized, and queries see their own token quantized too.\n\n"
    "FORMAT is a quantizer.h5, f16 or bf16: evaluated through the packed cache itself; or the name of\n"
    "somebody else's format (--list), simulated. LABEL=FORMAT names it in results. f32 is always there.\n\n"
    "  --model FILE        model.h5\n"
    "  --tokens FILE       tokens.h5, of the model's own tokenizer\n"
    "  --window N          tokens of a window (2048)\n"
    "  --first-window A    the first window that may be taken (0)\n"
    "  --end-window B      the one behind the last that may be (the text's end)\n"
    "  --windows N         the first N of them (all)\n"
    "  --spread N          N of them, spread evenly\n"
    "  --sinks N           first tokens in 16 bits, of simulated formats (1); a quantizer.h5 has its own\n"
    "  --activations FILE  activations.h5, for simulated formats that calibrate; may be given again\n"
    "  --csv FILE          a row for each format and window, added as it comes. Where FILE is there, its\n"
    "                      rows are taken as done, so that a run that was stopped goes on; rows of other\n"
    "                      settings are refused\n"
    "  --summary FILE      a row for each format, as CSV\n"
    "  --references DIR    keep the reference's hidden states there, 4 bytes a number, and take them from\n"
    "                      there: the next run needs no pass of its own for them\n"
    "  --json              one JSON object on stdout, in place of the table\n"
    "  --threads N         (as many as there are CPUs); results do not depend on it\n"
    "  --list              the names of simulated formats\n";

struct options {
    const char *model, *tokens, *csv, *summary, *references;
    struct lowkey_window_choice choice;
    int64_t n_sinks, n_threads;
    const char **activations; /* [n_activations], owned */
    int n_activations, json;
    int n_formats;
    char **formats; /* borrowed from argv, f32 left out */
};

static int list_peers(void)
{
    for (int i = 0; lowkey_peer_name(i); i++) puts(lowkey_peer_name(i));
    return -1;
}

static int check(int argc, char **argv, struct options *options)
{
    if (!options->model || !options->tokens)
        return lowkey_command_usage("eval", "--model and --tokens are needed");
    if (options->choice.n_first && options->choice.n_spread)
        return lowkey_command_usage("eval", "--windows and --spread exclude each other");
    options->formats = argv + optind;
    for (int i = optind; i < argc; i++)
        if (strcmp(argv[i], "f32") != 0) options->formats[options->n_formats++] = argv[i];
    const char *inputs[] = { options->model, options->tokens };
    const char *const outputs[][2] = { { "--csv", options->csv }, { "--summary", options->summary } };
    for (int o = 0; o < 2; o++) {
        if (!outputs[o][1]) continue;
        int bad = lowkey_check_output("eval", outputs[o][0], outputs[o][1], 2, inputs);
        for (int f = 0; f < options->n_formats && !bad; f++) {
            const char *equals = strchr(options->formats[f], '='),
                       *format = equals ? equals + 1 : options->formats[f];
            bad = lowkey_check_output("eval", outputs[o][0], outputs[o][1], 1, &format);
        }
        if (!bad)
            bad = lowkey_check_output("eval", outputs[o][0], outputs[o][1], options->n_activations,
                                      options->activations);
        if (bad) return bad;
    }
    if (options->csv && options->summary)
        return lowkey_check_output("eval", "--summary", options->summary, 1, &options->csv);
    return 0;
}

/* 0: go on; -1: help was asked for; 2: wrong usage */
static int parse(int argc, char **argv, struct options *options)
{
    enum {
        MODEL = 256,
        TOKENS,
        WINDOW,
        FIRST,
        END,
        WINDOWS,
        SPREAD,
        SINKS,
        ACTIVATIONS,
        REFERENCES,
        CSV,
        SUMMARY,
        JSON,
        THREADS,
        LIST
    };
    static const struct option known[] = {
        { "model", 1, 0, MODEL },
        { "tokens", 1, 0, TOKENS },
        { "window", 1, 0, WINDOW },
        { "first-window", 1, 0, FIRST },
        { "end-window", 1, 0, END },
        { "windows", 1, 0, WINDOWS },
        { "spread", 1, 0, SPREAD },
        { "sinks", 1, 0, SINKS },
        { "activations", 1, 0, ACTIVATIONS },
        { "csv", 1, 0, CSV },
        { "summary", 1, 0, SUMMARY },
        { "json", 0, 0, JSON },
        { "threads", 1, 0, THREADS },
        { "list", 0, 0, LIST },
        { "references", 1, 0, REFERENCES },
        { "help", 0, 0, 'h' },
        { 0 },
    };
    struct lowkey_window_choice *choice = &options->choice;
    const int64_t most = 1 << 30;
    options->activations = calloc((size_t)argc, sizeof *options->activations);
    if (!options->activations) return lowkey_command_usage("eval", "no memory");
    int wrong = 0;
    optind = 0; /* a fresh scan: getopt is a global */
    for (int c; !wrong && (c = lowkey_next_option("eval", argc, argv, known, NULL)) != -1;) {
        switch (c) {
        case MODEL: options->model = optarg; break;
        case TOKENS: options->tokens = optarg; break;
        case CSV: options->csv = optarg; break;
        case SUMMARY: options->summary = optarg; break;
        case REFERENCES: options->references = optarg; break;
        case ACTIVATIONS: options->activations[options->n_activations++] = optarg; break;
        case WINDOW: wrong = lowkey_parse_int("eval", "--window", optarg, 2, 1 << 24, &choice->length); break;
        case FIRST:
            wrong = lowkey_parse_int("eval", "--first-window", optarg, 0, most, &choice->first);
            break;
        case END: wrong = lowkey_parse_int("eval", "--end-window", optarg, 1, most, &choice->end); break;
        case WINDOWS: wrong = lowkey_parse_int("eval", "--windows", optarg, 1, most, &choice->n_first); break;
        case SPREAD: wrong = lowkey_parse_int("eval", "--spread", optarg, 1, most, &choice->n_spread); break;
        case SINKS: wrong = lowkey_parse_int("eval", "--sinks", optarg, 0, 1 << 20, &options->n_sinks); break;
        case THREADS:
            wrong = lowkey_parse_int("eval", "--threads", optarg, 1, 256, &options->n_threads);
            break;
        case JSON: options->json = 1; break;
        case LIST: return list_peers();
        case 'h': return fputs(usage, stdout), -1;
        default: return 2;
        }
    }
    return wrong ? wrong : check(argc, argv, options);
}

/* ---- the run ---- */

static int is_wanted(void *user, int format, int i)
{
    return !lowkey_eval_journal_find(*(lowkey_eval_journal **)user, format, i);
}

static lowkey_status note(void *user, int format, int i, const struct lowkey_eval_result *result,
                          lowkey_error *err)
{
    return lowkey_eval_journal_add(*(lowkey_eval_journal **)user, format, i, result, err);
}

static lowkey_status open_formats(const struct options *options, const lowkey_model *model,
                                  struct lowkey_eval_format *formats, lowkey_error *err)
{
    const struct lowkey_eval_format_options of = { .model = model,
                                                   .model_path = options->model,
                                                   .n_sinks = (int)options->n_sinks,
                                                   .n_activations = options->n_activations,
                                                   .activations = options->activations,
                                                   .n_threads = (int)options->n_threads };
    for (int f = 0; f < options->n_formats; f++) {
        LOWKEY_TRY(lowkey_eval_format_open(options->formats[f], &of, &formats[f], err));
        for (int other = -1; other < f; other++)
            if (strcmp(formats[f].label, other < 0 ? "f32" : formats[other].label) == 0)
                return lowkey_fail(err, LOWKEY_EINVAL,
                                   "'%s' names two formats; LABEL=FORMAT gives one another name",
                                   formats[f].label);
    }
    return LOWKEY_OK;
}

static lowkey_status print(const struct options *options, const struct lowkey_eval_report *report,
                           struct lowkey_whole_file *summary, lowkey_error *err)
{
    int good = !summary->to || lowkey_eval_print_csv(report, summary->to);
    if (good && summary->to) LOWKEY_TRY(lowkey_whole_file_commit(summary, err));
    if (good)
        good = options->json ? lowkey_eval_print_json(report, stdout)
                             : lowkey_eval_print_table(report, stdout);
    if (fflush(stdout) != 0 || ferror(stdout))
        return lowkey_fail(err, LOWKEY_EIO, "stdout: cannot write: %s", strerror(errno));
    return good ? LOWKEY_OK
                : lowkey_fail(err, LOWKEY_EINVAL,
                              "no row could be made: no memory, or a name that is not UTF-8");
}

static void warn_of_overlap(const struct lowkey_eval_request *request)
{
    for (int f = 0; f < request->n_formats; f++) {
        const int n = lowkey_eval_fit_overlap(request, f);
        if (n)
            fprintf(stderr,
                    "lowkey eval: warning: %s was fitted on %d of the %d windows, which flatters it\n",
                    request->formats[f].label, n, request->n_windows);
    }
}

static lowkey_status run(const struct options *options, struct lowkey_eval_request *request,
                         lowkey_eval_journal **journal, struct lowkey_whole_file *summary, lowkey_error *err)
{
    const struct lowkey_eval_journal_config config = { request, lowkey_commit() };
    LOWKEY_TRY(open_formats(options, request->model, request->formats, err));
    warn_of_overlap(request);
    LOWKEY_TRY(lowkey_eval_journal_open(options->csv, &config, journal, err));
    if (lowkey_eval_journal_n_kept(*journal))
        fprintf(stderr, "lowkey eval: %s: %d results are there already\n", options->csv,
                lowkey_eval_journal_n_kept(*journal));
    if (options->summary) LOWKEY_TRY(lowkey_whole_file_open(summary, options->summary, err));
    LOWKEY_TRY(lowkey_eval(request, err));
    const struct lowkey_eval_report report = { request, *journal, lowkey_commit() };
    return print(options, &report, summary, err);
}

static lowkey_status eval(const struct options *options, lowkey_model *model, lowkey_tokens *tokens,
                          lowkey_error *err)
{
    int64_t *windows = NULL;
    int n_windows = 0;
    LOWKEY_TRY(lowkey_samples_check(options->tokens, tokens, model->vocab_size, err));
    LOWKEY_TRY(lowkey_choose_windows(options->tokens, tokens, &options->choice, &windows, &n_windows, err));
    lowkey_eval_journal *journal = NULL;
    struct lowkey_whole_file summary = { 0 };
    struct lowkey_eval_request request = {
        .model = model,
        .tokens = tokens,
        .window = (int)options->choice.length,
        .n_windows = n_windows,
        .windows = windows,
        .n_formats = options->n_formats,
        .formats = calloc((size_t)options->n_formats + 1, sizeof *request.formats),
        .n_threads = (int)options->n_threads,
        .references = options->references,
        .is_wanted = is_wanted,
        .on_result = note,
        .user = &journal,
    };
    lowkey_status status = request.formats ? run(options, &request, &journal, &summary, err)
                                           : lowkey_fail(err, LOWKEY_ENOMEM, "no memory for the formats");
    if (status == LOWKEY_ECANCELLED && options->csv)
        status = lowkey_fail(err, status, "interrupted; what was done is in %s, and the same command goes on",
                             options->csv);
    lowkey_whole_file_abandon(&summary);
    lowkey_eval_journal_close(journal);
    for (int f = 0; request.formats && f < request.n_formats; f++)
        lowkey_eval_format_close(&request.formats[f]);
    free(request.formats);
    free(windows);
    return status;
}

int lowkey_eval_cmd(int argc, char **argv)
{
    struct options options = { .choice = { .length = 2048 }, .n_sinks = 1, .n_threads = lowkey_cpu_count() };
    int exit_status = parse(argc, argv, &options);
    if (exit_status == 0) {
        lowkey_catch_interrupts();
        lowkey_error err;
        lowkey_model *model = NULL;
        lowkey_tokens *tokens = NULL;
        lowkey_status status = lowkey_tokens_open(options.tokens, &tokens, &err);
        if (status == LOWKEY_OK) status = lowkey_model_open(options.model, 1, &model, &err);
        if (status == LOWKEY_OK) status = eval(&options, model, tokens, &err);
        lowkey_model_free(model);
        lowkey_tokens_free(tokens);
        if (status != LOWKEY_OK) exit_status = lowkey_command_failed("eval", &err);
    }
    free(options.activations);
    return exit_status < 0 ? 0 : exit_status;
}
