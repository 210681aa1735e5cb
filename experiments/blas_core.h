/* blas_core.h - OpenBLAS picks its kernels by a list of processors; one that is newer than the list gets SSE3 kernels,
 * five times slower than AVX-512. */
#ifndef LOWKEY_BLAS_CORE_H
#define LOWKEY_BLAS_CORE_H

/* Where OpenBLAS chose less than this CPU can do, start the program anew with OPENBLAS_CORETYPE set; else, or where
 * that variable is set already, return. argv: main's. */
void lowkey_blas_core_choose(char **argv);

#endif
