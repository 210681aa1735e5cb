/* quantizer_parts.h - how the quantizer object is put together, for quantizer.c, quantizer_check.c and side.c alone:
 * a block of arrays measured and then filled by the same code, the checks, and the layout by rows. */
#ifndef LOWKEY_QUANTIZER_PARTS_H
#define LOWKEY_QUANTIZER_PARTS_H

#include "formats/side.h"

/* One block that many arrays are taken from. Code that takes runs twice: with base NULL it measures and gets NULL,
 * with the block it gets addresses. */
struct lowkey_block {
    char *base;
    size_t used; /* bytes taken, with padding */
    size_t bytes; /* of base */
    int overflow; /* more were measured than size_t counts */
};

/* count * bytes_each bytes, 64-byte aligned; NULL while measuring. */
void *lowkey_block_take(struct lowkey_block *block, size_t count, size_t bytes_each);

/* What of a side is key or value, for code that serves both: which is 0 for keys, 1 for values. */
const lowkey_side_desc *lowkey_side_of(const lowkey_layer_desc *layer, int which);
int lowkey_side_head_dim(const lowkey_layer_desc *layer, int which);

/* Before copying: scalars and required pointers of a layer whose geometry is checked, so that every array's size is
 * known. */
lowkey_status lowkey_layer_check_shape(const lowkey_layer_desc *layer, lowkey_error *err);
/* After copying and filling: every value. Messages begin "layer N key: " or "layer N value: ". */
lowkey_status lowkey_layer_check_values(const lowkey_layer_desc *layer, lowkey_error *err);

/* Lay a checked layer out by rows in block; layer is written once block has its base. desc must outlive it. */
void lowkey_layer_build(struct lowkey_block *block, const lowkey_layer_desc *desc,
                        struct lowkey_layer *layer);

#endif
