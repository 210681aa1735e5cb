/* samples.h - how a text is cut into samples (capture) and windows (perplexity): pieces of one length inside the
 * sequences, each on its own. What is left at a sequence's end and is shorter than a piece is not used. */
#ifndef LOWKEY_SAMPLES_H
#define LOWKEY_SAMPLES_H

#include "formats/tokens.h"

/* Pieces of length tokens whose starts are stride apart within a sequence. */
int64_t lowkey_samples_count(const lowkey_tokens *tokens, int length, int stride);
/* Where piece number i, counted over all sequences, begins in tokens->tokens; i < count. */
int64_t lowkey_samples_start(const lowkey_tokens *tokens, int length, int stride, int64_t i);

/* Can the model read these tokens? */
lowkey_status lowkey_samples_check(const char *path, const lowkey_tokens *tokens, int vocab_size,
                                   lowkey_error *err);

#endif
