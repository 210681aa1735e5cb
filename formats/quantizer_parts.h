/* quantizer_parts.h - how the quantizer object is put together, for quantizer.c, quantizer_check.c and side.c alone:
 * the checks, and the layout by rows. */
#ifndef LOWKEY_QUANTIZER_PARTS_H
#define LOWKEY_QUANTIZER_PARTS_H

#include "formats/block.h"
#include "formats/side.h"

/* Boundaries of a channel: none with a trellis. */
static inline size_t lowkey_n_between(const lowkey_side_desc *side)
{
    return side->table_entries > 0 && !side->trellis ? (size_t)side->table_entries - 1 : 0;
}

/* Before copying: scalars and required pointers of a layer whose geometry is checked, so that every array's size is
 * known. */
lowkey_status lowkey_layer_check_shape(const lowkey_layer_desc *layer, lowkey_error *err);
/* After copying and filling: every value. Messages begin "layer N key: " or "layer N value: ". */
lowkey_status lowkey_layer_check_values(const lowkey_layer_desc *layer, lowkey_error *err);

/* Lay a checked layer out by rows in block; layer is written once block has its base. desc must outlive it. */
void lowkey_layer_build(struct lowkey_block *block, const lowkey_layer_desc *desc,
                        struct lowkey_layer *layer);

#endif
