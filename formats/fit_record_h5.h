/* fit_record_h5.h - the part of quantizer.h5 that runtimes ignore: how it was fitted, and the report per layer and side.
 * For quantizer_h5.c alone. */
#ifndef LOWKEY_FIT_RECORD_H5_H
#define LOWKEY_FIT_RECORD_H5_H

#include "formats/fields_h5.h"
#include "formats/quantizer_file.h"

/* A record and what it points to; the record is first, so that lowkey_fit_record_free finds the pool. */
struct lowkey_record_box {
    struct lowkey_fit_record record;
    struct lowkey_pool pool;
};

/* Attributes of a side's group that belong to the report. */
#define LOWKEY_REPORT_SIDE_ATTRIBUTES "table_scope", "codebook", "gain", "qnorm"

lowkey_status lowkey_record_read(lowkey_h5 *file, struct lowkey_record_box *box, lowkey_error *err);
lowkey_status lowkey_record_write(lowkey_h5 *file, const struct lowkey_fit_record *record, lowkey_error *err);
/* side: "/layers/007/key". */
lowkey_status lowkey_report_read(lowkey_h5 *file, const char *side, const struct lowkey_field_sizes *sizes,
                                 struct lowkey_side_report *report, struct lowkey_pool *pool, lowkey_error *err);
lowkey_status lowkey_report_write(lowkey_h5 *file, const char *side, const struct lowkey_field_sizes *sizes,
                                  const struct lowkey_side_report *report, lowkey_error *err);

#endif
