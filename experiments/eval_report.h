/* eval_report.h - results of lowkey eval over all windows, format by format: a table for people, JSON and CSV for scripts.
 * Everything is made from the journal's rows.
 *
 *   perplexity   exp of the mean negative log-likelihood over all predicted tokens
 *   loss         mean added nats per token: negative log-likelihood less the reference's
 *   KL, top-1    means over tokens (prediction.h)
 *   bits         payload an element at 131,072 tokens, sinks and recent window in 16 bits with it; of keys, values, both
 *   held         everything an element takes there: tables, factors, sinks, padding, block tables; packed formats alone
 *
 * Intervals are of 95 %, by bootstrap over windows (bootstrap.h). */
#ifndef LOWKEY_EVAL_REPORT_H
#define LOWKEY_EVAL_REPORT_H

#include <stdio.h>

#include "experiments/eval_journal.h"

struct lowkey_eval_report { /* all borrowed */
    const struct lowkey_eval_request *request;
    const lowkey_eval_journal *journal; /* holds every result of the request */
    const char *commit;
};

/* 0: no memory, or a name that is not UTF-8. Write errors stay in the stream. */
int lowkey_eval_print_table(const struct lowkey_eval_report *report, FILE *to);
/* One object: the settings, and formats, of which each has its windows. */
int lowkey_eval_print_json(const struct lowkey_eval_report *report, FILE *to);
/* A line for each format with all settings. */
int lowkey_eval_print_csv(const struct lowkey_eval_report *report, FILE *to);

/* Of the request's windows, how many a format's quantizer was fitted on: the same tokens cut in the same way. */
int lowkey_eval_fit_overlap(const struct lowkey_eval_request *request, int format);

#endif
