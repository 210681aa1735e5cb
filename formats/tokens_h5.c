/* tokens_h5.c - tokens.h5: the token ids of a text, read whole (4 bytes a token) and written. */
#include "formats/tokens.h"

#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "formats/file_h5.h"
#include "runtime/error.h"

static const char *const objects[] = { "tokens", "sequence_offsets", NULL };
static const char *const attributes[] = { "tokenizer",   "tokenizer_sha256", "vocab_size", "text_name",
                                          "text_sha256", "add_bos",          NULL };

static lowkey_status read_attributes(lowkey_h5 *file, lowkey_tokens *tokens, lowkey_error *err)
{
    LOWKEY_TRY(lowkey_h5_get_string(file, "/", "tokenizer", &tokens->tokenizer, err));
    LOWKEY_TRY(lowkey_h5_get_sha256(file, "/", "tokenizer_sha256", tokens->tokenizer_sha256, err));
    LOWKEY_TRY(lowkey_h5_get_small(file, "/", "vocab_size", 1, INT32_MAX, &tokens->vocab_size, err));
    LOWKEY_TRY(lowkey_h5_get_string(file, "/", "text_name", &tokens->text_name, err));
    LOWKEY_TRY(lowkey_h5_get_sha256(file, "/", "text_sha256", tokens->text_sha256, err));
    return lowkey_h5_get_small(file, "/", "add_bos", 0, 1, &tokens->add_bos, err);
}

static lowkey_status read_datasets(lowkey_h5 *file, lowkey_tokens *tokens, lowkey_error *err)
{
    int64_t n_offsets = -1, n = -1;
    LOWKEY_TRY(lowkey_h5_get_shape(file, "/tokens", 1, 1, &n, err));
    LOWKEY_TRY(lowkey_h5_get_shape(file, "/sequence_offsets", 1, 1, &n_offsets, err));
    if (n_offsets < 2 || n_offsets > INT_MAX)
        return lowkey_h5_fail(file, err, "/sequence_offsets: expected 2 to %d offsets, found %" PRId64,
                              INT_MAX, n_offsets);
    tokens->n_tokens = n;
    tokens->n_sequences = (int)n_offsets - 1;
    tokens->tokens = malloc((size_t)n * sizeof *tokens->tokens);
    tokens->sequence_offsets = malloc((size_t)n_offsets * sizeof *tokens->sequence_offsets);
    if (!tokens->tokens || !tokens->sequence_offsets)
        return lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory for %" PRId64 " tokens", lowkey_h5_path(file),
                           n);
    LOWKEY_TRY(lowkey_h5_read_ints(file, "/tokens", 1, &n, 0, tokens->vocab_size - 1, tokens->tokens,
                                   sizeof *tokens->tokens, err));
    LOWKEY_TRY(lowkey_h5_read_ints(file, "/sequence_offsets", 1, &n_offsets, 0, n, tokens->sequence_offsets,
                                   sizeof *tokens->sequence_offsets, err));
    return lowkey_h5_blame(
        file,
        lowkey_offsets_check("/sequence_offsets", tokens->sequence_offsets, tokens->n_sequences, n, err),
        err);
}

lowkey_status lowkey_tokens_open(const char *path, lowkey_tokens **out, lowkey_error *err)
{
    lowkey_h5 *file;
    *out = NULL;
    LOWKEY_TRY(lowkey_h5_open(path, "tokens", &file, err));
    lowkey_tokens *tokens = calloc(1, sizeof *tokens);
    lowkey_status status = tokens ? LOWKEY_OK : lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory", path);
    if (!status) status = lowkey_h5_refuse_others(file, "/", objects, attributes, err);
    if (!status) status = read_attributes(file, tokens, err);
    if (!status) status = read_datasets(file, tokens, err);
    lowkey_h5_close(file);
    if (status)
        lowkey_tokens_free(tokens);
    else
        *out = tokens;
    return status;
}

static lowkey_status check(const lowkey_tokens *tokens, lowkey_error *err)
{
    if (tokens->n_tokens < 1 || tokens->n_sequences < 1 || tokens->n_sequences > tokens->n_tokens ||
        tokens->vocab_size < 1)
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "tokens: expected at least 1 token, sequence and entry of the vocabulary, found "
                           "%" PRId64 ", %d, %d",
                           tokens->n_tokens, tokens->n_sequences, tokens->vocab_size);
    for (int64_t i = 0; i < tokens->n_tokens; i++)
        if (tokens->tokens[i] < 0 || tokens->tokens[i] >= tokens->vocab_size)
            return lowkey_fail(err, LOWKEY_EINVAL, "tokens[%" PRId64 "]: expected 0..%d, found %d", i,
                               tokens->vocab_size - 1, tokens->tokens[i]);
    return lowkey_offsets_check("sequence_offsets", tokens->sequence_offsets, tokens->n_sequences,
                                tokens->n_tokens, err);
}

static lowkey_status write_all(lowkey_h5 *file, const lowkey_tokens *tokens, lowkey_error *err)
{
    LOWKEY_TRY(lowkey_h5_put_string(file, "/", "tokenizer", tokens->tokenizer, err));
    LOWKEY_TRY(lowkey_h5_put_sha256(file, "/", "tokenizer_sha256", tokens->tokenizer_sha256, err));
    LOWKEY_TRY(lowkey_h5_put_int(file, "/", "vocab_size", tokens->vocab_size, err));
    LOWKEY_TRY(lowkey_h5_put_string(file, "/", "text_name", tokens->text_name, err));
    LOWKEY_TRY(lowkey_h5_put_sha256(file, "/", "text_sha256", tokens->text_sha256, err));
    LOWKEY_TRY(lowkey_h5_put_int(file, "/", "add_bos", tokens->add_bos, err));
    LOWKEY_TRY(lowkey_h5_write_ints(file, "/tokens", 1, &tokens->n_tokens, tokens->tokens,
                                    sizeof *tokens->tokens, 1, err));
    return lowkey_h5_write_ints(file, "/sequence_offsets", LOWKEY_DIMS((int64_t)tokens->n_sequences + 1),
                                tokens->sequence_offsets, sizeof *tokens->sequence_offsets, 1, err);
}

static int same(const lowkey_tokens *a, const lowkey_tokens *b)
{
    return a->n_tokens == b->n_tokens && a->n_sequences == b->n_sequences && a->vocab_size == b->vocab_size &&
           a->add_bos == b->add_bos && strcmp(a->tokenizer, b->tokenizer) == 0 &&
           strcmp(a->text_name, b->text_name) == 0 &&
           memcmp(a->tokenizer_sha256, b->tokenizer_sha256, 32) == 0 &&
           memcmp(a->text_sha256, b->text_sha256, 32) == 0 &&
           memcmp(a->tokens, b->tokens, (size_t)a->n_tokens * sizeof *a->tokens) == 0 &&
           memcmp(a->sequence_offsets, b->sequence_offsets,
                  ((size_t)a->n_sequences + 1) * sizeof *a->sequence_offsets) == 0;
}

static lowkey_status verify(void *arg, const char *temporary_path, lowkey_error *err)
{
    lowkey_tokens *found;
    LOWKEY_TRY(lowkey_tokens_open(temporary_path, &found, err));
    const int good = same(arg, found);
    lowkey_tokens_free(found);
    return good ? LOWKEY_OK
                : lowkey_fail(err, LOWKEY_EIO, "%s: reads back as other tokens than were written",
                              temporary_path);
}

lowkey_status lowkey_tokens_write(const char *path, const lowkey_tokens *tokens, lowkey_error *err)
{
    lowkey_h5 *file;
    LOWKEY_TRY(check(tokens, err));
    LOWKEY_TRY(lowkey_h5_create(path, "tokens", &file, err));
    const lowkey_status status = write_all(file, tokens, err);
    if (!status) return lowkey_h5_commit(file, verify, (void *)(uintptr_t)tokens, err);
    lowkey_h5_abandon(file);
    return status;
}

void lowkey_tokens_free(lowkey_tokens *tokens)
{
    if (!tokens) return;
    free(tokens->tokens);
    free(tokens->sequence_offsets);
    free(tokens->tokenizer);
    free(tokens->text_name);
    free(tokens);
}
