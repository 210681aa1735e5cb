/* captures.h - the samples of one or several activation files as one body of tokens, in the order of their
 * hashes: what is computed from them does not depend on files, or on the order in them. Sinks are left out
 * of what is counted. */
#ifndef LOWKEY_CAPTURES_H
#define LOWKEY_CAPTURES_H

#include "formats/activations.h"

struct lowkey_sample {
    int file;
    int64_t offset; /* of its first token in the file */
    int64_t n_tokens; /* with its sinks */
    int64_t n_sinks; /* tokens of it that are left out: n_sinks, or all where it is shorter */
    int64_t start; /* number of its first token that is kept, of all that are */
    const unsigned char *sha256; /* [32] */
};

typedef struct lowkey_captures {
    int n_files, n_samples, n_sinks;
    int64_t n_tokens; /* kept */
    unsigned contents; /* streams that every file has: bit per enum lowkey_stream */
    unsigned some_contents; /* streams that some have */
    const struct lowkey_activations_info *info; /* of the first file; all share geometry and identity */
    struct lowkey_sample *samples; /* [n_samples], rising hashes */
    char *text_name, *text_sha256; /* those that differ, sorted, joined by ';' */
    lowkey_activations **files;
} lowkey_captures;

/* Samples first_sample..end_sample-1 of every file; end_sample 0: to its end. Refused: a file that has not
 * so many, files of different models, of different layers, with a sample in common; no token left. */
lowkey_status lowkey_captures_open(int n_paths, const char *const *paths, int first_sample, int end_sample,
                                   int n_sinks, lowkey_captures **out, lowkey_error *err);
void lowkey_captures_close(lowkey_captures *captures); /* takes NULL */

/* lowkey_activations_read by sample: its tokens first..first+n_tokens-1, counted with its sinks. One
 * thread at a time. */
lowkey_status lowkey_captures_read(const lowkey_captures *captures, int layer, enum lowkey_stream stream,
                                   int sample, int64_t first, int64_t n_tokens, int first_head, int n_heads,
                                   float *out, lowkey_error *err);

#endif
