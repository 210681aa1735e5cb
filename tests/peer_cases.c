/* peer_cases.c - see peer_cases.h. */
#include "tests/peer_cases.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/check.h"
#include "tests/random.h"

void peer_model_make(struct peer_model *model, const struct peer_shape *shape)
{
    memset(model, 0, sizeof *model);
    for (int i = 0; i < shape->rope_dims / 2; i++) model->inv_freq[i] = pow(1e4, -2.0 * i / shape->rope_dims);
    for (int l = 0; l < PEER_LAYERS; l++)
        model->layers[l] = (lowkey_layer_desc) {
            .struct_size = sizeof(lowkey_layer_desc),
            .index = l,
            .n_q_heads = shape->n_q_heads,
            .n_kv_heads = shape->n_kv_heads,
            .key_head_dim = shape->key_head_dim,
            .value_head_dim = shape->value_head_dim,
            .logit_scale = 1 / sqrt(shape->key_head_dim),
            .rope_dims = shape->rope_dims,
            .rope_pairing = shape->pairing,
            .rope_attention_factor = shape->attention_factor != 0 ? shape->attention_factor : 1,
            .rope_inv_freq = model->inv_freq,
        };
    model->model.n_layers = PEER_LAYERS;
    model->model.name = (char *)"test";
    model->model.geometry = model->layers;
}

static float *rows(struct lowkey_random *random, size_t n, size_t row)
{
    float *x = malloc((n ? n : 1) * row * sizeof *x);
    assert_non_null(x);
    for (size_t i = 0; random && i < n * row; i++)
        x[i] = (float)(lowkey_random_normal(random) * (1 + (double)(i % row % 5)) + (double)(i % row % 3));
    return x;
}

void peer_tokens_make(struct peer_tokens *tokens, const struct peer_shape *shape, int n, unsigned seed)
{
    struct lowkey_random random = { seed };
    *tokens = (struct peer_tokens) {
        .n = n,
        .key_row = (size_t)shape->n_kv_heads * (size_t)shape->key_head_dim,
        .value_row = (size_t)shape->n_kv_heads * (size_t)shape->value_head_dim,
        .query_row = (size_t)shape->n_q_heads * (size_t)shape->key_head_dim,
    };
    tokens->key = rows(&random, (size_t)n, tokens->key_row);
    tokens->value = rows(&random, (size_t)n, tokens->value_row);
    tokens->query = rows(&random, (size_t)n, tokens->query_row);
    tokens->stored_key = rows(NULL, (size_t)n, tokens->key_row);
    tokens->stored_value = rows(NULL, (size_t)n, tokens->value_row);
}

void peer_tokens_free(struct peer_tokens *tokens)
{
    free(tokens->key);
    free(tokens->value);
    free(tokens->query);
    free(tokens->stored_key);
    free(tokens->stored_value);
}

lowkey_status peer_run(lowkey_peer *peer, const struct peer_model *model, int layer,
                       struct peer_tokens *tokens, int chunk, lowkey_error *err)
{
    const struct lowkey_store store = lowkey_peer_store(peer);
    assert_int_equal(store.reset(store.user, err), LOWKEY_OK);
    for (int first = 0; first < tokens->n; first += chunk ? chunk : tokens->n) {
        const size_t at = (size_t)first;
        const int left = tokens->n - first;
        const struct lowkey_store_step step = {
            .layer = &model->layers[layer],
            .first = first,
            .n_tokens = chunk && chunk < left ? chunk : left,
            .key = tokens->key + at * tokens->key_row,
            .value = tokens->value + at * tokens->value_row,
            .query = tokens->query + at * tokens->query_row,
            .stored_key = tokens->stored_key + at * tokens->key_row,
            .stored_value = tokens->stored_value + at * tokens->value_row,
        };
        const lowkey_status status = store.put(store.user, &step, err);
        if (status != LOWKEY_OK) return status;
    }
    return LOWKEY_OK;
}

void peer_captures_make(const struct peer_model *model, int n_samples, int length, unsigned contents,
                        unsigned seed, char path[64])
{
    peer_captures_fill(model, NULL, n_samples, length, contents, seed, NULL, path);
}

void peer_captures_fill(const struct peer_model *model, const struct peer_shape *shape, int n_samples,
                        int length, unsigned contents, unsigned seed, peer_fill *fill, char path[64])
{
    struct lowkey_random random = { seed };
    int64_t *offsets = calloc((size_t)n_samples + 1, sizeof *offsets);
    unsigned char(*hashes)[32] = calloc((size_t)n_samples, sizeof *hashes);
    assert_true(offsets && hashes);
    for (int s = 0; s < n_samples; s++) {
        offsets[s + 1] = offsets[s] + length;
        hashes[s][0] = (unsigned char)s;
        hashes[s][31] = (unsigned char)seed;
    }
    const struct lowkey_activations_info info = {
        .n_model_layers = PEER_LAYERS,
        .model_name = "test",
        .n_layers = PEER_LAYERS,
        .layers = model->layers,
        .contents = contents,
        .n_samples = n_samples,
        .sample_offsets = offsets,
        .text_name = "text",
        .sample_sha256 = (const unsigned char(*)[32])hashes,
    };
    strcpy(path, "/tmp/lowkey-peers-XXXXXX");
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    lowkey_activations_writer *writer;
    lowkey_error err;
    assert_ok(lowkey_activations_create(path, &info, LOWKEY_F32, &writer, &err), err);
    for (int l = 0; l < PEER_LAYERS; l++)
        for (int stream = 0; stream < LOWKEY_N_STREAMS; stream++) {
            if (!(contents >> stream & 1)) continue;
            const enum lowkey_stream s = (enum lowkey_stream)stream;
            const size_t row = (size_t)lowkey_stream_heads(&model->layers[l], s) *
                               (size_t)lowkey_stream_head_dim(&model->layers[l], s);
            float *x = rows(&random, (size_t)(n_samples * length), row);
            if (fill) fill(shape, l, s, x, n_samples * length);
            assert_ok(lowkey_activations_write(writer, l, s, 0, (int64_t)n_samples * length, x, &err), err);
            free(x);
        }
    assert_ok(lowkey_activations_commit(writer, &err), err);
    free(offsets);
    free(hashes);
}

double peer_relative_error(const float *x, const float *stored, size_t n)
{
    double difference = 0, square = 0;
    for (size_t i = 0; i < n; i++) {
        const double e = (double)stored[i] - (double)x[i];
        difference += e * e;
        square += (double)x[i] * (double)x[i];
    }
    return difference / square;
}

void peer_oracle_turn(const lowkey_layer_desc *layer, int position, int back, double *head)
{
    const int n = layer->rope_dims / 2;
    const double factor = layer->rope_attention_factor;
    for (int i = 0; i < n; i++) {
        const int a = layer->rope_pairing == LOWKEY_PAIR_HALF ? i : 2 * i;
        const int b = layer->rope_pairing == LOWKEY_PAIR_HALF ? i + n : 2 * i + 1;
        const double angle = position * layer->rope_inv_freq[i] * (back ? -1 : 1), x = head[a], y = head[b];
        const double length = back ? 1 / factor : factor;
        head[a] = length * (x * cos(angle) - y * sin(angle));
        head[b] = length * (x * sin(angle) + y * cos(angle));
    }
}
