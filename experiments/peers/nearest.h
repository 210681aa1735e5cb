/* nearest.h - the nearest of many points: the search of coupled quantization. */
#ifndef LOWKEY_NEAREST_H
#define LOWKEY_NEAREST_H

#include <stddef.h>

enum { LOWKEY_NEAREST_RUN = 64, LOWKEY_NEAREST_MAX_DIM = 8, LOWKEY_NEAREST_MAX_POINTS = 256 };

/* point[n_points][dim], points rise by no order; half[n_points]: half of each one's square. */
struct lowkey_points {
    int n_points, dim;
    float point[LOWKEY_NEAREST_MAX_POINTS * LOWKEY_NEAREST_MAX_DIM];
    float half[LOWKEY_NEAREST_MAX_POINTS];
};

/* x[dim][LOWKEY_NEAREST_RUN]: vectors side by side. index[LOWKEY_NEAREST_RUN]: the point nearest to each, the
 * first of equals. Distances are taken as |p|^2 / 2 - p x, in f32. The same numbers at every level of SIMD.
 */
void lowkey_nearest_points(const struct lowkey_points *points, const float *x, int *index);

/* With AVX2; calls nothing else. */
void lowkey_nearest_points_avx2(const struct lowkey_points *points, const float *x, int *index);

#endif
