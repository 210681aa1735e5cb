/* decoder.h - the forward pass of a Llama-like model (model.h5) on BLAS: RMSNorm, grouped attention through
 * attention_step.h, SwiGLU; optional bias and QK-norm, tied or separate output. Sums of BLAS are f32.
 * Results do not depend on the number of threads, and on the cut into chunks only by rounding. */
#ifndef LOWKEY_DECODER_H
#define LOWKEY_DECODER_H

#include "experiments/lm/attention_step.h"
#include "formats/model.h"

typedef struct lowkey_decoder lowkey_decoder;

struct lowkey_decoder_config {
    const lowkey_model *model; /* borrowed, as the attention is */
    struct lowkey_attention attention;
    int n_layers; /* run only the first so many; 0: all */
    int max_chunk; /* tokens a call takes at most; 0: 1024 */
    int n_threads; /* 0: 1 */
};

lowkey_status lowkey_decoder_create(const struct lowkey_decoder_config *config, lowkey_decoder **out,
                                    lowkey_error *err);
void lowkey_decoder_free(lowkey_decoder *decoder); /* takes NULL */
int lowkey_decoder_max_chunk(const lowkey_decoder *decoder);
const lowkey_model *lowkey_decoder_model(const lowkey_decoder *decoder);

/* Another sequence begins. */
lowkey_status lowkey_decoder_reset(lowkey_decoder *decoder, lowkey_error *err);

/* The sequence's next n_tokens tokens, 1..max_chunk. hidden: [n_tokens][hidden_size], after the final norm, if wanted. */
lowkey_status lowkey_decoder_forward(lowkey_decoder *decoder, const int32_t *tokens, int n_tokens,
                                     float *hidden, lowkey_error *err);

/* logits: [n_rows][vocab_size] of hidden [n_rows][hidden_size]. */
void lowkey_decoder_logits(const lowkey_decoder *decoder, const float *hidden, int n_rows, float *logits);

#endif
