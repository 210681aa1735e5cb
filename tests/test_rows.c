/* test_rows.c - the caller's rows: number types, strides, and what is not finite found wherever it is. */
#include "runtime/rows.h"

#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "formats/half.h"
#include "tests/check.h"

enum { TOKENS = 5, HEADS = 3, DIM = 8 };
static const struct lowkey_rows_shape shape = { TOKENS, HEADS, DIM };

static float value_at(int t, int h, int c)
{
    return (float)(t * 100 + h * 10 + c) * 0.25f;
}

/* Elements at token * token_stride + head * head_stride + c, in the type; NaN between them. */
static void *make_rows(lowkey_dtype dtype, int token_stride, int head_stride)
{
    const size_t n = (size_t)((TOKENS - 1) * token_stride + (HEADS - 1) * head_stride + DIM);
    void *data = malloc(n * (dtype == LOWKEY_F32 ? 4 : 2));
    for (size_t i = 0; i < n; i++)
        if (dtype == LOWKEY_F32)
            ((float *)data)[i] = NAN;
        else
            ((uint16_t *)data)[i] = 0x7fff;
    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < HEADS; h++)
            for (int c = 0; c < DIM; c++) {
                const int at = t * token_stride + h * head_stride + c;
                if (dtype == LOWKEY_F32)
                    ((float *)data)[at] = value_at(t, h, c);
                else if (dtype == LOWKEY_F16)
                    ((uint16_t *)data)[at] = lowkey_f32_to_f16(value_at(t, h, c));
                else
                    ((uint16_t *)data)[at] = lowkey_f32_to_bf16(value_at(t, h, c));
            }
    return data;
}

static void test_types_and_strides(void **state)
{
    (void)state;
    static const int strides[][2] = { { 0, 0 }, { HEADS * DIM, DIM }, { 40, 12 }, { DIM, TOKENS * DIM } };
    for (int dtype = LOWKEY_F32; dtype <= LOWKEY_BF16; dtype++)
        for (int i = 0; i < 4; i++) {
            const int token_stride = i ? strides[i][0] : HEADS * DIM, head_stride = i ? strides[i][1] : DIM;
            void *data = make_rows((lowkey_dtype)dtype, token_stride, head_stride);
            lowkey_rows rows = { data, (lowkey_dtype)dtype, strides[i][0], strides[i][1] };
            struct lowkey_bad_element bad;
            lowkey_error err;
            assert_ok(lowkey_rows_check(&rows, shape, "rows", &err), err);
            assert_false(lowkey_rows_find_bad(&rows, shape, &bad));
            for (int t = 0; t < TOKENS; t++)
                for (int h = 0; h < HEADS; h++) {
                    float row[DIM];
                    lowkey_rows_read(&rows, t, h, DIM, row);
                    for (int c = 0; c < DIM; c++) {
                        const float want = value_at(t, h, c);
                        assert_true(dtype == LOWKEY_BF16 ? fabsf(row[c] - want) <= want / 256
                                                         : row[c] == want);
                    }
                }
            free(data);
        }
}

static void test_bad_elements(void **state)
{
    (void)state;
    static const float bads[] = { NAN, INFINITY, -INFINITY };
    static const uint16_t bad_f16[] = { 0x7e00, 0x7c00, 0xfc00 }, bad_bf16[] = { 0x7fc0, 0x7f80, 0xff80 };
    for (int dtype = LOWKEY_F32; dtype <= LOWKEY_BF16; dtype++)
        for (int i = 0; i < 3; i++) {
            void *data = make_rows((lowkey_dtype)dtype, 40, 12);
            const int places[] = { 3 * 40 + 12 + 7, 3 * 40 + 2 * 12, 4 * 40 + 2 * 12 + 7 };
            for (int k = 0; k < 3; k++)
                if (dtype == LOWKEY_F32)
                    ((float *)data)[places[k]] = bads[i];
                else
                    ((uint16_t *)data)[places[k]] = dtype == LOWKEY_F16 ? bad_f16[i] : bad_bf16[i];
            const lowkey_rows rows = { data, (lowkey_dtype)dtype, 40, 12 };
            struct lowkey_bad_element bad;
            assert_true(lowkey_rows_find_bad(&rows, shape, &bad));
            assert_int_equal(bad.token, 3);
            assert_int_equal(bad.head, 1);
            assert_int_equal(bad.channel, 7);
            assert_int_equal(bad.n_bad, 3);
            assert_true(i == 0 ? isnan(bad.value) : bad.value == bads[i]);
            free(data);
        }
}

/* Two tokens more than 2^31 elements apart, and two heads the other way. */
static void test_far_apart(void **state)
{
    (void)state;
    const size_t bytes = (size_t)9 << 30;
    char *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                      0);
    if (base == MAP_FAILED) lowkey_skip("no 9 GiB of addresses");
    const ptrdiff_t token_stride = ((ptrdiff_t)1 << 31) + 8;
    float *middle = (float *)base + 64;
    middle[token_stride - 16] = 1.5f;
    const lowkey_rows rows = { middle, LOWKEY_F32, token_stride, -16 };
    float row[DIM];
    lowkey_rows_read(&rows, 1, 1, DIM, row);
    assert_true(row[0] == 1.5f);
    middle[token_stride - 16 + 3] = NAN;
    struct lowkey_bad_element bad;
    assert_true(lowkey_rows_find_bad(&rows, (struct lowkey_rows_shape) { 2, 2, DIM }, &bad));
    assert_true(bad.token == 1 && bad.head == 1 && bad.channel == 3 && bad.n_bad == 1);
    munmap(base, bytes);
}

static void test_refused(void **state)
{
    (void)state;
    lowkey_rows rows = { NULL, LOWKEY_F32, 0, 0 };
    lowkey_error err;
    assert_refused(lowkey_rows_check(&rows, shape, "keys", &err), LOWKEY_EINVAL, err, "keys: data");
    assert_ok(lowkey_rows_check(&rows, (struct lowkey_rows_shape) { 0, HEADS, DIM }, "keys", &err), err);
    for (int dtype = LOWKEY_F32; dtype <= LOWKEY_BF16; dtype++)
        for (int shift = 0; shift <= 4; shift++) {
            rows.data = (char *)&err + shift, rows.dtype = (lowkey_dtype)dtype; /* err begins with an int */
            if (shift % (dtype == LOWKEY_F32 ? 4 : 2))
                assert_refused(lowkey_rows_check(&rows, shape, "keys", &err), LOWKEY_EINVAL, err,
                               "keys: data: expected an address");
            else
                assert_ok(lowkey_rows_check(&rows, shape, "keys", &err), err);
        }
    rows.data = &err, rows.dtype = (lowkey_dtype)3;
    assert_refused(lowkey_rows_check(&rows, shape, "keys", &err), LOWKEY_EINVAL, err, "dtype");
    rows.dtype = (lowkey_dtype)-1;
    assert_refused(lowkey_rows_check(&rows, shape, "keys", &err), LOWKEY_EINVAL, err, "dtype");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        { "rows: f32, f16, bf16 with any strides are read as they are", test_types_and_strides, NULL, NULL,
          NULL },
        { "rows: the first NaN or infinity is found, and how many there are", test_bad_elements, NULL, NULL,
          NULL },
        { "rows: strides beyond 2^31 elements, and negative ones", test_far_apart, NULL, NULL, NULL },
        { "rows: no data, data between elements, no such type", test_refused, NULL, NULL, NULL },
    };
    return lowkey_run_tests(tests);
}
