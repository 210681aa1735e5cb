/* tuning.h - a tiny model, a text for it, and a quantizer of static tables that fits its keys and values: what tuning starts
 * from in tests. */
#ifndef LOWKEY_TEST_TUNING_H
#define LOWKEY_TEST_TUNING_H

#include "experiments/tune.h"
#include "tests/tiny_model.h"

enum { TUNING_WINDOW = 70, TUNING_WINDOWS = 12 };

struct tuning_choice {
    struct tiny_shape shape;
    int bits[2][4]; /* keys, values: channel c has bits[..][c % 4] */
    int feedback, trellis, n_sinks;
};

struct tuning {
    lowkey_model *model;
    lowkey_tokens *tokens; /* one sequence of TUNING_WINDOWS windows */
    lowkey_quantizer *quantizer;
    struct lowkey_fit_record record; /* reports hold what the tables' steps say of errors */
};

/* Fails the test where it cannot be made. */
struct tuning tuning_make(const struct tuning_choice *choice);
void tuning_free(struct tuning *tuning);

struct tuning_choice tuning_plain(void); /* two layers, mixed widths, a sink */

#endif
