/* trellis.h - the search for the codes of a trellis, one head of one token at a time; for the packing kernels. */
#ifndef LOWKEY_TRELLIS_H
#define LOWKEY_TRELLIS_H

#include "formats/block.h"
#include "formats/side.h"

enum { LOWKEY_TRELLIS_LANES = 16 }; /* survivors at most: four of each state */

struct lowkey_trellis_choices { /* of the survivors at one row; parent: which of those at the row behind it goes on */
    uint8_t code[LOWKEY_TRELLIS_LANES], parent[LOWKEY_TRELLIS_LANES];
};

struct lowkey_trellis_scratch {
    float *target; /* [head_dim][LOWKEY_TRELLIS_LANES] */
    struct lowkey_trellis_choices *choices; /* [head_dim] */
};
struct lowkey_trellis_scratch lowkey_trellis_take(struct lowkey_block *block, const struct lowkey_side *side);

/* codes[r]: row r's. x: [head_dim] by row. formats/README.md, "Packing", "With a trellis". */
void lowkey_trellis_search(const struct lowkey_side *side, int head, const float *x,
                           const struct lowkey_trellis_scratch *scratch, uint8_t *codes);

#endif
