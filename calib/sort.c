/* sort.c - a radix sort: three passes over 11 bits each, stable, so that equal values keep their order on
 * every run. */
#include "calib/sort.h"

void lowkey_sort_keyed(size_t n, struct lowkey_keyed *items, struct lowkey_keyed *scratch)
{
    enum { BITS = 11, DIGITS = 1 << BITS, PASSES = 3 };
    size_t place[PASSES][DIGITS] = { { 0 } };
    for (size_t i = 0; i < n; i++)
        for (int pass = 0; pass < PASSES; pass++) place[pass][items[i].key >> (BITS * pass) & (DIGITS - 1)]++;
    struct lowkey_keyed *from = items, *to = scratch;
    for (int pass = 0; pass < PASSES; pass++) {
        size_t next = 0;
        for (int digit = 0; digit < DIGITS; digit++) {
            const size_t count = place[pass][digit];
            place[pass][digit] = next;
            next += count;
        }
        for (size_t i = 0; i < n; i++)
            to[place[pass][from[i].key >> (BITS * pass) & (DIGITS - 1)]++] = from[i];
        struct lowkey_keyed *swap = from;
        from = to;
        to = swap;
    }
    if (from != items) memcpy(items, from, n * sizeof *items);
}
