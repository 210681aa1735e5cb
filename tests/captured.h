/* captured.h - activation files for the C tests of calibration, through the project's own writer. */
#ifndef LOWKEY_TEST_CAPTURED_H
#define LOWKEY_TEST_CAPTURED_H

#include "formats/activations.h"

enum { CAPTURED_SAMPLES = 3, CAPTURED_STREAMS = 8 };

struct captured {
    lowkey_layer_desc layer; /* index 1 of 2 */
    double inv_freq[128];
    int lengths[CAPTURED_SAMPLES];
    int n_tokens;
    float *rows[CAPTURED_STREAMS]; /* of the streams that are there: [n_tokens][heads][head_dim] */
    unsigned char sha256[CAPTURED_SAMPLES][32];
    unsigned contents;
    char path[64]; /* in f32 */
};

/* Fill with seeded numbers and write to a temporary file. Hashes fall with the sample's number, so that
 * the order of calibration is the reverse of the file's. */
void captured_make(struct captured *captured, const lowkey_layer_desc *geometry, const int *lengths,
                   unsigned contents, unsigned seed);
void captured_write(struct captured *captured); /* again, after rows were changed */
void captured_free(struct captured *captured);

#endif
