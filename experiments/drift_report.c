/* drift_report.c - lowkey check --drift: one line for the keys and the values of each layer, then the worst channels. */
#include "experiments/drift_report.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "calib/command.h"
#include "experiments/drift.h"
#include "runtime/error.h"

static const char *side_name(int which)
{
    return which ? "value" : "key";
}

/* The most divergent channel of a side; channels are sorted, so it is the first. */
static const struct lowkey_drift_channel *worst_of(const struct lowkey_drift_channel *channels, size_t n,
                                                   const struct lowkey_drift_channel *side)
{
    for (size_t i = 0; i < n; i++)
        if (channels[i].layer == side->layer && channels[i].which == side->which) return &channels[i];
    return NULL;
}

static void print_share(double share)
{
    if (isnan(share))
        printf(" %9s", "-");
    else
        printf(" %9.5f", share);
}

static json_t *share_json(double share)
{
    return isnan(share) ? json_null() : json_real(share);
}

static json_t *channel_json(const struct lowkey_drift_channel *c)
{
    return json_pack("{s:i, s:s, s:i, s:i, s:i, s:f, s:f, s:f, s:o}", "layer", c->layer, "side",
                     side_name(c->which), "head", c->head, "channel", c->channel, "bits", c->bits,
                     "divergence", c->divergence, "end_share", c->ends, "end_share_fit", c->ends_fit,
                     "outside_share", share_json(c->outside));
}

/* 1 where the side is over a limit. */
static int report_side(const struct lowkey_drift_options *options, const struct lowkey_drift_channel *mean,
                       const struct lowkey_drift_channel *worst, uint64_t n_tokens, json_t *sides)
{
    const char *verdict = lowkey_drift_verdict(mean->divergence, worst->divergence);
    const int failed = mean->divergence > options->fail_above ||
                       worst->divergence > options->fail_channel_above;
    if (sides) {
        json_array_append_new(
            sides,
            json_pack("{s:i, s:s, s:I, s:i, s:f, s:f, s:i, s:i, s:f, s:f, s:o, s:s, s:b}", "layer", mean->layer,
                      "side", side_name(mean->which), "tokens", (json_int_t)n_tokens, "channels", mean->channel,
                      "mean_divergence", mean->divergence, "worst_divergence", worst->divergence, "worst_head",
                      worst->head, "worst_channel", worst->channel, "end_share", mean->ends, "end_share_fit",
                      mean->ends_fit, "outside_share", share_json(mean->outside), "verdict", verdict,
                      "failed", failed));
        return failed;
    }
    printf("%5d %-5s %8llu %10.5f %10.5f %4d:%-4d %8.4f %8.4f", mean->layer, side_name(mean->which),
           (unsigned long long)n_tokens, mean->divergence, worst->divergence, worst->head, worst->channel,
           mean->ends, mean->ends_fit);
    print_share(mean->outside);
    printf("  %s%s\n", verdict, failed ? ", FAILED" : "");
    return failed;
}

static void print_worst(const struct lowkey_drift_channel *channels, size_t n)
{
    printf("\nmost divergent channels\n%5s %-5s %4s %7s %4s %10s %8s %8s %9s\n", "layer", "side", "head",
           "channel", "bits", "divergence", "ends", "at fit", "outside");
    for (size_t i = 0; i < n; i++) {
        const struct lowkey_drift_channel *c = &channels[i];
        printf("%5d %-5s %4d %7d %4d %10.5f %8.4f %8.4f", c->layer, side_name(c->which), c->head, c->channel,
               c->bits, c->divergence, c->ends, c->ends_fit);
        print_share(c->outside);
        printf("\n");
    }
}

static lowkey_status report(const struct lowkey_drift_options *options, const lowkey_drift *drift, int *failed,
                            lowkey_error *err)
{
    size_t n;
    struct lowkey_drift_channel *channels = lowkey_drift_channels(drift, &n);
    json_t *sides = options->json ? json_array() : NULL;
    double sum = 0;
    int n_sides = 0, n_failed = 0;
    if (!channels) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %d sides", drift->n_sides);
    if (!sides)
        printf("%5s %-5s %8s %10s %10s %-9s %8s %8s %9s\n", "layer", "side", "tokens", "divergence", "worst",
               "head:chan", "ends", "at fit", "outside");
    for (int i = 0; i < drift->n_sides; i++) {
        const struct lowkey_drift_channel mean = lowkey_drift_mean(drift, i),
                                          *worst = worst_of(channels, n, &mean);
        if (!worst) continue;
        sum += mean.divergence;
        n_sides++;
        n_failed += report_side(options, &mean, worst, drift->sides[i].n_tokens, sides);
    }
    *failed = n_failed > 0;
    const size_t n_worst = n < (size_t)options->n_worst ? n : (size_t)options->n_worst;
    const double mean = n_sides ? sum / n_sides : 0, worst = n ? channels[0].divergence : 0;
    if (sides) {
        json_t *list = json_array();
        for (size_t i = 0; i < n_worst; i++) json_array_append_new(list, channel_json(&channels[i]));
        json_t *root = json_pack("{s:s, s:s, s:f, s:f, s:s, s:b, s:o, s:o}", "quantizer", options->quantizer,
                                 "fitted_on", drift->record->text_name, "mean_divergence", mean,
                                 "worst_divergence", worst, "verdict", lowkey_drift_verdict(mean, worst),
                                 "failed", *failed, "sides", sides, "worst_channels", list);
        json_dumpf(root, stdout, JSON_INDENT(1));
        printf("\n");
        json_decref(root);
    } else {
        print_worst(channels, n_worst);
        printf("\n%s, fitted on %s: %s (mean divergence %.5f bits, worst channel %.5f)\n", options->quantizer,
               drift->record->text_name, lowkey_drift_verdict(mean, worst), mean, worst);
        if (n_failed) printf("%d of %d sides are above the limit\n", n_failed, n_sides);
    }
    free(channels);
    return n_sides ? LOWKEY_OK
                   : lowkey_fail(err, LOWKEY_EINVAL, "%s: no channel has a table: there are no codes to count",
                                 options->quantizer);
}

lowkey_status lowkey_drift_run(const struct lowkey_drift_options *options, int *failed, lowkey_error *err)
{
    lowkey_quantizer *quantizer;
    struct lowkey_fit_record *record;
    lowkey_drift *drift = NULL;
    *failed = 0;
    LOWKEY_TRY(lowkey_quantizer_read(options->quantizer, &quantizer, &record, err));
    lowkey_status status = lowkey_drift_create(quantizer, record, &drift, err);
    if (!status)
        status = lowkey_drift_add_captures(drift, options->quantizer, options->n_paths, options->paths,
                                           lowkey_cpu_count(), err);
    if (!status) status = report(options, drift, failed, err);
    lowkey_drift_free(drift);
    lowkey_fit_record_free(record);
    lowkey_quantizer_free(quantizer);
    return status;
}
