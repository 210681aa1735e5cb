/* fit_cmd.c - lowkey fit: options, one call, the report. */
#include <getopt.h>
#include <stdio.h>
#include <string.h>

#include "calib/command.h"
#include "calib/fit.h"

static const char usage[] =
    "usage: lowkey fit --out QUANTIZER.h5 [OPTION]... ACTIVATIONS.h5...\n"
    "\n"
    "Fit tables to captured keys and values. Options of a side are for both; --key-... and --value-... for "
    "one.\n"
    "  --preset NAME             2, 3, 4: our recipe, so many bits on average; KVQuant's: kvquant-nuq2, "
    "-nuq3, "
    "-nuq4,\n"
    "                            each also with -1%; other options then change it. Without: 4, but where an "
    "option of\n"
    "                            a side (--[..]) and no budget is given: then plain tables of 4 bits, no "
    "sinks, "
    "for it to\n"
    "                            change\n"
    "  --budget F                mean bits of all elements, shared out over channels by what their errors "
    "cost; "
    "given\n"
    "                            without a preset it changes preset 4\n"
    "  --widths LOW:HIGH         of a budget (1:5 by gradients, else 2:4)\n"
    "  --[key-|value-]bits N     1 to 5, 8 or 16 instead of a budget; N,M,...: by RoPE pair of keys, by "
    "channel "
    "of\n"
    "                            values, in turn\n"
    "  --[..]codebook KIND       fitted (default), uniform, normal_float\n"
    "  --[..]scope S             what shares a codebook: channel (default), head, layer\n"
    "  --[..]token-scale TYPE    none (default: static tables), f16, f32\n"
    "  --[..]scale-block N       channels that share a token's scale (all)\n"
    "  --[..]outliers F          fraction kept apart, 0 to 1 (0)\n"
    "  --[..]outlier-cap N       at most so many a token\n"
    "  --[..]outlier-page N      at most so many a page of 64 tokens\n"
    "  --[..]rule-8 R            e4m3 (default), e5m2, int8\n"
    "  --[..]rule-16 R           f16 (default), bf16\n"
    "  --[..]trellis N           code rows by a trellis, whose search keeps 1, 2 or 4 survivors a state (0: "
    "none)\n"
    "  --[..]qnorm               match the spread after quantization\n"
    "  --gain[=SIDE]             correct for shrinkage: values (default), keys, both, none\n"
    "  --feedback[=SIDE]         feed errors back when packing: keys (default), values, both, none\n"
    "  --refit N                 rounds of fitting tables again to what packing makes of the values (3 with "
    "a "
    "trellis;\n"
    "                            with feedback alone 2 by gradients, else 0: without their weights it does "
    "harm)\n"
    "  --damp F                  of the feedback's matrix (0.05)\n"
    "  --samples FIRST:END       of every file only samples FIRST..END-1 (all): the others are for "
    "measuring\n"
    "  --sinks N                 first tokens of a sample left out and kept in 16 bits (0)\n"
    "  --sink-rule R             f16 (default), bf16\n"
    "  --sensitivity S           auto (default: the first that the files have), fisher, weight, attention, "
    "none\n"
    "  --queries N               sampled of each sample and head for attention (128)\n"
    "  --weight-clip F, --weight-floor F   multiples of a channel's mean weight (50, 0.001); 0: none\n"
    "  --weight-units U          original (default), normalised\n"
    "  --threads N               (as many as CPUs); the result does not depend on it\n"
    "  --json                    the report as JSON\n";

enum { KEYS = 1, VALUES = 2, BOTH = KEYS | VALUES };

/* Options of a side; each exists three times. */
enum side_option {
    BITS,
    CODEBOOK,
    SCOPE,
    TOKEN_SCALE,
    SCALE_BLOCK,
    OUTLIERS,
    OUTLIER_CAP,
    OUTLIER_PAGE,
    RULE_8,
    RULE_16,
    TRELLIS,
    QNORM,
    N_SIDE_OPTIONS
};
static const char *const side_options[N_SIDE_OPTIONS] = { "bits",        "codebook",     "scope",
                                                          "token-scale", "scale-block",  "outliers",
                                                          "outlier-cap", "outlier-page", "rule-8",
                                                          "rule-16",     "trellis",      "qnorm" };
enum other_option {
    OUT = 4 * N_SIDE_OPTIONS + 256,
    PRESET,
    GAIN,
    FEEDBACK,
    BUDGET,
    WIDTHS,
    REFITS,
    DAMP,
    SAMPLES,
    SINKS,
    SINK_RULE,
    SENSITIVITY,
    QUERIES,
    CLIP,
    FLOOR,
    UNITS,
    THREADS,
    JSON,
    HELP = 'h'
};
static const struct option other_options[] = {
    { "out", required_argument, NULL, OUT },
    { "preset", required_argument, NULL, PRESET },
    { "budget", required_argument, NULL, BUDGET },
    { "widths", required_argument, NULL, WIDTHS },
    { "gain", optional_argument, NULL, GAIN },
    { "feedback", optional_argument, NULL, FEEDBACK },
    { "refit", required_argument, NULL, REFITS },
    { "samples", required_argument, NULL, SAMPLES },
    { "damp", required_argument, NULL, DAMP },
    { "sinks", required_argument, NULL, SINKS },
    { "sink-rule", required_argument, NULL, SINK_RULE },
    { "sensitivity", required_argument, NULL, SENSITIVITY },
    { "queries", required_argument, NULL, QUERIES },
    { "weight-clip", required_argument, NULL, CLIP },
    { "weight-floor", required_argument, NULL, FLOOR },
    { "weight-units", required_argument, NULL, UNITS },
    { "threads", required_argument, NULL, THREADS },
    { "json", no_argument, NULL, JSON },
    { "help", no_argument, NULL, HELP },
};
enum { N_OTHER = sizeof other_options / sizeof other_options[0] };

struct command {
    struct lowkey_fit_options options;
    const char *out;
    int json, has_preset, has_side_option, has_bits, has_budget; /* which of them are given */
    char names[3 * N_SIDE_OPTIONS][32];
    struct option table[3 * N_SIDE_OPTIONS + N_OTHER + 1];
};

static void make_table(struct command *command)
{
    static const char *const prefixes[] = { "", "key-", "value-" };
    static const int sides[] = { BOTH, KEYS, VALUES };
    int n = 0;
    for (int o = 0; o < N_SIDE_OPTIONS; o++)
        for (int p = 0; p < 3; p++, n++) {
            snprintf(command->names[n], sizeof command->names[n], "%s%s", prefixes[p], side_options[o]);
            command->table[n] = (struct option) { command->names[n],
                                                  o == QNORM ? no_argument : required_argument, NULL,
                                                  256 + 4 * o + sides[p] };
        }
    memcpy(command->table + n, other_options, sizeof other_options);
}

/* The number of a name in a list; complains and returns -1. */
static int choose(const char *option, const char *text, const char *const *names)
{
    char all[160] = "";
    for (int i = 0; names[i]; i++) {
        if (strcmp(names[i], text) == 0) return i;
        snprintf(all + strlen(all), sizeof all - strlen(all), "%s%s", i ? ", " : "", names[i]);
    }
    lowkey_command_usage("fit", "%s is one of %s, not '%s'", option, all, text);
    return -1;
}

static int parse_widths(const char *option, const char *text, struct lowkey_side_options *side)
{
    char copy[256], *rest = copy;
    if (strlen(text) >= sizeof copy) return lowkey_command_usage("fit", "%s: too long a list", option);
    strcpy(copy, text);
    side->n_widths = 0;
    for (char *word; (word = strsep(&rest, ",")) != NULL;) {
        int64_t bits;
        if (lowkey_parse_int("fit", option, word, 1, 16, &bits)) return 2;
        if (side->n_widths == LOWKEY_MAX_WIDTHS)
            return lowkey_command_usage("fit", "%s: too long a list", option);
        side->widths[side->n_widths++] = (uint8_t)bits;
    }
    return 0;
}

static int parse_number(const char *option, const char *text, int64_t low, int64_t high, int *out)
{
    int64_t value;
    if (lowkey_parse_int("fit", option, text, low, high, &value)) return 2;
    *out = (int)value;
    return 0;
}

static int parse_side(struct lowkey_side_options *side, enum side_option which, const char *option,
                      const char *text)
{
    static const char *const codebooks[] = { "fitted", "uniform", "normal_float", NULL };
    static const char *const scopes[] = { "channel", "head", "layer", NULL };
    static const char *const scales[] = { "none", "f16", "f32", NULL };
    static const char *const rules_8[] = { "e4m3", "e5m2", "int8", NULL }, *const rules_16[] = { "f16",
                                                                                                 "bf16",
                                                                                                 NULL };
    int chosen = 0;
    switch (which) {
    case BITS: return parse_widths(option, text, side);
    case CODEBOOK: side->codebook = (enum lowkey_codebook)(chosen = choose(option, text, codebooks)); break;
    case SCOPE: side->scope = (enum lowkey_scope)(chosen = choose(option, text, scopes)); break;
    case TOKEN_SCALE: side->token_scale = (lowkey_token_scale)(chosen = choose(option, text, scales)); break;
    case RULE_8:
        side->rule_8 = (lowkey_rule)(LOWKEY_RULE_E4M3 + (chosen = choose(option, text, rules_8)));
        break;
    case RULE_16:
        side->rule_16 = (lowkey_rule)(LOWKEY_RULE_F16 + (chosen = choose(option, text, rules_16)));
        break;
    case SCALE_BLOCK: return parse_number(option, text, 0, 65536, &side->scale_block);
    case OUTLIERS: return lowkey_parse_double("fit", option, text, 0, 1, &side->outlier_fraction);
    case OUTLIER_CAP: return parse_number(option, text, 1, 65535, &side->outlier_cap);
    case TRELLIS: return parse_number(option, text, 0, 4, &side->trellis);
    case OUTLIER_PAGE: return parse_number(option, text, 1, 65535, &side->outlier_page_capacity);
    default: side->qnorm = 1;
    }
    return chosen < 0 ? 2 : 0;
}

static int parse_sides(const char *option, const char *text, int otherwise)
{
    static const char *const names[] = { "none", "keys", "values", "both", NULL };
    return text ? choose(option, text, names) : otherwise;
}

static int parse_width_range(const char *option, const char *text, struct lowkey_fit_options *o)
{
    char low[32] = "";
    const char *colon = strchr(text, ':');
    if (!colon || (size_t)(colon - text) >= sizeof low)
        return lowkey_command_usage("fit", "%s is LOW:HIGH, not '%s'", option, text);
    memcpy(low, text, (size_t)(colon - text));
    return parse_number(option, low, 1, 5, &o->low_width) ||
                   parse_number(option, colon + 1, 1, 5, &o->high_width)
               ? 2
               : 0;
}

static int parse_other(struct command *command, int which, const char *option)
{
    static const char *const rules[] = { "f16", "bf16", NULL }, *const units[] = { "original", "normalised",
                                                                                   NULL };
    static const char *const sensitivities[] = { "auto", "none", "weight", "fisher", "attention", NULL };
    struct lowkey_fit_options *o = &command->options;
    int chosen = 0;
    switch (which) {
    case OUT: command->out = optarg; break;
    case PRESET: break; /* taken before */
    case GAIN:
        chosen = parse_sides(option, optarg, VALUES);
        for (int s = 0; s < 2 && chosen >= 0; s++) o->side[s].gain = chosen >> s & 1;
        break;
    case FEEDBACK:
        chosen = parse_sides(option, optarg, KEYS);
        for (int s = 0; s < 2 && chosen >= 0; s++) o->side[s].feedback = chosen >> s & 1;
        break;
    case BUDGET: return lowkey_parse_double("fit", option, optarg, 0x1p-20, 16, &o->budget);
    case WIDTHS: return parse_width_range(option, optarg, o);
    case REFITS:
        return parse_number(option, optarg, 0, 100, &o->side[0].refit) ||
                       parse_number(option, optarg, 0, 100, &o->side[1].refit)
                   ? 2
                   : 0;
    case DAMP: return lowkey_parse_double("fit", option, optarg, 1e-9, 1e9, &o->damp);
    case SAMPLES: return lowkey_parse_range("fit", option, optarg, &o->first_sample, &o->end_sample);
    case SINKS: return parse_number(option, optarg, 0, 64, &o->n_sinks);
    case SINK_RULE:
        o->sink_rule = (lowkey_rule)(LOWKEY_RULE_F16 + (chosen = choose(option, optarg, rules)));
        break;
    case SENSITIVITY:
        o->sensitivity = (enum lowkey_sensitivity)(chosen = choose(option, optarg, sensitivities));
        break;
    case QUERIES: return parse_number(option, optarg, 1, 1 << 20, &o->n_queries);
    case CLIP: return lowkey_parse_double("fit", option, optarg, 0, 1e30, &o->weight_clip);
    case FLOOR: return lowkey_parse_double("fit", option, optarg, 0, 1e30, &o->weight_floor);
    case UNITS: o->normalised_units = chosen = choose(option, optarg, units); break;
    case THREADS: return parse_number(option, optarg, 1, 256, &o->n_threads);
    case JSON: command->json = 1; break;
    default: return 2;
    }
    return chosen < 0 ? 2 : 0;
}

/* The first round, what the others change: the preset, wherever it stands; notes what else is given. */
static int take_preset(struct command *command, int o)
{
    if (o == PRESET && !lowkey_fit_preset(optarg, &command->options))
        return lowkey_command_usage("fit", "there is no preset '%s'", optarg);
    command->has_preset |= o == PRESET;
    command->has_budget |= o == BUDGET;
    command->has_side_option |= o >= 256 && o < OUT;
    command->has_bits |= o >= 256 && o < OUT && (o - 256) / 4 == BITS;
    return 0;
}

/* Widths that are given take the place of a budget. */
static int settle_preset(struct command *command)
{
    if (command->has_bits && command->has_budget)
        return lowkey_command_usage("fit", "--bits and --budget both say how many bits: choose one");
    if (!command->has_preset && (command->has_budget || !command->has_side_option))
        lowkey_fit_preset("4", &command->options);
    if (command->has_bits) command->options.budget = 0;
    return 0;
}

static int take_option(struct command *command, int o, int index)
{
    char option[40];
    snprintf(option, sizeof option, "--%s", command->table[index].name);
    if (o >= OUT) return parse_other(command, o, option);
    int bad = 0;
    for (int s = 0; s < 2 && !bad; s++)
        if ((o - 256) % 4 >> s & 1)
            bad = parse_side(&command->options.side[s], (enum side_option)((o - 256) / 4), option, optarg);
    return bad;
}

/* Two rounds: the preset first, so that all other options change it. */
static int parse(int argc, char **argv, struct command *command)
{
    make_table(command);
    for (int round = 0; round < 2; round++) {
        optind = 0;
        for (int o, index = 0; (o = lowkey_next_option("fit", argc, argv, command->table, &index)) != -1;) {
            if (o == '?') return 2;
            if (o == HELP) return fputs(usage, stdout), -1;
            const int bad = round == 0 ? take_preset(command, o) : take_option(command, o, index);
            if (bad) return bad;
        }
        if (round == 0 && settle_preset(command)) return 2;
    }
    if (!command->out) return lowkey_command_usage("fit", "--out is missing");
    if (optind == argc) return lowkey_command_usage("fit", "no activations are given");
    return lowkey_check_output("fit", "--out", command->out, argc - optind,
                               (const char *const *)(argv + optind));
}

int lowkey_fit_cmd(int argc, char **argv)
{
    struct command command = { .options = lowkey_fit_defaults() };
    command.options.n_threads = lowkey_cpu_count();
    const int bad = parse(argc, argv, &command);
    if (bad) return bad < 0 ? 0 : bad;
    lowkey_catch_interrupts();
    lowkey_keep_freed_memory();
    struct lowkey_fit_result *result;
    lowkey_error err;
    if (lowkey_fit(argc - optind, (const char *const *)(argv + optind), command.out, &command.options,
                   &result, &err))
        return lowkey_command_failed("fit", &err);
    lowkey_fit_report(result, command.json);
    lowkey_fit_result_free(result);
    return 0;
}
