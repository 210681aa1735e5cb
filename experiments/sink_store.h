/* sink_store.h - the first tokens of a sequence in 16 bits, around a store that knows no sinks. */
#ifndef LOWKEY_SINK_STORE_H
#define LOWKEY_SINK_STORE_H

#include "experiments/lm/store.h"

/* Tokens below n_sinks are seen rounded to f16 (beyond it saturates). What the inner store is handed in their place is the
 * first token behind them, if the same step has one: formats that share a range over tokens would else spread it over
 * sinks, which are far larger than what they keep. The rest is as the inner store has it. */
struct lowkey_sink_store {
    struct lowkey_store inner;
    int n_sinks;
};

struct lowkey_store lowkey_sink_store_interface(struct lowkey_sink_store *sinks); /* borrowed */

#endif
