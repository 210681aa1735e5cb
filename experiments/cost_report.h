/* cost_report.h - costs as a table for people, as JSON and as CSV for scripts. */
#ifndef LOWKEY_COST_REPORT_H
#define LOWKEY_COST_REPORT_H

#include <stdio.h>

#include "experiments/cost_run.h"

enum lowkey_cost_detail { LOWKEY_COST_SUMMARY, LOWKEY_COST_PER_LAYER, LOWKEY_COST_PER_HEAD, LOWKEY_COST_PER_CHANNEL };

/* 0: no memory, or (JSON, CSV) a name that is not UTF-8. Write errors stay in the stream. */
int lowkey_cost_print_table(const struct lowkey_cost_result *result, enum lowkey_cost_detail detail, FILE *to);
/* One array of flat objects, one a row, every row with all its settings; null for what is all, or not a number. */
int lowkey_cost_print_json(const struct lowkey_cost_result *result, enum lowkey_cost_detail detail, FILE *to);
/* The same rows and columns, a line of names first; null is empty. */
int lowkey_cost_print_csv(const struct lowkey_cost_result *result, enum lowkey_cost_detail detail, FILE *to);

#endif
