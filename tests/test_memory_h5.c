/* test_memory_h5.c - files and an allocator that fails: for every n, the nth request of ours and all later
 * ones are refused; each call then answers LOWKEY_ENOMEM, gives back all it took, leaves no file, and works
 * again afterwards. The linker puts the functions below in place of malloc and its kin in our code
 * (Makefile); HDF5 has its own. */
#include <stdlib.h>
#include <unistd.h>

#include "formats/activations.h"
#include "formats/file_h5.h"
#include "formats/model.h"
#include "formats/quantizer_file.h"
#include "formats/tokens.h"
#include "tests/check.h"

static long left = -1; /* requests that are still granted; -1: all */
static long live; /* blocks taken and not given back */

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *block, size_t n);
void *__real_aligned_alloc(size_t alignment, size_t n);
char *__real_strdup(const char *text);
char *__real_strndup(const char *text, size_t n);
void __real_free(void *block);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *block, size_t n);
void *__wrap_aligned_alloc(size_t alignment, size_t n);
char *__wrap_strdup(const char *text);
char *__wrap_strndup(const char *text, size_t n);
void __wrap_free(void *block);

static int granted(void)
{
    if (left > 0)
        left--;
    else if (left == 0)
        return 0;
    live++;
    return 1;
}

void *__wrap_malloc(size_t n)
{
    return granted() ? __real_malloc(n) : NULL;
}
void *__wrap_calloc(size_t n, size_t size)
{
    return granted() ? __real_calloc(n, size) : NULL;
}
void *__wrap_aligned_alloc(size_t alignment, size_t n)
{
    return granted() ? __real_aligned_alloc(alignment, n) : NULL;
}
char *__wrap_strdup(const char *text)
{
    return granted() ? __real_strdup(text) : NULL;
}
char *__wrap_strndup(const char *text, size_t n)
{
    return granted() ? __real_strndup(text, n) : NULL;
}

void *__wrap_realloc(void *block, size_t n)
{
    if (!granted()) return NULL;
    if (block) live--;
    return __real_realloc(block, n);
}

void __wrap_free(void *block)
{
    if (block) live--;
    __real_free(block);
}

static char folder[64], path[96];

static int make_folder(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/lowkey_memory_XXXXXX");
    if (!mkdtemp(folder)) return -1;
    snprintf(path, sizeof path, "%s/file.h5", folder);
    return 0;
}

static int remove_folder(void **state)
{
    (void)state;
    left = -1;
    unlink(path);
    return rmdir(folder); /* fails where a temporary file was left */
}

/* Runs a call, which frees what it made, with 0, 1, 2 .. requests granted, until it succeeds. Long calls go
 * by steps, each number in FULL=1. */
static void fail_at_every_request(lowkey_status (*call)(lowkey_error *err), int at_least, int step)
{
    lowkey_error err;
    const char *full = getenv("FULL");
    int n = 0;
    for (;; n += full && strcmp(full, "1") == 0 ? 1 : step) {
        const long before = live;
        err.message[0] = 0;
        left = n;
        const lowkey_status status = call(&err);
        const int ran_out = left == 0;
        left = -1;
        if (live != before) fail_msg("request %d: %ld blocks not given back", n, live - before);
        if (!status) break;
        if (status != LOWKEY_ENOMEM) fail_msg("request %d: status %d: %s", n, status, err.message);
        if (!ran_out || !err.message[0]) fail_msg("request %d: failed with memory left, or without words", n);
        if (n > 5000) fail_msg("no end");
    }
    if (n < at_least) fail_msg("only %d requests: does the linker wrap them?", n);
}

static int32_t ids[3] = { 0, 1, 2 };
static int64_t offsets[3] = { 0, 1, 3 };

static lowkey_status write_tokens(lowkey_error *err)
{
    const lowkey_tokens tokens = { .n_tokens = 3,
                                   .tokens = ids,
                                   .n_sequences = 2,
                                   .sequence_offsets = offsets,
                                   .vocab_size = 9,
                                   .tokenizer = (char *)"t",
                                   .text_name = (char *)"x" };
    return lowkey_tokens_write(path, &tokens, err);
}

static lowkey_status open_tokens(lowkey_error *err)
{
    lowkey_tokens *tokens;
    const lowkey_status status = lowkey_tokens_open(path, &tokens, err);
    lowkey_tokens_free(tokens);
    return status;
}

static void tokens_survive_every_failed_request(void **state)
{
    (void)state;
    fail_at_every_request(write_tokens, 8, 1);
    fail_at_every_request(open_tokens, 5, 1);
}

static const double inv_freq[4] = { 1, 0.1, 0.01, 0.001 };
static const unsigned char hashes[2][32] = { { 1 }, { 2 } };

static lowkey_status write_activations(lowkey_error *err)
{
    static const float rows[3 * 4 * 8];
    lowkey_layer_desc layers[2];
    for (int i = 0; i < 2; i++)
        layers[i] = (lowkey_layer_desc) { .struct_size = sizeof layers[i],
                                          .index = i,
                                          .n_q_heads = 4,
                                          .n_kv_heads = 2,
                                          .key_head_dim = 8,
                                          .value_head_dim = 8,
                                          .rope_dims = 8,
                                          .rope_inv_freq = inv_freq };
    const struct lowkey_activations_info info = {
        .n_model_layers = 2,
        .model_name = "m",
        .n_layers = 2,
        .layers = layers,
        .contents = 3u | 1u << LOWKEY_KEY_GRAD,
        .n_samples = 2,
        .sample_offsets = offsets,
        .sample_sha256 = hashes,
        .text_name = "x",
    };
    lowkey_activations_writer *writer;
    lowkey_status status = lowkey_activations_create(path, &info, LOWKEY_F16, &writer, err);
    if (status) return status;
    for (int i = 0; i < 2 && !status; i++)
        for (int s = 0; s < LOWKEY_N_STREAMS && !status; s++)
            if (info.contents >> s & 1)
                status = lowkey_activations_write(writer, i, (enum lowkey_stream)s, 0, 3, rows, err);
    if (!status) return lowkey_activations_commit(writer, err);
    lowkey_activations_abandon(writer);
    return status;
}

static lowkey_status read_activations(lowkey_error *err)
{
    float rows[3 * 2 * 8];
    lowkey_activations *a;
    lowkey_status status = lowkey_activations_open(path, &a, err);
    if (status) return status;
    for (int i = 0; i < 2 && !status; i++)
        status = lowkey_activations_read(a, i, LOWKEY_VALUE, 0, 3, 0, 2, rows, err);
    lowkey_activations_close(a);
    return status;
}

static void activations_survive_every_failed_request(void **state)
{
    (void)state;
    fail_at_every_request(write_activations, 30, 1);
    fail_at_every_request(read_activations, 20, 1);
}

static lowkey_status open_model(lowkey_error *err)
{
    lowkey_model *model;
    const lowkey_status status = lowkey_model_open("build/model/smollm2-135m.model.h5", 0, &model, err);
    lowkey_model_free(model);
    return status;
}

static lowkey_status describe_model(lowkey_error *err)
{
    lowkey_model *model;
    const lowkey_status status = lowkey_model_describe("build/model/smollm2-135m.model.h5", 0, &model, err);
    lowkey_model_free(model);
    return status;
}

static void models_survive_failed_requests(void **state)
{
    (void)state;
    fail_at_every_request(describe_model, 100, 3);
    lowkey_error err;
    for (int n = 0; n < 600;
         n = 2 * n + 1) { /* some of them: reading the weights to every n would take long */
        const long before = live;
        left = n;
        const lowkey_status status = open_model(&err);
        left = -1;
        assert_int_equal(status, LOWKEY_ENOMEM);
        assert_int_equal(live, before);
    }
}

static lowkey_status read_quantizer(lowkey_error *err)
{
    lowkey_quantizer *quantizer;
    struct lowkey_fit_record *record;
    const lowkey_status status = lowkey_quantizer_read(path, &quantizer, &record, err);
    lowkey_fit_record_free(record);
    lowkey_quantizer_free(quantizer);
    return status;
}

static const lowkey_quantizer_desc *fitted;
static struct lowkey_fit_record *fit_record;

static lowkey_status write_quantizer(lowkey_error *err)
{
    return lowkey_quantizer_write(path, fitted, fit_record, err);
}

static void quantizers_survive_every_failed_request(void **state)
{
    (void)state;
    lowkey_error err;
    char command[400];
    const char *build = getenv("B");
    snprintf(command, sizeof command,
             "%s/lowkey fit --bits 2 --outliers 0.01 --feedback --samples 0:1 --sensitivity none --out %s "
             "experiments/data/demo/smollm2-135m.activations.h5 >/dev/null",
             build ? build : "build/opt", path);
    assert_int_equal(system(command), 0);
    lowkey_quantizer *quantizer;
    fail_at_every_request(read_quantizer, 50, 11);
    assert_ok(lowkey_quantizer_read(path, &quantizer, &fit_record, &err), err);
    fitted = lowkey_quantizer_describe(quantizer);
    fail_at_every_request(write_quantizer, 50, 17);
    lowkey_fit_record_free(fit_record);
    lowkey_quantizer_free(quantizer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(tokens_survive_every_failed_request, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(activations_survive_every_failed_request, make_folder, remove_folder),
        cmocka_unit_test(models_survive_failed_requests),
        cmocka_unit_test_setup_teardown(quantizers_survive_every_failed_request, make_folder, remove_folder),
    };
    return lowkey_run_tests(tests);
}
