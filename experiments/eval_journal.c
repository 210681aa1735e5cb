/* eval_journal.c - see eval_journal.h. A row is one write at the end of the file, so that what a signal or a crash leaves is
 * whole rows and at most one torn line. */
#include "experiments/eval_journal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "formats/sha256.h"
#include "runtime/error.h"

enum column {
    LABEL,
    FORMAT,
    SIMULATED,
    FILE_SHA256,
    CALIBRATION,
    SINKS,
    MODEL,
    MODEL_SHA256,
    TEXT,
    TEXT_SHA256,
    WINDOW,
    WINDOW_INDEX,
    N_PREDICTED,
    NLL,
    KL,
    TOP1,
    BITS_KEY,
    BITS_VALUE,
    SECONDS,
    CPU_SECONDS,
    VERSION,
    COMMIT,
    N_COLUMNS
};
static const char header[] =
    "label,format,simulated,file_sha256,calibration,sinks,model,model_sha256,text,text_sha256,window,"
    "window_index,n_predicted,nll,kl,top1,bits_key,bits_value,seconds,cpu_seconds,version,commit";
enum { TEXT_SIZE = 128, LINE_SIZE = 4096 };

struct settings { /* of a format's rows, as they stand in the file */
    char fields[WINDOW + 1][TEXT_SIZE]; /* LABEL..WINDOW */
};

struct lowkey_eval_journal {
    struct lowkey_eval_journal_config config;
    int fd; /* -1: no file */
    char *path;
    int n_kept;
    struct settings *settings; /* [1 + n_formats], the reference's first, as below */
    struct lowkey_eval_result *results; /* [1 + n_formats][n_windows] */
    unsigned char *is_there; /* [1 + n_formats][n_windows] */
};

static size_t place(const lowkey_eval_journal *journal, int format, int i)
{
    return (size_t)(1 + format) * (size_t)journal->config.request->n_windows + (size_t)i;
}

/* A name as a field: what would break the line is replaced. */
static void put_name(char field[TEXT_SIZE], const char *name)
{
    snprintf(field, TEXT_SIZE, "%s", name);
    for (char *c = field; *c; c++)
        if (strchr(",\"\n\r", *c)) *c = '_';
}

static void describe(const struct lowkey_eval_request *request, int f, struct settings *settings)
{
    const struct lowkey_eval_format *format = f < 0 ? NULL : &request->formats[f];
    const char *slash = format ? strrchr(format->name, '/') : NULL;
    put_name(settings->fields[LABEL], format ? format->label : "f32");
    put_name(settings->fields[FORMAT], !format ? "f32" : slash ? slash + 1 : format->name);
    put_name(settings->fields[SIMULATED], format && format->is_simulated ? "yes" : "no");
    put_name(settings->fields[FILE_SHA256], format ? format->file_sha256 : "");
    put_name(settings->fields[CALIBRATION], format ? format->calibration : "");
    snprintf(settings->fields[SINKS], TEXT_SIZE, "%d", format ? format->n_sinks : 0);
    put_name(settings->fields[MODEL], request->model->name);
    lowkey_sha256_print(request->model->sha256, settings->fields[MODEL_SHA256]);
    put_name(settings->fields[TEXT], request->tokens->text_name);
    lowkey_sha256_print(request->tokens->text_sha256, settings->fields[TEXT_SHA256]);
    snprintf(settings->fields[WINDOW], TEXT_SIZE, "%d", request->window);
}

/* ---- reading ---- */

/* Cuts a line at its commas. Returns how many fields it has, at most N_COLUMNS + 1. */
static int split(char *line, char *fields[N_COLUMNS])
{
    int n = 0;
    for (char *at = line; at; n++) {
        char *comma = strchr(at, ',');
        if (comma) *comma = 0;
        if (n == N_COLUMNS) return n + 1;
        fields[n] = at;
        at = comma ? comma + 1 : NULL;
    }
    return n;
}

static lowkey_status check_fields(const lowkey_eval_journal *journal, long number,
                                  char *const fields[N_COLUMNS], const struct settings *settings,
                                  const enum column *columns, int n, lowkey_error *err)
{
    static const char *const names[] = { "label",       "format",      "simulated", "file_sha256",
                                         "calibration", "sinks",       "model",     "model_sha256",
                                         "text",        "text_sha256", "window" };
    for (int i = 0; i < n; i++) {
        const char *found = fields[columns[i]], *wanted = settings->fields[columns[i]];
        if (strcmp(found, wanted) != 0)
            return lowkey_fail(err, LOWKEY_EINVAL, "%s: line %ld (%s): %s is '%s', of this run '%s'",
                               journal->path, number, fields[LABEL], names[columns[i]], found, wanted);
    }
    return LOWKEY_OK;
}

static int parse_number(const char *text, double *out)
{
    char *end;
    *out = strtod(text, &end);
    return end != text && !*end;
}

static lowkey_status take_result(lowkey_eval_journal *journal, long number, char *const fields[N_COLUMNS],
                                 int f, lowkey_error *err)
{
    double numbers[N_COLUMNS];
    for (int c = WINDOW_INDEX; c <= CPU_SECONDS; c++)
        if (!parse_number(fields[c], &numbers[c]))
            return lowkey_fail(err, LOWKEY_EFORMAT, "%s: line %ld: field %d: expected a number, found '%s'",
                               journal->path, number, c + 1, fields[c]);
    const struct lowkey_eval_request *request = journal->config.request;
    int i = 0;
    while (i < request->n_windows && (double)request->windows[i] != numbers[WINDOW_INDEX]) i++;
    if (i == request->n_windows || journal->is_there[place(journal, f, i)]) return LOWKEY_OK;
    journal->is_there[place(journal, f, i)] = 1;
    journal->n_kept++;
    journal->results[place(journal, f, i)] = (struct lowkey_eval_result) {
        .n_predicted = (int)numbers[N_PREDICTED],
        .nll = numbers[NLL],
        .kl = numbers[KL],
        .n_top1 = (int)numbers[TOP1],
        .bits = { numbers[BITS_KEY], numbers[BITS_VALUE] },
        .seconds = numbers[SECONDS],
        .cpu_seconds = numbers[CPU_SECONDS],
    };
    return LOWKEY_OK;
}

static lowkey_status take_line(lowkey_eval_journal *journal, char *line, long number, lowkey_error *err)
{
    static const enum column of_run[] = { MODEL_SHA256, TEXT_SHA256, WINDOW },
                             of_format[] = { FORMAT, SIMULATED, FILE_SHA256, CALIBRATION, SINKS };
    char *fields[N_COLUMNS];
    if (number == 1)
        return strcmp(line, header) == 0
                   ? LOWKEY_OK
                   : lowkey_fail(err, LOWKEY_EFORMAT,
                                 "%s: is no journal of lowkey eval: expected the columns %s", journal->path,
                                 header);
    const int n = split(line, fields);
    if (n != N_COLUMNS)
        return lowkey_fail(err, LOWKEY_EFORMAT, "%s: line %ld: expected %d fields, found %s", journal->path,
                           number, N_COLUMNS, n < N_COLUMNS ? "fewer" : "more");
    LOWKEY_TRY(check_fields(journal, number, fields, &journal->settings[0], of_run, 3, err));
    for (int f = -1; f < journal->config.request->n_formats; f++) {
        const struct settings *settings = &journal->settings[1 + f];
        if (strcmp(fields[LABEL], settings->fields[LABEL]) != 0) continue;
        /* A file may be called something else, as long as it is the same; of the others the name is what they are. */
        const int skip = settings->fields[FILE_SHA256][0] != 0;
        LOWKEY_TRY(check_fields(journal, number, fields, settings, of_format + skip, 5 - skip, err));
        return take_result(journal, number, fields, f, err);
    }
    return LOWKEY_OK;
}

/* Whole lines; *end: where the last of them ends. */
static lowkey_status read_lines(lowkey_eval_journal *journal, FILE *file, off_t *end, lowkey_error *err)
{
    char *line = NULL;
    size_t size = 0;
    long number = 0;
    lowkey_status status = LOWKEY_OK;
    *end = 0;
    for (ssize_t n; status == LOWKEY_OK && (n = getline(&line, &size, file)) > 0 && line[n - 1] == '\n';) {
        line[n - 1] = 0;
        *end += n;
        if (strlen(line) != (size_t)n - 1)
            status = lowkey_fail(err, LOWKEY_EFORMAT, "%s: line %ld: is no text", journal->path, number + 1);
        else
            status = take_line(journal, line, ++number, err);
    }
    free(line);
    return status;
}

static lowkey_status write_line(lowkey_eval_journal *journal, const char *line, size_t n, lowkey_error *err)
{
    for (size_t done = 0; done < n;) {
        const ssize_t now = write(journal->fd, line + done, n - done);
        if (now < 0 && errno == EINTR) continue;
        if (now <= 0)
            return lowkey_fail(err, LOWKEY_EIO, "%s: cannot write: %s", journal->path, strerror(errno));
        done += (size_t)now;
    }
    return LOWKEY_OK;
}

static lowkey_status open_file(lowkey_eval_journal *journal, lowkey_error *err)
{
    off_t end = 0;
    journal->fd = open(journal->path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (journal->fd < 0)
        return lowkey_fail(err, LOWKEY_EIO, "%s: cannot open: %s", journal->path, strerror(errno));
    if (flock(journal->fd, LOCK_EX | LOCK_NB) != 0)
        return lowkey_fail(err, LOWKEY_EIO, "%s: another process is writing to it", journal->path);
    const int copy = dup(journal->fd);
    FILE *file = copy < 0 ? NULL : fdopen(copy, "r");
    if (!file) {
        if (copy >= 0) close(copy);
        return lowkey_fail(err, LOWKEY_EIO, "%s: cannot read: %s", journal->path, strerror(errno));
    }
    const lowkey_status status = read_lines(journal, file, &end, err);
    fclose(file);
    LOWKEY_TRY(status);
    if (ftruncate(journal->fd, end) != 0)
        return lowkey_fail(err, LOWKEY_EIO, "%s: cannot cut off a torn line: %s", journal->path,
                           strerror(errno));
    if (end > 0) return LOWKEY_OK;
    char line[sizeof header + 1];
    snprintf(line, sizeof line, "%s\n", header);
    return write_line(journal, line, strlen(line), err);
}

/* ---- the object ---- */

lowkey_status lowkey_eval_journal_open(const char *path, const struct lowkey_eval_journal_config *config,
                                       lowkey_eval_journal **out, lowkey_error *err)
{
    *out = NULL;
    const struct lowkey_eval_request *request = config->request;
    const size_t rows = (size_t)(1 + request->n_formats), n = rows * (size_t)request->n_windows;
    lowkey_eval_journal *journal = calloc(1, sizeof *journal);
    if (!journal) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for a journal");
    journal->fd = -1;
    journal->config = *config;
    journal->path = strdup(path ? path : "");
    journal->settings = calloc(rows, sizeof *journal->settings);
    journal->results = calloc(n + 1, sizeof *journal->results);
    journal->is_there = calloc(n + 1, 1);
    lowkey_status status = LOWKEY_OK;
    if (!journal->path || !journal->settings || !journal->results || !journal->is_there)
        status = lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %zu results", n);
    for (int f = -1; status == LOWKEY_OK && f < request->n_formats; f++)
        describe(request, f, &journal->settings[1 + f]);
    if (status == LOWKEY_OK && path) status = open_file(journal, err);
    if (status != LOWKEY_OK) {
        lowkey_eval_journal_close(journal);
        return status;
    }
    *out = journal;
    return LOWKEY_OK;
}

void lowkey_eval_journal_close(lowkey_eval_journal *journal)
{
    if (!journal) return;
    if (journal->fd >= 0) close(journal->fd);
    free(journal->path);
    free(journal->settings);
    free(journal->results);
    free(journal->is_there);
    free(journal);
}

const struct lowkey_eval_result *lowkey_eval_journal_find(const lowkey_eval_journal *journal, int format,
                                                          int i)
{
    return journal->is_there[place(journal, format, i)] ? &journal->results[place(journal, format, i)] : NULL;
}

int lowkey_eval_journal_n_kept(const lowkey_eval_journal *journal)
{
    return journal->n_kept;
}

lowkey_status lowkey_eval_journal_add(lowkey_eval_journal *journal, int format, int i,
                                      const struct lowkey_eval_result *result, lowkey_error *err)
{
    journal->results[place(journal, format, i)] = *result;
    journal->is_there[place(journal, format, i)] = 1;
    if (journal->fd < 0) return LOWKEY_OK;
    const struct settings *settings = &journal->settings[1 + format];
    char line[LINE_SIZE];
    size_t n = 0;
    for (int c = LABEL; c <= WINDOW; c++)
        n += (size_t)snprintf(line + n, sizeof line - n, "%s,", settings->fields[c]);
    n += (size_t)snprintf(line + n, sizeof line - n, "%lld,%d,%.17g,%.17g,%d,%.17g,%.17g,%.3f,%.3f,%s,%s\n",
                          (long long)journal->config.request->windows[i], result->n_predicted, result->nll,
                          result->kl, result->n_top1, result->bits.key, result->bits.value, result->seconds,
                          result->cpu_seconds, lowkey_version(), journal->config.commit);
    return write_line(journal, line, n, err);
}
