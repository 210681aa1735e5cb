/* weights.c - weights of elements: from the file, from gradients, or computed before and kept in a scratch
 * file. */
#include "calib/weights.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/error.h"

void lowkey_weight_learn(int64_t n, const float *raw, int square, double clip, double floor,
                         struct lowkey_weight_shape *shape)
{
    *shape = (struct lowkey_weight_shape) { .square = square, .clip = HUGE_VAL, .mean = 1 };
    float largest = 0;
    for (int64_t i = 0; raw && i < n; i++) largest = fabsf(raw[i]) > largest ? fabsf(raw[i]) : largest;
    if (!(largest > 0)) return;
    shape->largest = (double)largest;
    double sum = 0;
    for (int64_t i = 0; i < n; i++) { /* neither clip nor floor yet */
        const float weight = lowkey_weight_made(shape, raw[i]);
        shape->any_tiny |= weight == 0 && raw[i] != 0;
        sum += (double)weight;
    }
    const double mean = sum / (double)n;
    if (clip > 0) shape->clip = clip * mean;
    if (floor > 0) shape->floor = floor * mean;
    sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (double)lowkey_weight_made(shape, raw[i]);
    shape->mean = sum / (double)n;
}

double lowkey_weight_unit(const struct lowkey_weight_shape *shape)
{
    return shape->square ? shape->largest * shape->largest : shape->largest;
}

lowkey_status lowkey_store_open(const char *beside, int64_t n_tokens, int n_heads, int width,
                                struct lowkey_store *store, lowkey_error *err)
{
    *store = (struct lowkey_store) { .fd = -1, .n_heads = n_heads, .width = width, .n_tokens = n_tokens };
    static const char name[] = ".lowkey-fit-XXXXXX";
    const char *slash = strrchr(beside, '/');
    const size_t folder = slash ? (size_t)(slash - beside) + 1 : 0;
    char *path = malloc(folder + sizeof name);
    if (!path) return lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory", beside);
    memcpy(path, beside, folder);
    memcpy(path + folder, name, sizeof name);
    store->fd = mkstemp(path);
    lowkey_status status = LOWKEY_OK;
    if (store->fd < 0)
        status = lowkey_fail(err, LOWKEY_EIO, "%s: a scratch file beside it: %s", beside, strerror(errno));
    else
        unlink(path);
    free(path);
    return status;
}

void lowkey_store_close(struct lowkey_store *store)
{
    if (store->fd >= 0) close(store->fd);
    store->fd = -1;
}

/* One body for reading and writing: all bytes or an error. */
static lowkey_status transfer(const struct lowkey_store *store, int is_write, int head, int64_t first,
                              int64_t n_tokens, char *rows, lowkey_error *err)
{
    const size_t row = (size_t)store->width * sizeof(float), bytes = (size_t)n_tokens * row;
    const off_t start = (off_t)((head * store->n_tokens + first) * (int64_t)row);
    for (size_t done = 0; done < bytes;) {
        const off_t at = start + (off_t)done;
        const ssize_t part = is_write ? pwrite(store->fd, rows + done, bytes - done, at)
                                      : pread(store->fd, rows + done, bytes - done, at);
        if (part < 0 && errno == EINTR) continue;
        if (part <= 0)
            return lowkey_fail(err, LOWKEY_EIO, "scratch file for weights: %s %zu bytes: %s",
                               is_write ? "write" : "read", bytes - done,
                               part < 0 ? strerror(errno) : "end of file");
        done += (size_t)part;
    }
    return LOWKEY_OK;
}

lowkey_status lowkey_store_write(const struct lowkey_store *store, int head, int64_t first, int64_t n_tokens,
                                 const float *rows, lowkey_error *err)
{
    return transfer(store, 1, head, first, n_tokens, (char *)rows, err);
}

lowkey_status lowkey_store_read(const struct lowkey_store *store, int head, int64_t first, int64_t n_tokens,
                                float *rows, lowkey_error *err)
{
    return transfer(store, 0, head, first, n_tokens, (char *)rows, err);
}

/* Spread [n_tokens][width] of one head over out[n_tokens][n_heads][head_dim]. */
static lowkey_status read_stored(const struct lowkey_weights *weights, int64_t start, int64_t n_tokens,
                                 int head, int n_heads, float *out, lowkey_error *err)
{
    const size_t width = (size_t)weights->store->width, D = (size_t)weights->head_dim,
                 stride = (size_t)n_heads * D;
    float *rows = malloc((size_t)n_tokens * width * sizeof *rows);
    if (!rows)
        return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for weights of %lld tokens", (long long)n_tokens);
    const lowkey_status status = lowkey_store_read(weights->store, head, start, n_tokens, rows, err);
    for (size_t t = 0; status == LOWKEY_OK && t < (size_t)n_tokens; t++)
        for (size_t c = 0; c < D; c++) out[t * stride + c] = rows[t * width + (width == 1 ? 0 : c)];
    free(rows);
    return status;
}

lowkey_status lowkey_weights_read(const struct lowkey_weights *weights, int sample, int64_t first,
                                  int64_t n_tokens, int first_head, int n_heads, float *out,
                                  lowkey_error *err)
{
    if (weights->source != LOWKEY_WEIGHTS_STORE)
        return lowkey_captures_read(weights->captures, weights->layer, weights->stream, sample, first,
                                    n_tokens, first_head, n_heads, out, err);
    const struct lowkey_sample *s = &weights->captures->samples[sample];
    for (int h = 0; h < n_heads; h++)
        LOWKEY_TRY(read_stored(weights, s->start + first - s->n_sinks, n_tokens, first_head + h, n_heads,
                               out + (size_t)h * (size_t)weights->head_dim, err));
    return LOWKEY_OK;
}
