/* nearest_body.h - lowkey_nearest_points in vectors that compilers make of what registers there are; dim is a
 * constant. */
#ifndef LOWKEY_NEAREST_BODY_H
#define LOWKEY_NEAREST_BODY_H

#include <string.h>

#include "experiments/peers/nearest.h"

typedef float lowkey_lanes __attribute__((vector_size(32)));
typedef int lowkey_lane_masks __attribute__((vector_size(32)));

static inline __attribute__((always_inline)) void lowkey_nearest_body(const struct lowkey_points *points,
                                                                      const float *x, int *index, int dim)
{
    enum { WIDTH = 8, SIDE = 2, RUN = LOWKEY_NEAREST_RUN }; /* SIDE registers of WIDTH vectors side by side */
    for (int first = 0; first < RUN; first += WIDTH * SIDE) {
        lowkey_lanes lanes[LOWKEY_NEAREST_MAX_DIM][SIDE], best[SIDE];
        lowkey_lane_masks best_index[SIDE];
        for (int c = 0; c < dim; c++) memcpy(lanes[c], x + c * RUN + first, sizeof lanes[c]);
        for (int s = 0; s < SIDE; s++) {
            best[s] = (lowkey_lanes) { 0 } + 3.402823466e38f;
            best_index[s] = (lowkey_lane_masks) { 0 };
        }
        for (int k = 0; k < points->n_points; k++)
            for (int s = 0; s < SIDE; s++) {
                lowkey_lanes distance = (lowkey_lanes) { 0 } + points->half[k];
                for (int c = 0; c < dim; c++) distance -= points->point[k * dim + c] * lanes[c][s];
                const lowkey_lane_masks nearer = distance < best[s];
                best_index[s] = (nearer & k) | (~nearer & best_index[s]);
                best[s] = (lowkey_lanes)((nearer & (lowkey_lane_masks)distance) |
                                         (~nearer & (lowkey_lane_masks)best[s]));
            }
        memcpy(index + first, best_index, sizeof best_index);
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
