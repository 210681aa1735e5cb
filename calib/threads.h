/* threads.h - a lowkey_parallel_for of plain threads, for the commands (the library starts none itself). */
#ifndef LOWKEY_THREADS_H
#define LOWKEY_THREADS_H

#include "runtime/lowkey.h"

/* user: pointer to an int, the number of threads (the caller's included, >= 1). Indices are handed out one by one;
 * threads live for the call. If no thread can be started, the caller does all the work. */
lowkey_parallel_for lowkey_threads_run;

#endif
