/* nearest.c - the search at the level that this CPU has. */
#include "experiments/peers/nearest_body.h"

void lowkey_nearest_points(const struct lowkey_points *points, const float *x, int *index)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        lowkey_nearest_points_avx2(points, x, index);
        return;
    }
#endif
    lowkey_nearest_dims(points, x, index);
}
