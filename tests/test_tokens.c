/* test_tokens.c - tokens.h5: what is written is read, the same bytes each time; bad tokens and offsets are
 * refused on both sides. */
#include "formats/tokens.h"

#include <stdlib.h>
#include <unistd.h>

#include "formats/file_h5.h"
#include "tests/check.h"

static char folder[64], path[96];
static int32_t ids[7] = { 0, 5, 99, 1, 2, 3, 4 };
static int64_t offsets[3] = { 0, 3, 7 };

static lowkey_tokens example(void)
{
    return (lowkey_tokens) { .n_tokens = 7,
                             .tokens = ids,
                             .n_sequences = 2,
                             .sequence_offsets = offsets,
                             .vocab_size = 100,
                             .add_bos = 1,
                             .tokenizer = (char *)"bpe",
                             .text_name = (char *)"text",
                             .tokenizer_sha256 = { 1 },
                             .text_sha256 = { 2, 3 } };
}

static int make_folder(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/lowkey_tokens_XXXXXX");
    if (!mkdtemp(folder)) return -1;
    snprintf(path, sizeof path, "%s/a.tokens.h5", folder);
    return 0;
}

static int remove_folder(void **state)
{
    (void)state;
    unlink(path);
    return rmdir(folder); /* fails where a temporary file was left */
}

static void tokens_written_are_read(void **state)
{
    (void)state;
    lowkey_error err;
    lowkey_tokens tokens = example(), *found;
    assert_ok(lowkey_tokens_write(path, &tokens, &err), err);
    assert_ok(lowkey_tokens_open(path, &found, &err), err);
    assert_int_equal(found->n_tokens, 7);
    assert_int_equal(found->n_sequences, 2);
    assert_memory_equal(found->tokens, ids, sizeof ids);
    assert_memory_equal(found->sequence_offsets, offsets, sizeof offsets);
    assert_int_equal(found->vocab_size, 100);
    assert_int_equal(found->add_bos, 1);
    assert_string_equal(found->tokenizer, "bpe");
    assert_string_equal(found->text_name, "text");
    assert_memory_equal(found->tokenizer_sha256, tokens.tokenizer_sha256, 32);
    assert_memory_equal(found->text_sha256, tokens.text_sha256, 32);
    lowkey_tokens_free(found);
}

static void bad_tokens_are_not_written(void **state)
{
    (void)state;
    lowkey_error err;
    lowkey_tokens tokens = example();
    tokens.vocab_size = 99;
    assert_refused(lowkey_tokens_write(path, &tokens, &err), LOWKEY_EINVAL, err,
                   "tokens[2]: expected 0..98, found 99");
    tokens = example();
    int64_t late[3] = { 1, 3, 7 }, flat[3] = { 0, 0, 7 }, over[3] = { 0, 3, 8 };
    tokens.sequence_offsets = late;
    assert_refused(lowkey_tokens_write(path, &tokens, &err), LOWKEY_EFORMAT, err,
                   "expected from 0 to 7, found from 1 to 7");
    tokens.sequence_offsets = flat;
    assert_refused(lowkey_tokens_write(path, &tokens, &err), LOWKEY_EFORMAT, err,
                   "[1]: expected more than 0");
    tokens.sequence_offsets = over;
    assert_refused(lowkey_tokens_write(path, &tokens, &err), LOWKEY_EFORMAT, err, "from 0 to 8");
    tokens = example();
    tokens.n_tokens = 0;
    assert_refused(lowkey_tokens_write(path, &tokens, &err), LOWKEY_EINVAL, err, "at least 1 token");
    assert_int_equal(access(path, F_OK), -1);
}

/* Files that the writer would not write, through the layer below. */
static void bad_files_are_refused_in_words(void **state)
{
    (void)state;
    static const struct {
        int32_t last;
        int64_t middle, end, add_bos;
        const char *extra, *words;
    } cases[] = {
        { 100, 3, 7, 0, NULL, "/tokens[6]: expected 0..99, found 100" },
        { -1, 3, 7, 0, NULL, "/tokens[6]: expected 0..99, found -1" },
        { 4, 0, 7, 0, NULL, "/sequence_offsets[1]: expected more than 0" },
        { 4, 7, 7, 0, NULL, "/sequence_offsets[2]: expected more than 7" },
        { 4, 3, 6, 0, NULL, "/sequence_offsets: expected from 0 to 7, found from 0 to 6" },
        { 4, 3, 7, 2, NULL, "/: attribute add_bos: expected 0..1, found 2" },
        { 4, 3, 7, 0, "/more", "/: unknown object more; expected tokens, sequence_offsets" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        lowkey_error err;
        lowkey_h5 *file;
        lowkey_tokens *tokens;
        const int32_t bad_ids[7] = { 0, 5, 99, 1, 2, 3, cases[i].last };
        const int64_t bad_offsets[3] = { 0, cases[i].middle, cases[i].end };
        assert_ok(lowkey_h5_create(path, "tokens", &file, &err), err);
        assert_ok(lowkey_h5_put_string(file, "/", "tokenizer", "bpe", &err), err);
        assert_ok(lowkey_h5_put_sha256(file, "/", "tokenizer_sha256", (const unsigned char[32]) { 1 }, &err),
                  err);
        assert_ok(lowkey_h5_put_int(file, "/", "vocab_size", 100, &err), err);
        assert_ok(lowkey_h5_put_string(file, "/", "text_name", "", &err), err);
        assert_ok(lowkey_h5_put_sha256(file, "/", "text_sha256", (const unsigned char[32]) { 1 }, &err), err);
        assert_ok(lowkey_h5_put_int(file, "/", "add_bos", cases[i].add_bos, &err), err);
        assert_ok(lowkey_h5_write_ints(file, "/tokens", LOWKEY_DIMS(7), bad_ids, 4, 1, &err), err);
        assert_ok(lowkey_h5_write_ints(file, "/sequence_offsets", LOWKEY_DIMS(3), bad_offsets, 8, 1, &err),
                  err);
        if (cases[i].extra) assert_ok(lowkey_h5_put_group(file, cases[i].extra, &err), err);
        assert_ok(lowkey_h5_commit(file, NULL, NULL, &err), err);
        assert_refused(lowkey_tokens_open(path, &tokens, &err), LOWKEY_EFORMAT, err, cases[i].words);
        assert_null(tokens);
    }
}

static void the_text_in_a_models_tokens_is_read(void **state)
{
    (void)state;
    lowkey_error err;
    lowkey_tokens *tokens;
    static const int32_t first[10] = { 3717, 446, 6356, 389, 9226, 352, 446, 3717, 3717, 6356 };
    assert_ok(lowkey_tokens_open("build/model/wiki.test.tokens.h5", &tokens, &err), err);
    assert_int_equal(tokens->n_tokens, 303415);
    assert_memory_equal(tokens->tokens, first, sizeof first);
    lowkey_tokens_free(tokens);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(tokens_written_are_read, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(bad_tokens_are_not_written, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(bad_files_are_refused_in_words, make_folder, remove_folder),
        cmocka_unit_test(the_text_in_a_models_tokens_is_read),
    };
    return lowkey_run_tests(tests);
}
