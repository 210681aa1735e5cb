/* eval_windows.c - see eval_windows.h. */
#include "experiments/eval_windows.h"

#include <limits.h>
#include <stdlib.h>

#include "experiments/samples.h"
#include "runtime/error.h"

lowkey_status lowkey_choose_windows(const char *path, const lowkey_tokens *tokens,
                                    const struct lowkey_window_choice *choice, int64_t **windows, int *n,
                                    lowkey_error *err)
{
    *windows = NULL;
    const int64_t all = lowkey_samples_count(tokens, (int)choice->length, (int)choice->length),
                  end = choice->end ? choice->end : all, of = end - choice->first;
    if (end > all || of < 1)
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: has %lld windows of %lld tokens, %lld:%lld wanted", path,
                           (long long)all, (long long)choice->length, (long long)choice->first,
                           (long long)(end > choice->first ? end : choice->first + 1));
    const int64_t wanted = choice->n_spread ? choice->n_spread : choice->n_first ? choice->n_first : of;
    if (wanted > of || wanted > INT_MAX)
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: has %lld windows of %lld tokens, %lld wanted", path,
                           (long long)of, (long long)choice->length, (long long)wanted);
    *windows = malloc((size_t)wanted * sizeof **windows);
    if (!*windows) return lowkey_fail(err, LOWKEY_ENOMEM, "no memory for %lld windows", (long long)wanted);
    for (int64_t i = 0; i < wanted; i++)
        (*windows)[i] = choice->first + (choice->n_spread ? (2 * i + 1) * of / (2 * wanted) : i);
    *n = (int)wanted;
    return LOWKEY_OK;
}
