/* kernels.c - the table of variants. A level without a better version of an operation names the lower one's. */
#include "kernels/kernels.h"

#include <string.h>

static int always(void)
{
    return 1;
}

const struct lowkey_kernels lowkey_kernels[] = {
    /* isa       supported  pack                unpack                attend_page                merge */
    { "scalar", always, lowkey_pack_scalar, lowkey_unpack_scalar, lowkey_attend_page_scalar,
      lowkey_merge_scalar },
    { 0 },
};

const struct lowkey_kernels *lowkey_kernels_find(const char *isa)
{
    for (const struct lowkey_kernels *row = lowkey_kernels; row->isa; row++)
        if ((!isa || strcmp(isa, row->isa) == 0) && row->supported()) return row;
    return NULL;
}
