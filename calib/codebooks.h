/* codebooks.h - codebooks that need no data: on [-1, 1], both ends in use. */
#ifndef LOWKEY_CODEBOOKS_H
#define LOWKEY_CODEBOOKS_H

/* 2^bits values, 1 to 5 bits, rising: equal steps from -1 to 1. */
void lowkey_uniform_codebook(int bits, double *values);

/* 2^bits values, 2 to 5 bits, rising: quantiles of a normal distribution scaled to [-1, 1] with an exact
 * 0, as QLoRA (arXiv 2305.14314) has them: equal steps of probability, 2^(bits-1) of them above 0 and one
 * less below. */
void lowkey_normal_float_codebook(int bits, double *values);

#endif
