/* nearest_body.h - lowkey_nearest_points for compilers to make vectors of: lanes are vectors, dim is a constant. */
#ifndef LOWKEY_NEAREST_BODY_H
#define LOWKEY_NEAREST_BODY_H

#include "experiments/peers/nearest.h"

static inline __attribute__((always_inline)) void lowkey_nearest_body(const struct lowkey_points *points,
                                                                      const float *x, int *index, int dim)
{
    enum { LANES = 16, RUN = LOWKEY_NEAREST_RUN };
    for (int first = 0; first < RUN; first += LANES) {
        float best[LANES], best_index[LANES];
        for (int i = 0; i < LANES; i++) {
            best[i] = 3.402823466e38f;
            best_index[i] = 0;
        }
        for (int k = 0; k < points->n_points; k++) {
            const float half = points->half[k], number = (float)k;
            float distance[LANES];
            for (int i = 0; i < LANES; i++) distance[i] = half;
            for (int c = 0; c < dim; c++) {
                const float p = points->point[k * dim + c];
                for (int i = 0; i < LANES; i++) distance[i] -= p * x[c * RUN + first + i];
            }
            for (int i = 0; i < LANES; i++) {
                best_index[i] = distance[i] < best[i] ? number : best_index[i];
                best[i] = distance[i] < best[i] ? distance[i] : best[i];
            }
        }
        for (int i = 0; i < LANES; i++) index[first + i] = (int)best_index[i];
    }
}

static inline __attribute__((always_inline)) void lowkey_nearest_dims(const struct lowkey_points *points,
                                                                      const float *x, int *index)
{
    switch (points->dim) {
    case 2: lowkey_nearest_body(points, x, index, 2); break;
    case 4: lowkey_nearest_body(points, x, index, 4); break;
    case 8: lowkey_nearest_body(points, x, index, 8); break;
    default: lowkey_nearest_body(points, x, index, points->dim);
    }
}

#endif
