/* captured.c - see captured.h. */
#include "tests/captured.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include <gsl/gsl_randist.h>
#include <gsl/gsl_rng.h>

#include "tests/check.h"

void captured_make(struct captured *captured, const lowkey_layer_desc *geometry, const int *lengths,
                   unsigned contents, unsigned seed)
{
    memset(captured, 0, sizeof *captured);
    captured->layer = *geometry;
    captured->layer.index = 1;
    for (int i = 0; i < geometry->rope_dims / 2; i++)
        captured->inv_freq[i] = pow(1e4, -2.0 * i / geometry->rope_dims);
    captured->layer.rope_inv_freq = captured->inv_freq;
    captured->contents = contents;
    for (int s = 0; s < CAPTURED_SAMPLES; s++) {
        captured->lengths[s] = lengths[s];
        captured->n_tokens += lengths[s];
        captured->sha256[s][0] = (unsigned char)(200 - s);
        captured->sha256[s][31] = (unsigned char)seed;
    }
    gsl_rng *rng = gsl_rng_alloc(gsl_rng_mt19937);
    gsl_rng_set(rng, seed);
    for (int stream = 0; stream < LOWKEY_N_STREAMS; stream++) {
        if (!(contents >> stream & 1)) continue;
        const size_t row = (size_t)lowkey_stream_heads(geometry, (enum lowkey_stream)stream) *
                           (size_t)lowkey_stream_head_dim(geometry, (enum lowkey_stream)stream);
        captured->rows[stream] = malloc((size_t)captured->n_tokens * row * sizeof(float));
        for (size_t i = 0; i < (size_t)captured->n_tokens * row; i++) {
            const double x = gsl_ran_ugaussian(rng) * (1 + (double)(i % row % 5)) + (double)(i % row % 3);
            captured->rows[stream][i] = (float)(stream >= LOWKEY_KEY_WEIGHT ? fabs(x) : x);
        }
    }
    gsl_rng_free(rng);
    strcpy(captured->path, "/tmp/lowkey-captured-XXXXXX");
    const int fd = mkstemp(captured->path);
    assert_true(fd >= 0);
    close(fd);
    captured_write(captured);
}

void captured_write(struct captured *captured)
{
    int64_t offsets[CAPTURED_SAMPLES + 1] = { 0 };
    for (int s = 0; s < CAPTURED_SAMPLES; s++) offsets[s + 1] = offsets[s] + captured->lengths[s];
    const struct lowkey_activations_info info = {
        .n_model_layers = 2,
        .model_name = "test",
        .n_layers = 1,
        .layers = &captured->layer,
        .contents = captured->contents,
        .n_samples = CAPTURED_SAMPLES,
        .sample_offsets = offsets,
        .text_name = "text",
        .sample_sha256 = (const unsigned char(*)[32])captured->sha256,
    };
    lowkey_activations_writer *writer;
    lowkey_error err;
    assert_ok(lowkey_activations_create(captured->path, &info, LOWKEY_F32, &writer, &err), err);
    for (int stream = 0; stream < LOWKEY_N_STREAMS; stream++)
        if (captured->contents >> stream & 1)
            assert_ok(lowkey_activations_write(writer, 0, (enum lowkey_stream)stream, 0, captured->n_tokens,
                                               captured->rows[stream], &err),
                      err);
    assert_ok(lowkey_activations_commit(writer, &err), err);
}

void captured_free(struct captured *captured)
{
    unlink(captured->path);
    for (int stream = 0; stream < LOWKEY_N_STREAMS; stream++) free(captured->rows[stream]);
}
