/* capture_cmd.c - lowkey capture: run text through a model, write its keys, values and queries. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "calib/command.h"
#include "experiments/capture.h"
#include "experiments/commands.h"
#include "experiments/samples.h"

static const char usage[] =
    "usage: lowkey capture --model MODEL.h5 --tokens TOKENS.h5 --out ACTIVATIONS.h5 [OPTION]...\n\n"
    "Run text through a model and write what calibration reads: per layer, keys and queries before\n"
    "RoPE, and values. The text is cut into samples of one length, each read from position 0.\n\n"
    "  --model FILE       model.h5\n"
    "  --tokens FILE      tokens.h5, of the model's own tokenizer\n"
    "  --out FILE         activations.h5 to write; it is whole or not there\n"
    "  --length N         tokens of a sample (2048)\n"
    "  --stride N         from one sample's start to the next one's (the length)\n"
    "  --samples N        how many from the text's beginning, or FIRST:END (all)\n"
    "  --layers A,B,...   layers to write, or all (all)\n"
    "  --queries yes|no   queries too, for calibration without gradients and lowkey error (yes)\n"
    "  --grad[=LABELS]    also the signed gradient of each sample's summed loss with respect to keys and\n"
    "                     values (f32), for --sensitivity fisher, error feedback and lowkey cost. LABELS:\n"
    "                     text (the default): the loss of the text's own next tokens, whose squares are the\n"
    "                     empirical Fisher information; model: of tokens drawn from the model's own\n"
    "                     distribution, whose squares are the Fisher information, which is what the KL\n"
    "                     divergence between the model with and without errors is made of\n"
    "  --seed N           of the tokens that --grad=model draws (1)\n"
    "  --dtype TYPE       f16, bf16 or f32 (f16); what f16 cannot hold is refused\n"
    "  --per-file N       files of N samples, OUT.000.h5 and so on; one that is there already and\n"
    "                     holds the same samples, layers and streams of the same model is kept,\n"
    "                     whatever its --dtype, so that a run that was stopped goes on. A fit over\n"
    "                     them equals the fit over one file\n"
    "  --threads N        (as many as there are CPUs); the file does not depend on it\n";

struct options {
    const char *model, *tokens, *out, *layers, *samples;
    int64_t length, stride, per_file, n_threads; /* stride 0: length; per_file 0: one file */
    int queries, labels; /* labels: enum lowkey_gradient_labels */
    int64_t seed; /* 0: not given */
    lowkey_dtype dtype;
};

static int parse_word(const char *option, const char *text, const char *const words[], int *out)
{
    for (int i = 0; words[i]; i++)
        if (strcmp(text, words[i]) == 0) return *out = i, 0;
    return lowkey_command_usage("capture", "%s does not know '%s'", option, text);
}

/* 0: go on; -1: help was asked for; 2: wrong usage */
static int parse(int argc, char **argv, struct options *options)
{
    static const struct option known[] = {
        { "model", 1, 0, 'm' },   { "tokens", 1, 0, 't' },  { "out", 1, 0, 'o' },
        { "length", 1, 0, 'L' },  { "stride", 1, 0, 's' },  { "samples", 1, 0, 'n' },
        { "layers", 1, 0, 'l' },  { "queries", 1, 0, 'q' }, { "grad", 2, 0, 'g' },
        { "seed", 1, 0, 'S' },    { "dtype", 1, 0, 'd' },   { "per-file", 1, 0, 'p' },
        { "threads", 1, 0, 'j' }, { "help", 0, 0, 'h' },    { 0 },
    };
    static const char *const answers[] = { "no", "yes", NULL };
    static const char *const labels[] = { "text", "model", NULL }; /* of the enumeration, but for the first */
    static const char *const dtypes[] = { "f32", "f16", "bf16", NULL };
    for (int c; (c = lowkey_next_option("capture", argc, argv, known, NULL)) != -1;) {
        int wrong = 0, dtype = options->dtype;
        switch (c) {
        case 'm': options->model = optarg; break;
        case 't': options->tokens = optarg; break;
        case 'o': options->out = optarg; break;
        case 'l': options->layers = optarg; break;
        case 'n': options->samples = optarg; break;
        case 'L':
            wrong = lowkey_parse_int("capture", "--length", optarg, 1, 1 << 24, &options->length);
            break;
        case 's':
            wrong = lowkey_parse_int("capture", "--stride", optarg, 1, 1 << 24, &options->stride);
            break;
        case 'p':
            wrong = lowkey_parse_int("capture", "--per-file", optarg, 1, 1 << 30, &options->per_file);
            break;
        case 'j':
            wrong = lowkey_parse_int("capture", "--threads", optarg, 1, 256, &options->n_threads);
            break;
        case 'q': wrong = parse_word("--queries", optarg, answers, &options->queries); break;
        case 'g':
            wrong = optarg ? parse_word("--grad", optarg, labels, &options->labels) : 0;
            options->labels = optarg ? options->labels + 1 : LOWKEY_LABELS_TEXT;
            break;
        case 'S': wrong = lowkey_parse_int("capture", "--seed", optarg, 1, INT64_MAX, &options->seed); break;
        case 'd': wrong = parse_word("--dtype", optarg, dtypes, &dtype); break;
        case 'h': return fputs(usage, stdout), -1;
        default: return 2;
        }
        if (wrong) return 2;
        options->dtype = (lowkey_dtype)dtype; /* dtypes has the order of the enumeration */
    }
    if (optind < argc) return lowkey_command_usage("capture", "'%s' is not expected", argv[optind]);
    if (!options->model || !options->tokens || !options->out)
        return lowkey_command_usage("capture", "--model, --tokens and --out are needed");
    if (options->seed && options->labels != LOWKEY_LABELS_MODEL)
        return lowkey_command_usage("capture", "--seed goes with --grad=model");
    return lowkey_check_output("capture", "--out", options->out, 2,
                               (const char *const[]) { options->model, options->tokens });
}

/* --samples and --layers, which need the files: fills request; 0 good, else the complaint is printed and 2 returned. */
static int choose(const struct options *options, struct lowkey_capture_request *request, int **layers)
{
    const char *colon = options->samples ? strchr(options->samples, ':') : NULL;
    request->n_samples = lowkey_samples_count(request->tokens, request->length, request->stride);
    if (colon) {
        int first, end;
        if (lowkey_parse_range("capture", "--samples", options->samples, &first, &end)) return 2;
        request->first_sample = first;
        request->n_samples = end - first;
    } else if (options->samples && lowkey_parse_int("capture", "--samples", options->samples, 1, INT32_MAX,
                                                    &request->n_samples)) {
        return 2;
    }
    if (options->layers && strcmp(options->layers, "all") != 0) {
        if (lowkey_parse_list("capture", "--layers", options->layers, layers, &request->n_layers)) return 2;
    } else {
        request->n_layers = request->model->n_layers;
        *layers = malloc((size_t)request->n_layers * sizeof **layers);
        for (int l = 0; *layers && l < request->n_layers; l++) (*layers)[l] = l;
        if (!*layers) return lowkey_command_usage("capture", "no memory");
    }
    request->layers = *layers;
    return 0;
}

static void on_file(const char *path, int kept)
{
    printf("%s: %s\n", path, kept ? "was there already" : "written");
    fflush(stdout);
}

static int run(const struct options *options, const lowkey_model *model, const lowkey_tokens *tokens,
               lowkey_error *err)
{
    struct lowkey_capture_request request = {
        .model = model,
        .tokens = tokens,
        .length = (int)options->length,
        .stride = (int)(options->stride ? options->stride : options->length),
        .queries = options->queries,
        .gradients = (enum lowkey_gradient_labels)options->labels,
        .seed = options->labels != LOWKEY_LABELS_MODEL ? 0
                : options->seed                        ? options->seed
                                                       : 1,
        .dtype = options->dtype,
        .n_threads = (int)options->n_threads,
    };
    int *layers = NULL;
    int exit_status = choose(options, &request, &layers);
    if (exit_status == 0) {
        lowkey_status status = lowkey_samples_check(options->tokens, tokens, model->vocab_size, err);
        if (status == LOWKEY_OK)
            status = options->per_file
                         ? lowkey_capture_parts(&request, options->out, options->per_file, on_file, err)
                         : lowkey_capture(&request, options->out, err);
        if (status == LOWKEY_OK && !options->per_file) on_file(options->out, 0);
        if (status != LOWKEY_OK) exit_status = lowkey_command_failed("capture", err);
    }
    free(layers);
    return exit_status;
}

int lowkey_capture_cmd(int argc, char **argv)
{
    struct options options = {
        .length = 2048, .queries = 1, .dtype = LOWKEY_F16, .n_threads = lowkey_cpu_count()
    };
    const int wrong = parse(argc, argv, &options);
    if (wrong) return wrong < 0 ? 0 : wrong;
    lowkey_catch_interrupts();
    lowkey_error err;
    lowkey_model *model = NULL;
    lowkey_tokens *tokens = NULL;
    lowkey_status status = lowkey_tokens_open(options.tokens, &tokens, &err);
    if (status == LOWKEY_OK) status = lowkey_model_open(options.model, 1, &model, &err);
    const int exit_status = status == LOWKEY_OK ? run(&options, model, tokens, &err)
                                                : lowkey_command_failed("capture", &err);
    lowkey_model_free(model);
    lowkey_tokens_free(tokens);
    return exit_status;
}
