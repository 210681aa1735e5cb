/* test_sha256.c - SHA-256 of the published examples, in one run and in parts. */
#include "formats/sha256.h"

#include <stdlib.h>

#include "tests/check.h"

static const struct {
    const char *text, *digest;
} examples[] = {
    /* FIPS 180-4 */
    { "", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855" },
    { "abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" },
    { "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
      "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1" },
};

static void published_examples_have_their_digests(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof examples / sizeof examples[0]; i++) {
        lowkey_error err;
        unsigned char digest[32];
        char text[65];
        assert_ok(lowkey_sha256_of(examples[i].text, strlen(examples[i].text), digest, &err), err);
        lowkey_sha256_print(digest, text);
        assert_string_equal(text, examples[i].digest);
    }
}

static void parts_give_the_digest_of_the_whole(void **state)
{
    (void)state;
    lowkey_error err;
    unsigned char whole[32], parts[32], bytes[1000];
    for (int i = 0; i < 1000; i++) bytes[i] = (unsigned char)(i * 7);
    assert_ok(lowkey_sha256_of(bytes, sizeof bytes, whole, &err), err);
    lowkey_sha256 *sha256 = lowkey_sha256_begin();
    for (size_t at = 0, n = 0;
         at<sizeof bytes; at += n, n = n % 97 + 1> sizeof bytes - at ? sizeof bytes - at : n % 97 + 1)
        lowkey_sha256_add(sha256, bytes + at, n);
    assert_ok(lowkey_sha256_end(sha256, parts, &err), err);
    assert_memory_equal(whole, parts, 32);
}

static void ending_needs_a_beginning_and_no_digest(void **state)
{
    (void)state;
    lowkey_error err;
    assert_refused(lowkey_sha256_end(NULL, NULL, &err), LOWKEY_ENOMEM, err, "SHA-256");
    assert_ok(lowkey_sha256_end(lowkey_sha256_begin(), NULL, &err), err);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_examples_have_their_digests),
        cmocka_unit_test(parts_give_the_digest_of_the_whole),
        cmocka_unit_test(ending_needs_a_beginning_and_no_digest),
    };
    return lowkey_run_tests(tests);
}
