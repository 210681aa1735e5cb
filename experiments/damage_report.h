/* damage_report.h - a measured damage as a table for people, as JSON and as CSV for scripts. */
#ifndef LOWKEY_DAMAGE_REPORT_H
#define LOWKEY_DAMAGE_REPORT_H

#include <stdio.h>

#include "experiments/damage_run.h"

enum lowkey_damage_detail { LOWKEY_DAMAGE_SUMMARY, LOWKEY_DAMAGE_PER_LAYER, LOWKEY_DAMAGE_PER_HEAD };

void lowkey_damage_print_table(const struct lowkey_damage_result *result,
                               enum lowkey_damage_detail detail, FILE *to);

/* One array of flat objects, one a row, every row with all its settings. What a row has not is null (a head's
 * bits, an infinite ratio). 0: no memory, or a name that is not UTF-8. Write errors stay in the stream. */
int lowkey_damage_print_json(const struct lowkey_damage_result *result,
                             enum lowkey_damage_detail detail, FILE *to);

/* The same rows and columns, a line of names first; null is empty. */
int lowkey_damage_print_csv(const struct lowkey_damage_result *result,
                            enum lowkey_damage_detail detail, FILE *to);

#endif
