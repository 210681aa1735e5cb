/* merge_scalar.c - two partial results of attention over different tokens become one. The outputs are weighted by
 * their share of the sum of exponentials, so nothing grows beyond the larger of them. */
#include <math.h>

#include "kernels/element.h"
#include "kernels/kernels.h"

void lowkey_merge_scalar(int n_rows, int value_head_dim, struct lowkey_state into, struct lowkey_state from)
{
    for (int j = 0; j < n_rows; j++) {
        float *out = into.out + (size_t)j * (size_t)value_head_dim;
        const float *other = from.out + (size_t)j * (size_t)value_head_dim;
        if (from.sum[j] == 0) continue; /* empty, and -inf minus -inf is no number */
        if (into.sum[j] == 0) {
            for (int c = 0; c < value_head_dim; c++) out[c] = other[c];
            into.max[j] = from.max[j];
            into.sum[j] = from.sum[j];
            continue;
        }
        const float max = fmaxf(into.max[j], from.max[j]);
        const float part = into.sum[j] * expf(into.max[j] - max),
                    other_part = from.sum[j] * expf(from.max[j] - max);
        const float sum = part + other_part, share = part / sum, other_share = other_part / sum;
        for (int c = 0; c < value_head_dim; c++)
            out[c] = lowkey_within_f32(share * out[c] + other_share * other[c]);
        into.max[j] = max;
        into.sum[j] = sum;
    }
}
