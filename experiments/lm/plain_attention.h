/* plain_attention.h - attention in f32 over keys and values as they are, or over what a store gives back in their place
 * (a packed cache, another format). */
#ifndef LOWKEY_PLAIN_ATTENTION_H
#define LOWKEY_PLAIN_ATTENTION_H

#include "experiments/lm/attention_step.h"
#include "experiments/lm/store.h"
#include "formats/model.h"

typedef struct lowkey_plain_attention lowkey_plain_attention;

/* Room for one sequence of max_tokens in the model's first n_layers layers. The model is borrowed, as is what stands
 * behind the store; NULL: keys and values as they are. Results do not depend on n_threads.
 *
 * Each step's tokens are put into the store once. Where the store has exact_from, a query sees the tokens from there on
 * as they were, rounded to f16 (a window is kept in 16 bits; beyond f16 saturates), and older ones as stored, for keys
 * and values each. exact_from must not fall as the position rises. */
lowkey_status lowkey_plain_attention_create(const lowkey_model *model, int n_layers, int max_tokens,
                                            int n_threads, const struct lowkey_store *store,
                                            lowkey_plain_attention **out, lowkey_error *err);
void lowkey_plain_attention_free(lowkey_plain_attention *attention); /* takes NULL */

/* As the decoder wants it; lives as long as the object. Its reset resets the store too. */
struct lowkey_attention lowkey_plain_attention_interface(lowkey_plain_attention *attention);

#endif
