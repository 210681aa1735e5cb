/* eval_report.c - see eval_report.h. A format's figures become one flat JSON object; table, JSON and CSV print it. */
#include "experiments/eval_report.h"

#include <jansson.h>
#include <endian.h>
#include <math.h>
#include <openssl/sha.h>
#include <stdlib.h>
#include <string.h>

#include "experiments/bootstrap.h"
#include "experiments/json_rows.h"
#include "experiments/samples.h"
#include "formats/sha256.h"

/* ---- overlap with a fit ---- */

static int hash_window(const struct lowkey_eval_request *request, int i, unsigned char hash[32])
{
    const int32_t *tokens = request->tokens->tokens + lowkey_samples_start(request->tokens, request->window,
                                                                           request->window,
                                                                           request->windows[i]);
    uint32_t *little = malloc((size_t)request->window * sizeof *little);
    if (!little) return 0;
    for (int t = 0; t < request->window; t++) little[t] = htole32((uint32_t)tokens[t]);
    SHA256((const unsigned char *)little, (size_t)request->window * sizeof *little, hash);
    free(little);
    return 1;
}

int lowkey_eval_fit_overlap(const struct lowkey_eval_request *request, int format)
{
    const struct lowkey_eval_format *of = &request->formats[format];
    int n = 0;
    for (int i = 0; of->n_fit_samples && i < request->n_windows; i++) {
        unsigned char hash[32];
        if (!hash_window(request, i, hash)) continue;
        int s = 0;
        while (s < of->n_fit_samples && memcmp(of->fit_samples[s], hash, 32) != 0) s++;
        n += s < of->n_fit_samples;
    }
    return n;
}

/* ---- figures ---- */

struct sums { /* [n_windows] each */
    double *predicted, *nll, *loss, *kl, *top1;
};

static int take_sums(const struct lowkey_eval_report *report, int f, struct sums *sums)
{
    const int n = report->request->n_windows;
    double *all = calloc(5 * (size_t)n + 1, sizeof *all);
    *sums = (struct sums) { all, all + n, all + 2 * n, all + 3 * n, all + 4 * n };
    for (int i = 0; all && i < n; i++) {
        const struct lowkey_eval_result *result = lowkey_eval_journal_find(report->journal, f, i),
                                        *reference = lowkey_eval_journal_find(report->journal, -1, i);
        sums->predicted[i] = result->n_predicted;
        sums->nll[i] = result->nll;
        sums->loss[i] = result->nll - reference->nll;
        sums->kl[i] = result->kl;
        sums->top1[i] = result->n_top1;
    }
    return all != NULL;
}

static double sum_of(const double *x, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) sum += x[i];
    return sum;
}

/* What is not finite has no JSON. */
static json_t *number(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

static void put_with_interval(json_t *row, const char *name, double x, struct lowkey_interval interval)
{
    char key[64];
    json_object_set_new(row, name, number(x));
    snprintf(key, sizeof key, "%s_low", name);
    json_object_set_new(row, key, number(interval.low));
    snprintf(key, sizeof key, "%s_high", name);
    json_object_set_new(row, key, number(interval.high));
}

static void put_figures(const struct lowkey_eval_report *report, const struct sums *sums, json_t *row)
{
    const int n = report->request->n_windows;
    const double predicted = sum_of(sums->predicted, n);
    const struct lowkey_interval nll = lowkey_bootstrap(n, sums->nll, sums->predicted);
    put_with_interval(row, "perplexity", exp(sum_of(sums->nll, n) / predicted),
                      (struct lowkey_interval) { exp(nll.low), exp(nll.high) });
    put_with_interval(row, "loss", sum_of(sums->loss, n) / predicted,
                      lowkey_bootstrap(n, sums->loss, sums->predicted));
    put_with_interval(row, "kl", sum_of(sums->kl, n) / predicted,
                      lowkey_bootstrap(n, sums->kl, sums->predicted));
    put_with_interval(row, "top1", sum_of(sums->top1, n) / predicted,
                      lowkey_bootstrap(n, sums->top1, sums->predicted));
}

static void put_bits(const struct lowkey_eval_report *report, int f, json_t *row)
{
    double key = 0, value = 0, seconds = 0, cpu = 0;
    const int n = report->request->n_windows;
    for (int i = 0; i < n; i++) {
        const struct lowkey_eval_result *result = lowkey_eval_journal_find(report->journal, f, i);
        key += result->bits.key / n;
        value += result->bits.value / n;
        seconds += result->seconds;
        cpu += result->cpu_seconds;
    }
    double both = 32, held = 32;
    if (f >= 0) {
        const struct lowkey_eval_format *format = &report->request->formats[f];
        key = lowkey_eval_stated_bits(format, LOWKEY_STORE_KEY, key);
        value = lowkey_eval_stated_bits(format, LOWKEY_STORE_VALUE, value);
        both = format->key_share * key + (1 - format->key_share) * value;
        held = format->bits_held;
    }
    json_object_set_new(row, "bits_key", number(key));
    json_object_set_new(row, "bits_value", number(value));
    json_object_set_new(row, "bits_payload", number(both));
    json_object_set_new(row, "bits_held", number(held));
    json_object_set_new(row, "seconds", number(seconds));
    json_object_set_new(row, "cpu_seconds", number(cpu));
}

/* What a format is, and its figures; NULL: no memory or not UTF-8. */
static json_t *make_row(const struct lowkey_eval_report *report, int f)
{
    const struct lowkey_eval_format *format = f < 0 ? NULL : &report->request->formats[f];
    const char *slash = format ? strrchr(format->name, '/') : NULL;
    const char *name = !format ? "f32" : slash ? slash + 1 : format->name;
    json_t *row = json_pack(
        "{s:s, s:s, s:b, s:i, s:s, s:s, s:i, s:i}", "label", format ? format->label : "f32", "format", name,
        "simulated", format && format->is_simulated, "sinks", format ? format->n_sinks : 0, "file_sha256",
        format ? format->file_sha256 : "", "calibration", format ? format->calibration : "", "fit_samples",
        format ? format->n_fit_samples : 0, "fit_overlap",
        format ? lowkey_eval_fit_overlap(report->request, f) : 0);
    struct sums sums;
    if (!row || !take_sums(report, f, &sums)) return json_decref(row), NULL;
    put_figures(report, &sums, row);
    free(sums.predicted);
    put_bits(report, f, row);
    return row;
}

/* ---- settings ---- */

static json_t *window_list(const struct lowkey_eval_request *request)
{
    json_t *windows = json_array();
    for (int i = 0; i < request->n_windows; i++)
        json_array_append_new(windows, json_integer(request->windows[i]));
    return windows;
}

static json_t *make_settings(const struct lowkey_eval_report *report)
{
    const struct lowkey_eval_request *request = report->request;
    char model[65], text[65];
    lowkey_sha256_print(request->model->sha256, model);
    lowkey_sha256_print(request->tokens->text_sha256, text);
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:i, s:i, s:o, s:I, s:i, s:i}", "command", "eval",
                     "version", lowkey_version(), "commit", report->commit, "model", request->model->name,
                     "model_sha256", model, "text", request->tokens->text_name, "text_sha256", text, "window",
                     request->window, "n_windows", request->n_windows, "windows", window_list(request),
                     "n_predicted", (json_int_t)request->n_windows * (request->window - 1), "stated_tokens",
                     LOWKEY_EVAL_STATED_TOKENS, "resamples", LOWKEY_RESAMPLES);
}

/* ---- printing ---- */

static double real(const json_t *row, const char *name)
{
    const json_t *value = json_object_get(row, name);
    return json_is_real(value) ? json_real_value(value) : (double)NAN;
}

static void print_interval(const json_t *row, const char *name, int digits, FILE *to)
{
    char low[32], high[32];
    snprintf(low, sizeof low, "%s_low", name);
    snprintf(high, sizeof high, "%s_high", name);
    fprintf(to, " %10.*f", digits, real(row, name));
    if (isnan(real(row, low)))
        fprintf(to, " %19s", "");
    else
        fprintf(to, " [%8.*f %8.*f]", digits, real(row, low), digits, real(row, high));
}

static void print_bits(double bits, FILE *to)
{
    if (isnan(bits))
        fprintf(to, " %6s", "");
    else
        fprintf(to, " %6.2f", bits);
}

int lowkey_eval_print_table(const struct lowkey_eval_report *report, FILE *to)
{
    const struct lowkey_eval_request *request = report->request;
    fprintf(to, "%s on %s, %d windows of %d tokens; nats per token, intervals of 95 %% over windows\n",
            request->model->name, request->tokens->text_name, request->n_windows, request->window);
    fprintf(to, "%-24s %10s %10s %19s %10s %19s %8s %6s %6s %6s %6s\n", "", "perplexity", "loss", "", "KL",
            "", "top-1", "K bits", "V bits", "bits", "held");
    for (int f = -1; f < request->n_formats; f++) {
        json_t *row = make_row(report, f);
        if (!row) return 0;
        fprintf(to, "%-24s %10.4f", json_string_value(json_object_get(row, "label")),
                real(row, "perplexity"));
        print_interval(row, "loss", 5, to);
        print_interval(row, "kl", 5, to);
        fprintf(to, " %8.4f", real(row, "top1"));
        print_bits(real(row, "bits_key"), to);
        print_bits(real(row, "bits_value"), to);
        print_bits(real(row, "bits_payload"), to);
        print_bits(real(row, "bits_held"), to);
        fprintf(to, "%s\n", json_is_true(json_object_get(row, "simulated")) ? "  simulated" : "");
        json_decref(row);
    }
    return 1;
}

static json_t *make_windows(const struct lowkey_eval_report *report, int f)
{
    json_t *windows = json_array();
    for (int i = 0; i < report->request->n_windows; i++) {
        const struct lowkey_eval_result *result = lowkey_eval_journal_find(report->journal, f, i);
        const double n = result->n_predicted;
        json_array_append_new(
            windows, json_pack("{s:I, s:f, s:f, s:f}", "window", (json_int_t)report->request->windows[i],
                               "nll", result->nll / n, "kl", result->kl / n, "top1", result->n_top1 / n));
    }
    return windows;
}

int lowkey_eval_print_json(const struct lowkey_eval_report *report, FILE *to)
{
    json_t *object = make_settings(report), *formats = json_array();
    int good = object && formats;
    for (int f = -1; good && f < report->request->n_formats; f++) {
        json_t *row = make_row(report, f);
        good = row && json_object_set_new(row, "per_window", make_windows(report, f)) == 0 &&
               json_array_append(formats, row) == 0;
        json_decref(row);
    }
    good = good && json_object_set(object, "formats", formats) == 0 &&
           json_dumpf(object, to, JSON_INDENT(1) | JSON_REAL_PRECISION(12)) == 0;
    if (good) fputc('\n', to);
    json_decref(formats);
    json_decref(object);
    return good;
}

/* A cell holds no list: the windows become "2 7 11". */
static int write_windows_as_text(const struct lowkey_eval_request *request, json_t *settings)
{
    const size_t size = (size_t)request->n_windows * 24 + 1;
    char *text = calloc(size, 1);
    size_t n = 0;
    for (int i = 0; text && i < request->n_windows; i++)
        n += (size_t)snprintf(text + n, size - n, "%s%lld", i ? " " : "", (long long)request->windows[i]);
    const int good = text && json_object_set_new(settings, "windows", json_string(text)) == 0;
    free(text);
    return good;
}

int lowkey_eval_print_csv(const struct lowkey_eval_report *report, FILE *to)
{
    json_t *settings = make_settings(report);
    int good = settings && write_windows_as_text(report->request, settings);
    for (int f = -1; good && f < report->request->n_formats; f++) {
        json_t *row = make_row(report, f);
        good = row && json_object_update(row, settings) == 0;
        if (good) lowkey_json_csv_line(row, f < 0, to);
        json_decref(row);
    }
    json_decref(settings);
    return good;
}
