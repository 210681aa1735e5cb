/* reference_states.h - the final hidden states of a window with keys and values in f32, kept in a folder: half of the time
 * of evaluating one format is the reference's pass, which is the same each time. Scratch files of this machine (its byte
 * order, its BLAS), for this version of the decoder; no format for others to read. */
#ifndef LOWKEY_REFERENCE_STATES_H
#define LOWKEY_REFERENCE_STATES_H

#include "formats/model.h"
#include "formats/tokens.h"

struct lowkey_reference_window { /* all borrowed */
    const char *folder;
    const lowkey_model *model;
    const lowkey_tokens *tokens;
    int window; /* tokens */
    int64_t index;
};

/* hidden: [window][hidden_size]. found 0: there is no such file. One that is of another model, text or window, or whose
 * content is not what was written, is refused by name. */
lowkey_status lowkey_reference_read(const struct lowkey_reference_window *of, float *hidden, int *found,
                                    lowkey_error *err);
/* Makes the folder where it is not there; the file is whole or not there. */
lowkey_status lowkey_reference_write(const struct lowkey_reference_window *of, const float *hidden,
                                     lowkey_error *err);

#endif
