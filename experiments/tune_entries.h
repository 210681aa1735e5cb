/* tune_entries.h - which entry of its table each element in a packed cache stands for: sums over entries of what came
 * back (gradients) and of what went in (the report). All channels have tables, and there are no outliers. */
#ifndef LOWKEY_TUNE_ENTRIES_H
#define LOWKEY_TUNE_ENTRIES_H

#include "experiments/lm/gradient.h"
#include "formats/quantizer_file.h"

struct lowkey_entry_layer { /* tokens 0..n_tokens-1 of sequence 0 at one layer; arrays by key, value */
    const lowkey_cache *cache; /* of quantizer */
    const lowkey_quantizer *quantizer;
    int index, n_tokens, n_threads; /* results do not depend on n_threads */
    const float *x[2], *stored[2]; /* [n_tokens][n_kv_heads][head_dim] */
    const float *grad[2]; /* as they */
};

/* sums[side], [n_kv_heads][head_dim][table_entries], gets added the gradient with respect to each entry: of all elements
 * that stand for it, codes held fixed. Sinks do not count. */
lowkey_status lowkey_entry_gradients(const struct lowkey_entry_layer *layer, double *const sums[2],
                                     lowkey_error *err);

/* Into reports[side], whose arrays begin as zeros: counts n_tokens and histogram are added to, mean, variance and mse get
 * sums of x, of its square, and of the error's, until lowkey_entry_report_end divides them. grad is not looked at. */
lowkey_status lowkey_entry_reports(const struct lowkey_entry_layer *layer,
                                   struct lowkey_side_report reports[2], lowkey_error *err);
void lowkey_entry_report_end(struct lowkey_side_report *report, size_t n_channels);

#endif
