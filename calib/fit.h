/* fit.h - lowkey fit: activations.h5 -> quantizer.h5. */
#ifndef LOWKEY_FIT_H
#define LOWKEY_FIT_H

#include <stdint.h>

#include "formats/quantizer_file.h"
#include "runtime/lowkey.h"

enum lowkey_codebook { LOWKEY_CODEBOOK_FITTED, LOWKEY_CODEBOOK_UNIFORM, LOWKEY_CODEBOOK_NORMAL_FLOAT };
enum lowkey_scope { LOWKEY_SCOPE_CHANNEL, LOWKEY_SCOPE_HEAD, LOWKEY_SCOPE_LAYER };
enum lowkey_sensitivity {
    LOWKEY_SENSITIVITY_AUTO, /* the first of fisher, weight, attention, none that every file has */
    LOWKEY_SENSITIVITY_NONE,
    LOWKEY_SENSITIVITY_WEIGHT,
    LOWKEY_SENSITIVITY_FISHER,
    LOWKEY_SENSITIVITY_ATTENTION
};

enum { LOWKEY_MAX_WIDTHS = 64 };
enum { LOWKEY_FEEDBACK_IF_POSSIBLE = 2 }; /* where the files have what it takes */
enum { LOWKEY_REFIT_AUTO = -1 }; /* 3 with a trellis; with feedback and gradients 2, where tables are static ones per channel; else 0 */

struct lowkey_side_options { /* of keys, or of values */
    int n_widths; /* widths of channels in turn: RoPE pair by pair for keys, channel by channel for values */
    uint8_t widths[LOWKEY_MAX_WIDTHS];
    lowkey_rule rule_8, rule_16;
    enum lowkey_codebook codebook;
    enum lowkey_scope scope;
    lowkey_token_scale token_scale;
    int scale_block; /* 0: one scale a token */
    double outlier_fraction; /* 0 to 1; the rule is limit for static tables, rank with a token scale */
    int outlier_cap; /* a token; 0: four times what the fraction says for limit, all for rank */
    int outlier_page_capacity; /* 0: one and a half times what the fraction says for limit, all for rank */
    int trellis; /* survivors of a state that packing keeps: 1, 2, 4; 0: no trellis */
    int feedback; /* 0, 1, or LOWKEY_FEEDBACK_IF_POSSIBLE */
    int refit; /* rounds of fitting tables again to what feedback makes of the values; LOWKEY_REFIT_AUTO */
    int gain, qnorm;
};

struct lowkey_fit_options {
    struct lowkey_side_options side[2]; /* keys, values */
    double budget; /* mean bits of all elements, shared out by cost in place of the sides' widths; 0: none */
    /* Of what a budget is shared out in: 1 to 5; both 0: 1 to 5 by gradients, else 2 to 4 and what the budget needs
     * beyond: costs that know nothing of a common direction of errors give too many channels one bit. */
    int low_width, high_width;
    int first_sample, end_sample; /* of every file: samples first..end-1; end 0: to the file's end */
    int n_sinks;
    lowkey_rule sink_rule; /* F16 or BF16 */
    enum lowkey_sensitivity sensitivity;
    int n_queries; /* sampled of each sample and query head, for attention */
    double weight_clip, weight_floor; /* multiples of a channel's mean weight; 0: none */
    int normalised_units; /* weights count on normalised values, as KVQuant's public code has it */
    double damp;
    int n_threads;
    int64_t column_bytes; /* of values loaded at once; 0: 320 MiB */
};

struct lowkey_fit_options lowkey_fit_defaults(void); /* 4 bits, static tables per channel, no outliers */
/* Ours: "2", "3", "4" bits on average; KVQuant's own recipe: "kvquant-nuq2", "kvquant-nuq3-1%" ...; 0: no such
 * name. */
int lowkey_fit_preset(const char *name, struct lowkey_fit_options *options);

/* What was seen that a user should know: bits of lowkey_side_notes.suspicions. */
enum {
    LOWKEY_SUSPECT_BF16_AS_F16 = 1, /* f16 by its type, yet every value has bf16's few mantissa bits */
    LOWKEY_SUSPECT_ALL_EQUAL = 2, /* one value in the whole layer */
    LOWKEY_SUSPECT_OFFSETS = 4 /* more than a tenth of the channels are offset-heavy */
};
struct lowkey_side_notes {
    unsigned suspicions;
    int zero_feedback; /* KV heads whose feedback matrix is 0 */
    int tables_clamped_to_range; /* channels whose correction was left out: it would have left the range */
};

/* What was written, for a report: lives until lowkey_fit_result_free. */
struct lowkey_fit_result {
    const lowkey_quantizer_desc *desc;
    const struct lowkey_fit_record *record;
    struct lowkey_side_notes (*notes)[2]; /* [n_layers] */
    double seconds;
};

/* The quantizer file's bytes depend on the samples and the options alone: not on threads, files, or the
 * order of either. At most 1 GiB of memory, and at most 2^26 tokens (more are refused). result may be
 * NULL. */
lowkey_status lowkey_fit(int n_paths, const char *const *paths, const char *out,
                         const struct lowkey_fit_options *options, struct lowkey_fit_result **result,
                         lowkey_error *err);
void lowkey_fit_result_free(struct lowkey_fit_result *result);

/* The report on stdout: a table, or one JSON object. */
void lowkey_fit_report(const struct lowkey_fit_result *result, int json);

int lowkey_fit_cmd(int argc, char **argv);

#endif
