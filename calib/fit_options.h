/* fit_options.h - which options of a fit go together, and with what files hold. */
#ifndef LOWKEY_FIT_OPTIONS_H
#define LOWKEY_FIT_OPTIONS_H

#include "calib/captures.h"
#include "calib/fit.h"

lowkey_status lowkey_fit_options_check(const struct lowkey_fit_options *options, lowkey_error *err);

/* Are the side's tables fitted, static and of each channel's own, and do they hold all values? */
int lowkey_has_plain_tables(const struct lowkey_side_options *side);

/* What AUTO stands for, or whether what was asked for can be done. contents, some_contents: streams that
 * all files have, that any has. Files that differ are refused unless told what is meant. */
lowkey_status lowkey_choose_sensitivity(enum lowkey_sensitivity asked, unsigned contents,
                                        unsigned some_contents, enum lowkey_sensitivity *out,
                                        lowkey_error *err);

#endif
