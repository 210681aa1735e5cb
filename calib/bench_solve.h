/* bench_solve.h - what lowkey bench times of calibration. */
#ifndef LOWKEY_BENCH_SOLVE_H
#define LOWKEY_BENCH_SOLVE_H

/* Subcommands of lowkey bench: argv[0] is "solve" or "tables"; return the exit status. */
int lowkey_bench_solve(int argc, char **argv);
int lowkey_bench_tables(int argc, char **argv);

#endif
