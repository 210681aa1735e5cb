/* nearest_points_avx2.c - the same search, compiled for AVX2. */
#include "experiments/peers/nearest_body.h"

#if defined(__AVX2__)
void lowkey_nearest_points_avx2(const struct lowkey_points *points, const float *x, int *index)
{
    lowkey_nearest_dims(points, x, index);
}
#else
void lowkey_nearest_points_avx2(const struct lowkey_points *points, const float *x, int *index)
{
    (void)points, (void)x, (void)index;
}
#endif
