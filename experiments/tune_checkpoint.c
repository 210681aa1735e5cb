/* tune_checkpoint.c - a head that says what run it is of, the log, and the numbers of the tables with their hash. */
#include "experiments/tune_checkpoint.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "experiments/whole_file.h"
#include "formats/sha256.h"
#include "runtime/error.h"

enum { LENGTH, FIRST, END, FIRST_VALIDATION, END_VALIDATION, STEPS, EVERY, SEED, N_SETTINGS };
static const char *const setting_names[N_SETTINGS] = { "length",           "first-window",
                                                       "end-window",       "validation's first",
                                                       "validation's end", "steps",
                                                       "validate",         "seed" };
enum { MODEL, TOKENS, QUANTIZER, N_HASHES };
static const char *const hash_names[N_HASHES] = { "model", "tokens", "quantizer" };

struct head { /* no padding: it is compared as bytes */
    char magic[24];
    unsigned char hashes[N_HASHES][32];
    int64_t settings[N_SETTINGS];
    double rate;
    int64_t n; /* numbers in the tables */
    /* above: what must agree */
    int64_t done, best_step;
    double best_kl;
    unsigned char sha256[32]; /* of the whole file with zeros here */
};

static lowkey_status hash_quantizer(const struct lowkey_tune_request *request, unsigned char digest[32],
                                    lowkey_error *err)
{
    const lowkey_quantizer_desc *desc = lowkey_quantizer_describe(request->quantizer);
    lowkey_sha256 *sha256 = lowkey_sha256_begin();
    for (int i = 0; sha256 && i < 2 * desc->n_layers; i++) {
        const lowkey_layer_desc *layer = &desc->layers[i / 2];
        const lowkey_side_desc *side = i % 2 ? &layer->value : &layer->key;
        const size_t D = (size_t)(i % 2 ? layer->value_head_dim : layer->key_head_dim),
                     C = (size_t)layer->n_kv_heads * D, E = (size_t)side->table_entries;
        const int settings[] = { desc->n_sink_tokens, (int)desc->sink_rule, side->trellis, side->outlier_cap,
                                 side->outlier_page_capacity };
        lowkey_sha256_add(sha256, settings, sizeof settings);
        lowkey_sha256_add(sha256, side->bits, C * sizeof *side->bits);
        lowkey_sha256_add(sha256, side->order, C * sizeof *side->order);
        lowkey_sha256_add(sha256, side->lower, C * sizeof *side->lower);
        lowkey_sha256_add(sha256, side->upper, C * sizeof *side->upper);
        lowkey_sha256_add(sha256, request->record->reports[i / 2][i % 2].mse, C * sizeof(double));
        if (E) lowkey_sha256_add(sha256, side->table, C * E * sizeof *side->table);
        if (E && side->boundary)
            lowkey_sha256_add(sha256, side->boundary, C * (E - 1) * sizeof *side->boundary);
        if (side->factor) lowkey_sha256_add(sha256, side->factor, C * D * sizeof *side->factor);
        if (side->metric_weight)
            lowkey_sha256_add(sha256, side->metric_weight, C * sizeof *side->metric_weight);
    }
    return lowkey_sha256_end(sha256, digest, err);
}

static lowkey_status make_head(const struct lowkey_tune_request *request,
                               const struct lowkey_tune_state *state, struct head *head, lowkey_error *err)
{
    const int64_t settings[N_SETTINGS] = { [LENGTH] = request->length,
                                           [FIRST] = request->first_window,
                                           [END] = request->end_window,
                                           [FIRST_VALIDATION] = request->first_validation,
                                           [END_VALIDATION] = request->end_validation,
                                           [STEPS] = request->steps,
                                           [EVERY] = request->validate_every,
                                           [SEED] = request->seed };
    memset(head, 0, sizeof *head);
    snprintf(head->magic, sizeof head->magic, "lowkey %s tuning", lowkey_version());
    memcpy(head->hashes[MODEL], request->model->sha256, 32);
    LOWKEY_TRY(lowkey_sha256_of(request->tokens->tokens,
                                (size_t)request->tokens->n_tokens * sizeof *request->tokens->tokens,
                                head->hashes[TOKENS], err));
    LOWKEY_TRY(hash_quantizer(request, head->hashes[QUANTIZER], err));
    memcpy(head->settings, settings, sizeof settings);
    head->rate = request->rate;
    head->n = (int64_t)state->tables->n;
    head->done = state->done;
    head->best_step = state->best_step;
    head->best_kl = state->best_kl;
    return LOWKEY_OK;
}

static size_t log_bytes(const struct lowkey_tune_state *state)
{
    return ((size_t)state->steps + 1) * sizeof *state->log;
}

static size_t table_bytes(const struct lowkey_tune_state *state)
{
    return 4 * state->tables->n * sizeof *state->tables->move; /* one block */
}

static lowkey_status hash_state(const struct head *head, const struct lowkey_tune_step *log,
                                const double *tables, const struct lowkey_tune_state *of,
                                unsigned char digest[32], lowkey_error *err)
{
    struct head copy = *head;
    lowkey_sha256 *sha256 = lowkey_sha256_begin();
    memset(copy.sha256, 0, sizeof copy.sha256);
    if (sha256) {
        lowkey_sha256_add(sha256, &copy, sizeof copy);
        lowkey_sha256_add(sha256, log, log_bytes(of));
        lowkey_sha256_add(sha256, tables, table_bytes(of));
    }
    return lowkey_sha256_end(sha256, digest, err);
}

lowkey_status lowkey_tune_checkpoint_write(const struct lowkey_tune_request *request,
                                           const struct lowkey_tune_state *state, lowkey_error *err)
{
    struct head head;
    struct lowkey_whole_file file = { 0 };
    LOWKEY_TRY(make_head(request, state, &head, err));
    LOWKEY_TRY(hash_state(&head, state->log, state->tables->move, state, head.sha256, err));
    LOWKEY_TRY(lowkey_whole_file_open(&file, request->checkpoint, err));
    fwrite(&head, sizeof head, 1, file.to); /* commit sees what went wrong */
    fwrite(state->log, log_bytes(state), 1, file.to);
    fwrite(state->tables->move, table_bytes(state), 1, file.to);
    const lowkey_status status = lowkey_whole_file_commit(&file, err);
    lowkey_whole_file_abandon(&file);
    return status;
}

static lowkey_status compare(const char *path, const struct head *found, const struct head *wanted,
                             lowkey_error *err)
{
    if (memcmp(found->magic, wanted->magic, sizeof found->magic) != 0)
        return lowkey_fail(err, LOWKEY_EFORMAT, "%s: no checkpoint of this version of lowkey tune", path);
    for (int i = 0; i < N_HASHES; i++)
        if (memcmp(found->hashes[i], wanted->hashes[i], 32) != 0) {
            char of_file[65], of_run[65];
            lowkey_sha256_print(found->hashes[i], of_file);
            lowkey_sha256_print(wanted->hashes[i], of_run);
            return lowkey_fail(err, LOWKEY_EINVAL, "%s: its %s is %.16s, of this run %.16s", path,
                               hash_names[i], of_file, of_run);
        }
    for (int i = 0; i < N_SETTINGS; i++)
        if (found->settings[i] != wanted->settings[i])
            return lowkey_fail(err, LOWKEY_EINVAL, "%s: its %s is %lld, of this run %lld", path,
                               setting_names[i], (long long)found->settings[i],
                               (long long)wanted->settings[i]);
    if (found->rate != wanted->rate)
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: its rate is %g, of this run %g", path, found->rate,
                           wanted->rate);
    return LOWKEY_OK;
}

/* What follows the head, into log and tables. */
static lowkey_status read_body(FILE *file, const char *path, const struct head *head,
                               const struct lowkey_tune_state *state, struct lowkey_tune_step *log,
                               double *tables, lowkey_error *err)
{
    unsigned char digest[32] = { 0 };
    const int whole = head->n == (int64_t)state->tables->n && head->done >= 0 && head->done <= state->steps &&
                      fread(log, log_bytes(state), 1, file) == 1 &&
                      fread(tables, table_bytes(state), 1, file) == 1 && fgetc(file) == EOF;
    if (whole) LOWKEY_TRY(hash_state(head, log, tables, state, digest, err));
    if (!whole || memcmp(digest, head->sha256, sizeof digest) != 0)
        return lowkey_fail(err, LOWKEY_EFORMAT, "%s: not what was written; without it, the run begins anew",
                           path);
    return LOWKEY_OK;
}

static lowkey_status read_state(FILE *file, const struct lowkey_tune_request *request,
                                struct lowkey_tune_state *state, lowkey_error *err)
{
    const char *path = request->checkpoint;
    struct head head, wanted;
    LOWKEY_TRY(make_head(request, state, &wanted, err));
    if (fread(&head, sizeof head, 1, file) != 1)
        return lowkey_fail(err, LOWKEY_EFORMAT, "%s: no checkpoint of lowkey tune", path);
    LOWKEY_TRY(compare(path, &head, &wanted, err));
    struct lowkey_tune_step *log = malloc(log_bytes(state));
    double *tables = malloc(table_bytes(state));
    lowkey_status status = log && tables ? read_body(file, path, &head, state, log, tables, err)
                                         : lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory", path);
    if (status == LOWKEY_OK) {
        memcpy(state->log, log, log_bytes(state));
        memcpy(state->tables->move, tables, table_bytes(state));
        state->done = (int)head.done;
        state->best_step = (int)head.best_step;
        state->best_kl = head.best_kl;
    }
    free(log);
    free(tables);
    return status;
}

lowkey_status lowkey_tune_checkpoint_read(const struct lowkey_tune_request *request,
                                          struct lowkey_tune_state *state, lowkey_error *err)
{
    FILE *file = fopen(request->checkpoint, "rb");
    if (!file && errno == ENOENT) return LOWKEY_OK;
    if (!file)
        return lowkey_fail(err, LOWKEY_EIO, "%s: cannot open: %s", request->checkpoint, strerror(errno));
    const lowkey_status status = read_state(file, request, state, err);
    fclose(file);
    return status;
}
