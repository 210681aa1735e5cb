/* test_model.c - model.h5: a small model written through the layer over HDF5 reads back tensor by tensor,
 * with and without its options; a changed weight is seen by the hash. Files of others are in
 * test_h5py_files.py. */
#include "formats/model.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "formats/file_h5.h"
#include "formats/sha256.h"
#include "tests/check.h"

enum { HIDDEN = 24, INTERMEDIATE = 40, VOCABULARY = 11, N_LAYERS = 2 };

struct options {
    int tied, bias, qk_norm, extended; /* extended: with post_norms */
};

static char folder[64], path[96];

static int make_folder(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/lowkey_model_XXXXXX");
    if (!mkdtemp(folder)) return -1;
    snprintf(path, sizeof path, "%s/m.model.h5", folder);
    return 0;
}

static int remove_folder(void **state)
{
    (void)state;
    unlink(path);
    return rmdir(folder);
}

/* Layer 1 has other heads than layer 0. */
static lowkey_layer_desc layer_of(int l, const double *inv_freq)
{
    return (lowkey_layer_desc) { .struct_size = sizeof(lowkey_layer_desc),
                                 .index = l,
                                 .n_q_heads = l ? 2 : 6,
                                 .n_kv_heads = 2,
                                 .key_head_dim = l ? 8 : 16,
                                 .value_head_dim = 24,
                                 .rope_dims = 8,
                                 .rope_inv_freq = inv_freq };
}

static float value_at(const char *name, int64_t i)
{
    uint32_t h = (uint32_t)i * 2654435761u;
    for (const char *c = name; *c; c++) h = (h ^ (uint32_t)*c) * 16777619u;
    return (float)(h >> 9) / 4194304 - 1;
}

struct writing {
    lowkey_h5 *file;
    lowkey_sha256 *sha256;
};

static void write_tensor(const struct writing *w, const char *name, int64_t rows, int64_t columns)
{
    lowkey_error err;
    char head[96];
    const int64_t dims[2] = { rows, columns }, n = rows * (columns ? columns : 1);
    float *values = malloc((size_t)n * sizeof *values);
    for (int64_t i = 0; i < n; i++) values[i] = value_at(name, i);
    assert_ok(lowkey_h5_write_f32(w->file, name, columns ? 2 : 1, dims, values, &err), err);
    if (columns)
        snprintf(head, sizeof head, "%s\n%d,%d\n", name, (int)rows, (int)columns);
    else
        snprintf(head, sizeof head, "%s\n%d\n", name, (int)rows);
    lowkey_sha256_add(w->sha256, head, strlen(head));
    lowkey_sha256_add(w->sha256, values, (size_t)n * sizeof *values);
    free(values);
}

static void write_layer(const struct writing *w, const lowkey_layer_desc *l, struct options o)
{
    lowkey_error err;
    char group[LOWKEY_H5_MAX_PATH], name[LOWKEY_H5_MAX_PATH];
    const int q = l->n_q_heads * l->key_head_dim, k = l->n_kv_heads * l->key_head_dim,
              v = l->n_kv_heads * l->value_head_dim;
    const struct {
        const char *name;
        int rows, columns, there;
    } tensors[] = {
        { "attention_norm", HIDDEN, 0, 1 },
        { "query_proj", q, HIDDEN, 1 },
        { "key_proj", k, HIDDEN, 1 },
        { "value_proj", v, HIDDEN, 1 },
        { "query_bias", q, 0, o.bias },
        { "key_bias", k, 0, o.bias },
        { "value_bias", v, 0, o.bias },
        { "query_norm", l->key_head_dim, 0, o.qk_norm },
        { "key_norm", l->key_head_dim, 0, o.qk_norm },
        { "output_proj", HIDDEN, l->n_q_heads * l->value_head_dim, 1 },
        { "post_attention_norm", HIDDEN, 0, o.extended },
        { "ffn_norm", HIDDEN, 0, 1 },
        { "gate_proj", INTERMEDIATE, HIDDEN, 1 },
        { "up_proj", INTERMEDIATE, HIDDEN, 1 },
        { "down_proj", HIDDEN, INTERMEDIATE, 1 },
        { "post_ffn_norm", HIDDEN, 0, o.extended },
    };
    lowkey_h5_layer_path(l->index, NULL, group);
    assert_ok(lowkey_h5_put_group(w->file, group, &err), err);
    assert_ok(lowkey_h5_write_geometry(w->file, l, &err), err);
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++) {
        lowkey_h5_layer_path(l->index, tensors[i].name, name);
        if (tensors[i].there) write_tensor(w, name, tensors[i].rows, tensors[i].columns);
    }
}

static void write_extended(lowkey_h5 *file)
{
    lowkey_error err;
    const int windows[N_LAYERS] = { 0, 77 };
    assert_ok(lowkey_h5_put_string(file, "/", "activation", "gelu_tanh", &err), err);
    assert_ok(lowkey_h5_put_int(file, "/", "post_norms", 1, &err), err);
    assert_ok(lowkey_h5_put_double(file, "/", "embedding_scale", 4.5, &err), err);
    assert_ok(lowkey_h5_write_ints(file, "/window", LOWKEY_DIMS(N_LAYERS),
                                   windows, sizeof *windows, 1, &err),
              err);
}

/* stated: what the attributes say of all three sizes; 0: the truth. */
static void write_model_of(struct options o, int stated)
{
    lowkey_error err;
    struct writing w = { .sha256 = lowkey_sha256_begin() };
    const double inv_freq[4] = { 1, 0.1, 0.01, 0.001 };
    unsigned char sha256[32];
    assert_ok(lowkey_h5_create(path, "model", &w.file, &err), err);
    assert_ok(lowkey_h5_put_group(w.file, "/layers", &err), err);
    write_tensor(&w, "/token_embedding", VOCABULARY, HIDDEN);
    for (int l = 0; l < N_LAYERS; l++) {
        const lowkey_layer_desc layer = layer_of(l, inv_freq);
        write_layer(&w, &layer, o);
    }
    write_tensor(&w, "/final_norm", HIDDEN, 0);
    if (!o.tied) write_tensor(&w, "/output", VOCABULARY, HIDDEN);
    assert_ok(lowkey_sha256_end(w.sha256, sha256, &err), err);
    assert_ok(lowkey_h5_write_identity(w.file, N_LAYERS, "m", sha256, &err), err);
    const struct {
        const char *name;
        int value;
    } numbers[] = {
        { "hidden_size", stated ? stated : HIDDEN },
        { "intermediate_size", stated ? stated : INTERMEDIATE },
        { "vocab_size", stated ? stated : VOCABULARY },
        { "tied_output", o.tied },
        { "attention_bias", o.bias },
        { "qk_norm", o.qk_norm },
        { "bos_token_id", -1 },
        { "eos_token_id", 10 },
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        assert_ok(lowkey_h5_put_int(w.file, "/", numbers[i].name, numbers[i].value, &err), err);
    assert_ok(lowkey_h5_put_double(w.file, "/", "rms_norm_eps", 1e-6, &err), err);
    assert_ok(
        lowkey_h5_put_string(w.file, "/", "architecture", o.extended ? "extended" : "llama", &err), err);
    if (o.extended) write_extended(w.file);
    assert_ok(lowkey_h5_put_string(w.file, "/", "source", "s", &err), err);
    assert_ok(lowkey_h5_put_string(w.file, "/", "license", "l", &err), err);
    assert_ok(lowkey_h5_commit(w.file, NULL, NULL, &err), err);
}

static void write_model(struct options o)
{
    write_model_of(o, 0);
}

static void check_tensor(const float *values, const char *name, int64_t n)
{
    assert_non_null(values);
    for (int64_t i = 0; i < n; i++)
        if (values[i] != value_at(name, i)) fail_msg("%s[%d]: %g", name, (int)i, (double)values[i]);
}

static void a_model_reads_back_with_every_option(void **state)
{
    (void)state;
    for (int bits = 0; bits < 16; bits++) {
        lowkey_error err;
        lowkey_model *m;
        const struct options o = { bits & 1, bits >> 1 & 1, bits >> 2 & 1, bits >> 3 };
        write_model(o);
        assert_ok(lowkey_model_open(path, 1, &m, &err), err);
        assert_int_equal(m->n_layers, N_LAYERS);
        assert_int_equal(m->hidden_size, HIDDEN);
        assert_int_equal(m->intermediate_size, INTERMEDIATE);
        assert_int_equal(m->vocab_size, VOCABULARY);
        assert_int_equal(m->bos_token_id, -1);
        assert_int_equal(m->eos_token_id, 10);
        assert_true(m->rms_norm_eps == 1e-6);
        assert_string_equal(m->name, "m");
        check_tensor(m->token_embedding, "/token_embedding", VOCABULARY * HIDDEN);
        check_tensor(m->final_norm, "/final_norm", HIDDEN);
        if (o.tied)
            assert_ptr_equal(m->output, m->token_embedding);
        else
            check_tensor(m->output, "/output", VOCABULARY * HIDDEN);
        check_tensor(m->layers[0].query_proj, "/layers/000/query_proj", 6 * 16 * HIDDEN);
        check_tensor(m->layers[1].query_proj, "/layers/001/query_proj", 2 * 8 * HIDDEN);
        check_tensor(m->layers[1].value_proj, "/layers/001/value_proj", 2 * 24 * HIDDEN);
        check_tensor(m->layers[1].output_proj, "/layers/001/output_proj", HIDDEN * 2 * 24);
        check_tensor(m->layers[1].down_proj, "/layers/001/down_proj", HIDDEN * INTERMEDIATE);
        assert_int_equal(m->layers[0].key_bias != NULL, o.bias);
        assert_int_equal(m->layers[1].key_norm != NULL, o.qk_norm);
        assert_int_equal(m->post_norms, o.extended);
        assert_int_equal(m->activation, o.extended ? LOWKEY_GELU_TANH : LOWKEY_SILU);
        assert_true(m->embedding_scale == (o.extended ? 4.5 : 1));
        assert_int_equal(m->layers[0].window, 0);
        assert_int_equal(m->layers[1].window, o.extended ? 77 : 0);
        assert_int_equal(m->layers[1].post_ffn_norm != NULL, o.extended);
        if (o.extended) check_tensor(m->layers[0].post_attention_norm, "/layers/000/post_attention_norm", HIDDEN);
        if (o.extended) check_tensor(m->layers[1].post_ffn_norm, "/layers/001/post_ffn_norm", HIDDEN);
        if (o.bias) check_tensor(m->layers[0].key_bias, "/layers/000/key_bias", 2 * 16);
        if (o.qk_norm) check_tensor(m->layers[1].key_norm, "/layers/001/key_norm", 8);
        assert_int_equal(m->geometry[1].n_q_heads, 2);
        assert_true(m->geometry[0].rope_inv_freq[3] == 0.001);
        assert_int_equal((uintptr_t)m->layers[0].up_proj % 64, 0);
        lowkey_model_free(m);
    }
    lowkey_model_free(NULL);
}

static void a_description_has_all_but_the_weights(void **state)
{
    (void)state;
    lowkey_error err;
    lowkey_model *m, *whole;
    write_model((struct options) { .tied = 0, .bias = 1, .qk_norm = 1 });
    for (int verify = 0; verify < 2; verify++) {
        assert_ok(lowkey_model_describe(path, verify, &m, &err), err);
        assert_ok(lowkey_model_open(path, 0, &whole, &err), err);
        assert_null(m->token_embedding);
        assert_null(m->layers[0].query_proj);
        assert_int_equal(m->n_parameters, whole->n_parameters);
        assert_int_equal(m->n_parameters, 2 * VOCABULARY * HIDDEN + HIDDEN +
                                              2 * (2 * HIDDEN + 3 * HIDDEN * INTERMEDIATE) +
                                              (96 + 32 + 48) * (HIDDEN + 1) + 2 * 16 + HIDDEN * 6 * 24 +
                                              (16 + 16 + 48) * (HIDDEN + 1) + 2 * 8 + HIDDEN * 2 * 24);
        assert_memory_equal(m->sha256, whole->sha256, 32);
        assert_int_equal(m->geometry[0].key_head_dim, 16);
        lowkey_model_free(m);
        lowkey_model_free(whole);
    }
}

/* Weights are contiguous and without checksum: find one and flip its lowest bit. */
static void a_changed_weight_is_seen_by_the_hash_alone(void **state)
{
    (void)state;
    lowkey_error err;
    lowkey_model *m;
    write_model((struct options) { .tied = 1 });
    const float wanted = value_at("/layers/001/up_proj", 77);
    FILE *file = fopen(path, "r+b");
    assert_non_null(file);
    float found = NAN;
    long at = 0;
    for (; fseek(file, at, SEEK_SET) == 0 && fread(&found, sizeof found, 1, file) == 1 && found != wanted;
         at++) {
    }
    assert_true(found == wanted);
    fseek(file, at, SEEK_SET);
    fputc(((unsigned char *)&found)[0] ^ 1, file);
    fclose(file);
    assert_ok(lowkey_model_open(path, 0, &m, &err), err);
    lowkey_model_free(m);
    assert_refused(lowkey_model_open(path, 1, &m, &err), LOWKEY_EFORMAT, err,
                   "attribute model_sha256: expected");
    assert_null(m);
    assert_refused(lowkey_model_describe(path, 1, &m, &err), LOWKEY_EFORMAT, err,
                   "attribute model_sha256: expected");
    assert_null(m);
}

/* 2^62 elements a matrix: their sum is more than 63 bits count. */
static void sizes_that_no_machine_holds_are_refused_before_they_are_added_up(void **state)
{
    (void)state;
    lowkey_error err;
    lowkey_model *m;
    write_model_of((struct options) { .tied = 1 }, 2147483647);
    assert_refused(lowkey_model_open(path, 0, &m, &err), LOWKEY_EFORMAT, err,
                   "/token_embedding: expected float [2147483647, 2147483647]");
    assert_null(m);
    assert_refused(lowkey_model_describe(path, 0, &m, &err), LOWKEY_EFORMAT, err,
                   "/token_embedding: expected float");
    assert_null(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_model_reads_back_with_every_option, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(a_description_has_all_but_the_weights, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(a_changed_weight_is_seen_by_the_hash_alone, make_folder,
                                        remove_folder),
        cmocka_unit_test_setup_teardown(sizes_that_no_machine_holds_are_refused_before_they_are_added_up,
                                        make_folder, remove_folder),
    };
    return lowkey_run_tests(tests);
}
