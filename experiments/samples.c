/* samples.c - cutting tokens.h5 into pieces for capture and perplexity. */
#include "experiments/samples.h"

#include "runtime/error.h"

static int64_t count_in(const lowkey_tokens *tokens, int sequence, int length, int stride)
{
    const int64_t n = tokens->sequence_offsets[sequence + 1] - tokens->sequence_offsets[sequence];
    return n < length ? 0 : (n - length) / stride + 1;
}

int64_t lowkey_samples_count(const lowkey_tokens *tokens, int length, int stride)
{
    int64_t n = 0;
    for (int s = 0; s < tokens->n_sequences; s++) n += count_in(tokens, s, length, stride);
    return n;
}

int64_t lowkey_samples_start(const lowkey_tokens *tokens, int length, int stride, int64_t i)
{
    int s = 0;
    for (int64_t n; i >= (n = count_in(tokens, s, length, stride)); s++) i -= n;
    return tokens->sequence_offsets[s] + i * stride;
}

lowkey_status lowkey_samples_check(const char *path, const lowkey_tokens *tokens, int vocab_size,
                                   lowkey_error *err)
{
    if (tokens->vocab_size > vocab_size)
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "%s: tokens of a vocabulary of %d, the model's has %d: not its tokenizer (%s)",
                           path, tokens->vocab_size, vocab_size, tokens->tokenizer);
    return LOWKEY_OK;
}
