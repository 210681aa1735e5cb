/* activations_parts.h - what reader, writer and tests of activations.h5 share. */
#ifndef LOWKEY_ACTIVATIONS_PARTS_H
#define LOWKEY_ACTIVATIONS_PARTS_H

#include "formats/activations.h"

/* The attribute contents: a mask of streams, as text of names joined by one space. */
enum { LOWKEY_CONTENTS_SIZE = 96 };
lowkey_status lowkey_contents_check(unsigned contents, lowkey_error *err);
void lowkey_contents_print(unsigned contents, char text[LOWKEY_CONTENTS_SIZE]);
lowkey_status lowkey_contents_parse(const char *text, unsigned *contents, lowkey_error *err);

enum { LOWKEY_CONTENTS_GRADS = 1u << LOWKEY_KEY_GRAD | 1u << LOWKEY_VALUE_GRAD };

/* A sum over elements first..first+n-1 of a stream [tokens][heads][head_dim], in which every element's place
 * counts: sums of parts add up to the sum of the whole, in any order. */
uint64_t lowkey_rows_checksum(const float *rows, size_t first, size_t n);

#endif
