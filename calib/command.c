/* command.c - the manners of the subcommands. Results go to stdout, everything here to stderr. */
#include "calib/command.h"

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <malloc.h>
#include <math.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

int lowkey_command_failed(const char *command, const lowkey_error *err)
{
    fprintf(stderr, "lowkey %s: %s\n", command, err->message);
    return 1;
}

int lowkey_command_usage(const char *command, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "lowkey %s: ", command);
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "; see lowkey help %s\n", command);
    va_end(arguments);
    return 2;
}

int lowkey_next_option(const char *command, int argc, char **argv, const struct option *options, int *index)
{
    int has_help = 0, is_known = 0; /* what was wrong with a known one is its value */
    for (const struct option *o = options; o->name; o++) has_help |= o->val == 'h';
    opterr = 0;
    const int found = getopt_long(argc, argv, has_help ? ":h" : ":", options, index);
    if (found != '?' && found != ':') return found;
    for (const struct option *o = options; o->name; o++) is_known |= optopt && o->val == optopt;
    if (found == ':')
        lowkey_command_usage(command, "%s takes a value", argv[optind - 1]);
    else if (is_known)
        lowkey_command_usage(command, "%s: it takes no value", argv[optind - 1]);
    else if (optopt)
        lowkey_command_usage(command, "unknown option '-%c'", optopt);
    else
        lowkey_command_usage(command, "unknown option '%s'", argv[optind - 1]);
    return '?';
}

int lowkey_parse_int(const char *command, const char *option, const char *text, int64_t low, int64_t high,
                     int64_t *out)
{
    char *end;
    errno = 0;
    const long long value = strtoll(text, &end, 10);
    if (errno || end == text || *end || value < low || value > high)
        return lowkey_command_usage(command, "%s takes an integer from %lld to %lld, not '%s'", option,
                                    (long long)low, (long long)high, text);
    *out = value;
    return 0;
}

int lowkey_parse_double(const char *command, const char *option, const char *text, double low, double high,
                        double *out)
{
    char *end;
    const double value = strtod(text, &end);
    if (end == text || *end || !(value >= low && value <= high))
        return lowkey_command_usage(command, "%s takes a number from %g to %g, not '%s'", option, low, high,
                                    text);
    *out = value;
    return 0;
}

int lowkey_parse_range(const char *command, const char *option, const char *text, int *first, int *end)
{
    char *rest;
    errno = 0;
    const long low = strtol(text, &rest, 10);
    const char *second = rest + 1;
    if (!isdigit((unsigned char)*text) || *rest != ':' || !isdigit((unsigned char)*second))
        return lowkey_command_usage(command, "%s takes FIRST:END, not '%s'", option, text);
    const long high = strtol(second, &rest, 10);
    if (errno || *rest || low >= high || high > INT_MAX)
        return lowkey_command_usage(command, "%s takes FIRST:END with FIRST < END, not '%s'", option, text);
    *first = (int)low;
    *end = (int)high;
    return 0;
}

int lowkey_parse_list(const char *command, const char *option, const char *text, int **out, int *n)
{
    *n = 1;
    for (const char *c = text; *c; c++) *n += *c == ',';
    *out = malloc((size_t)*n * sizeof **out);
    const char *at = text;
    for (int i = 0; *out && i < *n; i++) {
        char *rest = (char *)at;
        const long value = isdigit((unsigned char)*at) ? strtol(at, &rest, 10) : -1;
        if (value < 0 || value > 65535 || *rest != (i + 1 < *n ? ',' : 0) || (i && value <= (*out)[i - 1])) {
            free(*out);
            *out = NULL;
            return lowkey_command_usage(command, "%s takes rising numbers joined by ',', not '%s'", option,
                                        text);
        }
        (*out)[i] = (int)value;
        at = rest + 1;
    }
    if (!*out) return lowkey_command_usage(command, "no memory for %s", option);
    return 0;
}

int lowkey_check_output(const char *command, const char *option, const char *out, int n_inputs,
                        const char *const *inputs)
{
    struct stat of_out, of_input;
    if (!*out) return lowkey_command_usage(command, "%s takes a file's name, not ''", option);
    if (stat(out, &of_out) != 0) return 0;
    for (int i = 0; i < n_inputs; i++)
        if (stat(inputs[i], &of_input) == 0 && of_input.st_dev == of_out.st_dev &&
            of_input.st_ino == of_out.st_ino)
            return lowkey_command_usage(command, "%s %s is the input %s", option, out, inputs[i]);
    return 0;
}

void lowkey_progress_start(struct lowkey_progress *progress, const char *what, double total)
{
    *progress = (struct lowkey_progress) {
        .what = what, .total = total, .start = lowkey_seconds(), .live = isatty(STDERR_FILENO)
    };
}

void lowkey_progress_at(struct lowkey_progress *progress, double done)
{
    const double now = lowkey_seconds();
    if (!progress->live || now - progress->shown < 0.2) return;
    progress->shown = now;
    const double share = progress->total > 0 ? fmin(done / progress->total, 1) : 1;
    const double elapsed = now - progress->start;
    fprintf(stderr, "\r%s %3.0f %%", progress->what, 100 * share);
    if (share > 0) fprintf(stderr, ", %.0f s left", elapsed / share - elapsed);
    fprintf(stderr, "\033[K");
    fflush(stderr);
}

void lowkey_progress_end(struct lowkey_progress *progress)
{
    if (progress->live && progress->shown > 0) fprintf(stderr, "\r\033[K");
    progress->live = 0;
}

static volatile sig_atomic_t interrupted;

static void on_interrupt(int number)
{
    (void)number;
    interrupted = 1;
}

void lowkey_catch_interrupts(void)
{
    struct sigaction action = { .sa_handler = on_interrupt, .sa_flags = (int)SA_RESETHAND };
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

int lowkey_interrupted(void)
{
    return interrupted;
}

void lowkey_keep_freed_memory(void)
{
#if defined(__GLIBC__)
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, 128 << 20);
#endif
}

double lowkey_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int lowkey_cpu_count(void)
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}
