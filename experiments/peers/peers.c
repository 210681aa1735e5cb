/* peers.c - a format of other people as a store: keys and values come, are quantized and dequantized in
 * place, keys between a turn by RoPE and the turn back, and go to whoever attends. What a format does to them
 * is its method's; here tokens are cut into groups, which threads share, and chunks are checked to fit those
 * groups. */
#include "experiments/peers/peers.h"

#include <math.h>
#include <openblas_config.h>
#include <cblas.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "calib/threads.h"
#include "experiments/lm/rope.h"
#include "experiments/peers/peer_parts.h"
#include "formats/half.h"
#include "runtime/error.h"

enum { UNIT = 64 }; /* tokens that a thread takes at a time where they are quantized one by one */

struct lowkey_peer {
    const struct lowkey_peer_format *format;
    int n_layers, n_threads;
    struct lowkey_peer_side *sides[2]; /* keys, values: [n_layers] */
    int *n_tokens; /* [n_layers] given so far */
};

lowkey_status lowkey_peer_refuse(const struct lowkey_peer_side *side, lowkey_error *err, const char *format,
                                 ...)
{
    char why[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(why, sizeof why, format, arguments);
    va_end(arguments);
    return lowkey_fail(err, LOWKEY_EUNSUPPORTED, "layer %d, %s: %s", side->layer->index,
                       side->which == LOWKEY_STORE_KEY ? "keys" : "values", why);
}

void lowkey_peer_turn(const lowkey_layer_desc *layer, int64_t position, int back, int n_heads, float *x)
{
    float cosine[LOWKEY_MAX_ROPE_PAIRS], sine[LOWKEY_MAX_ROPE_PAIRS];
    lowkey_rope_angles(layer, position, cosine, sine);
    const double factor = layer->rope_attention_factor != 0 ? layer->rope_attention_factor : 1;
    const float square = (float)(factor * factor); /* turned there and back, pairs are so much longer */
    for (int i = 0; back && i < layer->rope_dims / 2; i++) {
        cosine[i] /= square;
        sine[i] = -sine[i] / square;
    }
    for (int h = 0; h < n_heads; h++) {
        float *head = x + (size_t)h * (size_t)layer->key_head_dim;
        lowkey_rope_turn(layer, cosine, sine, head, head);
    }
}

/* ---- a chunk of tokens ---- */

struct work {
    const struct lowkey_peer *peer;
    const struct lowkey_store_step *step;
    int unit; /* tokens */
};

static void quantize_unit(void *arg, int i)
{
    const struct work *work = arg;
    const struct lowkey_store_step *step = work->step;
    const struct lowkey_peer_side *key = &work->peer->sides[0][step->layer->index];
    const struct lowkey_peer_side *value = &work->peer->sides[1][step->layer->index];
    const int turned = !work->peer->format->before_rope && step->layer->rope_dims > 0;
    const int t = i * work->unit;
    const int n = step->n_tokens - t < work->unit ? step->n_tokens - t : work->unit;
    const size_t key_row = (size_t)key->n_heads * (size_t)key->head_dim;
    const size_t value_row = (size_t)value->n_heads * (size_t)value->head_dim;
    float *keys = step->stored_key + (size_t)t * key_row,
          *values = step->stored_value + (size_t)t * value_row;

    memmove(keys, step->key + (size_t)t * key_row, (size_t)n * key_row * sizeof *keys);
    memmove(values, step->value + (size_t)t * value_row, (size_t)n * value_row * sizeof *values);
    for (int j = 0; turned && j < n; j++)
        lowkey_peer_turn(key->layer, (int64_t)step->first + t + j, 0, key->n_heads,
                         keys + (size_t)j * key_row);
    key->method->quantize(key, keys, n);
    for (int j = 0; turned && j < n; j++)
        lowkey_peer_turn(key->layer, (int64_t)step->first + t + j, 1, key->n_heads,
                         keys + (size_t)j * key_row);
    value->method->quantize(value, values, n);
}

static lowkey_status check_finite(const char *name, const struct lowkey_store_step *step, const char *what,
                                  const float *x, int n_heads, int head_dim, lowkey_error *err)
{
    const size_t row = (size_t)n_heads * (size_t)head_dim, n = (size_t)step->n_tokens * row;
    uint32_t all = 1;
    for (size_t i = 0; i < n; i++) all &= lowkey_f32_is_finite(x[i]);
    for (size_t i = 0; !all && i < n; i++)
        if (!lowkey_f32_is_finite(x[i]))
            return lowkey_fail(err, LOWKEY_EINVAL, "%s: layer %d, %s, head %zu, channel %zu, token %zu is %g",
                               name, step->layer->index, what, i % row / (size_t)head_dim,
                               i % (size_t)head_dim, (size_t)step->first + i / row, (double)x[i]);
    return LOWKEY_OK;
}

static lowkey_status put(void *user, const struct lowkey_store_step *step, lowkey_error *err)
{
    struct lowkey_peer *peer = user;
    const char *name = peer->format->name;
    const int l = step->layer->index, group = peer->format->group_tokens;
    if (l < 0 || l >= peer->n_layers) return lowkey_fail(err, LOWKEY_EINVAL, "%s: no layer %d", name, l);
    const lowkey_layer_desc *layer = peer->sides[0][l].layer;
    if (step->first != peer->n_tokens[l] || step->n_tokens < 0)
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: layer %d has %d tokens; token %d does not follow", name,
                           l, peer->n_tokens[l], step->first);
    if (step->first % group != 0)
        return lowkey_fail(
            err, LOWKEY_EINVAL,
            "%s: %d tokens are quantized together: a chunk begins at a multiple of it, not at %d", name,
            group, step->first);
    LOWKEY_TRY(check_finite(name, step, "keys", step->key, layer->n_kv_heads, layer->key_head_dim, err));
    LOWKEY_TRY(
        check_finite(name, step, "values", step->value, layer->n_kv_heads, layer->value_head_dim, err));
    struct work work = { .peer = peer, .step = step, .unit = group > 1 ? group : UNIT };
    lowkey_threads_run(&peer->n_threads, (step->n_tokens + work.unit - 1) / work.unit, quantize_unit, &work);
    peer->n_tokens[l] += step->n_tokens;
    return LOWKEY_OK;
}

static lowkey_status reset(void *user, lowkey_error *err)
{
    (void)err;
    struct lowkey_peer *peer = user;
    memset(peer->n_tokens, 0, (size_t)peer->n_layers * sizeof *peer->n_tokens);
    return LOWKEY_OK;
}

static int exact_from(void *user, enum lowkey_store_side side, int position)
{
    const struct lowkey_peer_format *format = ((const struct lowkey_peer *)user)->format;
    if (side == LOWKEY_STORE_KEY && format->window_blocks)
        return position / format->window_blocks * format->window_blocks;
    return position + 1 > format->window ? position + 1 - format->window : 0;
}

/* ---- the object ---- */

static void init_side(struct lowkey_peer_side *side, const struct lowkey_peer_format *format,
                      enum lowkey_store_side which, const lowkey_layer_desc *layer)
{
    const int is_key = which == LOWKEY_STORE_KEY;
    *side = (struct lowkey_peer_side) {
        .method = is_key ? format->key : format->value,
        .setting = is_key ? format->key_setting : format->value_setting,
        .which = which,
        .layer = layer,
        .n_heads = layer->n_kv_heads,
        .head_dim = is_key ? layer->key_head_dim : layer->value_head_dim,
    };
}

static lowkey_status prepare(struct lowkey_peer *peer, struct lowkey_peer_reader *reader, lowkey_error *err)
{
    for (int l = 0; l < peer->n_layers; l++) {
        const struct lowkey_peer_sample *sample = NULL;
        if (reader) LOWKEY_TRY(lowkey_peer_reader_layer(reader, l, &sample, err));
        for (int which = 0; which < 2; which++) {
            struct lowkey_peer_side *side = &peer->sides[which][l];
            LOWKEY_TRY(side->method->prepare(side, sample, peer->n_threads, err));
        }
    }
    for (int which = 0; which < 2; which++) {
        struct lowkey_peer_side *sides = peer->sides[which];
        if (sides->method->share) LOWKEY_TRY(sides->method->share(sides, peer->n_layers, err));
    }
    return LOWKEY_OK;
}

/* Put the format's name in front of what was wrong. */
static lowkey_status name_failure(const char *name, lowkey_status status, lowkey_error *err)
{
    if (!err || status == LOWKEY_OK || strncmp(err->message, name, strlen(name)) == 0) return status;
    char message[sizeof err->message];
    memcpy(message, err->message, sizeof message);
    return lowkey_fail(err, status, "%s: %.480s", name, message);
}

lowkey_status lowkey_peer_open(const char *name, const lowkey_model *model, int n_paths,
                               const char *const *paths, int n_threads, struct lowkey_peer **out,
                               lowkey_error *err)
{
    *out = NULL;
    const struct lowkey_peer_format *format = lowkey_peer_find(name);
    if (!format) return lowkey_fail(err, LOWKEY_EINVAL, "no format is named '%s'", name);
    struct lowkey_peer *peer = calloc(1, sizeof *peer);
    if (!peer) return lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory", name);
    peer->format = format;
    peer->n_layers = model->n_layers;
    peer->n_threads = n_threads > 0 ? n_threads : 1;
    peer->n_tokens = calloc((size_t)model->n_layers, sizeof *peer->n_tokens);
    for (int which = 0; which < 2; which++) {
        peer->sides[which] = calloc((size_t)model->n_layers, sizeof **peer->sides);
        for (int l = 0; peer->sides[which] && l < model->n_layers; l++)
            init_side(&peer->sides[which][l], format, which ? LOWKEY_STORE_VALUE : LOWKEY_STORE_KEY,
                      &model->geometry[l]);
    }
    openblas_set_num_threads(1); /* the threads are ours: BLAS is called from several at once */
    struct lowkey_peer_reader *reader = NULL;
    lowkey_status status = LOWKEY_OK;
    if (!peer->n_tokens || !peer->sides[0] || !peer->sides[1])
        status = lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory", name);
    if (status == LOWKEY_OK && format->wants)
        status = lowkey_peer_reader_open(format, model, n_paths, paths, &reader, err);
    if (status == LOWKEY_OK) status = prepare(peer, reader, err);
    lowkey_peer_reader_close(reader);
    if (status != LOWKEY_OK) {
        lowkey_peer_close(peer);
        return name_failure(name, status, err);
    }
    *out = peer;
    return LOWKEY_OK;
}

void lowkey_peer_close(struct lowkey_peer *peer)
{
    if (!peer) return;
    for (int which = 0; which < 2; which++) {
        for (int l = 0; peer->sides[which] && l < peer->n_layers; l++) free(peer->sides[which][l].fitted);
        free(peer->sides[which]);
    }
    free(peer->n_tokens);
    free(peer);
}

struct lowkey_store lowkey_peer_store(struct lowkey_peer *peer)
{
    return (struct lowkey_store) {
        .put = put, .reset = reset, .exact_from = peer->format->window ? exact_from : NULL, .user = peer
    };
}

struct lowkey_peer_bits lowkey_peer_bits(const struct lowkey_peer *peer)
{
    double bits[2], elements[2];
    for (int which = 0; which < 2; which++) {
        bits[which] = elements[which] = 0;
        for (int l = 0; l < peer->n_layers; l++) {
            const struct lowkey_peer_side *side = &peer->sides[which][l];
            const double n = (double)side->n_heads * side->head_dim;
            bits[which] += n * side->bits;
            elements[which] += n;
        }
    }
    return (struct lowkey_peer_bits) { .key = bits[0] / elements[0], .value = bits[1] / elements[1] };
}
