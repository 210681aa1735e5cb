/* bench_cmd.c - lowkey bench WHAT: one table of the things that are timed. Each checks what it times first. */
#include "experiments/bench.h"

#include <getopt.h>
#include <stdio.h>
#include <string.h>

#include "calib/bench_solve.h"
#include "calib/command.h"
#include "experiments/bench_layout.h"

static const char usage[] =
    "usage: lowkey bench WHAT [OPTION]...\n"
    "\n"
    "  layout   decode loops over candidate page layouts, AVX2 and AVX-512 (formats/README.md, \"Why the page looks so\")\n"
    "  solve    one codebook over many weighted values: [--points N] [--centroids K] [--seed S] [--repeat N]\n"
    "           [--input X.f32 [--weights W.f32]], raw f32 files; 2^22 points, 16 centroids unless said\n"
    "  tables   all channels of a layer: [--channels C] [--points TOKENS] [--centroids K] [--threads N];\n"
    "           4,096 channels of 32,768 tokens, 4 centroids unless said\n"
    "\n"
    "  --json   one JSON object instead of a table\n";

static int bench_layout(int argc, char **argv)
{
    static const struct option options[] = { { "json", no_argument, NULL, 'j' }, { 0 } };
    int json = 0;
    for (int option; (option = lowkey_next_option("bench", argc, argv, options, NULL)) != -1;) {
        if (option != 'j') return 2;
        json = 1;
    }
    if (optind < argc) return lowkey_command_usage("bench", "layout takes no '%s'", argv[optind]);
    return lowkey_bench_layout(json);
}

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
} benches[] = {
    { "layout", bench_layout },
    { "solve", lowkey_bench_solve },
    { "tables", lowkey_bench_tables },
};

int lowkey_bench_cmd(int argc, char **argv)
{
    if (argc < 2) return lowkey_command_usage("bench", "what?");
    if (strcmp(argv[1], "--help") == 0) return fputs(usage, stdout), 0;
    for (size_t i = 0; i < sizeof benches / sizeof benches[0]; i++)
        if (strcmp(benches[i].name, argv[1]) == 0) return benches[i].run(argc - 1, argv + 1);
    return lowkey_command_usage("bench", "there is no '%s'", argv[1]);
}
