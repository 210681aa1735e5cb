/* tuning.c - see tuning.h. Tables are even steps between the extremes that the oracle's keys and values reach. */
#include "tests/tuning.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "formats/half.h"
#include "tests/check.h"

static void *take(size_t n, size_t size)
{
    void *block = calloc(n ? n : 1, size);
    if (!block) abort();
    return block;
}

struct tuning_choice tuning_plain(void)
{
    return (struct tuning_choice) {
        .shape = { 2, 24, 40, 50, 4, 2, 16, 8, 16, LOWKEY_PAIR_HALF, 0, 0, 0, 0, 0 },
        .bits = { { 2, 1, 3, 2 }, { 3, 2, 4, 1 } },
        .n_sinks = 1,
    };
}

static float f16_near(double x)
{
    return lowkey_f16_to_f32(lowkey_f32_to_f16_saturate((float)x, NULL));
}

/* Entries [n] of channel c of a side from its values x [tokens][C], and the channel's error. */
static double fill_channel(const struct tuning_choice *choice, lowkey_side_desc *side, int C, int c, int n,
                           const double *x)
{
    const int E = side->table_entries;
    double low = INFINITY, high = -INFINITY;
    for (int t = choice->n_sinks; t < TUNING_WINDOW; t++) {
        low = fmin(low, x[t * C + c]);
        high = fmax(high, x[t * C + c]);
    }
    float *table = (float *)side->table + c * E;
    for (int k = 0; k < E; k++)
        table[k] = k < n ? f16_near(low + (k + 0.5) / n * (high - low)) : table[n - 1];
    ((float *)side->lower)[c] = (float)low;
    ((float *)side->upper)[c] = (float)high;
    for (int k = 0; side->boundary && k + 1 < E; k++)
        ((float *)side->boundary)[c * (E - 1) + k] = k + 1 < n ? (table[k] + table[k + 1]) / 2 : FLT_MAX;
    return pow((high - low) / n, 2) / 12;
}

static void fill_side(const struct tuning_choice *choice, const lowkey_layer_desc *layer, int which,
                      const double *x, lowkey_side_desc *side, struct lowkey_side_report *report)
{
    const int D = which ? layer->value_head_dim : layer->key_head_dim, C = layer->n_kv_heads * D,
              more = choice->trellis ? 1 : 0;
    int most = 0;
    for (int i = 0; i < 4; i++) most = choice->bits[which][i] > most ? choice->bits[which][i] : most;
    const int E = 1 << (most + more);
    uint8_t *bits = take((size_t)C, 1), *n_entries = take((size_t)C, 1);
    float *factor = choice->feedback ? take((size_t)(C * D), sizeof *factor) : NULL,
          *weight = choice->trellis ? take((size_t)C, sizeof *weight) : NULL;
    *side = (lowkey_side_desc) {
        .struct_size = sizeof *side,
        .bits = bits,
        .n_entries = n_entries,
        .table_entries = E,
        .table = take((size_t)(C * E), sizeof(float)),
        .boundary = choice->trellis ? NULL : take((size_t)(C * (E - 1)), sizeof(float)),
        .lower = take((size_t)C, sizeof(float)),
        .upper = take((size_t)C, sizeof(float)),
        .factor = factor,
        .metric_weight = weight,
        .trellis = choice->trellis,
    };
    *report = (struct lowkey_side_report) {
        .table_scope = "channel",
        .codebook = "fitted",
        .mean = take((size_t)C, sizeof(double)),
        .variance = take((size_t)C, sizeof(double)),
        .mse = take((size_t)C, sizeof(double)),
        .weighted_mse = take((size_t)C, sizeof(double)),
        .gain = take((size_t)C, sizeof(float)),
        .histogram = take((size_t)(C * E), sizeof(uint64_t)),
        .flags = take((size_t)C, 1),
    };
    for (int c = 0; c < C; c++) {
        bits[c] = (uint8_t)choice->bits[which][c % 4];
        n_entries[c] = (uint8_t)(1 << (bits[c] + more));
        report->mse[c] = fill_channel(choice, side, C, c, n_entries[c], x);
        report->gain[c] = 1;
        if (weight) weight[c] = 1 + (float)(c % 3);
        for (int j = 0; factor && j < c % D; j++) factor[c * D + j] = (float)((c * 7 + j * 5) % 9 - 4) / 64;
    }
}

static void side_free(const lowkey_side_desc *side)
{
    free((void *)side->bits), free((void *)side->n_entries), free((void *)side->table),
        free((void *)side->boundary);
    free((void *)side->lower), free((void *)side->upper), free((void *)side->factor),
        free((void *)side->metric_weight);
}

static void report_free(const struct lowkey_side_report *report)
{
    free(report->mean), free(report->variance), free(report->mse), free(report->weighted_mse);
    free(report->gain), free(report->histogram), free(report->flags);
}

static lowkey_tokens *make_tokens(int vocab)
{
    lowkey_tokens *tokens = take(1, sizeof *tokens);
    uint64_t state = 11;
    *tokens = (lowkey_tokens) { .n_tokens = TUNING_WINDOW * TUNING_WINDOWS,
                                .tokens = take(TUNING_WINDOW * TUNING_WINDOWS, sizeof(int32_t)),
                                .n_sequences = 1,
                                .sequence_offsets = take(2, sizeof(int64_t)),
                                .vocab_size = vocab,
                                .text_name = (char *)"made up" };
    tokens->sequence_offsets[1] = tokens->n_tokens;
    for (int64_t t = 0; t < tokens->n_tokens; t++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        tokens->tokens[t] = (int32_t)((state >> 33) % (uint64_t)vocab);
    }
    tokens->text_sha256[0] = 0xab;
    return tokens;
}

static void fill_layer(const struct tuning_choice *choice, const struct tuning *tuning, int l,
                       lowkey_layer_desc *layer, struct lowkey_side_report reports[2])
{
    const lowkey_model *model = tuning->model;
    *layer = model->geometry[l];
    const int n = TUNING_WINDOW;
    double *hidden = take((size_t)(n * model->hidden_size), sizeof *hidden),
           *query = take((size_t)(n * layer->n_q_heads * layer->key_head_dim), sizeof *query),
           *key = take((size_t)(n * layer->n_kv_heads * layer->key_head_dim), sizeof *key),
           *value = take((size_t)(n * layer->n_kv_heads * layer->value_head_dim), sizeof *value);
    lowkey_tiny_oracle(model, tuning->tokens->tokens, n, hidden, l, query, key, value);
    fill_side(choice, layer, 0, key, &layer->key, &reports[0]);
    fill_side(choice, layer, 1, value, &layer->value, &reports[1]);
    free(hidden), free(query), free(key), free(value);
}

struct tuning tuning_make(const struct tuning_choice *choice)
{
    lowkey_error err;
    struct tuning tuning = { .model = lowkey_tiny_model(&choice->shape, 3),
                             .tokens = make_tokens(choice->shape.vocab) };
    const int n_layers = choice->shape.n_layers;
    lowkey_layer_desc *layers = take((size_t)n_layers, sizeof *layers);
    unsigned char(*sample)[32] = take(1, sizeof *sample);
    tuning.record = (struct lowkey_fit_record) {
        .n_model_layers = n_layers,
        .sensitivity = "none",
        .n_tokens = TUNING_WINDOW - choice->n_sinks,
        .text_name = "another",
        .text_sha256 = "0000000000000000000000000000000000000000000000000000000000000000",
        .n_samples = 1,
        .sample_sha256 = (const unsigned char(*)[32])sample,
        .reports = take((size_t)n_layers, sizeof *tuning.record.reports)
    };
    for (int l = 0; l < n_layers; l++) fill_layer(choice, &tuning, l, &layers[l], tuning.record.reports[l]);
    const lowkey_quantizer_desc desc = { .struct_size = sizeof desc,
                                         .n_layers = n_layers,
                                         .layers = layers,
                                         .n_sink_tokens = choice->n_sinks,
                                         .model_name = "tiny" };
    assert_ok(lowkey_quantizer_create(&desc, NULL, &tuning.quantizer, &err), err);
    for (int l = 0; l < n_layers; l++) side_free(&layers[l].key), side_free(&layers[l].value);
    free(layers);
    return tuning;
}

void tuning_free(struct tuning *tuning)
{
    for (int l = 0; l < tuning->model->n_layers; l++)
        report_free(&tuning->record.reports[l][0]), report_free(&tuning->record.reports[l][1]);
    free(tuning->record.reports);
    free((void *)tuning->record.sample_sha256);
    lowkey_quantizer_free(tuning->quantizer);
    lowkey_tiny_model_free(tuning->model);
    free(tuning->tokens->tokens), free(tuning->tokens->sequence_offsets), free(tuning->tokens);
}
