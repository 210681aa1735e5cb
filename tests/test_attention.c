/* Sensitivity from queries against the formula written out in f64, pair by pair. */
#include <math.h>
#include <stdlib.h>

#include "calib/attention.h"
#include "formats/geometry.h"
#include "tests/captured.h"
#include "tests/check.h"

/* u = R(steps) q */
static void turned(const lowkey_layer_desc *layer, const float *q, double steps, double *u)
{
    for (int c = 0; c < layer->key_head_dim; c++) u[c] = (double)q[c];
    for (int i = 0; i < layer->rope_dims / 2; i++) {
        int a, b;
        lowkey_rope_pair(layer->rope_dims, layer->rope_pairing, i, &a, &b);
        const double c = cos(steps * layer->rope_inv_freq[i]), s = sin(steps * layer->rope_inv_freq[i]);
        const double x = (double)q[a], y = (double)q[b];
        u[a] = x * c - y * s;
        u[b] = x * s + y * c;
    }
}

struct expected {
    double *diagonal; /* [n_tokens][H][D], tokens as in the file */
    double *squares; /* [n_tokens][H] */
    double *moments; /* [H][D][D] */
};

static void add_query(const struct captured *captured, int start, int m, int q_head, int n_sinks,
                      struct expected *want)
{
    const lowkey_layer_desc *layer = &captured->layer;
    const int H = layer->n_kv_heads, D = layer->key_head_dim, V = layer->value_head_dim,
              h = q_head / (layer->n_q_heads / H);
    const float *q = captured->rows[LOWKEY_QUERY] +
                     ((size_t)(start + m) * (size_t)layer->n_q_heads + (size_t)q_head) * (size_t)D;
    const double scale = layer->logit_scale * pow(layer->rope_attention_factor, 2);
    double *p = malloc((size_t)(m + 1) * sizeof *p), *u = malloc((size_t)((m + 1) * D) * sizeof *u),
           o[256] = { 0 }, sum = 0;
    double max = -HUGE_VAL;
    for (int t = 0; t <= m; t++) {
        const float *k = captured->rows[LOWKEY_KEY] +
                         ((size_t)(start + t) * (size_t)H + (size_t)h) * (size_t)D;
        turned(layer, q, m - t, u + t * D);
        p[t] = 0;
        for (int c = 0; c < D; c++) p[t] += scale * u[t * D + c] * (double)k[c];
        max = fmax(max, p[t]);
    }
    for (int t = 0; t <= m; t++) sum += p[t] = exp(p[t] - max);
    for (int t = 0; t <= m; t++) {
        const float *v = captured->rows[LOWKEY_VALUE] +
                         ((size_t)(start + t) * (size_t)H + (size_t)h) * (size_t)V;
        p[t] /= sum;
        for (int c = 0; c < V; c++) o[c] += p[t] * (double)v[c];
    }
    for (int t = n_sinks; t <= m; t++) {
        const float *v = captured->rows[LOWKEY_VALUE] +
                         ((size_t)(start + t) * (size_t)H + (size_t)h) * (size_t)V;
        double distance = 0;
        for (int c = 0; c < V; c++) distance += pow((double)v[c] - o[c], 2);
        const double a = pow(p[t] * scale, 2) * distance;
        want->squares[(start + t) * H + h] += p[t] * p[t];
        for (int i = 0; i < D; i++) {
            want->diagonal[((start + t) * H + h) * D + i] += a * pow(u[t * D + i], 2);
            for (int j = 0; j < D; j++) want->moments[(h * D + i) * D + j] += a * u[t * D + i] * u[t * D + j];
        }
    }
    free(p);
    free(u);
}

static int close_to(double got, double want, double scale)
{
    return fabs(got - want) <= 1e-4 * fabs(want) + 1e-5 * scale;
}

static void check(const lowkey_layer_desc *geometry, int n_sinks, int n_queries, int n_threads)
{
    static const int lengths[CAPTURED_SAMPLES] = { 37, 1, 70 };
    struct captured captured;
    captured_make(&captured, geometry, lengths, 1u << LOWKEY_KEY | 1u << LOWKEY_VALUE | 1u << LOWKEY_QUERY,
                  7);
    const int H = geometry->n_kv_heads, D = geometry->key_head_dim;
    for (int i = 0; i < captured.n_tokens * geometry->n_q_heads * D; i++)
        captured.rows[LOWKEY_QUERY][i] *= 0.3f;
    captured_write(&captured);
    struct expected want = { calloc((size_t)(captured.n_tokens * H * D), sizeof(double)),
                             calloc((size_t)(captured.n_tokens * H), sizeof(double)),
                             calloc((size_t)(H * D * D), sizeof(double)) };
    for (int s = 0, start = 0; s < CAPTURED_SAMPLES; start += lengths[s++])
        for (int m = 0; m < lengths[s]; m++) {
            int is_sampled = lengths[s] <= n_queries; /* evenly spaced, the last one always */
            for (int i = 1; i <= n_queries; i++) is_sampled |= i * lengths[s] / n_queries - 1 == m;
            for (int q = 0; q < geometry->n_q_heads && is_sampled; q++)
                add_query(&captured, start, m, q, n_sinks, &want);
        }
    lowkey_captures *captures;
    lowkey_error err;
    const char *paths[] = { captured.path };
    assert_ok(lowkey_captures_open(1, paths, 0, 0, n_sinks, &captures, &err), err);
    struct lowkey_store key, value;
    double *moments = malloc((size_t)(H * D * D) * sizeof *moments);
    assert_ok(lowkey_store_open(captured.path, captures->n_tokens, H, D, &key, &err), err);
    assert_ok(lowkey_store_open(captured.path, captures->n_tokens, H, 1, &value, &err), err);
    const struct lowkey_attention out = { &key, &value, moments };
    assert_ok(lowkey_attention_sensitivity(captures, 0, n_queries, n_threads, &out, &err), err);
    double largest = 0;
    for (int i = 0; i < captured.n_tokens * H * D; i++) largest = fmax(largest, want.diagonal[i]);
    for (int s = 0; s < CAPTURED_SAMPLES; s++) {
        const struct lowkey_sample *sample = &captures->samples[s];
        for (int64_t t = sample->n_sinks; t < sample->n_tokens; t++)
            for (int h = 0; h < H; h++) {
                float row[256], square;
                const int64_t at = sample->start + t - sample->n_sinks, in_file = sample->offset + t;
                assert_ok(lowkey_store_read(&key, h, at, 1, row, &err), err);
                assert_ok(lowkey_store_read(&value, h, at, 1, &square, &err), err);
                assert_true(close_to((double)square, want.squares[in_file * H + h], 1e-3));
                for (int c = 0; c < D; c++)
                    assert_true(
                        close_to((double)row[c], want.diagonal[(in_file * H + h) * D + c], 1e-2 * largest));
            }
    }
    double trace = 0;
    for (int i = 0; i < H * D; i++) trace += want.moments[i * D + i % D];
    for (int i = 0; i < H * D * D; i++) assert_true(close_to(moments[i], want.moments[i], 1e-2 * trace));
    lowkey_store_close(&key);
    lowkey_store_close(&value);
    lowkey_captures_close(captures);
    captured_free(&captured);
    free(moments);
    free(want.diagonal);
    free(want.squares);
    free(want.moments);
}

static const lowkey_layer_desc geometries[] = {
    { .struct_size = sizeof(lowkey_layer_desc),
      .n_q_heads = 4,
      .n_kv_heads = 2,
      .key_head_dim = 16,
      .value_head_dim = 8,
      .logit_scale = 0.25,
      .rope_dims = 16,
      .rope_pairing = LOWKEY_PAIR_HALF,
      .rope_attention_factor = 1 },
    { .struct_size = sizeof(lowkey_layer_desc),
      .n_q_heads = 3,
      .n_kv_heads = 3,
      .key_head_dim = 24,
      .value_head_dim = 16,
      .logit_scale = 0.1,
      .rope_dims = 8,
      .rope_pairing = LOWKEY_PAIR_INTERLEAVED,
      .rope_attention_factor = 1.2 },
    { .struct_size = sizeof(lowkey_layer_desc),
      .n_q_heads = 8,
      .n_kv_heads = 1,
      .key_head_dim = 8,
      .value_head_dim = 8,
      .logit_scale = 0.35,
      .rope_dims = 0,
      .rope_pairing = LOWKEY_PAIR_HALF,
      .rope_attention_factor = 1 },
};

static void all_queries_give_the_formula(void **state)
{
    (void)state;
    for (int g = 0; g < 3; g++) check(&geometries[g], 0, 1000, 1);
}

static void sampled_queries_and_sinks_give_the_formula(void **state)
{
    (void)state;
    for (int g = 0; g < 3; g++) check(&geometries[g], g + 1, 5 + 10 * g, 3);
}

static void overflowing_scores_are_refused_by_name(void **state)
{
    (void)state;
    static const int lengths[CAPTURED_SAMPLES] = { 5, 5, 5 };
    struct captured captured;
    captured_make(&captured, &geometries[0], lengths,
                  1u << LOWKEY_KEY | 1u << LOWKEY_VALUE | 1u << LOWKEY_QUERY, 7);
    for (int i = 0; i < captured.n_tokens * 2 * 16; i++) captured.rows[LOWKEY_KEY][i] *= 1e37f;
    captured_write(&captured);
    lowkey_captures *captures;
    lowkey_error err;
    const char *paths[] = { captured.path };
    double moments[2 * 16 * 16];
    const struct lowkey_attention out = { NULL, NULL, moments };
    assert_ok(lowkey_captures_open(1, paths, 0, 0, 0, &captures, &err), err);
    assert_refused(lowkey_attention_sensitivity(captures, 0, 4, 1, &out, &err), LOWKEY_EINVAL, err,
                   "overflows");
    lowkey_captures_close(captures);
    captured_free(&captured);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_queries_give_the_formula),
        cmocka_unit_test(sampled_queries_and_sinks_give_the_formula),
        cmocka_unit_test(overflowing_scores_are_refused_by_name),
    };
    return lowkey_run_tests(tests);
}
