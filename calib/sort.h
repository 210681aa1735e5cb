/* sort.h - floats in rising order, each with 32 bits that go with it. */
#ifndef LOWKEY_SORT_H
#define LOWKEY_SORT_H

#include <stdint.h>
#include <string.h>

struct lowkey_keyed {
    uint32_t key; /* lowkey_float_key of the value */
    uint32_t load; /* goes with it: a weight's bits, an index */
};

/* The order of floats as unsigned integers; -0 and 0 are the same. */
static inline uint32_t lowkey_float_key(float value)
{
    uint32_t bits;
    value += 0.0f; /* -0 becomes 0 */
    memcpy(&bits, &value, sizeof bits);
    return bits ^ ((0u - (bits >> 31)) | 0x80000000u); /* no branch: signs are random */
}

static inline float lowkey_key_float(uint32_t key)
{
    const uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Sort by key, equal keys in the order they came. scratch: [n]. */
void lowkey_sort_keyed(size_t n, struct lowkey_keyed *items, struct lowkey_keyed *scratch);

#endif
