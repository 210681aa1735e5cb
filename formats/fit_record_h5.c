/* fit_record_h5.c - how a quantizer was fitted, and how well it did: group /fit, sample hashes, and a report per side. */
#include "formats/fit_record_h5.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/error.h"

enum { FIT_MAX_COUNT = INT32_MAX };
enum { BUDGET_MINOR = 2, TUNED_MINOR = 4 }; /* versions that brought them */

static const char *const sensitivities[] = { "none", "fisher", "weight", "attention", NULL };
static const char *const scopes[] = { "channel", "head", "layer", NULL };
static const char *const codebooks[] = { "none", "fitted", "uniform", "normal_float",
                                         NULL }; /* none is number 0 */

/* ---- /fit and the samples ---- */

static lowkey_status get_fraction(lowkey_h5 *file, const char *name, double high, double *out,
                                  lowkey_error *err)
{
    LOWKEY_TRY(lowkey_h5_get_double(file, "/fit", name, out, err));
    if (*out < 0 || *out > high)
        return lowkey_h5_fail(file, err, "/fit: attribute %s: expected 0 to %g, found %g", name, high, *out);
    return LOWKEY_OK;
}

/* One or more hashes of 64 lower-case hexadecimal digits, joined by ';'. */
static int are_hashes(const char *text)
{
    for (;;) {
        if (strspn(text, "0123456789abcdef") != 64) return 0;
        text += 64;
        if (!*text) return 1;
        if (*text++ != ';') return 0;
    }
}

static lowkey_status read_samples(lowkey_h5 *file, struct lowkey_record_box *box, lowkey_error *err)
{
    int64_t dims[2] = { -1, 32 };
    void *hashes;
    LOWKEY_TRY(lowkey_h5_get_shape(file, "/sample_sha256", 1, 2, dims, err));
    if (dims[0] > FIT_MAX_COUNT)
        return lowkey_h5_fail(file, err, "/sample_sha256: expected at most %d samples, found %lld",
                              FIT_MAX_COUNT, (long long)dims[0]);
    LOWKEY_TRY(lowkey_pool_take(&box->pool, (size_t)dims[0], 32, &hashes, err));
    LOWKEY_TRY(lowkey_h5_read_ints(file, "/sample_sha256", 2, dims, 0, 255, hashes, 1, err));
    const unsigned char(*sha256)[32] = hashes;
    for (int64_t i = 1; i < dims[0]; i++)
        if (memcmp(sha256[i - 1], sha256[i], 32) > 0)
            return lowkey_h5_fail(file, err,
                                  "/sample_sha256: expected hashes sorted by their bytes, found number %lld "
                                  "below the one before",
                                  (long long)i);
    box->record.n_samples = (int)dims[0];
    box->record.sample_sha256 = sha256;
    return LOWKEY_OK;
}

static lowkey_status read_budget(lowkey_h5 *file, struct lowkey_fit_record *record, lowkey_error *err)
{
    LOWKEY_TRY(get_fraction(file, "budget", 16, &record->budget, err));
    LOWKEY_TRY(get_fraction(file, "predicted_cost_key", DBL_MAX, &record->predicted_cost_key, err));
    LOWKEY_TRY(get_fraction(file, "predicted_cost_value", DBL_MAX, &record->predicted_cost_value, err));
    if (record->budget > 0 || record->predicted_cost_key + record->predicted_cost_value == 0) return LOWKEY_OK;
    return lowkey_h5_fail(file, err, "/fit: attributes predicted_cost_key, _value: expected 0 without a budget, found %g, %g",
                          record->predicted_cost_key, record->predicted_cost_value);
}

lowkey_status lowkey_record_read(lowkey_h5 *file, struct lowkey_record_box *box, lowkey_error *err)
{
    static const char *const no_objects[] = { NULL };
    struct lowkey_fit_record *record = &box->record;
    int sensitivity, major, minor;
    char *text_name, *text_sha256;
    lowkey_h5_version(file, &major, &minor);
    const int has_budget = minor >= BUDGET_MINOR;
    const char *const attributes[] = { /* of later versions last */
        "sensitivity", "outlier_fraction_key", "outlier_fraction_value", "damp",
        "n_tokens",    "text_name",            "text_sha256",
        has_budget ? "budget" : NULL, "predicted_cost_key", "predicted_cost_value",
        minor >= TUNED_MINOR ? "tuned_steps" : NULL, NULL
    };
    LOWKEY_TRY(lowkey_h5_refuse_others(file, "/fit", no_objects, attributes, err));
    LOWKEY_TRY(lowkey_h5_get_choice(file, "/fit", "sensitivity", sensitivities, &sensitivity, err));
    record->sensitivity = sensitivities[sensitivity];
    LOWKEY_TRY(get_fraction(file, "outlier_fraction_key", 1, &record->outlier_fraction_key, err));
    LOWKEY_TRY(get_fraction(file, "outlier_fraction_value", 1, &record->outlier_fraction_value, err));
    LOWKEY_TRY(get_fraction(file, "damp", 1e30, &record->damp, err));
    if (has_budget) LOWKEY_TRY(read_budget(file, record, err));
    if (minor >= TUNED_MINOR)
        LOWKEY_TRY(lowkey_h5_get_int(file, "/fit", "tuned_steps", 0, INT64_MAX, &record->tuned_steps, err));
    LOWKEY_TRY(lowkey_h5_get_int(file, "/fit", "n_tokens", 0, INT64_MAX, &record->n_tokens, err));
    LOWKEY_TRY(lowkey_h5_get_string(file, "/fit", "text_name", &text_name, err));
    LOWKEY_TRY(lowkey_pool_own(&box->pool, text_name, err));
    LOWKEY_TRY(lowkey_h5_get_string(file, "/fit", "text_sha256", &text_sha256, err));
    LOWKEY_TRY(lowkey_pool_own(&box->pool, text_sha256, err));
    record->text_name = text_name;
    record->text_sha256 = text_sha256;
    if (!are_hashes(text_sha256))
        return lowkey_h5_fail(
            file, err,
            "/fit: attribute text_sha256: expected hashes of 64 lower-case hexadecimal digits joined by ';', "
            "found '%.100s'",
            text_sha256);
    return read_samples(file, box, err);
}

lowkey_status lowkey_record_write(lowkey_h5 *file, const struct lowkey_fit_record *record, lowkey_error *err)
{
    if (!record->sensitivity || !record->text_name || !record->text_sha256 || !record->sample_sha256 ||
        record->n_samples < 1)
        return lowkey_fail(
            err, LOWKEY_EINVAL,
            "fit record: expected sensitivity, text_name, text_sha256 and samples, found one missing");
    LOWKEY_TRY(lowkey_h5_put_group(file, "/fit", err));
    LOWKEY_TRY(lowkey_h5_put_string(file, "/fit", "sensitivity", record->sensitivity, err));
    LOWKEY_TRY(lowkey_h5_put_double(file, "/fit", "outlier_fraction_key", record->outlier_fraction_key, err));
    LOWKEY_TRY(
        lowkey_h5_put_double(file, "/fit", "outlier_fraction_value", record->outlier_fraction_value, err));
    LOWKEY_TRY(lowkey_h5_put_double(file, "/fit", "damp", record->damp, err));
    int major, minor;
    lowkey_h5_version(file, &major, &minor);
    if (minor >= BUDGET_MINOR) {
        LOWKEY_TRY(lowkey_h5_put_double(file, "/fit", "budget", record->budget, err));
        LOWKEY_TRY(lowkey_h5_put_double(file, "/fit", "predicted_cost_key", record->predicted_cost_key, err));
        LOWKEY_TRY(lowkey_h5_put_double(file, "/fit", "predicted_cost_value", record->predicted_cost_value, err));
    }
    if (minor >= TUNED_MINOR)
        LOWKEY_TRY(lowkey_h5_put_int(file, "/fit", "tuned_steps", record->tuned_steps, err));
    LOWKEY_TRY(lowkey_h5_put_int(file, "/fit", "n_tokens", record->n_tokens, err));
    LOWKEY_TRY(lowkey_h5_put_string(file, "/fit", "text_name", record->text_name, err));
    LOWKEY_TRY(lowkey_h5_put_string(file, "/fit", "text_sha256", record->text_sha256, err));
    return lowkey_h5_write_ints(file, "/sample_sha256", LOWKEY_DIMS(record->n_samples, 32),
                                record->sample_sha256, 1, 0, err);
}

/* ---- reports ---- */

#define REPORT(member) .name = #member, .offset = offsetof(struct lowkey_side_report, member)
static const struct lowkey_field report_fields[] = {
    { REPORT(mean), .type = LOWKEY_FIELD_F64, .when = LOWKEY_FIELD_ALWAYS },
    { REPORT(variance), .type = LOWKEY_FIELD_F64, .when = LOWKEY_FIELD_ALWAYS },
    { REPORT(mse), .type = LOWKEY_FIELD_F64, .when = LOWKEY_FIELD_ALWAYS },
    { REPORT(weighted_mse), .type = LOWKEY_FIELD_F64, .when = LOWKEY_FIELD_ALWAYS },
    { REPORT(gain), .type = LOWKEY_FIELD_F32, .when = LOWKEY_FIELD_ALWAYS },
    { REPORT(histogram), .type = LOWKEY_FIELD_U64, .shape = LOWKEY_FIELD_HDE, .when = LOWKEY_FIELD_TABLE,
      .high = INT64_MAX },
    { REPORT(flags), .type = LOWKEY_FIELD_U8, .when = LOWKEY_FIELD_ALWAYS, .high = 31 },
    { 0 },
};
static const char *const count_names[] = { "n_tokens", "n_outliers", "n_clamped", "n_saturated", NULL };

/* The counts of a report, in the order of their names. */
static uint64_t *count_of(struct lowkey_side_report *report, int i)
{
    uint64_t *const counts[] = { &report->n_tokens, &report->n_outliers, &report->n_clamped,
                                 &report->n_saturated };
    return counts[i];
}

static lowkey_status check_not_negative(lowkey_h5 *file, const char *group, const char *name,
                                        const double *values, size_t n, lowkey_error *err)
{
    for (size_t c = 0; c < n; c++)
        if (values[c] < 0)
            return lowkey_h5_fail(file, err, "%s/%s channel %zu of all heads: expected 0 or more, found %g",
                                  group, name, c, values[c]);
    return LOWKEY_OK;
}

lowkey_status lowkey_report_read(lowkey_h5 *file, const char *side, const struct lowkey_field_sizes *sizes,
                                 struct lowkey_side_report *report, struct lowkey_pool *pool,
                                 lowkey_error *err)
{
    static const char *const no_others[] = { NULL };
    const size_t n = (size_t)sizes->n_heads * (size_t)sizes->head_dim;
    int scope, codebook;
    char group[2 * LOWKEY_H5_MAX_PATH];
    LOWKEY_TRY(lowkey_h5_get_choice(file, side, "table_scope", scopes, &scope, err));
    LOWKEY_TRY(lowkey_h5_get_choice(file, side, "codebook", codebooks, &codebook, err));
    if (!codebook != !sizes->n_table)
        return lowkey_h5_fail(file, err,
                              "%s: attribute codebook: expected none iff table_entries is 0, found %s and %d",
                              side, codebooks[codebook], sizes->n_table);
    report->table_scope = scopes[scope];
    report->codebook = codebooks[codebook];
    LOWKEY_TRY(lowkey_h5_get_small(file, side, "gain", 0, 1, &report->gain_corrected, err));
    LOWKEY_TRY(lowkey_h5_get_small(file, side, "qnorm", 0, 1, &report->qnorm, err));

    snprintf(group, sizeof group, "%s/report", side);
    LOWKEY_TRY(lowkey_fields_refuse_others(file, group, report_fields, sizes, no_others, count_names, err));
    for (int i = 0; count_names[i]; i++) {
        int64_t count;
        LOWKEY_TRY(lowkey_h5_get_int(file, group, count_names[i], 0, INT64_MAX, &count, err));
        *count_of(report, i) = (uint64_t)count;
    }
    LOWKEY_TRY(lowkey_fields_read(file, group, report_fields, sizes, report, pool, err));
    LOWKEY_TRY(check_not_negative(file, group, "variance", report->variance, n, err));
    LOWKEY_TRY(check_not_negative(file, group, "mse", report->mse, n, err));
    return check_not_negative(file, group, "weighted_mse", report->weighted_mse, n, err);
}

lowkey_status lowkey_report_write(lowkey_h5 *file, const char *side, const struct lowkey_field_sizes *sizes,
                                  const struct lowkey_side_report *report, lowkey_error *err)
{
    struct lowkey_side_report copy = *report;
    char group[2 * LOWKEY_H5_MAX_PATH];
    if (!report->table_scope || !report->codebook)
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "%s: report: expected table_scope and codebook, found one missing", side);
    LOWKEY_TRY(lowkey_h5_put_string(file, side, "table_scope", report->table_scope, err));
    LOWKEY_TRY(lowkey_h5_put_string(file, side, "codebook", report->codebook, err));
    LOWKEY_TRY(lowkey_h5_put_int(file, side, "gain", report->gain_corrected, err));
    LOWKEY_TRY(lowkey_h5_put_int(file, side, "qnorm", report->qnorm, err));
    snprintf(group, sizeof group, "%s/report", side);
    LOWKEY_TRY(lowkey_h5_put_group(file, group, err));
    for (int i = 0; count_names[i]; i++) {
        const uint64_t count = *count_of(&copy, i);
        if (count > INT64_MAX)
            return lowkey_fail(err, LOWKEY_EINVAL, "%s: %s: too large", group, count_names[i]);
        LOWKEY_TRY(lowkey_h5_put_int(file, group, count_names[i], (int64_t)count, err));
    }
    return lowkey_fields_write(file, group, report_fields, sizes, report, err);
}

void lowkey_fit_record_free(struct lowkey_fit_record *record)
{
    if (!record) return;
    struct lowkey_record_box *box = (struct lowkey_record_box *)record; /* the record is its first member */
    lowkey_pool_free(&box->pool);
    free(box);
}
