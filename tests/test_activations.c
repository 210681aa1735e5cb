/* test_activations.c - captures: rows written in any order and cut are read back in any cut, in all three
 * number types; what is missing, written twice, not finite or out of range is named. */
#include "formats/activations.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "formats/activations_parts.h"
#include "formats/half.h"
#include "tests/check.h"

enum { N_TOKENS = 2100, MAX_ROW = 6 * 64 };

static char folder[64], path[96];
static double inv_freq[32];
static lowkey_layer_desc layers[2];
static const int64_t offsets[3] = { 0, 100, N_TOKENS };
static const unsigned char hashes[2][32] = { { 1 }, { 2, 9 } };
static struct lowkey_activations_info info;

static int make_folder(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/lowkey_activations_XXXXXX");
    if (!mkdtemp(folder)) return -1;
    snprintf(path, sizeof path, "%s/a.activations.h5", folder);
    for (int i = 0; i < 32; i++) inv_freq[i] = pow(1e4, -i / 32.0);
    /* Heads and dims of keys and values differ, and so do the layers. */
    layers[0] = (lowkey_layer_desc) { .struct_size = sizeof layers[0],
                                      .index = 3,
                                      .n_q_heads = 6,
                                      .n_kv_heads = 2,
                                      .key_head_dim = 64,
                                      .value_head_dim = 40,
                                      .rope_dims = 64,
                                      .rope_inv_freq = inv_freq };
    layers[1] = (lowkey_layer_desc) { .struct_size = sizeof layers[1],
                                      .index = 7,
                                      .n_q_heads = 1,
                                      .n_kv_heads = 1,
                                      .key_head_dim = 8,
                                      .value_head_dim = 256,
                                      .logit_scale = 0.5,
                                      .rope_pairing = LOWKEY_PAIR_INTERLEAVED,
                                      .rope_attention_factor = 1.25 };
    info = (struct lowkey_activations_info) {
        .n_model_layers = 9,
        .model_name = "model",
        .model_sha256 = { 7 },
        .n_layers = 2,
        .layers = layers,
        .contents = 1u << LOWKEY_KEY | 1u << LOWKEY_VALUE | 1u << LOWKEY_QUERY | 1u << LOWKEY_KEY_GRAD |
                    1u << LOWKEY_VALUE_WEIGHT,
        .n_samples = 2,
        .sample_offsets = offsets,
        .sample_sha256 = hashes,
        .text_name = "text",
        .text_sha256 = { 8 },
    };
    return 0;
}

static int remove_folder(void **state)
{
    (void)state;
    unlink(path);
    return rmdir(folder); /* fails where a temporary file was left */
}

/* A number of the element's place, exact in no 16-bit format. */
static float value_at(int i, enum lowkey_stream s, int64_t token, int head, int channel)
{
    const uint32_t mixed = (uint32_t)(((i * 7 + (int)s) * 4099 + token) * 67 + head * 257 + channel) *
                           2654435761u;
    const float x = (float)(mixed >> 8) / 4096 - 2048;
    return s == LOWKEY_VALUE_WEIGHT ? fabsf(x) : x;
}

static float stored(lowkey_dtype dtype, enum lowkey_stream s, float x)
{
    return s > LOWKEY_QUERY || dtype == LOWKEY_F32 ? x
           : dtype == LOWKEY_F16                   ? lowkey_f16_to_f32(lowkey_f32_to_f16(x))
                                                   : lowkey_bf16_to_f32(lowkey_f32_to_bf16(x));
}

static void fill(int i, enum lowkey_stream s, int64_t first, int64_t n, float *rows)
{
    const int n_heads = lowkey_stream_heads(&layers[i], s), head_dim = lowkey_stream_head_dim(&layers[i], s);
    for (int64_t t = 0; t < n; t++)
        for (int h = 0; h < n_heads; h++)
            for (int c = 0; c < head_dim; c++) *rows++ = value_at(i, s, first + t, h, c);
}

/* Pieces of odd lengths, from the last to the first and the streams interleaved, or all at once. */
static void write_file(lowkey_dtype dtype, int in_pieces)
{
    lowkey_error err;
    lowkey_activations_writer *writer;
    float *rows = malloc(sizeof(float) * N_TOKENS * MAX_ROW);
    assert_ok(lowkey_activations_create(path, &info, dtype, &writer, &err), err);
    const int64_t step = in_pieces ? 301 : N_TOKENS;
    for (int64_t last = N_TOKENS; last > 0; last -= step) {
        const int64_t first = last > step ? last - step : 0;
        for (int i = 0; i < 2; i++) {
            for (int s = 0; s < LOWKEY_N_STREAMS; s++) {
                if (!(info.contents >> s & 1)) continue;
                fill(i, (enum lowkey_stream)s, first, last - first, rows);
                assert_ok(lowkey_activations_write(writer, i, (enum lowkey_stream)s, first, last - first,
                                                   rows, &err),
                          err);
            }
        }
    }
    assert_ok(lowkey_activations_commit(writer, &err), err);
    free(rows);
}

static void check_block(lowkey_activations *a, lowkey_dtype dtype, int i, enum lowkey_stream s, int64_t first,
                        int64_t n, int head, int n_heads)
{
    lowkey_error err;
    const int head_dim = lowkey_stream_head_dim(&layers[i], s);
    const size_t size = (size_t)(n * n_heads * head_dim);
    float *rows = malloc((size + 1) * sizeof *rows);
    rows[size] = 12345;
    assert_ok(lowkey_activations_read(a, i, s, first, n, head, n_heads, rows, &err), err);
    const float *x = rows;
    for (int64_t t = first; t < first + n; t++)
        for (int h = head; h < head + n_heads; h++)
            for (int c = 0; c < head_dim; c++, x++)
                if (*x != stored(dtype, s, value_at(i, s, t, h, c)))
                    fail_msg("layer %d %s token %d head %d channel %d: %g", i, lowkey_stream_names[s], (int)t,
                             h, c, (double)*x);
    assert_true(rows[size] == 12345);
    free(rows);
}

static void rows_are_read_back_in_every_number_type(void **state)
{
    (void)state;
    static const lowkey_dtype dtypes[] = { LOWKEY_F16, LOWKEY_BF16, LOWKEY_F32 };
    for (int k = 0; k < 3; k++) {
        lowkey_error err;
        lowkey_activations *a;
        write_file(dtypes[k], 1);
        assert_ok(lowkey_activations_open(path, &a, &err), err);
        for (int i = 0; i < 2; i++) {
            for (int s = 0; s < LOWKEY_N_STREAMS; s++) {
                if (!(info.contents >> s & 1)) continue;
                const int n_heads = lowkey_stream_heads(&layers[i], (enum lowkey_stream)s);
                check_block(a, dtypes[k], i, (enum lowkey_stream)s, 0, N_TOKENS, 0, n_heads);
                check_block(a, dtypes[k], i, (enum lowkey_stream)s, 0, N_TOKENS, n_heads - 1, 1);
                check_block(a, dtypes[k], i, (enum lowkey_stream)s, 1023, 2, n_heads / 2,
                            n_heads - n_heads / 2);
                check_block(a, dtypes[k], i, (enum lowkey_stream)s, N_TOKENS - 1, 1, 0, n_heads);
            }
        }
        lowkey_activations_close(a);
    }
}

static void the_description_is_read_back(void **state)
{
    (void)state;
    lowkey_error err;
    lowkey_activations *a;
    write_file(LOWKEY_F16, 0);
    assert_ok(lowkey_activations_open(path, &a, &err), err);
    const struct lowkey_activations_info *found = lowkey_activations_describe(a);
    assert_int_equal(found->n_model_layers, 9);
    assert_string_equal(found->model_name, "model");
    assert_memory_equal(found->model_sha256, info.model_sha256, 32);
    assert_int_equal(found->n_layers, 2);
    assert_int_equal(found->contents, info.contents);
    assert_int_equal(found->n_samples, 2);
    assert_memory_equal(found->sample_offsets, offsets, sizeof offsets);
    assert_memory_equal(found->sample_sha256, hashes, sizeof hashes);
    assert_string_equal(found->text_name, "text");
    assert_memory_equal(found->text_sha256, info.text_sha256, 32);
    for (int i = 0; i < 2; i++) {
        const lowkey_layer_desc *l = &found->layers[i];
        assert_int_equal(l->index, layers[i].index);
        assert_int_equal(l->n_q_heads, layers[i].n_q_heads);
        assert_int_equal(l->n_kv_heads, layers[i].n_kv_heads);
        assert_int_equal(l->key_head_dim, layers[i].key_head_dim);
        assert_int_equal(l->value_head_dim, layers[i].value_head_dim);
        assert_int_equal(l->rope_dims, layers[i].rope_dims);
        assert_int_equal(l->rope_pairing, layers[i].rope_pairing);
    }
    assert_true(found->layers[0].logit_scale == 0.125 && found->layers[1].logit_scale == 0.5);
    assert_true(found->layers[0].rope_attention_factor == 1 &&
                found->layers[1].rope_attention_factor == 1.25);
    assert_memory_equal(found->layers[0].rope_inv_freq, inv_freq, sizeof inv_freq);
    assert_null(found->layers[1].rope_inv_freq);
    lowkey_activations_close(a);
}

static long size_and_sum(uint64_t *sum)
{
    FILE *stream = fopen(path, "rb");
    assert_non_null(stream);
    *sum = 0;
    for (int c; (c = getc(stream)) != EOF;) *sum = *sum * 1099511628211u + (unsigned)c;
    const long size = ftell(stream);
    fclose(stream);
    return size;
}

static void the_same_rows_give_the_same_bytes_however_they_are_cut(void **state)
{
    (void)state;
    uint64_t whole, again, cut;
    write_file(LOWKEY_F16, 0);
    const long size = size_and_sum(&whole);
    write_file(LOWKEY_F16, 0);
    assert_int_equal(size_and_sum(&again), size);
    assert_true(whole == again);
    write_file(LOWKEY_F16, 1);
    assert_int_equal(size_and_sum(&cut), size);
    assert_true(whole == cut);
}

static void what_cannot_be_stored_is_refused_by_place(void **state)
{
    (void)state;
    lowkey_error err;
    lowkey_activations_writer *writer;
    float rows[3 * MAX_ROW];
    assert_ok(lowkey_activations_create(path, &info, LOWKEY_F16, &writer, &err), err);
    fill(0, LOWKEY_KEY, 0, 3, rows);
    rows[2 * 128 + 64 + 5] = 65520;
    assert_refused(
        lowkey_activations_write(writer, 0, LOWKEY_KEY, 10, 3, rows, &err), LOWKEY_EINVAL, err,
        "key of layer 3, head 1, channel 5, token 12: expected a number that f16 holds, found 65520");
    rows[2 * 128 + 64 + 5] = 65519;
    assert_ok(lowkey_activations_write(writer, 0, LOWKEY_KEY, 10, 3, rows, &err), err);
    rows[0] = 1e30f;
    assert_ok(lowkey_activations_write(writer, 0, LOWKEY_KEY_GRAD, 10, 3, rows, &err), err);
    rows[0] = NAN;
    assert_refused(lowkey_activations_write(writer, 0, LOWKEY_KEY_GRAD, 13, 3, rows, &err), LOWKEY_EINVAL,
                   err, "f32 holds, found nan");
    rows[0] = -1;
    assert_refused(lowkey_activations_write(writer, 0, LOWKEY_VALUE_WEIGHT, 13, 1, rows, &err), LOWKEY_EINVAL,
                   err,
                   "value_weight of layer 3, head 0, channel 0, token 13: expected a number that f32 holds, "
                   "0 or more, found -1");
    assert_refused(lowkey_activations_write(writer, 0, LOWKEY_KEY_WEIGHT, 0, 1, rows, &err), LOWKEY_EINVAL,
                   err, "stream 5");
    assert_refused(lowkey_activations_write(writer, 2, LOWKEY_KEY, 0, 1, rows, &err), LOWKEY_EINVAL, err,
                   "layer number 2");
    assert_refused(lowkey_activations_write(writer, 0, LOWKEY_KEY, N_TOKENS - 1, 2, rows, &err),
                   LOWKEY_EINVAL, err, "no tokens 2099..2100");
    lowkey_activations_abandon(writer);
    assert_ok(lowkey_activations_create(path, &info, LOWKEY_BF16, &writer, &err), err);
    rows[3] = -0x1.ffp127f;
    assert_refused(lowkey_activations_write(writer, 0, LOWKEY_QUERY, 0, 1, rows, &err), LOWKEY_EINVAL, err,
                   "query of layer 3, head 0, channel 3, token 0: expected a number that bf16 holds, found "
                   "-3.39618e+38 (1 such in tokens 0..0)");
    rows[3] = -0x1.fefffep127f;
    rows[0] = 1;
    assert_ok(lowkey_activations_write(writer, 0, LOWKEY_QUERY, 0, 1, rows, &err), err);
    lowkey_activations_abandon(writer);
    assert_int_equal(access(path, F_OK), -1);
    lowkey_activations_abandon(NULL);
}

static void rows_missing_or_written_twice_are_named(void **state)
{
    (void)state;
    lowkey_error err;
    lowkey_activations_writer *writer;
    static float rows[20 * MAX_ROW];
    static const struct {
        int64_t first, n;
        int good;
    } writes[] = {
        { 10, 10, 1 }, { 30, 10, 1 }, { 15, 1, 0 },  { 5, 6, 0 },   { 19, 3, 0 },
        { 5, 20, 0 },  { 25, 6, 0 },  { 20, 11, 0 }, { 20, 10, 1 }, /* joins both */ { 9, 2, 0 },
        { 39, 1, 0 },  { 40, 1, 1 },  { 0, 9, 1 },   { 9, 1, 1 },   { 0, 1, 0 },
        { 40, 1, 0 },
    };
    assert_ok(lowkey_activations_create(path, &info, LOWKEY_F16, &writer, &err), err);
    for (size_t i = 0; i < sizeof writes / sizeof writes[0]; i++) {
        err.message[0] = 0;
        const lowkey_status got = lowkey_activations_write(writer, 0, LOWKEY_KEY, writes[i].first,
                                                           writes[i].n, rows, &err);
        if ((got == LOWKEY_OK) != writes[i].good)
            fail_msg("write %d: status %d %s", (int)i, got, err.message);
        if (!writes[i].good) assert_non_null(strstr(err.message, "were written before"));
    }
    assert_refused(lowkey_activations_commit(writer, &err), LOWKEY_EINVAL, err,
                   "key of layer 3: token 41 of 2100 was not written");
    assert_int_equal(access(path, F_OK), -1);
}

static void descriptions_that_break_the_rules_are_refused(void **state)
{
    (void)state;
    lowkey_error err;
    lowkey_activations_writer *writer;
    const struct lowkey_activations_info good = info;
    info.contents = 1u << LOWKEY_KEY;
    assert_refused(lowkey_activations_create(path, &info, LOWKEY_F16, &writer, &err), LOWKEY_EFORMAT, err,
                   "expected key and value, found 'key'");
    info.contents = good.contents | 1u << LOWKEY_KEY_WEIGHT;
    assert_refused(lowkey_activations_create(path, &info, LOWKEY_F16, &writer, &err), LOWKEY_EFORMAT, err,
                   "gradients or weights");
    info = good;
    layers[1].index = 3;
    assert_refused(lowkey_activations_create(path, &info, LOWKEY_F16, &writer, &err), LOWKEY_EINVAL, err,
                   "rising indices below 9, found 3");
    layers[1].index = 9;
    assert_refused(lowkey_activations_create(path, &info, LOWKEY_F16, &writer, &err), LOWKEY_EINVAL, err,
                   "found 9");
    layers[1].index = 7;
    layers[1].value_head_dim = 100;
    assert_refused(lowkey_activations_create(path, &info, LOWKEY_F16, &writer, &err), LOWKEY_EFORMAT, err,
                   "layer 7: value_head_dim");
    layers[1].value_head_dim = 256;
    info.n_samples = 0;
    assert_refused(lowkey_activations_create(path, &info, LOWKEY_F16, &writer, &err), LOWKEY_EINVAL, err,
                   "samples");
    assert_null(writer);
    assert_int_equal(access(path, F_OK), -1);
}

static void contents_are_read_and_printed(void **state)
{
    (void)state;
    lowkey_error err;
    unsigned contents;
    char text[LOWKEY_CONTENTS_SIZE];
    assert_ok(lowkey_contents_parse("key value", &contents, &err), err);
    assert_int_equal(contents, 3);
    assert_ok(lowkey_contents_parse("key value query key_grad value_weight", &contents, &err), err);
    lowkey_contents_print(contents, text);
    assert_string_equal(text, "key value query key_grad value_weight");
    lowkey_contents_print((1u << LOWKEY_N_STREAMS) - 1, text);
    assert_true(strlen(text) + 1 < LOWKEY_CONTENTS_SIZE);
    static const char *const bad[] = { "",
                                       "key",
                                       "value key",
                                       "key  value",
                                       "key value ",
                                       " key value",
                                       "key value key",
                                       "key value keys",
                                       "key value key_grad key_weight",
                                       "key value value_grad value_weight",
                                       "keyvalue" };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        if (lowkey_contents_parse(bad[i], &contents, &err) != LOWKEY_EFORMAT)
            fail_msg("'%s' was taken", bad[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(rows_are_read_back_in_every_number_type, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(the_description_is_read_back, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(the_same_rows_give_the_same_bytes_however_they_are_cut, make_folder,
                                        remove_folder),
        cmocka_unit_test_setup_teardown(what_cannot_be_stored_is_refused_by_place, make_folder,
                                        remove_folder),
        cmocka_unit_test_setup_teardown(rows_missing_or_written_twice_are_named, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(descriptions_that_break_the_rules_are_refused, make_folder,
                                        remove_folder),
        cmocka_unit_test(contents_are_read_and_printed),
    };
    return lowkey_run_tests(tests);
}
