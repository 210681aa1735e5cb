/* trellis_oracle.h - the search of formats/README.md, "With a trellis", a second time: one survivor after the other, by
 * the words of the document, sharing no code with kernels/ or formats/page.h, and slow. */
#ifndef LOWKEY_TEST_TRELLIS_ORACLE_H
#define LOWKEY_TEST_TRELLIS_ORACLE_H

#include "runtime/lowkey.h"

/* Codes and decoded values [head_dim] by channel of the token x[head_dim] of one head. */
void lowkey_oracle_trellis(const lowkey_side_desc *side, int head, int head_dim, const float *x,
                           unsigned *codes, float *values);

/* The value at a row of a token with these codes, [head_dim] by channel of the head. */
float lowkey_oracle_trellis_value(const lowkey_side_desc *side, int head, int head_dim, const unsigned *codes,
                                  int row);

#endif
