/* tune_checkpoint.h - the state of a run of lowkey tune on disk. A scratch file of this machine (its byte order), no format
 * for others to read. */
#ifndef LOWKEY_TUNE_CHECKPOINT_H
#define LOWKEY_TUNE_CHECKPOINT_H

#include "experiments/tune.h"

/* The file is whole, or the one before stays. */
lowkey_status lowkey_tune_checkpoint_write(const struct lowkey_tune_request *request,
                                           const struct lowkey_tune_state *state, lowkey_error *err);
/* Where there is no file, the state stays as it is. One of another model, text, quantizer or with other settings is refused
 * with both values, and so is one that is not what was written. */
lowkey_status lowkey_tune_checkpoint_read(const struct lowkey_tune_request *request,
                                          struct lowkey_tune_state *state, lowkey_error *err);

#endif
