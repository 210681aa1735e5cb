/* tokens.h - token ids of a text (tokens.h5). */
#ifndef LOWKEY_TOKENS_H
#define LOWKEY_TOKENS_H

#include <stdint.h>

#include "runtime/lowkey.h"

typedef struct lowkey_tokens { /* read whole: 4 bytes a token */
    int64_t n_tokens;
    int32_t *tokens;           /* [n_tokens], each 0..vocab_size-1 */
    int n_sequences;
    int64_t *sequence_offsets; /* [n_sequences + 1] */
    int vocab_size, add_bos;
    char *tokenizer, *text_name;
    unsigned char tokenizer_sha256[32], text_sha256[32];
} lowkey_tokens;

lowkey_status lowkey_tokens_open(const char *path, lowkey_tokens **out, lowkey_error *err);
lowkey_status lowkey_tokens_write(const char *path, const lowkey_tokens *tokens, lowkey_error *err);
void lowkey_tokens_free(lowkey_tokens *tokens);

#endif
