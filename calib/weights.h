/* weights.h - how much an element's error counts in a codebook: where weights come from, and how they are
 * tamed. */
#ifndef LOWKEY_WEIGHTS_H
#define LOWKEY_WEIGHTS_H

#include "calib/captures.h"

/* What is made of a channel's raw weights (of gradients: their squares). Relative to the largest: those
 * below 2^-40 are 0; then those above clip times the mean, and below floor times the mean, are moved
 * there; all zero: all 1. */
struct lowkey_weight_shape {
    double largest; /* of |raw|; 0: all are zero */
    int square; /* raw ones are gradients */
    double clip, floor; /* relative to the largest weight; HUGE_VAL and 0 where there is none */
    double mean; /* of what is made, relative to the largest weight */
    int any_tiny; /* some were taken as 0 that were not */
};

/* clip and floor in multiples of the channel's mean; 0: none. raw NULL: all 1. */
void lowkey_weight_learn(int64_t n, const float *raw, int square, double clip, double floor,
                         struct lowkey_weight_shape *shape);
/* The weight made of a raw one, relative to the largest of its channel: 0 to 1. In the header, as it is
 * asked for several times an element. */
static inline float lowkey_weight_made(const struct lowkey_weight_shape *shape, float raw)
{
    if (!(shape->largest > 0)) return 1;
    const double share = (raw < 0 ? -(double)raw : (double)raw) / shape->largest;
    double weight = shape->square ? share * share : share;
    if (weight < 0x1p-40) weight = 0;
    if (weight < shape->floor) weight = shape->floor;
    return (float)(weight > shape->clip ? shape->clip : weight);
}
/* The largest weight of the channel: what makes weights of different channels comparable; 0 where all are
 * zero. */
double lowkey_weight_unit(const struct lowkey_weight_shape *shape);

/* Rows of numbers for every token that is kept, in a file without a name: it is gone when the program is. */
struct lowkey_store {
    int fd;
    int n_heads, width; /* numbers a token and head */
    int64_t n_tokens;
};

/* beside: a path in whose folder the file is made. */
lowkey_status lowkey_store_open(const char *beside, int64_t n_tokens, int n_heads, int width,
                                struct lowkey_store *store, lowkey_error *err);
void lowkey_store_close(struct lowkey_store *store);
/* Tokens first.. of one head: rows [n_tokens][width]. Any thread. */
lowkey_status lowkey_store_write(const struct lowkey_store *store, int head, int64_t first, int64_t n_tokens,
                                 const float *rows, lowkey_error *err);
lowkey_status lowkey_store_read(const struct lowkey_store *store, int head, int64_t first, int64_t n_tokens,
                                float *rows, lowkey_error *err);

enum lowkey_weight_source {
    LOWKEY_WEIGHTS_NONE,
    LOWKEY_WEIGHTS_FILE,
    LOWKEY_WEIGHTS_GRADIENT,
    LOWKEY_WEIGHTS_STORE
};

struct lowkey_weights {
    enum lowkey_weight_source source;
    const lowkey_captures *captures;
    int layer, head_dim;
    enum lowkey_stream stream; /* of FILE and GRADIENT */
    const struct lowkey_store *store; /* of STORE: width head_dim, or 1 for all channels of a head alike */
};

/* Raw weights, as lowkey_captures_read reads rows; tokens from the sample's sinks on. Not for NONE. */
lowkey_status lowkey_weights_read(const struct lowkey_weights *weights, int sample, int64_t first,
                                  int64_t n_tokens, int first_head, int n_heads, float *out,
                                  lowkey_error *err);

#endif
