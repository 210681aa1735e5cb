/* test_quantizer_h5.c - quantizer.h5 written, read and written again: every field survives, the bytes are the same, and
 * what is not as the specification says is refused in one line, with the target as it was. */
#include <hdf5.h>
#include <math.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "formats/quantizer_file.h"
#include "tests/check.h"
#include "tests/quantizers.h"

static lowkey_error err;
static char folder[64], first_path[96], second_path[96];

/* ---- records ---- */

static const unsigned char hashes[3][32] = { { 1, 9 }, { 2, 8 }, { 2, 9 } };

static double *doubles(size_t n, double from)
{
    double *values = calloc(n, sizeof *values);
    for (size_t c = 0; c < n; c++) values[c] = from + (double)c / 3;
    return values;
}

static void make_report(const lowkey_layer_desc *layer, int which, struct lowkey_side_report *report)
{
    const lowkey_side_desc *side = which ? &layer->value : &layer->key;
    const size_t n = (size_t)layer->n_kv_heads *
                     (size_t)(which ? layer->value_head_dim : layer->key_head_dim);
    const size_t n_table = (size_t)side->table_entries;
    *report = (struct lowkey_side_report) {
        .table_scope = which ? "layer" : "channel",
        .codebook = !n_table ? "none"
                    : which  ? "normal_float"
                             : "fitted",
        .gain_corrected = which,
        .qnorm = !which,
        .n_tokens = 1000 + (uint64_t)which,
        .n_outliers = 17,
        .n_clamped = 3,
        .n_saturated = (uint64_t)1 << 40,
        .mean = doubles(n, -2),
        .variance = doubles(n, 0),
        .mse = doubles(n, 0.1),
        .weighted_mse = doubles(n, 0.2),
        .gain = calloc(n, sizeof(float)),
        .flags = calloc(n, 1),
        .histogram = n_table ? calloc(n * n_table, sizeof(uint64_t)) : NULL,
    };
    for (size_t c = 0; c < n; c++) {
        report->gain[c] = 1 + (float)c / 64;
        report->flags[c] = (uint8_t)(c % 32);
        for (size_t k = 0; k < n_table; k++)
            report->histogram[c * n_table + k] = (uint64_t)(c * 1000003 + k) << (k % 20);
    }
}

static struct lowkey_fit_record *make_record(const lowkey_quantizer_desc *desc)
{
    struct lowkey_fit_record *record = calloc(1, sizeof *record);
    *record = (struct lowkey_fit_record) {
        .n_model_layers = 30,
        .sensitivity = "fisher",
        .outlier_fraction_key = 0.01,
        .outlier_fraction_value = 1.0 / 3,
        .damp = 0.05,
        .n_tokens = 123456789012,
        .text_name = "one;two \xc3\xa9",
        .n_samples = 3,
        .sample_sha256 = hashes,
        .text_sha256 = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff;"
                       "ff112233445566778899aabbccddeeff00112233445566778899aabbccddeeff",
        .reports = calloc((size_t)desc->n_layers, sizeof record->reports[0]),
    };
    for (int i = 0; i < desc->n_layers; i++)
        for (int which = 0; which < 2; which++)
            make_report(&desc->layers[i], which, &record->reports[i][which]);
    return record;
}

static void free_record(struct lowkey_fit_record *record, int n_layers)
{
    for (int i = 0; i < 2 * n_layers; i++) {
        struct lowkey_side_report *r = &record->reports[i / 2][i % 2];
        free(r->mean), free(r->variance), free(r->mse), free(r->weighted_mse), free(r->gain), free(r->flags),
            free(r->histogram);
    }
    free(record->reports);
    free(record);
}

static void same_record(const struct lowkey_fit_record *a, const struct lowkey_fit_record *b,
                        const lowkey_quantizer_desc *desc)
{
    assert_int_equal(a->n_model_layers, b->n_model_layers);
    assert_string_equal(a->sensitivity, b->sensitivity);
    assert_true(a->outlier_fraction_key == b->outlier_fraction_key &&
                a->outlier_fraction_value == b->outlier_fraction_value);
    assert_true(a->damp == b->damp && a->n_tokens == b->n_tokens && a->budget == b->budget);
    assert_true(a->predicted_cost_key == b->predicted_cost_key &&
                a->predicted_cost_value == b->predicted_cost_value);
    assert_string_equal(a->text_name, b->text_name);
    assert_string_equal(a->text_sha256, b->text_sha256);
    assert_int_equal(a->n_samples, b->n_samples);
    assert_memory_equal(a->sample_sha256, b->sample_sha256, 32 * (size_t)a->n_samples);
    for (int i = 0; i < 2 * desc->n_layers; i++) {
        const lowkey_layer_desc *layer = &desc->layers[i / 2];
        const struct lowkey_side_report *x = &a->reports[i / 2][i % 2], *y = &b->reports[i / 2][i % 2];
        const size_t n = (size_t)layer->n_kv_heads *
                         (size_t)(i % 2 ? layer->value_head_dim : layer->key_head_dim);
        const size_t n_table = (size_t)(i % 2 ? layer->value : layer->key).table_entries;
        assert_string_equal(x->table_scope, y->table_scope);
        assert_string_equal(x->codebook, y->codebook);
        assert_int_equal(x->gain_corrected, y->gain_corrected);
        assert_int_equal(x->qnorm, y->qnorm);
        assert_true(x->n_tokens == y->n_tokens && x->n_outliers == y->n_outliers &&
                    x->n_clamped == y->n_clamped && x->n_saturated == y->n_saturated);
        assert_memory_equal(x->mean, y->mean, n * 8);
        assert_memory_equal(x->variance, y->variance, n * 8);
        assert_memory_equal(x->mse, y->mse, n * 8);
        assert_memory_equal(x->weighted_mse, y->weighted_mse, n * 8);
        assert_memory_equal(x->gain, y->gain, n * 4);
        assert_memory_equal(x->flags, y->flags, n);
        assert_true(!x->histogram == !y->histogram);
        if (n_table) assert_memory_equal(x->histogram, y->histogram, n * n_table * 8);
    }
}

/* ---- files ---- */

static char *contents(const char *path, size_t *n)
{
    FILE *file = fopen(path, "rb");
    if (!file) fail_msg("%s is not there", path);
    fseek(file, 0, SEEK_END);
    *n = (size_t)ftell(file);
    rewind(file);
    char *bytes = malloc(*n + 1);
    assert_int_equal(fread(bytes, 1, *n, file), *n);
    fclose(file);
    return bytes;
}

static void put_contents(const char *path, const char *bytes, size_t n)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n, file), n);
    assert_int_equal(fclose(file), 0);
}

static void same_files(const char *a, const char *b)
{
    size_t n_a, n_b;
    char *in_a = contents(a, &n_a), *in_b = contents(b, &n_b);
    assert_int_equal(n_a, n_b);
    assert_memory_equal(in_a, in_b, n_a);
    free(in_a);
    free(in_b);
}

static void write_rich(const char *path)
{
    const struct lowkey_test_spec spec = lowkey_test_spec_rich();
    lowkey_quantizer_desc *desc = lowkey_test_desc_make(&spec);
    struct lowkey_fit_record *record = make_record(desc);
    assert_ok(lowkey_quantizer_write(path, desc, record, &err), err);
    free_record(record, desc->n_layers);
    lowkey_test_desc_free(desc);
}

static void everything_survives_and_is_written_again_alike(void **state)
{
    (void)state;
    static const struct lowkey_test_side sides[] = {
        { .bits = { 1 }, .n_bits = 1 },
        { .bits = { 3 }, .n_bits = 1, .outlier_rule = LOWKEY_OUTLIER_LIMIT, .feedback = 1 },
        { .bits = { 5, 4 },
          .n_bits = 2,
          .token_scale = LOWKEY_SCALE_F32,
          .outlier_rule = LOWKEY_OUTLIER_RANK,
          .scale_block = 8 },
        { .bits = { 8 }, .n_bits = 1, .rule_8 = LOWKEY_RULE_INT8, .feedback = 1 },
        { .bits = { 16 }, .n_bits = 1, .rule_16 = LOWKEY_RULE_F16 },
        { .bits = { 16, 8 }, .n_bits = 2, .rule_8 = LOWKEY_RULE_E5M2, .rule_16 = LOWKEY_RULE_BF16 },
        { .bits = { 1, 2, 3, 4, 5, 8, 16 },
          .n_bits = 7,
          .rule_8 = LOWKEY_RULE_E4M3,
          .rule_16 = LOWKEY_RULE_BF16,
          .feedback = 1 },
        { .bits = { 2 }, .n_bits = 1, .trellis = 1, .feedback = 1 },
        { .bits = { 5, 1, 2, 4, 3 }, .n_bits = 5, .trellis = 4 },
    };
    enum { N = sizeof sides / sizeof sides[0] };
    static const int dims[] = { 8, 64, 72, 80, 96, 128, 256 };
    for (int i = 0; i <= N + 1; i++) {
        struct lowkey_test_spec spec = i == N ? lowkey_test_spec_rich() : lowkey_test_spec_trellis();
        if (i < N)
            spec = (struct lowkey_test_spec) { .n_layers = 1 + i % 3,
                                               .n_q_heads = 2 * (1 + i % 2),
                                               .n_kv_heads = 1 + i % 2,
                                               .key_head_dim = dims[i % 7],
                                               .value_head_dim = dims[(i + 3) % 7],
                                               .rope_dims = i % 3 ? dims[i % 7] : 0,
                                               .rope_pairing = (lowkey_pairing)(i % 2),
                                               .seed = (unsigned)i,
                                               .side = { sides[i], sides[(i + 2) % N] } };
        lowkey_quantizer_desc *desc = lowkey_test_desc_make(&spec);
        struct lowkey_fit_record *record = make_record(desc), *got_record;
        if (i % 2) record->budget = 2.25, record->predicted_cost_key = 1.0 / 3, record->predicted_cost_value = 1e-300;
        lowkey_quantizer *quantizer, *opened;
        assert_ok(lowkey_quantizer_write(first_path, desc, record, &err), err);
        assert_ok(lowkey_quantizer_read(first_path, &quantizer, &got_record, &err), err);
        lowkey_test_desc_equal(lowkey_quantizer_describe(quantizer), desc);
        same_record(got_record, record, desc);
        assert_ok(lowkey_quantizer_write(second_path, lowkey_quantizer_describe(quantizer), got_record, &err),
                  err);
        same_files(first_path, second_path);
        assert_ok(lowkey_quantizer_open(second_path, NULL, &opened, &err), err);
        lowkey_test_desc_equal(lowkey_quantizer_describe(opened), desc);
        lowkey_quantizer_free(opened);
        lowkey_quantizer_free(quantizer);
        lowkey_fit_record_free(got_record);
        free_record(record, desc->n_layers);
        lowkey_test_desc_free(desc);
    }
    lowkey_fit_record_free(NULL);
}

static void the_golden_file_of_version_1_0_stays_readable(void **state)
{
    (void)state;
    lowkey_quantizer *quantizer; /* written by h5py from the document alone */
    assert_ok(lowkey_quantizer_open("tests/golden/quantizer-1.0.h5", NULL, &quantizer, &err), err);
    const lowkey_quantizer_desc *desc = lowkey_quantizer_describe(quantizer);
    const lowkey_layer_desc *layer = desc->layers;
    const lowkey_side_desc *key = &layer->key, *value = &layer->value;
    assert_int_equal(desc->n_layers, 1);
    assert_int_equal(desc->n_sink_tokens, 4);
    assert_int_equal(desc->sink_rule, LOWKEY_RULE_F16);
    assert_int_equal(layer->index, 3);
    assert_int_equal(layer->n_q_heads, 2);
    assert_int_equal(layer->rope_pairing, LOWKEY_PAIR_HALF);
    assert_true(layer->logit_scale == 0.3977813169592014);
    assert_memory_equal(key->bits, ((uint8_t[]) { 1, 2, 3, 4, 8, 16, 1, 2 }), 8);
    assert_memory_equal(key->order, ((uint16_t[]) { 1, 5, 2, 6, 0, 4, 3, 7 }), 16);
    assert_memory_equal(key->n_entries, ((uint8_t[]) { 2, 4, 8, 15, 0, 0, 2, 4 }), 8);
    assert_memory_equal(key->exponent, ((int16_t[]) { -3, -1, -2, -2, -3, -3, 2, -4 }), 16);
    assert_true(key->center[7] == -0.19400377571582794f && key->upper[2] == 7.640625f);
    assert_true(key->rule_scale[4] == 0.004800795111805201f && key->rule_scale[5] == 1);
    assert_true(key->table_entries == 16 && key->table[0] == -0x1.32cp-2f && key->table[1] == 0x1.93p-2f);
    assert_true(key->boundary[0] == -0x1.466b68p-3f && key->boundary[1] == 0x1.fffffep127f);
    assert_true(key->factor[7 * 8 + 2] == -0x1.5e8p-4f && key->factor[7 * 8 + 6] == 0x1.25p-5f);
    assert_int_equal(key->rule_8, LOWKEY_RULE_E4M3);
    assert_int_equal(key->rule_16, LOWKEY_RULE_BF16);
    assert_int_equal(key->outlier_rule, LOWKEY_OUTLIER_LIMIT);
    assert_true(key->outlier_cap == 3 && key->outlier_page_capacity == 100 &&
                key->token_scale == LOWKEY_SCALE_NONE);
    assert_true(value->token_scale == LOWKEY_SCALE_F16 && value->scale_block == 8);
    assert_true(value->outlier_rule == LOWKEY_OUTLIER_RANK && value->outlier_rank == 1 && !value->factor);
    assert_true(value->table_entries == 8 && value->table[7 * 8 + 3] == 0x1.a34p-1f);
    lowkey_quantizer_free(quantizer);
}

static void the_golden_file_of_version_1_3_stays_readable(void **state)
{
    (void)state;
    lowkey_quantizer *quantizer; /* written by h5py from the document alone */
    assert_ok(lowkey_quantizer_open("tests/golden/quantizer-1.3.h5", NULL, &quantizer, &err), err);
    const lowkey_layer_desc *layer = lowkey_quantizer_describe(quantizer)->layers;
    const lowkey_side_desc *key = &layer->key, *value = &layer->value;
    assert_true(key->trellis == 2 && value->trellis == 4 && !key->boundary && !value->boundary);
    assert_memory_equal(key->bits, ((uint8_t[]) { 1, 2, 3, 4, 5, 2, 1, 1 }), 8);
    assert_memory_equal(key->n_entries, ((uint8_t[]) { 4, 8, 16, 32, 63, 8, 4, 4 }), 8);
    assert_memory_equal(key->order, ((uint16_t[]) { 1, 4, 7, 6, 0, 3, 2, 5 }), 16);
    assert_true(key->table_entries == 64 && value->table_entries == 8);
    assert_true(key->table[2 * 64] == -0x1.628p+1f && key->table[2 * 64 + 4] == -0x1.54cp-1f);
    assert_true(key->metric_weight[0] == 0x1.caefcp+4f && value->metric_weight[3] == 0x1.0b9404p-3f);
    assert_true(key->factor[7 * 8 + 2] == -0x1.498p-3f && !value->factor);
    lowkey_quantizer_free(quantizer);
}

static void only_the_target_is_left_in_the_folder(void **state)
{
    (void)state;
    char command[200];
    write_rich(first_path);
    write_rich(first_path); /* over itself */
    unlink(second_path);
    snprintf(command, sizeof command, "test \"$(ls -A %s)\" = first.quantizer.h5", folder);
    assert_int_equal(system(command), 0);
}

struct counted {
    size_t live, calls, fail_at;
};

static void *counted_alloc(void *user, size_t bytes, size_t alignment)
{
    struct counted *counted = user;
    if (++counted->calls == counted->fail_at) return NULL;
    counted->live += bytes;
    return aligned_alloc(alignment, bytes);
}

static void counted_free(void *user, void *block, size_t bytes)
{
    ((struct counted *)user)->live -= bytes;
    free(block);
}

static void the_callers_memory_is_used_and_may_run_out(void **state)
{
    (void)state;
    write_rich(first_path);
    int status = LOWKEY_ENOMEM;
    for (size_t n = 1; status != LOWKEY_OK; n++) {
        struct counted counted = { .fail_at = n };
        const lowkey_allocator allocator = { counted_alloc, counted_free, &counted };
        lowkey_quantizer *quantizer = (lowkey_quantizer *)&counted;
        status = lowkey_quantizer_open(first_path, &allocator, &quantizer, &err);
        if (status != LOWKEY_OK) {
            assert_int_equal(status, LOWKEY_ENOMEM);
            assert_non_null(strstr(err.message, first_path));
            assert_null(quantizer);
        }
        lowkey_quantizer_free(quantizer);
        assert_int_equal(counted.live, 0);
        assert_true(status != LOWKEY_OK || n > 2);
    }
}

static void files_cut_anywhere_are_refused_in_one_line(void **state)
{
    (void)state;
    write_rich(first_path);
    size_t n;
    char *bytes = contents(first_path, &n);
    const size_t cuts[] = { 0, 1, 8, 96, 1000, n / 4, n / 2, n - 4096, n - 1 };
    for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++) {
        lowkey_quantizer *quantizer = (lowkey_quantizer *)bytes;
        put_contents(second_path, bytes, cuts[i]);
        const int status = lowkey_quantizer_open(second_path, NULL, &quantizer, &err);
        if (status != LOWKEY_EFORMAT && status != LOWKEY_EIO)
            fail_msg("cut at %zu: status %d", cuts[i], status);
        assert_non_null(strstr(err.message, second_path));
        assert_null(strchr(err.message, '\n'));
        assert_null(quantizer);
    }
    free(bytes);
}

static void missing_files_and_arguments_are_refused(void **state)
{
    (void)state;
    lowkey_quantizer *quantizer;
    assert_int_equal(lowkey_quantizer_open("/nonexistent/q.h5", NULL, &quantizer, &err), LOWKEY_EIO);
    assert_int_not_equal(lowkey_quantizer_open(folder, NULL, &quantizer, &err), LOWKEY_OK);
    assert_refused(lowkey_quantizer_open(NULL, NULL, &quantizer, &err), LOWKEY_EINVAL, err, "path is NULL");
    assert_refused(lowkey_quantizer_open(first_path, NULL, NULL, &err), LOWKEY_EINVAL, err, "out is NULL");
}

/* ---- mutations of a file by HDF5's own calls ---- */

static void del_attribute(hid_t file, const char *object, const char *name)
{
    assert_true(H5Adelete_by_name(file, object, name, H5P_DEFAULT) >= 0);
}

static void put_int(hid_t file, const char *object, const char *name, int64_t value)
{
    if (H5Aexists_by_name(file, object, name, H5P_DEFAULT) > 0) del_attribute(file, object, name);
    const hid_t space = H5Screate(H5S_SCALAR);
    const hid_t attribute = H5Acreate_by_name(file, object, name, H5T_STD_I64LE, space, H5P_DEFAULT,
                                              H5P_DEFAULT, H5P_DEFAULT);
    assert_true(H5Awrite(attribute, H5T_NATIVE_INT64, &value) >= 0);
    H5Aclose(attribute);
    H5Sclose(space);
}

static void put_string(hid_t file, const char *object, const char *name, const char *value)
{
    if (H5Aexists_by_name(file, object, name, H5P_DEFAULT) > 0) del_attribute(file, object, name);
    const hid_t space = H5Screate(H5S_SCALAR), type = H5Tcopy(H5T_C_S1);
    H5Tset_size(type, strlen(value) + 1);
    const hid_t attribute = H5Acreate_by_name(file, object, name, type, space, H5P_DEFAULT, H5P_DEFAULT,
                                              H5P_DEFAULT);
    assert_true(H5Awrite(attribute, type, value) >= 0);
    H5Aclose(attribute);
    H5Tclose(type);
    H5Sclose(space);
}

static void del(hid_t file, const char *object)
{
    assert_true(H5Ldelete(file, object, H5P_DEFAULT) >= 0);
}

static void put_doubles(hid_t file, const char *dataset, int rank, const hsize_t *dims)
{
    hsize_t n = 1;
    for (int i = 0; i < rank; i++) n *= dims[i];
    double *values = calloc(n, sizeof *values);
    const hid_t space = H5Screate_simple(rank, dims, NULL);
    const hid_t set = H5Dcreate2(file, dataset, H5T_IEEE_F64LE, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    assert_true(H5Dwrite(set, H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, values) >= 0);
    H5Dclose(set);
    H5Sclose(space);
    free(values);
}

/* One element, by its place in the flattened array. */
static void put_element(hid_t file, const char *dataset, hsize_t at, double value)
{
    const hid_t set = H5Dopen2(file, dataset, H5P_DEFAULT), space = H5Dget_space(set);
    const hssize_t n = H5Sget_simple_extent_npoints(space);
    double *values = calloc((size_t)n, sizeof *values);
    assert_true(H5Dread(set, H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, values) >= 0);
    values[at] = value;
    assert_true(H5Dwrite(set, H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, values) >= 0);
    H5Sclose(space);
    H5Dclose(set);
    free(values);
}

/* clang-format off: a table. f: the file; K, V: the key and value groups of layer 3 */
#define K "/layers/003/key"
#define V "/layers/003/value"
#define MUTATIONS(X)                                                                                         \
    X(del_attribute(f, "/", "n_layers"), "n_layers")                                                         \
    X(put_int(f, "/", "n_layers", 5), "/layer_index")                                                        \
    X(put_int(f, "/", "n_sink_tokens", 65), "n_sink_tokens")                                                 \
    X(put_string(f, "/", "sink_rule", "none"), "sink_rule")                                                  \
    X(put_string(f, "/", "model_sha256", "abc"), "model_sha256")                                             \
    X(del_attribute(f, "/", "model_name"), "model_name")                                                     \
    X(put_int(f, "/", "sinks", 3), "sinks")                                                                  \
    X(put_string(f, "/", "schema", "model"), "schema")                                                       \
    X(put_doubles(f, "/extra", 1, (hsize_t[]) { 3 }), "extra")                                               \
    X(del(f, "/fit"), "fit")                                                                                 \
    X(del(f, "/sample_sha256"), "sample_sha256")                                                             \
    X(put_element(f, "/sample_sha256", 0, 3), "/sample_sha256: expected hashes sorted by their bytes")       \
    X(put_string(f, "/fit", "sensitivity", "hessian"), "sensitivity")                                        \
    X(put_int(f, "/fit", "n_tokens", -1), "n_tokens")                                                        \
    X(put_string(f, "/fit", "text_sha256", "00"), "text_sha256")                                             \
    X(put_string(f, "/fit", "extra", "00"), "extra")                                                         \
    X(del(f, "/layers/003"), "/layers/003")                                                                  \
    X(del(f, V), "value")                                                                                    \
    X(put_int(f, "/layers/003", "rope_dims", 14), "rope_inv_freq")                                           \
    X(put_int(f, "/layers/003", "bits", 4), "bits")                                                          \
    X(put_int(f, K, "table_entries", 16), "table")                                                           \
    X(put_int(f, K, "table_entries", 1), "expected 0 or 2 to 32, found 1")                                   \
    X(put_int(f, K, "table_entries", 0), "expected")                                                         \
    X(put_string(f, K, "rule_8", "none"), "rule_scale")                                                      \
    X(put_string(f, K, "rule_8", "f16"), "rule_8")                                                           \
    X(put_string(f, K, "rule_16", "none"), "layer 3 key: rule_16")                                           \
    X(put_string(f, K, "token_scale", "f16"), "scale_block")                                                 \
    X(put_string(f, V, "token_scale", "none"), "scale_block")                                                \
    X(put_int(f, V, "scale_block", 0), "scale_block")                                                        \
    X(put_int(f, V, "scale_block", 24), "layer 3 value: scale_block")                                        \
    X(put_string(f, V, "outlier_rule", "limit"), "layer 3 value: outlier_rule")                              \
    X(put_int(f, K, "outlier_rank", 2), "layer 3 key: outlier_rank")                                         \
    X(put_int(f, K, "outlier_page_capacity", 65536), "outlier_page_capacity")                                \
    X(put_int(f, K, "feedback", 0), "factor")                                                                \
    X(put_int(f, V, "feedback", 1), "factor")                                                                \
    X(put_int(f, V, "gain", 2), "gain")                                                                      \
    X(put_string(f, V, "codebook", "none"), "codebook: expected none iff table_entries is 0")                \
    X(put_string(f, V, "table_scope", "row"), "table_scope")                                                 \
    X(put_int(f, V, "note", 1), "note")                                                                      \
    X(del(f, K "/bits"), K "/bits")                                                                          \
    X(del(f, K "/exponent"), K "/exponent")                                                                  \
    X((del(f, K "/upper"), put_doubles(f, K "/upper", 1, (hsize_t[]) { 2 })), K "/upper")                    \
    X((del(f, K "/order"), put_doubles(f, K "/order", 2, (hsize_t[]) { 2, 24 })), K "/order")                \
    X(put_element(f, K "/bits", 7, 17), K "/bits")                                                           \
    X(put_element(f, K "/bits", 7, 6),                                                                       \
      "layer 3 key: bits head 0 channel 7: expected 1 to 5, 8 or 16, found 6")                               \
    X(put_element(f, K "/table", 32, 1e30), "layer 3 key: table head 0 channel 1: entry 0 (")                \
    X(put_element(f, K "/lower", 3, HUGE_VAL), K "/lower")                                                   \
    X(put_element(f, K "/factor", 1, 0.5), "layer 3 key: factor head 0 row 0 column 1: expected 0")          \
    X(put_doubles(f, K "/zero", 1, (hsize_t[]) { 3 }), "zero")                                               \
    X(del(f, V "/report"), "report")                                                                         \
    X(del(f, V "/report/gain"), V "/report/gain")                                                            \
    X(del(f, V "/report/histogram"), V "/report/histogram")                                                  \
    X(put_int(f, V "/report", "n_outliers", -1), "n_outliers")                                               \
    X(put_element(f, V "/report/flags", 3, 32), V "/report/flags")                                           \
    X(put_element(f, V "/report/mse", 18, -0.5),                                                             \
      V "/report/mse channel 18 of all heads: expected 0 or more")                                           \
    X(put_doubles(f, V "/report/error", 1, (hsize_t[]) { 3 }), "error")
/* clang-format on */

static void mutate(int i, hid_t f)
{
    int n = 0;
#define MUTATION(code, words)                                                                                \
    if (n++ == i) code;
    MUTATIONS(MUTATION)
#undef MUTATION
}

static const char *const words_of[] = {
#define WORDS(code, words) words,
    MUTATIONS(WORDS)
#undef WORDS
};

static void each_mutated_file_is_refused_by_the_objects_name(void **state)
{
    (void)state;
    write_rich(first_path);
    size_t n;
    char *bytes = contents(first_path, &n);
    for (int i = 0; i < (int)(sizeof words_of / sizeof words_of[0]); i++) {
        lowkey_quantizer *quantizer = (lowkey_quantizer *)bytes;
        put_contents(second_path, bytes, n);
        const hid_t file = H5Fopen(second_path, H5F_ACC_RDWR, H5P_DEFAULT);
        assert_true(file >= 0);
        mutate(i, file);
        assert_true(H5Fclose(file) >= 0);
        assert_refused(lowkey_quantizer_open(second_path, NULL, &quantizer, &err), LOWKEY_EFORMAT, err,
                       words_of[i]);
        if (strncmp(err.message, second_path, strlen(second_path)) != 0)
            fail_msg("'%s' does not begin with the file", err.message);
        assert_null(quantizer);
    }
    free(bytes);
}

static void a_description_or_record_that_is_refused_leaves_the_target_alone(void **state)
{
    (void)state;
    const struct lowkey_test_spec spec = lowkey_test_spec_rich();
    lowkey_quantizer_desc *desc = lowkey_test_desc_make(&spec);
    struct lowkey_fit_record *record = make_record(desc);
    write_rich(first_path);
    write_rich(second_path);
    struct lowkey_side_report *report = &record->reports[1][0];
    const double mean = report->mean[3];
    const char *const name = record->text_name;
#define REFUSED(code, undo, words)                                                                           \
    do {                                                                                                     \
        code;                                                                                                \
        (err).message[0] = 0;                                                                                \
        assert_int_not_equal(lowkey_quantizer_write(first_path, desc, record, &err), LOWKEY_OK);             \
        if (!strstr(err.message, words)) fail_msg("'%s' lacks '%s'", err.message, words);                    \
        same_files(first_path, second_path);                                                                 \
        undo;                                                                                                \
    } while (0)
    REFUSED(((uint8_t *)desc->layers[1].key.bits)[0] = 7, ((uint8_t *)desc->layers[1].key.bits)[0] = 4,
            "layer 5 key: bits head 0 channel 0");
    REFUSED(report->mean[3] = NAN, report->mean[3] = mean, "/layers/005/key/report/mean");
    REFUSED(report->codebook = "nuq", report->codebook = "fitted", "codebook");
    REFUSED(record->n_model_layers = 5, record->n_model_layers = 30, "layer_index");
    REFUSED(record->text_name = NULL, record->text_name = name, "text_name");
    REFUSED(record->n_samples = 0, record->n_samples = 3, "samples");
    REFUSED(desc->n_sink_tokens = 99, desc->n_sink_tokens = 5, "n_sink_tokens");
    assert_ok(lowkey_quantizer_write(first_path, desc, record, &err), err); /* all was undone */
    same_files(first_path, second_path);
    assert_int_equal(lowkey_quantizer_write(first_path, desc, NULL, &err), LOWKEY_EINVAL);
    free_record(record, desc->n_layers);
    lowkey_test_desc_free(desc);
}

static int make_folder(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/lowkey-test-XXXXXX");
    if (!mkdtemp(folder)) return 1;
    snprintf(first_path, sizeof first_path, "%s/first.quantizer.h5", folder);
    snprintf(second_path, sizeof second_path, "%s/second.quantizer.h5", folder);
    return 0;
}

static int remove_folder(void **state)
{
    (void)state;
    unlink(first_path);
    unlink(second_path);
    return rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(everything_survives_and_is_written_again_alike),
        cmocka_unit_test(the_golden_file_of_version_1_0_stays_readable),
        cmocka_unit_test(the_golden_file_of_version_1_3_stays_readable),
        cmocka_unit_test(only_the_target_is_left_in_the_folder),
        cmocka_unit_test(the_callers_memory_is_used_and_may_run_out),
        cmocka_unit_test(files_cut_anywhere_are_refused_in_one_line),
        cmocka_unit_test(missing_files_and_arguments_are_refused),
        cmocka_unit_test(each_mutated_file_is_refused_by_the_objects_name),
        cmocka_unit_test(a_description_or_record_that_is_refused_leaves_the_target_alone),
    };
    return cmocka_run_group_tests_name(__FILE__, tests, make_folder, remove_folder);
}
