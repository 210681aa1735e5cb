/* peer_sample.c - captured tokens for formats that calibrate: of each layer, runs of consecutive tokens
 * spread evenly over all captures, so that memory does not grow with them. */
#include <stdlib.h>

#include "calib/captures.h"
#include "experiments/peers/peer_parts.h"
#include "formats/identity.h"
#include "runtime/error.h"

enum {
    RUN = 64,
    MAX_TOKENS = 16384,
    MAX_FLOATS = 1 << 26, /* of all streams together: 256 MiB */
    N_SINKS = 1
};

struct lowkey_peer_reader {
    const struct lowkey_peer_format *format;
    lowkey_captures *captures;
    int n_runs;
    struct run {
        int sample, n;
        int64_t first;
    } * runs; /* [n_runs], those that are read */
    float *rows[LOWKEY_N_STREAMS]; /* of the streams wanted */
    int *position;
    struct lowkey_peer_sample sample;
};

static int is_wanted(const struct lowkey_peer_reader *reader, int stream)
{
    const unsigned wants = reader->format->wants;
    const int there = (int)(reader->captures->contents >> stream & 1);
    if (stream == LOWKEY_KEY || stream == LOWKEY_VALUE) return 1;
    if (stream == LOWKEY_QUERY) return (wants & LOWKEY_PEER_QUERIES) != 0;
    return there && (wants & LOWKEY_PEER_GRADIENTS) &&
           (stream == LOWKEY_KEY_GRAD || stream == LOWKEY_VALUE_GRAD);
}

/* Every n-th of all runs, so that they fit; max_tokens at most. */
static lowkey_status choose_runs(struct lowkey_peer_reader *reader, int64_t max_tokens, lowkey_error *err)
{
    const lowkey_captures *captures = reader->captures;
    int64_t n_all = 0;
    for (int s = 0; s < captures->n_samples; s++)
        n_all += (captures->samples[s].n_tokens - captures->samples[s].n_sinks + RUN - 1) / RUN;
    const int64_t n_most = max_tokens / RUN > 1 ? max_tokens / RUN : 1, n = n_all < n_most ? n_all : n_most;
    reader->runs = malloc((size_t)n * sizeof *reader->runs);
    if (!reader->runs) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for a sample of the captures");
    int64_t i = 0; /* number of the run, of all */
    for (int s = 0; s < captures->n_samples; s++) {
        const struct lowkey_sample *sample = &captures->samples[s];
        for (int64_t t = sample->n_sinks; t < sample->n_tokens; t += RUN, i++) {
            if (reader->n_runs == n || i != n_all * reader->n_runs / n) continue;
            const int64_t left = sample->n_tokens - t;
            reader->runs[reader->n_runs++] = (struct run) { s, (int)(left < RUN ? left : RUN), t };
            reader->sample.n_tokens += (int)(left < RUN ? left : RUN);
        }
    }
    return LOWKEY_OK;
}

static lowkey_status allocate(struct lowkey_peer_reader *reader, lowkey_error *err)
{
    const lowkey_captures *captures = reader->captures;
    size_t most[LOWKEY_N_STREAMS] = { 0 }, floats = 0; /* of a token, over layers */
    for (int stream = 0; stream < LOWKEY_N_STREAMS; stream++) {
        for (int l = 0; is_wanted(reader, stream) && l < captures->info->n_layers; l++) {
            const lowkey_layer_desc *layer = &captures->info->layers[l];
            const size_t row = (size_t)lowkey_stream_heads(layer, (enum lowkey_stream)stream) *
                               (size_t)lowkey_stream_head_dim(layer, (enum lowkey_stream)stream);
            most[stream] = row > most[stream] ? row : most[stream];
        }
        floats += most[stream];
    }
    const int64_t fitting = MAX_FLOATS / (int64_t)floats;
    LOWKEY_TRY(choose_runs(reader, fitting < MAX_TOKENS ? fitting : MAX_TOKENS, err));
    const size_t n = (size_t)reader->sample.n_tokens;
    reader->position = malloc(n * sizeof *reader->position);
    int failed = !reader->position;
    for (int stream = 0; stream < LOWKEY_N_STREAMS; stream++) {
        if (most[stream]) reader->rows[stream] = malloc(n * most[stream] * sizeof(float));
        failed |= most[stream] && !reader->rows[stream];
    }
    if (failed) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %zu captured tokens", n);
    int t = 0;
    for (int r = 0; r < reader->n_runs; r++)
        for (int i = 0; i < reader->runs[r].n; i++) reader->position[t++] = (int)reader->runs[r].first + i;
    return LOWKEY_OK;
}

static lowkey_status open_captures(struct lowkey_peer_reader *reader, const lowkey_model *model, int n_paths,
                                   const char *const *paths, lowkey_error *err)
{
    if (n_paths < 1)
        return lowkey_fail(err, LOWKEY_EINVAL, "%s is fitted on captured activations: none are given",
                           reader->format->name);
    LOWKEY_TRY(lowkey_captures_open(n_paths, paths, 0, 0, N_SINKS, &reader->captures, err));
    const struct lowkey_identity theirs = lowkey_identity_of_activations(paths[0], reader->captures->info);
    const struct lowkey_identity ours = lowkey_identity_of_model("the model", model);
    LOWKEY_TRY(lowkey_identity_check(&ours, &theirs, LOWKEY_SAME_LAYERS, err));
    if ((reader->format->wants & LOWKEY_PEER_QUERIES) && !(reader->captures->contents >> LOWKEY_QUERY & 1))
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: %s is fitted on queries, of which there are none",
                           paths[0], reader->format->name);
    return allocate(reader, err);
}

lowkey_status lowkey_peer_reader_open(const struct lowkey_peer_format *format, const lowkey_model *model,
                                      int n_paths, const char *const *paths, struct lowkey_peer_reader **out,
                                      lowkey_error *err)
{
    *out = NULL;
    struct lowkey_peer_reader *reader = calloc(1, sizeof *reader);
    if (!reader) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for reading captures");
    reader->format = format;
    const lowkey_status status = open_captures(reader, model, n_paths, paths, err);
    if (status != LOWKEY_OK)
        lowkey_peer_reader_close(reader);
    else
        *out = reader;
    return status;
}

void lowkey_peer_reader_close(struct lowkey_peer_reader *reader)
{
    if (!reader) return;
    lowkey_captures_close(reader->captures);
    for (int stream = 0; stream < LOWKEY_N_STREAMS; stream++) free(reader->rows[stream]);
    free(reader->position);
    free(reader->runs);
    free(reader);
}

lowkey_status lowkey_peer_reader_layer(struct lowkey_peer_reader *reader, int l,
                                       const struct lowkey_peer_sample **out, lowkey_error *err)
{
    const lowkey_layer_desc *layer = &reader->captures->info->layers[l];
    for (int stream = 0; stream < LOWKEY_N_STREAMS; stream++) {
        if (!reader->rows[stream]) continue;
        const int H = lowkey_stream_heads(layer, (enum lowkey_stream)stream);
        const size_t row = (size_t)H * (size_t)lowkey_stream_head_dim(layer, (enum lowkey_stream)stream);
        const int turned = (stream == LOWKEY_KEY || stream == LOWKEY_QUERY) && !reader->format->before_rope;
        float *rows = reader->rows[stream];
        for (int r = 0; r < reader->n_runs; r++) {
            const struct run *run = &reader->runs[r];
            LOWKEY_TRY(lowkey_captures_read(reader->captures, l, (enum lowkey_stream)stream, run->sample,
                                            run->first, run->n, 0, H, rows, err));
            for (int t = 0; turned && t < run->n; t++)
                lowkey_peer_turn(layer, run->first + t, 0, H, rows + (size_t)t * row);
            rows += (size_t)run->n * row;
        }
    }
    struct lowkey_peer_sample *sample = &reader->sample;
    sample->position = reader->position;
    sample->key = reader->rows[LOWKEY_KEY];
    sample->value = reader->rows[LOWKEY_VALUE];
    sample->query = reader->rows[LOWKEY_QUERY];
    sample->key_grad = reader->rows[LOWKEY_KEY_GRAD];
    sample->value_grad = reader->rows[LOWKEY_VALUE_GRAD];
    *out = sample;
    return LOWKEY_OK;
}
