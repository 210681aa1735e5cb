/* activations_write_h5.c - activations.h5, written: the description first, then rows in any order. Chunks
 * hold one head of some 128 KiB of tokens, so that a head's columns and a run of tokens are both read in long
 * pieces; rows are sorted by head here, so that they are written in long pieces too. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/activations_parts.h"
#include "formats/file_h5.h"
#include "formats/geometry.h"
#include "formats/half.h"
#include "runtime/error.h"

enum { CHUNK_BYTES = 128 << 10 };

struct run {
    int64_t begin, end;
};

struct stream { /* one dataset */
    lowkey_h5_floats *data;
    int64_t chunk_tokens;
    struct run *runs; /* tokens written, rising, apart from each other */
    int n_runs, room;
    uint64_t checksum;
};

struct lowkey_activations_writer {
    lowkey_h5 *file;
    lowkey_dtype dtype;
    unsigned contents;
    int n_layers;
    int64_t n_tokens;
    lowkey_layer_desc *layers; /* geometry; RoPE is not looked at */
    struct stream (*streams)[LOWKEY_N_STREAMS]; /* [n_layers] */
    void *scratch; /* a head's rows of one chunk, as they are stored */
};

/* ---- creating ---- */

static lowkey_status check_info(const struct lowkey_activations_info *info, lowkey_error *err)
{
    if (info->n_layers < 1 || info->n_layers > info->n_model_layers ||
        info->n_model_layers > LOWKEY_MAX_LAYERS)
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "layers: expected 1 to n_model_layers = %d, at most %d, found %d",
                           info->n_model_layers, LOWKEY_MAX_LAYERS, info->n_layers);
    for (int i = 0; i < info->n_layers; i++)
        if (info->layers[i].index >= info->n_model_layers ||
            (i && info->layers[i].index <= info->layers[i - 1].index))
            return lowkey_fail(err, LOWKEY_EINVAL,
                               "layer number %d: expected rising indices below %d, found %d", i,
                               info->n_model_layers, info->layers[i].index);
    LOWKEY_TRY(lowkey_contents_check(info->contents, err));
    if ((unsigned)info->gradient_labels >= LOWKEY_N_LABELS ||
        (info->gradient_labels && !(info->contents & LOWKEY_CONTENTS_GRADS)) || info->gradient_seed < 0 ||
        (info->gradient_seed && info->gradient_labels != LOWKEY_LABELS_MODEL))
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "gradient_labels %d, gradient_seed %" PRId64 ": do not go with the contents",
                           (int)info->gradient_labels, info->gradient_seed);
    if (info->n_samples < 1)
        return lowkey_fail(err, LOWKEY_EINVAL, "samples: expected at least 1, found %d", info->n_samples);
    return lowkey_offsets_check("sample_offsets", info->sample_offsets, info->n_samples,
                                info->sample_offsets[info->n_samples], err);
}

static lowkey_status write_root(lowkey_h5 *file, const struct lowkey_activations_info *info,
                                lowkey_error *err)
{
    char contents[LOWKEY_CONTENTS_SIZE];
    lowkey_contents_print(info->contents, contents);
    LOWKEY_TRY(
        lowkey_h5_write_identity(file, info->n_model_layers, info->model_name, info->model_sha256, err));
    LOWKEY_TRY(lowkey_h5_put_string(file, "/", "contents", contents, err));
    if (info->gradient_labels)
        LOWKEY_TRY(lowkey_h5_put_string(file, "/", "gradient_labels",
                                        lowkey_gradient_labels_names[info->gradient_labels], err));
    if (info->gradient_labels == LOWKEY_LABELS_MODEL)
        LOWKEY_TRY(lowkey_h5_put_int(file, "/", "gradient_seed", info->gradient_seed, err));
    LOWKEY_TRY(lowkey_h5_put_string(file, "/", "key_stage", "pre_rope", err));
    LOWKEY_TRY(lowkey_h5_put_string(file, "/", "text_name", info->text_name, err));
    LOWKEY_TRY(lowkey_h5_put_sha256(file, "/", "text_sha256", info->text_sha256, err));
    LOWKEY_TRY(lowkey_h5_write_ints(file, "/sample_offsets", LOWKEY_DIMS((int64_t)info->n_samples + 1),
                                    info->sample_offsets, sizeof *info->sample_offsets, 1, err));
    LOWKEY_TRY(lowkey_h5_write_ints(file, "/sample_sha256", LOWKEY_DIMS(info->n_samples, 32),
                                    info->sample_sha256, 1, 0, err));
    int32_t *index = calloc((size_t)info->n_layers, sizeof *index);
    if (!index) return lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory", lowkey_h5_path(file));
    for (int i = 0; i < info->n_layers; i++) index[i] = info->layers[i].index;
    const lowkey_status status = lowkey_h5_write_ints(file, "/layer_index", LOWKEY_DIMS(info->n_layers),
                                                      index, sizeof *index, 1, err);
    free(index);
    return status;
}

static lowkey_status create_stream(lowkey_activations_writer *writer, int i, enum lowkey_stream stream,
                                   lowkey_error *err)
{
    const lowkey_layer_desc *layer = &writer->layers[i];
    struct stream *to = &writer->streams[i][stream];
    const int head_dim = lowkey_stream_head_dim(layer, stream);
    const lowkey_dtype dtype = stream <= LOWKEY_QUERY ? writer->dtype : LOWKEY_F32;
    char path[LOWKEY_H5_MAX_PATH];
    to->chunk_tokens = CHUNK_BYTES / (head_dim * (dtype == LOWKEY_F32 ? 4 : 2));
    if (to->chunk_tokens > writer->n_tokens) to->chunk_tokens = writer->n_tokens;
    lowkey_h5_layer_path(layer->index, lowkey_stream_names[stream], path);
    const int64_t dims[3] = { writer->n_tokens, lowkey_stream_heads(layer, stream), head_dim };
    const int64_t chunk[3] = { to->chunk_tokens, 1, head_dim };
    return lowkey_h5_floats_create(writer->file, path, 3, dims, chunk, dtype, &to->data, err);
}

static lowkey_status create_layer(lowkey_activations_writer *writer,
                                  const struct lowkey_activations_info *info, int i, lowkey_error *err)
{
    char group[LOWKEY_H5_MAX_PATH];
    lowkey_h5_layer_path(info->layers[i].index, NULL, group);
    LOWKEY_TRY(lowkey_h5_put_group(writer->file, group, err));
    LOWKEY_TRY(lowkey_h5_write_geometry(writer->file, &info->layers[i], err));
    writer->layers[i] = info->layers[i];
    for (int s = 0; s < LOWKEY_N_STREAMS; s++)
        if (info->contents >> s & 1) LOWKEY_TRY(create_stream(writer, i, (enum lowkey_stream)s, err));
    return LOWKEY_OK;
}

lowkey_status lowkey_activations_create(const char *path, const struct lowkey_activations_info *info,
                                        lowkey_dtype dtype, lowkey_activations_writer **out,
                                        lowkey_error *err)
{
    *out = NULL;
    LOWKEY_TRY(check_info(info, err));
    lowkey_activations_writer *writer = calloc(1, sizeof *writer);
    if (!writer) return lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory", path);
    writer->dtype = dtype;
    writer->contents = info->contents;
    writer->n_layers = info->n_layers;
    writer->n_tokens = info->sample_offsets[info->n_samples];
    writer->layers = calloc((size_t)info->n_layers, sizeof *writer->layers);
    writer->streams = calloc((size_t)info->n_layers, sizeof *writer->streams);
    writer->scratch = malloc(CHUNK_BYTES);
    lowkey_status status = LOWKEY_OK;
    if (!writer->layers || !writer->streams || !writer->scratch)
        status = lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory", path);
    if (!status)
        status = lowkey_h5_create_minor(
            path, "activations", info->gradient_labels ? 1 : LOWKEY_FORMAT_WRITTEN_MINOR, &writer->file, err);
    if (!status) status = write_root(writer->file, info, err);
    if (!status) status = lowkey_h5_put_group(writer->file, "/layers", err);
    for (int i = 0; i < info->n_layers && !status; i++) status = create_layer(writer, info, i, err);
    if (status)
        lowkey_activations_abandon(writer);
    else
        *out = writer;
    return status;
}

/* ---- rows ---- */

/* Add tokens first..first+n-1, none of which may be there yet. */
static lowkey_status note_run(const lowkey_activations_writer *writer, struct stream *stream, int64_t first,
                              int64_t n, lowkey_error *err)
{
    int at = 0;
    const int64_t end = first + n;
    while (at < stream->n_runs && stream->runs[at].end < first) at++;
    const int touches = at < stream->n_runs && stream->runs[at].end == first;
    const struct run *next = at + touches < stream->n_runs ? &stream->runs[at + touches] : NULL;
    if ((at < stream->n_runs && !touches && stream->runs[at].begin < end) ||
        (touches && next && next->begin < end))
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: tokens %" PRId64 "..%" PRId64 " were written before",
                           lowkey_h5_path(writer->file), first, end - 1);
    if (touches) {
        stream->runs[at].end = end;
        if (!next || next->begin != end) return LOWKEY_OK;
        stream->runs[at].end = next->end;
        memmove(&stream->runs[at + 1], &stream->runs[at + 2],
                (size_t)(stream->n_runs - at - 2) * sizeof *stream->runs);
        stream->n_runs--;
        return LOWKEY_OK;
    }
    if (next && next->begin == end) return stream->runs[at].begin = first, LOWKEY_OK;
    if (stream->n_runs == stream->room) {
        const int room = stream->room ? 2 * stream->room : 4;
        struct run *runs = realloc(stream->runs, (size_t)room * sizeof *runs);
        if (!runs) return lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory", lowkey_h5_path(writer->file));
        stream->runs = runs;
        stream->room = room;
    }
    memmove(&stream->runs[at + 1], &stream->runs[at], (size_t)(stream->n_runs - at) * sizeof *stream->runs);
    stream->runs[at] = (struct run) { first, end };
    stream->n_runs++;
    return LOWKEY_OK;
}

static uint16_t encode(lowkey_dtype dtype, float x)
{
    return dtype == LOWKEY_F16 ? lowkey_f32_to_f16(x) : lowkey_f32_to_bf16(x);
}

static float decode(lowkey_dtype dtype, uint16_t code)
{
    return dtype == LOWKEY_F16 ? lowkey_f16_to_f32(code) : lowkey_bf16_to_f32(code);
}

/* The smallest magnitude that the type does not hold, as bits of f32: what rounds to infinity, or is it. */
static uint32_t first_beyond(lowkey_dtype dtype)
{
    return lowkey_f32_bits(dtype == LOWKEY_F16 ? 65520 : dtype == LOWKEY_BF16 ? 0x1.ffp127f : INFINITY);
}

static uint32_t is_bad(float x, uint32_t beyond, int is_weight)
{
    return ((lowkey_f32_bits(x) & 0x7fffffffu) >= beyond) | ((uint32_t)is_weight & (x < 0));
}

static lowkey_status check_rows(const lowkey_activations_writer *writer, int i, enum lowkey_stream stream,
                                lowkey_dtype dtype, int64_t first, int64_t n_tokens, const float *rows,
                                lowkey_error *err)
{
    static const char *const names[] = { [LOWKEY_F32] = "f32", [LOWKEY_F16] = "f16", [LOWKEY_BF16] = "bf16" };
    const lowkey_layer_desc *layer = &writer->layers[i];
    const int is_weight = stream == LOWKEY_KEY_WEIGHT || stream == LOWKEY_VALUE_WEIGHT;
    const size_t head_dim = (size_t)lowkey_stream_head_dim(layer, stream);
    const size_t row = (size_t)lowkey_stream_heads(layer, stream) * head_dim;
    const uint32_t beyond = first_beyond(dtype);
    size_t n_bad = 0, at = 0;
    for (size_t k = 0; k < (size_t)n_tokens * row; k++) n_bad += is_bad(rows[k], beyond, is_weight);
    if (n_bad == 0) return LOWKEY_OK;
    while (!is_bad(rows[at], beyond, is_weight)) at++;
    return lowkey_fail(
        err, LOWKEY_EINVAL,
        "%s: %s of layer %d, head %d, channel %d, token %" PRId64 ": expected a number that %s "
        "holds%s, found %g (%zu such in tokens %" PRId64 "..%" PRId64 ")",
        lowkey_h5_path(writer->file), lowkey_stream_names[stream], layer->index, (int)(at % row / head_dim),
        (int)(at % head_dim), first + (int64_t)(at / row), names[dtype], is_weight ? ", 0 or more" : "",
        (double)rows[at], n_bad, first, first + n_tokens - 1);
}

/* Tokens first.. of one head, within one chunk. rows: from token first, all heads. */
static lowkey_status write_piece(lowkey_activations_writer *writer, int i, enum lowkey_stream stream,
                                 lowkey_dtype dtype, int head, int64_t first, int64_t n_tokens,
                                 const float *rows, lowkey_error *err)
{
    struct stream *to = &writer->streams[i][stream];
    const size_t head_dim = (size_t)lowkey_stream_head_dim(&writer->layers[i], stream);
    const size_t row = (size_t)lowkey_stream_heads(&writer->layers[i], stream) * head_dim;
    for (int64_t t = 0; t < n_tokens; t++) {
        const size_t at = (size_t)t * row + (size_t)head * head_dim;
        float stored[LOWKEY_MAX_HEAD_DIM];
        if (dtype == LOWKEY_F32) {
            memcpy((float *)writer->scratch + (size_t)t * head_dim, rows + at, head_dim * sizeof *rows);
            memcpy(stored, rows + at, head_dim * sizeof *rows);
        } else {
            uint16_t *codes = (uint16_t *)writer->scratch + (size_t)t * head_dim;
            for (size_t c = 0; c < head_dim; c++) codes[c] = encode(dtype, rows[at + c]);
            for (size_t c = 0; c < head_dim; c++) stored[c] = decode(dtype, codes[c]);
        }
        to->checksum += lowkey_rows_checksum(stored, (size_t)first * row + at, head_dim);
    }
    const int64_t start[3] = { first, head, 0 }, count[3] = { n_tokens, 1, (int64_t)head_dim };
    return lowkey_h5_floats_write_raw(to->data, start, count, writer->scratch, err);
}

lowkey_status lowkey_activations_write(lowkey_activations_writer *writer, int i, enum lowkey_stream stream,
                                       int64_t first, int64_t n_tokens, const float *rows, lowkey_error *err)
{
    if (i < 0 || i >= writer->n_layers || (unsigned)stream >= LOWKEY_N_STREAMS ||
        !(writer->contents >> stream & 1) || n_tokens < 1 || first < 0 || first > writer->n_tokens - n_tokens)
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "%s: no tokens %" PRId64 "..%" PRId64 " of stream %d at layer number %d",
                           lowkey_h5_path(writer->file), first, first + n_tokens - 1, (int)stream, i);
    const lowkey_dtype dtype = stream <= LOWKEY_QUERY ? writer->dtype : LOWKEY_F32;
    const lowkey_layer_desc *layer = &writer->layers[i];
    struct stream *to = &writer->streams[i][stream];
    const int n_heads = lowkey_stream_heads(layer, stream);
    const size_t row = (size_t)n_heads * (size_t)lowkey_stream_head_dim(layer, stream);
    LOWKEY_TRY(check_rows(writer, i, stream, dtype, first, n_tokens, rows, err));
    LOWKEY_TRY(note_run(writer, to, first, n_tokens, err));
    for (int64_t done = 0, n; done < n_tokens; done += n) {
        const int64_t in_chunk = to->chunk_tokens - (first + done) % to->chunk_tokens;
        n = n_tokens - done < in_chunk ? n_tokens - done : in_chunk;
        for (int h = 0; h < n_heads; h++)
            LOWKEY_TRY(
                write_piece(writer, i, stream, dtype, h, first + done, n, rows + (size_t)done * row, err));
    }
    return LOWKEY_OK;
}

/* ---- finishing ---- */

static void close_streams(lowkey_activations_writer *writer)
{
    for (int i = 0; writer->streams && i < writer->n_layers; i++) {
        for (int s = 0; s < LOWKEY_N_STREAMS; s++) {
            lowkey_h5_floats_close(writer->streams[i][s].data);
            free(writer->streams[i][s].runs);
            writer->streams[i][s].data = NULL;
            writer->streams[i][s].runs = NULL;
        }
    }
}

static void free_writer(lowkey_activations_writer *writer)
{
    close_streams(writer);
    free(writer->streams);
    free(writer->layers);
    free(writer->scratch);
    free(writer);
}

void lowkey_activations_abandon(lowkey_activations_writer *writer)
{
    if (!writer) return;
    close_streams(writer);
    lowkey_h5_abandon(writer->file);
    free_writer(writer);
}

static lowkey_status check_complete(const lowkey_activations_writer *writer, lowkey_error *err)
{
    for (int i = 0; i < writer->n_layers; i++) {
        for (int s = 0; s < LOWKEY_N_STREAMS; s++) {
            const struct stream *stream = &writer->streams[i][s];
            if (!(writer->contents >> s & 1)) continue;
            if (stream->n_runs == 1 && stream->runs[0].begin == 0 && stream->runs[0].end == writer->n_tokens)
                continue;
            const int64_t missing = stream->n_runs && stream->runs[0].begin == 0 ? stream->runs[0].end : 0;
            return lowkey_fail(err, LOWKEY_EINVAL,
                               "%s: %s of layer %d: token %" PRId64 " of %" PRId64 " was not written",
                               lowkey_h5_path(writer->file), lowkey_stream_names[s], writer->layers[i].index,
                               missing, writer->n_tokens);
        }
    }
    return LOWKEY_OK;
}

/* Reads all rows again and compares the sums. */
static lowkey_status verify_stream(const lowkey_activations_writer *writer, lowkey_activations *again, int i,
                                   enum lowkey_stream stream, float *rows, int64_t room, const char *path,
                                   lowkey_error *err)
{
    const int n_heads = lowkey_stream_heads(&writer->layers[i], stream);
    const size_t row = (size_t)n_heads * (size_t)lowkey_stream_head_dim(&writer->layers[i], stream);
    const int64_t step = room / (int64_t)row;
    uint64_t checksum = 0;
    for (int64_t first = 0, n; first < writer->n_tokens; first += n) {
        n = writer->n_tokens - first < step ? writer->n_tokens - first : step;
        LOWKEY_TRY(lowkey_activations_read(again, i, stream, first, n, 0, n_heads, rows, err));
        checksum += lowkey_rows_checksum(rows, (size_t)first * row, (size_t)n * row);
    }
    if (checksum == writer->streams[i][stream].checksum) return LOWKEY_OK;
    return lowkey_fail(err, LOWKEY_EIO, "%s: %s of layer %d reads back as other numbers than were written",
                       path, lowkey_stream_names[stream], writer->layers[i].index);
}

static lowkey_status verify(void *arg, const char *temporary_path, lowkey_error *err)
{
    enum { ROOM = 1 << 24 }; /* floats: a row of 65,536 heads of 256 channels at least */
    const lowkey_activations_writer *writer = arg;
    lowkey_activations *again;
    LOWKEY_TRY(lowkey_activations_open(temporary_path, &again, err));
    int64_t room = 0;
    for (int i = 0; i < writer->n_layers; i++) {
        const int64_t row = (int64_t)writer->layers[i].n_q_heads * LOWKEY_MAX_HEAD_DIM;
        if (row > room) room = row;
    }
    room = room * 1024 < ROOM ? room * 1024 : ROOM;
    float *rows = malloc((size_t)room * sizeof *rows);
    lowkey_status status = rows ? LOWKEY_OK
                                : lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory", temporary_path);
    for (int i = 0; i < writer->n_layers; i++)
        for (int s = 0; s < LOWKEY_N_STREAMS && !status; s++)
            if (writer->contents >> s & 1)
                status = verify_stream(writer, again, i, (enum lowkey_stream)s, rows, room, temporary_path,
                                       err);
    free(rows);
    lowkey_activations_close(again);
    return status;
}

lowkey_status lowkey_activations_commit(lowkey_activations_writer *writer, lowkey_error *err)
{
    const lowkey_status status = check_complete(writer, err);
    if (status) {
        lowkey_activations_abandon(writer);
        return status;
    }
    for (int i = 0; i < writer->n_layers; i++) {
        for (int s = 0; s < LOWKEY_N_STREAMS; s++) {
            lowkey_h5_floats_close(writer->streams[i][s].data);
            writer->streams[i][s].data = NULL;
        }
    }
    const lowkey_status committed = lowkey_h5_commit(writer->file, verify, writer, err);
    free_writer(writer);
    return committed;
}
