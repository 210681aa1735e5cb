/* eval_journal.h - results of lowkey eval as they come: a CSV file with a row for each format and window, every row with all
 * its settings. A run that was stopped reads it and goes on; figures over windows are made from it. */
#ifndef LOWKEY_EVAL_JOURNAL_H
#define LOWKEY_EVAL_JOURNAL_H

#include "experiments/eval.h"

typedef struct lowkey_eval_journal lowkey_eval_journal;

struct lowkey_eval_journal_config { /* all borrowed */
    const struct lowkey_eval_request *request;
    const char *commit; /* of the program, for the rows */
};

/* path NULL: kept in memory only. A file that is there is read: rows of another model, text or length of windows, and rows
 * of a wanted label that are of another file, calibration or number of sinks, are refused with both values; rows of other
 * labels and windows stay as they are. A last line without its end (a crash) is cut off. One process at a time. */
lowkey_status lowkey_eval_journal_open(const char *path, const struct lowkey_eval_journal_config *config,
                                       lowkey_eval_journal **out, lowkey_error *err);
void lowkey_eval_journal_close(lowkey_eval_journal *journal); /* takes NULL */

/* The result of a format (-1: the reference) at the request's windows[i], or NULL. */
const struct lowkey_eval_result *lowkey_eval_journal_find(const lowkey_eval_journal *journal, int format, int i);
/* Rows that were in the file and are of use now. */
int lowkey_eval_journal_n_kept(const lowkey_eval_journal *journal);
/* Append a row; it is in the file when this returns. */
lowkey_status lowkey_eval_journal_add(lowkey_eval_journal *journal, int format, int i,
                                      const struct lowkey_eval_result *result, lowkey_error *err);

#endif
