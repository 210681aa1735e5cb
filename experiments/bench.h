/* bench.h - lowkey bench. */
#ifndef LOWKEY_BENCH_H
#define LOWKEY_BENCH_H

int lowkey_bench_cmd(int argc, char **argv);

#endif
