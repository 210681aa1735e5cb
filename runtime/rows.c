/* rows.c - rows of f32, f16 or bf16 with strides. */
#include "runtime/rows.h"

#include <math.h>
#include <string.h>

#include "formats/half.h"
#include "runtime/error.h"

lowkey_status lowkey_rows_check(lowkey_rows *rows, struct lowkey_rows_shape shape, const char *what,
                                lowkey_error *err)
{
    if ((unsigned)rows->dtype > LOWKEY_BF16)
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: dtype: expected f32, f16 or bf16, found number %d", what,
                           (int)rows->dtype);
    if (!rows->data && shape.n_tokens > 0)
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: data: expected %lld rows, found NULL", what,
                           (long long)shape.n_tokens);
    const size_t element = rows->dtype == LOWKEY_F32 ? sizeof(float) : sizeof(uint16_t);
    if ((uintptr_t)rows->data % element)
        return lowkey_fail(err, LOWKEY_EINVAL,
                           "%s: data: expected an address that is a multiple of %zu, found %p", what, element,
                           rows->data);
    if (rows->token_stride == 0 && rows->head_stride == 0) {
        rows->head_stride = shape.head_dim;
        rows->token_stride = (ptrdiff_t)shape.n_heads * shape.head_dim;
    }
    return LOWKEY_OK;
}

void lowkey_rows_read(const lowkey_rows *rows, int64_t token, int head, int head_dim, float *out)
{
    const ptrdiff_t at = (ptrdiff_t)token * rows->token_stride + head * rows->head_stride;
    if (rows->dtype == LOWKEY_F32) {
        memcpy(out, (const float *)rows->data + at, (size_t)head_dim * sizeof *out);
        return;
    }
    const uint16_t *from = (const uint16_t *)rows->data + at;
    if (rows->dtype == LOWKEY_F16)
        for (int c = 0; c < head_dim; c++) out[c] = lowkey_f16_to_f32(from[c]);
    else
        for (int c = 0; c < head_dim; c++) out[c] = lowkey_bf16_to_f32(from[c]);
}

int lowkey_rows_find_bad(const lowkey_rows *rows, struct lowkey_rows_shape shape,
                         struct lowkey_bad_element *bad)
{
    float row[LOWKEY_MAX_HEAD_DIM];
    bad->n_bad = 0;
    for (int64_t t = 0; t < shape.n_tokens; t++)
        for (int h = 0; h < shape.n_heads; h++) {
            lowkey_rows_read(rows, t, h, shape.head_dim, row);
            int n_bad = 0;
            for (int c = 0; c < shape.head_dim; c++) n_bad += !isfinite(row[c]);
            if (!n_bad) continue;
            for (int c = 0; c < shape.head_dim && bad->n_bad == 0; c++)
                if (!isfinite(row[c])) *bad = (struct lowkey_bad_element) { t, 1, h, c, row[c] }, n_bad--;
            bad->n_bad += n_bad;
        }
    return bad->n_bad > 0;
}
