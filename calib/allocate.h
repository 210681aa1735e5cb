/* allocate.h - widths under a budget: which units get how many bits, so that the sum of their costs falls fastest. */
#ifndef LOWKEY_ALLOCATE_H
#define LOWKEY_ALLOCATE_H

#include "calib/channel_cost.h"

struct lowkey_unit { /* channels that have one width */
    int n_channels;
    double cost[LOWKEY_WIDEST_TABLE + 1]; /* by width, of all its channels */
};

/* Greedy over the lower convex hull of each unit's cost against width, from low bits up to high: the steps of the
 * greatest fall in cost per bit first, ties to the lower unit. total_bits: of all channels together; a step that does
 * not fit is passed over, and so are those of its unit that would follow. widths: [n_units]. Without such misfits at
 * the end, no other widths of as many bits cost less. */
lowkey_status lowkey_allocate(size_t n_units, const struct lowkey_unit *units, int low, int high, int64_t total_bits,
                              uint8_t *widths, lowkey_error *err);

#endif
