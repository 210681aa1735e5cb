/* quantizer_file.h - quantizer.h5 whole: what a runtime needs (lowkey_quantizer_desc), how it was fitted, and the
 * report. lowkey_quantizer_open (runtime/lowkey.h) reads the first alone. */
#ifndef LOWKEY_QUANTIZER_FILE_H
#define LOWKEY_QUANTIZER_FILE_H

#include <stdint.h>

#include "runtime/lowkey.h"

enum { /* bits of lowkey_side_report.flags */
    LOWKEY_FLAG_CONSTANT = 1, LOWKEY_FLAG_OFFSET = 2, LOWKEY_FLAG_UNUSED_CODES = 4,
    LOWKEY_FLAG_ZERO_WEIGHTS = 8, LOWKEY_FLAG_TINY_WEIGHTS = 16
};

struct lowkey_side_report {       /* H heads, D channels, E table entries; see formats/README.md, "report" */
    const char *table_scope, *codebook; /* "channel" ..., "fitted" ... */
    int gain_corrected, qnorm;
    uint64_t n_tokens, n_outliers, n_clamped, n_saturated;
    double *mean, *variance, *mse, *weighted_mse; /* [H][D] */
    float *gain;                  /* [H][D] */
    uint64_t *histogram;          /* [H][D][E]; NULL where E is 0 */
    uint8_t *flags;               /* [H][D] */
};

struct lowkey_fit_record {
    int n_model_layers;
    const char *sensitivity;      /* "none", "fisher", "weight", "attention" */
    double outlier_fraction_key, outlier_fraction_value, damp;
    double budget; /* mean bits that were shared out by cost; 0: widths were given, and the next two are 0 */
    double predicted_cost_key, predicted_cost_value; /* see formats/README.md, "quantizer.h5" */
    int64_t n_tokens;
    int64_t tuned_steps;          /* of tuning, after the fit; 0: none */
    const char *text_name, *text_sha256; /* joined by ';' */
    int n_samples;
    const unsigned char (*sample_sha256)[32]; /* rising */
    struct lowkey_side_report (*reports)[2];  /* [layers described][key, value] */
};

/* Validates the description, writes to a temporary file, reads it back, renames. */
lowkey_status lowkey_quantizer_write(const char *path, const lowkey_quantizer_desc *desc,
                                     const struct lowkey_fit_record *record, lowkey_error *err);

/* Read everything. The record and all it points to is one allocation list, freed by lowkey_fit_record_free. */
lowkey_status lowkey_quantizer_read(const char *path, lowkey_quantizer **quantizer, struct lowkey_fit_record **record,
                                    lowkey_error *err);
void lowkey_fit_record_free(struct lowkey_fit_record *record);

#endif
