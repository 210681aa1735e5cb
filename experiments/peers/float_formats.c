/* float_formats.c - formats of small floats and of blocks with one scale: FP8 (OCP E4M3, E5M2) and NVFP4 with
 * an outer scale of various scope, llama.cpp's q8_0 and q4_0.
 *
 * FP8: x ~ s decode(encode(x / s)), s such that the largest magnitude of the scope becomes the largest
 * number, f32. NVFP4: blocks of 16 channels hold E2M1 numbers and an E4M3 scale, largest magnitude / 6, in
 * units of an outer f32 scale which takes the scope's largest block scale to 448. Scales from captures do not
 * know the text: what is larger saturates. */
#include <math.h>
#include <stdlib.h>

#include "experiments/peers/peer_parts.h"
#include "formats/codes.h"
#include "formats/half.h"
#include "runtime/error.h"

enum { FLOAT_BLOCK = 16, GGML_BLOCK = 32 };

struct fixed_scales { /* [n_heads] */
    float scale[1];
};

static float magnitude_of(const float *x, int n_rows, size_t row_stride, int n)
{
    float largest = 0;
    for (int r = 0; r < n_rows; r++)
        for (int c = 0; c < n; c++) {
            const float magnitude = fabsf(x[(size_t)r * row_stride + (size_t)c]);
            largest = magnitude > largest ? magnitude : largest;
        }
    return largest;
}

/* The scale that takes a magnitude to the largest number; where f32 has none, everything becomes 0 anyway. */
static float scale_for(float magnitude, float largest_number)
{
    const float scale = magnitude / largest_number;
    return scale > 0 ? scale : 1;
}

static lowkey_status prepare_scopes(struct lowkey_peer_side *side, const struct lowkey_peer_sample *sample,
                                    double bits, float largest_number, lowkey_error *err)
{
    const int H = side->n_heads, D = side->head_dim, scope = side->setting.scope;
    const size_t row = (size_t)H * (size_t)D;
    side->bits = bits;
    if (scope == LOWKEY_PER_PAGE) side->bits += 32.0 / (LOWKEY_PAGE_SLOTS * D);
    if (scope == LOWKEY_PER_TOKEN) side->bits += 32.0 / (H * D);
    struct fixed_scales *fixed = side->fitted = malloc((size_t)H * sizeof(float));
    if (!fixed) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for scales");
    for (int h = 0; h < H; h++) fixed->scale[h] = 1;
    if (scope != LOWKEY_PER_TENSOR && scope != LOWKEY_PER_HEAD) return LOWKEY_OK;
    const float *x = side->which == LOWKEY_STORE_KEY ? sample->key : sample->value;
    const float all = magnitude_of(x, sample->n_tokens, row, H * D);
    for (int h = 0; h < H; h++) {
        const float own = magnitude_of(x + (size_t)h * (size_t)D, sample->n_tokens, row, D);
        fixed->scale[h] = scale_for(scope == LOWKEY_PER_TENSOR ? all : own, largest_number);
    }
    return LOWKEY_OK;
}

typedef void quantize_run(float *x, int n, float scale);

/* Runs that share an outer scale: heads of the tokens that are here (a page, of which the last may be short),
 * or tokens. */
static inline void quantize_scopes(const struct lowkey_peer_side *side, float *x, int n_tokens,
                                   float largest_number, quantize_run *quantize)
{
    const struct fixed_scales *fixed = side->fitted;
    const int H = side->n_heads, D = side->head_dim, scope = side->setting.scope;
    const size_t row = (size_t)H * (size_t)D;
    for (int h = 0; h < H; h++) {
        float *head = x + (size_t)h * (size_t)D, scale = fixed->scale[h];
        if (scope == LOWKEY_PER_TOKEN) break;
        if (scope == LOWKEY_PER_PAGE) scale = scale_for(magnitude_of(head, n_tokens, row, D), largest_number);
        for (int t = 0; t < n_tokens; t++) quantize(head + (size_t)t * row, D, scale);
    }
    for (int t = 0; scope == LOWKEY_PER_TOKEN && t < n_tokens; t++) {
        float *token = x + (size_t)t * row;
        quantize(token, H * D, scale_for(magnitude_of(token, 1, row, H * D), largest_number));
    }
}

static void e4m3_run(float *x, int n, float scale)
{
    for (int c = 0; c < n; c++) x[c] = scale * lowkey_e4m3_to_f32(lowkey_f32_to_e4m3(x[c] / scale));
}

static void e5m2_run(float *x, int n, float scale)
{
    for (int c = 0; c < n; c++) x[c] = scale * lowkey_e5m2_to_f32(lowkey_f32_to_e5m2(x[c] / scale));
}

static void nvfp4_run(float *x, int n, float scale)
{
    for (int first = 0; first < n; first += FLOAT_BLOCK) {
        float *block = x + first;
        const float wanted = magnitude_of(block, 1, 0, FLOAT_BLOCK) / 6 / scale;
        const float step = scale * lowkey_e4m3_to_f32(lowkey_f32_to_e4m3(wanted));
        for (int c = 0; c < FLOAT_BLOCK; c++)
            block[c] = step > 0 ? step * lowkey_e2m1_to_f32(lowkey_f32_to_e2m1(block[c] / step)) : 0;
    }
}

static lowkey_status prepare_e4m3(struct lowkey_peer_side *side, const struct lowkey_peer_sample *sample,
                                  int n_threads, lowkey_error *err)
{
    (void)n_threads;
    return prepare_scopes(side, sample, 8, 448, err);
}

static void quantize_e4m3(const struct lowkey_peer_side *side, float *x, int n_tokens)
{
    quantize_scopes(side, x, n_tokens, 448, e4m3_run);
}

static lowkey_status prepare_e5m2(struct lowkey_peer_side *side, const struct lowkey_peer_sample *sample,
                                  int n_threads, lowkey_error *err)
{
    (void)n_threads;
    return prepare_scopes(side, sample, 8, 57344, err);
}

static void quantize_e5m2(const struct lowkey_peer_side *side, float *x, int n_tokens)
{
    quantize_scopes(side, x, n_tokens, 57344, e5m2_run);
}

static lowkey_status prepare_nvfp4(struct lowkey_peer_side *side, const struct lowkey_peer_sample *sample,
                                   int n_threads, lowkey_error *err)
{
    (void)n_threads;
    if (side->head_dim % FLOAT_BLOCK != 0)
        return lowkey_peer_refuse(side, err, "blocks of %d channels do not divide a head of %d", FLOAT_BLOCK,
                                  side->head_dim);
    return prepare_scopes(side, sample, 4 + 8.0 / FLOAT_BLOCK, 6 * 448, err);
}

static void quantize_nvfp4(const struct lowkey_peer_side *side, float *x, int n_tokens)
{
    quantize_scopes(side, x, n_tokens, 6 * 448, nvfp4_run);
}

const struct lowkey_peer_method lowkey_peer_e4m3 = { prepare_e4m3, NULL, quantize_e4m3 };
const struct lowkey_peer_method lowkey_peer_e5m2 = { prepare_e5m2, NULL, quantize_e5m2 };
const struct lowkey_peer_method lowkey_peer_nvfp4 = { prepare_nvfp4, NULL, quantize_nvfp4 };

/* ---- llama.cpp: blocks of 32 consecutive elements of a token's vector over all KV heads, as its cache holds
 * rows ---- */

static lowkey_status prepare_ggml(struct lowkey_peer_side *side, const struct lowkey_peer_sample *sample,
                                  int n_threads, lowkey_error *err)
{
    (void)sample, (void)n_threads;
    if (side->n_heads * side->head_dim % GGML_BLOCK != 0)
        return lowkey_peer_refuse(side, err, "blocks of %d do not divide a token of %d", GGML_BLOCK,
                                  side->n_heads * side->head_dim);
    side->bits = side->setting.bits + 16.0 / GGML_BLOCK;
    return LOWKEY_OK;
}

static size_t n_elements(const struct lowkey_peer_side *side, int n_tokens)
{
    return (size_t)n_tokens * (size_t)side->n_heads * (size_t)side->head_dim;
}

static void quantize_q8_0(const struct lowkey_peer_side *side, float *x, int n_tokens)
{
    for (size_t i = 0; i < n_elements(side, n_tokens); i += GGML_BLOCK) {
        float *block = x + i;
        const float d = magnitude_of(block, 1, 0, GGML_BLOCK) / 127, inverse = d != 0 ? 1 / d : 0;
        const float stored = lowkey_f16_to_f32(lowkey_f32_to_f16_saturate(d, NULL));
        for (int c = 0; c < GGML_BLOCK; c++) block[c] = stored * roundf(block[c] * inverse);
    }
}

/* Codes 0 to 15 stand for -8 to 7 steps; the step's sign is such that the element of largest magnitude is -8
 * of them. */
static void quantize_q4_0(const struct lowkey_peer_side *side, float *x, int n_tokens)
{
    for (size_t i = 0; i < n_elements(side, n_tokens); i += GGML_BLOCK) {
        float *block = x + i, extreme = 0;
        for (int c = 0; c < GGML_BLOCK; c++)
            if (fabsf(block[c]) > fabsf(extreme)) extreme = block[c];
        const float d = extreme / -8, inverse = d != 0 ? 1 / d : 0;
        const float stored = lowkey_f16_to_f32(lowkey_f32_to_f16_saturate(d, NULL));
        for (int c = 0; c < GGML_BLOCK; c++) {
            const int code = (int)(block[c] * inverse + 8.5f);
            block[c] = stored * (float)((code > 15 ? 15 : code) - 8);
        }
    }
}

const struct lowkey_peer_method lowkey_peer_q8_0 = { prepare_ggml, NULL, quantize_q8_0 };
const struct lowkey_peer_method lowkey_peer_q4_0 = { prepare_ggml, NULL, quantize_q4_0 };
