/* command.h - what every subcommand shares: how it complains, shows progress, is interrupted, reads numbers. */
#ifndef LOWKEY_COMMAND_H
#define LOWKEY_COMMAND_H

#include <stdint.h>

#include "runtime/lowkey.h"

/* Print "lowkey COMMAND: message" on stderr and return exit status 1. */
int lowkey_command_failed(const char *command, const lowkey_error *err);
/* Print "lowkey COMMAND: message; see lowkey help COMMAND" on stderr and return exit status 2. */
int lowkey_command_usage(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The next option of a command line, as getopt_long has it (-1: no more); -h is --help where the table has one as 'h'. A
 * wrong one is complained of in one line: '?', and the exit status is 2. index: its place in the table, if wanted. */
struct option;
int lowkey_next_option(const char *command, int argc, char **argv, const struct option *options, int *index);

/* Whole-string numbers within [low, high]; 0 good, else the usage complaint is printed and 2 returned. */
int lowkey_parse_int(const char *command, const char *option, const char *text, int64_t low, int64_t high, int64_t *out);
int lowkey_parse_double(const char *command, const char *option, const char *text, double low, double high, double *out);
/* FIRST:END, 0 <= first < end. */
int lowkey_parse_range(const char *command, const char *option, const char *text, int *first, int *end);
/* A,B,... rising, 0..65535. *out is to be freed. */
int lowkey_parse_list(const char *command, const char *option, const char *text, int **out, int *n);

/* Refuse an output that is one of the inputs, by whatever name, and an empty name: writing would replace the input. */
int lowkey_check_output(const char *command, const char *option, const char *out, int n_inputs, const char *const *inputs);

/* Progress with an ETA on stderr; silent where stderr is no terminal. */
struct lowkey_progress {
    const char *what;
    double total, start, shown;
    int live;
};
void lowkey_progress_start(struct lowkey_progress *progress, const char *what, double total);
void lowkey_progress_at(struct lowkey_progress *progress, double done);
void lowkey_progress_end(struct lowkey_progress *progress);

/* SIGINT and SIGTERM set a flag from here on, so that long work ends tidily with LOWKEY_ECANCELLED; a second
 * signal kills. */
void lowkey_catch_interrupts(void);
int lowkey_interrupted(void);

/* Let malloc keep what is freed, up to some 100 MiB, instead of giving it back and asking for it again: a fifth of
 * the time of fitting many channels. */
void lowkey_keep_freed_memory(void);

double lowkey_seconds(void); /* monotonic clock */
int lowkey_cpu_count(void);  /* CPUs this process may run on */

#endif
