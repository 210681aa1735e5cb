/* drift_report.h - lowkey check --drift as one call. */
#ifndef LOWKEY_DRIFT_REPORT_H
#define LOWKEY_DRIFT_REPORT_H

#include "runtime/lowkey.h"

struct lowkey_drift_options {
    const char *quantizer;
    int n_paths;
    const char *const *paths; /* activations.h5 */
    double fail_above, fail_channel_above; /* bits; INFINITY: never */
    int n_worst, json;
};

/* Prints the report. failed: whether anything was above its limit. */
lowkey_status lowkey_drift_run(const struct lowkey_drift_options *options, int *failed, lowkey_error *err);

#endif
