/* plain_attention.h - attention over unquantized f32 keys and values: what a packed cache is compared with. */
#ifndef LOWKEY_PLAIN_ATTENTION_H
#define LOWKEY_PLAIN_ATTENTION_H

#include "experiments/lm/attention_step.h"
#include "formats/model.h"

typedef struct lowkey_plain_attention lowkey_plain_attention;

/* Room for one sequence of max_tokens in the model's first n_layers layers. The model is borrowed. Results do not
 * depend on n_threads. */
lowkey_status lowkey_plain_attention_create(const lowkey_model *model, int n_layers, int max_tokens,
                                            int n_threads, lowkey_plain_attention **out, lowkey_error *err);
void lowkey_plain_attention_free(lowkey_plain_attention *attention); /* takes NULL */

/* As the decoder wants it; lives as long as the object. */
struct lowkey_attention lowkey_plain_attention_interface(lowkey_plain_attention *attention);

#endif
