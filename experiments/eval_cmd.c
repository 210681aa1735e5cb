/* eval_cmd.c - lowkey eval: perplexity of a model over windows of a text. */
#include <getopt.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>

#include "calib/command.h"
#include "experiments/commands.h"
#include "experiments/lm/plain_attention.h"
#include "experiments/perplexity.h"
#include "experiments/samples.h"
#include "formats/sha256.h"
#include "runtime/error.h"

static const char usage[] =
    "usage: lowkey eval --model MODEL.h5 --tokens TOKENS.h5 [OPTION]...\n\n"
    "Perplexity of the model itself, keys and values in f32. The text is cut into windows without\n"
    "overlap, each is read on its own, its first token is not predicted; the exponential of the mean\n"
    "negative log-likelihood over all predicted tokens.\n\n"
    "  --model FILE     model.h5\n"
    "  --tokens FILE    tokens.h5, of the model's own tokenizer\n"
    "  --window N       tokens of a window (2048)\n"
    "  --windows N      how many, from the text's beginning (all)\n"
    "  --threads N      (as many as there are CPUs); the result does not depend on it\n"
    "  --json           one JSON object on stdout\n";

struct options {
    const char *model, *tokens;
    int64_t window, n_windows, n_threads; /* n_windows 0: all */
    int json;
};

struct report { /* what on_window fills */
    int json, window;
    double nll; /* so far */
    json_t *windows;
};

/* 0: go on; -1: help was asked for; 2: wrong usage */
static int parse(int argc, char **argv, struct options *options)
{
    static const struct option known[] = {
        { "model", 1, 0, 'm' },   { "tokens", 1, 0, 't' }, { "window", 1, 0, 'w' }, { "windows", 1, 0, 'n' },
        { "threads", 1, 0, 'j' }, { "json", 0, 0, 'J' },   { "help", 0, 0, 'h' },   { 0 },
    };
    for (int c; (c = lowkey_next_option("eval", argc, argv, known, NULL)) != -1;) {
        int wrong = 0;
        switch (c) {
        case 'm': options->model = optarg; break;
        case 't': options->tokens = optarg; break;
        case 'w': wrong = lowkey_parse_int("eval", "--window", optarg, 2, 1 << 24, &options->window); break;
        case 'n':
            wrong = lowkey_parse_int("eval", "--windows", optarg, 1, 1 << 30, &options->n_windows);
            break;
        case 'j': wrong = lowkey_parse_int("eval", "--threads", optarg, 1, 256, &options->n_threads); break;
        case 'J': options->json = 1; break;
        case 'h': return fputs(usage, stdout), -1;
        default: return 2;
        }
        if (wrong) return 2;
    }
    if (optind < argc) return lowkey_command_usage("eval", "'%s' is not expected", argv[optind]);
    if (!options->model || !options->tokens)
        return lowkey_command_usage("eval", "--model and --tokens are needed");
    return 0;
}

static void on_window(void *user, int i, double nll)
{
    struct report *report = user;
    report->nll += nll;
    const double alone = exp(nll / (report->window - 1));
    const double running = exp(report->nll / ((double)(i + 1) * (report->window - 1)));
    if (report->json) {
        json_array_append_new(report->windows, json_pack("{s:f, s:f, s:f}", "nll", nll / (report->window - 1),
                                                         "perplexity", alone, "running_perplexity", running));
        return;
    }
    if (i == 0) printf("window  perplexity  running perplexity\n");
    printf("%6d  %10.4f  %18.4f\n", i, alone, running);
    fflush(stdout);
}

static void print_json(const struct report *report, const lowkey_model *model, const lowkey_tokens *tokens,
                       double seconds)
{
    char model_hash[65], text_hash[65];
    lowkey_sha256_print(model->sha256, model_hash);
    lowkey_sha256_print(tokens->text_sha256, text_hash);
    const double n_predicted = (double)json_array_size(report->windows) * (report->window - 1);
    json_t *object = json_pack("{s:s, s:s, s:s, s:s, s:i, s:I, s:f, s:f, s:s, s:O}", "model", model->name,
                               "model_sha256", model_hash, "text", tokens->text_name, "text_sha256",
                               text_hash, "window", report->window, "n_predicted", (json_int_t)n_predicted,
                               "perplexity", exp(report->nll / n_predicted), "seconds", seconds, "cache",
                               "f32", "windows", report->windows);
    json_dumpf(object, stdout, JSON_INDENT(2));
    printf("\n");
    json_decref(object);
}

static lowkey_status run(const struct options *options, lowkey_model *model, lowkey_tokens *tokens,
                         lowkey_error *err)
{
    LOWKEY_TRY(lowkey_samples_check(options->tokens, tokens, model->vocab_size, err));
    const int window = (int)options->window, n_threads = (int)options->n_threads;
    const int64_t available = lowkey_samples_count(tokens, window, window);
    const int64_t n_windows = options->n_windows ? options->n_windows : available;
    if (available == 0 || n_windows > available)
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: has %lld windows of %d tokens, %lld wanted",
                           options->tokens, (long long)available, window,
                           (long long)(n_windows ? n_windows : 1));

    struct report report = { .json = options->json, .window = window, .windows = json_array() };
    struct lowkey_perplexity_request request = {
        .tokens = tokens,
        .window = window,
        .n_windows = (int)n_windows,
        .n_threads = n_threads,
        .on_window = on_window,
        .user = &report,
    };
    struct lowkey_decoder_config config = { .model = model, .n_threads = n_threads };
    lowkey_plain_attention *attention = NULL;
    const double start = lowkey_seconds();
    lowkey_status status = lowkey_plain_attention_create(model, model->n_layers, window, n_threads, NULL,
                                                         &attention, err);
    if (status == LOWKEY_OK) {
        config.attention = lowkey_plain_attention_interface(attention);
        status = lowkey_decoder_create(&config, &request.decoder, err);
    }
    if (status == LOWKEY_OK) status = lowkey_perplexity(&request, err);
    if (status == LOWKEY_OK && options->json) print_json(&report, model, tokens, lowkey_seconds() - start);
    lowkey_decoder_free(request.decoder);
    lowkey_plain_attention_free(attention);
    json_decref(report.windows);
    return status;
}

int lowkey_eval_cmd(int argc, char **argv)
{
    struct options options = { .window = 2048, .n_threads = lowkey_cpu_count() };
    const int wrong = parse(argc, argv, &options);
    if (wrong) return wrong < 0 ? 0 : wrong;
    lowkey_catch_interrupts();
    lowkey_error err;
    lowkey_model *model = NULL;
    lowkey_tokens *tokens = NULL;
    lowkey_status status = lowkey_tokens_open(options.tokens, &tokens, &err);
    if (status == LOWKEY_OK) status = lowkey_model_open(options.model, 1, &model, &err);
    if (status == LOWKEY_OK) status = run(&options, model, tokens, &err);
    lowkey_model_free(model);
    lowkey_tokens_free(tokens);
    return status == LOWKEY_OK ? 0 : lowkey_command_failed("eval", &err);
}
