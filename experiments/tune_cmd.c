/* tune_cmd.c - lowkey tune: the tables of a quantizer, tuned on what its errors do to a model's predictions. */
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "calib/command.h"
#include "experiments/commands.h"
#include "experiments/samples.h"
#include "experiments/tune.h"
#include "experiments/whole_file.h"
#include "formats/identity.h"
#include "runtime/error.h"

static const char usage[] =
    "usage: lowkey tune --model MODEL.h5 --tokens TOKENS.h5 --quantizer IN.h5 --out OUT.h5\n"
    "                   --validation FIRST:END [OPTION]...\n\n"
    "Tune a quantizer's tables by gradient on the KL divergence of the model's next tokens, with\n"
    "keys and values in the packed cache. Each step reads one window of tokens, packs it with the\n"
    "tables of now, and moves every entry against the gradient of the elements that stand for it.\n"
    "Widths, orders and error feedback stay as they are, and so do bits. The state that was best on\n"
    "the validation windows is written; where none was better than the quantizer was, that one is.\n\n"
    "  --model FILE           model.h5\n"
    "  --tokens FILE          tokens.h5, of the model's own tokenizer\n"
    "  --quantizer FILE       quantizer.h5 of that model, static tables in all its channels\n"
    "  --out FILE             quantizer.h5 to write; it is whole or not there\n"
    "  --length N             tokens of a window (1024); windows are counted in this length\n"
    "  --first-window A       tune on windows from A (0) ...\n"
    "  --end-window B         ... to B - 1 (the first validation window, or the last there is)\n"
    "  --validation FIRST:END windows to validate on, none of them tuned on\n"
    "  --validate N           validate every N steps, before the first and after the last (10)\n"
    "  --steps N              (100); each window is read once before one is read again\n"
    "  --rate X               how far an entry moves in the first step, in its channel's rms error\n"
    "                         (0.02); it falls to 0 as a cosine does\n"
    "  --seed N               of the order of windows (1)\n"
    "  --checkpoint FILE      written after each step; the same command goes on from it\n"
    "  --log FILE             a CSV file of the KL of every step and validation\n"
    "  --threads N            (as many as there are CPUs); the file does not depend on it\n";

struct options {
    const char *model, *tokens, *quantizer, *out, *checkpoint, *log;
    int64_t length, first, end, steps, every, seed, n_threads; /* end 0: not given */
    int validation[2];
    double rate;
};

static int check(int argc, char **argv, const struct options *options)
{
    const char *inputs[] = { options->model, options->tokens, options->quantizer, options->out,
                             options->checkpoint };
    if (optind < argc) return lowkey_command_usage("tune", "'%s' is not expected", argv[optind]);
    if (!options->model || !options->tokens || !options->quantizer || !options->out ||
        !options->validation[1])
        return lowkey_command_usage("tune",
                                    "--model, --tokens, --quantizer, --out and --validation are needed");
    int wrong = lowkey_check_output("tune", "--out", options->out, 3, inputs);
    if (!wrong && options->checkpoint)
        wrong = lowkey_check_output("tune", "--checkpoint", options->checkpoint, 4, inputs);
    if (!wrong && options->log)
        wrong = lowkey_check_output("tune", "--log", options->log, options->checkpoint ? 5 : 4, inputs);
    return wrong;
}

/* 0: go on; -1: help was asked for; 2: wrong usage */
static int parse(int argc, char **argv, struct options *options)
{
    enum {
        MODEL = 256,
        TOKENS,
        QUANTIZER,
        OUT,
        LENGTH,
        FIRST,
        END,
        VALIDATION,
        EVERY,
        STEPS,
        RATE,
        SEED,
        CHECKPOINT,
        LOG,
        THREADS
    };
    static const struct option known[] = {
        { "model", 1, 0, MODEL },
        { "tokens", 1, 0, TOKENS },
        { "quantizer", 1, 0, QUANTIZER },
        { "out", 1, 0, OUT },
        { "length", 1, 0, LENGTH },
        { "first-window", 1, 0, FIRST },
        { "end-window", 1, 0, END },
        { "validation", 1, 0, VALIDATION },
        { "validate", 1, 0, EVERY },
        { "steps", 1, 0, STEPS },
        { "rate", 1, 0, RATE },
        { "seed", 1, 0, SEED },
        { "log", 1, 0, LOG },
        { "checkpoint", 1, 0, CHECKPOINT },
        { "threads", 1, 0, THREADS },
        { "help", 0, 0, 'h' },
        { 0 },
    };
    const int64_t most = 1 << 30;
    int wrong = 0;
    optind = 0; /* a fresh scan: getopt is a global */
    for (int c; !wrong && (c = lowkey_next_option("tune", argc, argv, known, NULL)) != -1;) {
        switch (c) {
        case MODEL: options->model = optarg; break;
        case TOKENS: options->tokens = optarg; break;
        case QUANTIZER: options->quantizer = optarg; break;
        case OUT: options->out = optarg; break;
        case CHECKPOINT: options->checkpoint = optarg; break;
        case LOG: options->log = optarg; break;
        case LENGTH:
            wrong = lowkey_parse_int("tune", "--length", optarg, 2, 1 << 24, &options->length);
            break;
        case FIRST:
            wrong = lowkey_parse_int("tune", "--first-window", optarg, 0, most, &options->first);
            break;
        case END: wrong = lowkey_parse_int("tune", "--end-window", optarg, 1, most, &options->end); break;
        case EVERY: wrong = lowkey_parse_int("tune", "--validate", optarg, 1, most, &options->every); break;
        case STEPS: wrong = lowkey_parse_int("tune", "--steps", optarg, 1, 1 << 24, &options->steps); break;
        case RATE: wrong = lowkey_parse_double("tune", "--rate", optarg, 1e-9, 10, &options->rate); break;
        case SEED: wrong = lowkey_parse_int("tune", "--seed", optarg, 0, INT64_MAX, &options->seed); break;
        case THREADS:
            wrong = lowkey_parse_int("tune", "--threads", optarg, 1, 256, &options->n_threads);
            break;
        case VALIDATION:
            wrong = lowkey_parse_range("tune", "--validation", optarg, &options->validation[0],
                                       &options->validation[1]);
            break;
        case 'h': return fputs(usage, stdout), -1;
        default: return 2;
        }
    }
    return wrong ? wrong : check(argc, argv, options);
}

static void print_validation(void *user, int step, double kl, int is_best)
{
    (void)user;
    printf("after %d steps: KL %.6f nats per token%s\n", step, kl,
           is_best && step ? ", the best so far" : "");
    fflush(stdout);
}

static void print_number(FILE *to, double x)
{
    if (isnan(x))
        fputc(',', to);
    else
        fprintf(to, ",%.9g", x);
}

static lowkey_status write_log(const char *path, const struct lowkey_tune_request *request,
                               const struct lowkey_tune_state *state, lowkey_error *err)
{
    struct lowkey_whole_file file = { 0 };
    LOWKEY_TRY(lowkey_whole_file_open(&file, path, err));
    fprintf(file.to, "step,window,kl,validation_kl\n");
    for (int s = 0; s <= state->done; s++) {
        fprintf(file.to, "%d,", s);
        if (s < state->done) fprintf(file.to, "%d", lowkey_tune_window(request, s));
        print_number(file.to, state->log[s].kl);
        print_number(file.to, state->log[s].validation);
        fputc('\n', file.to);
    }
    const lowkey_status status = lowkey_whole_file_commit(&file, err);
    lowkey_whole_file_abandon(&file);
    return status;
}

static lowkey_status tune(const struct options *options, const struct lowkey_tune_request *request,
                          struct lowkey_tune_state *state, lowkey_error *err)
{
    LOWKEY_TRY(lowkey_tune_begin(request, state, err));
    if (state->done)
        fprintf(stderr, "lowkey tune: %s: %d steps are made already\n", options->checkpoint, state->done);
    lowkey_status status = lowkey_tune(request, state, err);
    if (options->log && (status == LOWKEY_OK || status == LOWKEY_ECANCELLED)) {
        lowkey_error of_log;
        if (write_log(options->log, request, state, &of_log) != LOWKEY_OK && status == LOWKEY_OK)
            return *err = of_log, of_log.status;
    }
    if (status == LOWKEY_OK) status = lowkey_tune_write(request, state, options->out, err);
    if (status == LOWKEY_ECANCELLED && options->checkpoint)
        return lowkey_fail(err, status,
                           "interrupted; the %d steps made are in %s, and the same command goes on",
                           state->done, options->checkpoint);
    return status;
}

static lowkey_status run(const struct options *options, const lowkey_model *model,
                         const lowkey_tokens *tokens, const lowkey_quantizer *quantizer,
                         const struct lowkey_fit_record *record, lowkey_error *err)
{
    const struct lowkey_identity of_model = lowkey_identity_of_model(options->model, model);
    struct lowkey_identity fitted = lowkey_identity_of_quantizer(options->quantizer,
                                                                 lowkey_quantizer_describe(quantizer));
    fitted.n_model_layers = record->n_model_layers;
    LOWKEY_TRY(lowkey_identity_check(&of_model, &fitted, LOWKEY_SAME_LAYERS, err));
    LOWKEY_TRY(lowkey_samples_check(options->tokens, tokens, model->vocab_size, err));
    const int64_t n = lowkey_samples_count(tokens, (int)options->length, (int)options->length);
    const int64_t before = options->validation[0] > options->first ? options->validation[0] : n;
    const struct lowkey_tune_request request = {
        .model = model,
        .tokens = tokens,
        .quantizer = quantizer,
        .record = record,
        .length = (int)options->length,
        .first_window = (int)options->first,
        .end_window = (int)(options->end ? options->end : before),
        .first_validation = options->validation[0],
        .end_validation = options->validation[1],
        .steps = (int)options->steps,
        .validate_every = (int)options->every,
        .rate = options->rate,
        .seed = options->seed,
        .n_threads = (int)options->n_threads,
        .checkpoint = options->checkpoint,
        .on_validation = print_validation,
    };
    struct lowkey_tune_state state = { 0 };
    const lowkey_status status = tune(options, &request, &state, err);
    if (status == LOWKEY_OK)
        printf("%s: %s, KL %.6f of %.6f\n", options->out,
               state.best_step ? "the tables of the best step" : "no step was better: as it was",
               state.best_kl, state.log[0].validation);
    lowkey_tune_state_free(&state);
    return status;
}

int lowkey_tune_cmd(int argc, char **argv)
{
    struct options options = {
        .length = 1024, .steps = 100, .every = 10, .seed = 1, .rate = 0.02, .n_threads = lowkey_cpu_count()
    };
    const int wrong = parse(argc, argv, &options);
    if (wrong) return wrong < 0 ? 0 : wrong;
    lowkey_catch_interrupts();
    lowkey_error err;
    lowkey_model *model = NULL;
    lowkey_tokens *tokens = NULL;
    lowkey_quantizer *quantizer = NULL;
    struct lowkey_fit_record *record = NULL;
    lowkey_status status = lowkey_quantizer_read(options.quantizer, &quantizer, &record, &err);
    if (status == LOWKEY_OK) status = lowkey_tokens_open(options.tokens, &tokens, &err);
    if (status == LOWKEY_OK) status = lowkey_model_open(options.model, 1, &model, &err);
    if (status == LOWKEY_OK) status = run(&options, model, tokens, quantizer, record, &err);
    lowkey_model_free(model);
    lowkey_tokens_free(tokens);
    lowkey_quantizer_free(quantizer);
    lowkey_fit_record_free(record);
    return status == LOWKEY_OK ? 0 : lowkey_command_failed("tune", &err);
}
