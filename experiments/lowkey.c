/* lowkey.c - the command: one table of subcommands, each implemented in the folder that does the work. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "calib/command.h"
#include "calib/fit.h"
#include "experiments/bench.h"
#include "experiments/blas_core.h"
#include "experiments/commands.h"
#include "experiments/files.h"
#include "formats/file_h5.h"
#include "runtime/lowkey.h"

static const struct subcommand {
    const char *name;
    int (*run)(int argc, char **argv); /* argv[0] is the subcommand's name; returns the exit status */
    const char *summary;
} subcommands[] = {
    { "capture", lowkey_capture_cmd, "run text through a model and write its keys, values and queries" },
    { "fit", lowkey_fit_cmd, "fit a quantizer to captured activations" },
    { "tune", lowkey_tune_cmd, "tune a quantizer's tables on what its errors do to a model's predictions" },
    { "error", lowkey_error_cmd, "what formats do to attention, from captured activations" },
    { "cost", lowkey_cost_cmd, "what formats will cost in loss, predicted from captured gradients" },
    { "eval", lowkey_eval_cmd, "perplexity of a model on a text" },
    { "bench", lowkey_bench_cmd, "time codebook solvers, kernels, page layouts" },
    { "inspect", lowkey_inspect_cmd, "show what is in any of our files" },
    { "check", lowkey_check_cmd, "validate any of our files" },
    { 0 },
};

static void print_usage(FILE *to)
{
    fprintf(to, "usage: lowkey COMMAND [OPTION]...\n\n");
    for (const struct subcommand *s = subcommands; s->name; s++) fprintf(to, "  %-10s %s\n", s->name, s->summary);
    fprintf(to, "  %-10s %s\n\nExit status: 0 good, 1 failed, 2 wrong usage.\n", "help", "lowkey help COMMAND: what a command takes");
}

static const struct subcommand *find(const char *name)
{
    const struct subcommand *s = subcommands;
    while (s->name && strcmp(s->name, name) != 0) s++;
    return s->name ? s : NULL;
}

/* Refuse files on which HDF5 itself crashes, before a command opens them. An argument may be FILE, --option=FILE or
 * LABEL=FILE. */
static int probe_files(const char *command, int argc, char **argv)
{
    lowkey_error err;
    for (int i = 1; i < argc; i++) {
        const char *equals = strchr(argv[i], '=');
        if (lowkey_h5_probe(argv[i], &err) || (equals && lowkey_h5_probe(equals + 1, &err)))
            return lowkey_command_failed(command, &err);
    }
    return 0;
}

/* Where one of them is closed, the next file to be opened would take its place, and what is printed would go into that
 * file. What stands there instead cannot be used either, so that printing fails. */
static void fill_standard_streams(void)
{
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY) != fd) _exit(1);
}

/* Results that do not arrive are a failure, whatever the command thought. */
static int check_stdout(const char *command, int exit_status)
{
    if (fflush(stdout) == 0 && !ferror(stdout)) return exit_status;
    if (exit_status == 0) fprintf(stderr, "lowkey %s: stdout: cannot write: %s\n", command, strerror(errno));
    return exit_status ? exit_status : 1;
}

int main(int argc, char **argv)
{
    fill_standard_streams();
    lowkey_blas_core_choose(argv);
    if (argc < 2) return print_usage(stderr), 2;
    if (strcmp(argv[1], "--version") == 0)
        return printf("lowkey %s %s\n", lowkey_version(), lowkey_commit()), check_stdout("--version", 0);
    const int asks_help = strcmp(argv[1], "help") == 0 || strcmp(argv[1], "--help") == 0;
    if (asks_help && argc == 2) return print_usage(stdout), check_stdout("help", 0);
    const struct subcommand *s = find(argv[asks_help ? 2 : 1]);
    if (!s) return fprintf(stderr, "lowkey: no command '%s'; see lowkey help\n", argv[asks_help ? 2 : 1]), 2;
    if (asks_help) return check_stdout(s->name, s->run(2, (char *[]){ argv[2], (char *)"--help", NULL }));
    const int looks_itself = s->run == lowkey_check_cmd; /* one bad file is no reason to leave out the others */
    if (!looks_itself && probe_files(s->name, argc - 1, argv + 1)) return 1;
    return check_stdout(s->name, s->run(argc - 1, argv + 1));
}
