/* eval_windows.h - which windows of a text are evaluated. */
#ifndef LOWKEY_EVAL_WINDOWS_H
#define LOWKEY_EVAL_WINDOWS_H

#include "formats/tokens.h"

struct lowkey_window_choice {
    int64_t length; /* tokens of a window */
    int64_t first, end; /* windows first..end-1 may be taken; end 0: to the text's end */
    int64_t n_first; /* the first so many of them; 0: all */
    int64_t n_spread; /* so many of them, number (2 i + 1) n / (2 n_spread) of n; 0: not spread */
};

/* windows: [n] rising numbers as experiments/samples.h counts pieces of that length without overlap; to be freed. path: of
 * the text, for messages. */
lowkey_status lowkey_choose_windows(const char *path, const lowkey_tokens *tokens,
                                    const struct lowkey_window_choice *choice, int64_t **windows, int *n,
                                    lowkey_error *err);

#endif
