/* blas_core.c - see blas_core.h. The kernels are chosen when the library is loaded, by the environment or by CPUID, and
 * cannot be changed later: hence another exec of the same program. */
#include "experiments/blas_core.h"

#include <cblas.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void lowkey_blas_core_choose(char **argv)
{
#if defined(__x86_64__)
    static const char variable[] = "OPENBLAS_CORETYPE";
    const char *better = NULL;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) better = "Haswell";
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512cd"))
        better = "SkylakeX";
    if (!better || getenv(variable) || strcmp(openblas_get_corename(), "Prescott") != 0) return;
    char program[4096];
    const ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (length < 0) return;
    program[length] = 0;
    setenv(variable, better, 1);
    execv(program, argv);
    unsetenv(variable); /* it could not be started: slower, but right */
#else
    (void)argv;
#endif
}
