/* block_gtq.c - Block-GTQ (arXiv 2606.24033). Keys (before RoPE): each RoPE pair of a head gets bits by its
 * energy s = (E|q|^2 + E|k|^2) / 2, q over the head's query heads: from one bit each, the next goes where s
 * 4^-b is largest, up to 8, until the mean is reached. Pairs of equal width are one vector for TurboQuant: a
 * norm in f16, a random rotation, Lloyd-Max for a normal distribution, and what was found scaled to the norm.
 * Values: TurboQuant so, all channels one vector. */
#include <math.h>
#include <stdlib.h>

#include "experiments/peers/minmax.h"
#include "experiments/peers/peer_parts.h"
#include "experiments/peers/rotation.h"
#include "formats/codes.h"
#include "formats/geometry.h"
#include "formats/half.h"
#include "runtime/error.h"

enum { MAX_BITS = 8, MAX_PAIRS = LOWKEY_MAX_HEAD_DIM / 2 };

struct width { /* table of unit normal numbers */
    float value[1 << MAX_BITS], boundary[1 << MAX_BITS];
    int is_made;
};

struct gtq_head {
    int n_groups;
    struct group {
        int first, n, bits; /* of the turned vector's coordinates */
    } group[MAX_BITS];
};

struct gtq {
    struct width width[MAX_BITS + 1];
    struct gtq_head *heads; /* [n_heads], behind the matrices */
    float matrix[1]; /* per head: [dim][dim] to the coordinates of its groups, and back */
};

/* Pair i of a head's dim / 2: RoPE's, then the channels that do not turn two by two. */
static void channels_of_pair(const struct lowkey_peer_side *side, int i, int *first, int *second)
{
    const lowkey_layer_desc *layer = side->layer;
    if (side->which == LOWKEY_STORE_KEY && i < layer->rope_dims / 2) {
        lowkey_rope_pair(layer->rope_dims, layer->rope_pairing, i, first, second);
        return;
    }
    *first = 2 * i;
    *second = 2 * i + 1;
}

static double energy(const float *x, int n_tokens, int all_heads, int first_head, int n_heads, int dim,
                     int channel)
{
    double sum = 0;
    for (int t = 0; t < n_tokens; t++)
        for (int h = first_head; h < first_head + n_heads; h++) {
            const double v = (double)
                x[((size_t)t * (size_t)all_heads + (size_t)h) * (size_t)dim + (size_t)channel];
            sum += v * v;
        }
    return sum / ((double)n_tokens * n_heads);
}

static void allocate(const double *score, int n_pairs, int total, int *bits)
{
    for (int i = 0; i < n_pairs; i++) bits[i] = 1;
    for (int left = total - n_pairs; left > 0; left--) {
        int best = -1;
        double most = 0;
        for (int i = 0; i < n_pairs; i++) {
            const double gain = bits[i] < MAX_BITS ? score[i] * pow(4, -bits[i]) : 0;
            if (gain > most) {
                most = gain;
                best = i;
            }
        }
        if (best < 0) return; /* nothing has energy */
        bits[best]++;
    }
}

static void choose_bits(const struct lowkey_peer_side *side, const struct lowkey_peer_sample *sample, int h,
                        int *bits)
{
    const lowkey_layer_desc *layer = side->layer;
    const int dim = side->head_dim, n_pairs = dim / 2, per_head = layer->n_q_heads / layer->n_kv_heads;
    double score[MAX_PAIRS];
    for (int i = 0; i < n_pairs; i++) {
        bits[i] = side->setting.bits;
        if (side->which == LOWKEY_STORE_VALUE) continue;
        int channel[2];
        channels_of_pair(side, i, &channel[0], &channel[1]);
        score[i] = 0;
        for (int j = 0; j < 2; j++)
            score[i] += (energy(sample->query, sample->n_tokens, layer->n_q_heads, h * per_head, per_head,
                                dim, channel[j]) +
                         energy(sample->key, sample->n_tokens, layer->n_kv_heads, h, 1, dim, channel[j])) /
                        2;
    }
    if (side->which == LOWKEY_STORE_KEY) allocate(score, n_pairs, n_pairs * side->setting.bits, bits);
}

/* Pairs of equal width become neighbours, narrow ones first, and each such group is turned. */
static lowkey_status build_head(const struct lowkey_peer_side *side, const int *bits, int h, float *rotation,
                                lowkey_error *err)
{
    struct gtq *gtq = side->fitted;
    struct gtq_head *head = &gtq->heads[h];
    const size_t D = (size_t)side->head_dim;
    float *matrix = gtq->matrix + (size_t)h * 2 * D * D;
    int first = 0;
    head->n_groups = 0;
    for (size_t i = 0; i < D * D; i++) matrix[i] = 0;
    for (int width = 1; width <= MAX_BITS; width++) {
        int channels[LOWKEY_MAX_HEAD_DIM], n = 0;
        for (int i = 0; i < side->head_dim / 2; i++)
            if (bits[i] == width) {
                channels_of_pair(side, i, &channels[n], &channels[n + 1]);
                n += 2;
            }
        if (!n) continue;
        const unsigned long seed = 1000 + (unsigned long)width +
                                   16 * ((unsigned long)h + 512 * (2 * (unsigned long)side->layer->index +
                                                                   (unsigned long)side->which));
        LOWKEY_TRY(lowkey_random_rotation(n, seed, rotation, err));
        for (int i = 0; i < n; i++)
            for (int j = 0; j < n; j++)
                matrix[(size_t)channels[i] * D + (size_t)(first + j)] =
                    rotation[(size_t)j * (size_t)n + (size_t)i];
        if (!gtq->width[width].is_made)
            lowkey_lloyd_max(width, 0, gtq->width[width].value, gtq->width[width].boundary);
        gtq->width[width].is_made = 1;
        head->group[head->n_groups++] = (struct group) { first, n, width };
        first += n;
    }
    lowkey_transpose(side->head_dim, matrix, matrix + D * D);
    return LOWKEY_OK;
}

static lowkey_status prepare(struct lowkey_peer_side *side, const struct lowkey_peer_sample *sample,
                             int n_threads, lowkey_error *err)
{
    (void)n_threads;
    const size_t D = (size_t)side->head_dim, H = (size_t)side->n_heads, n_floats = H * 2 * D * D;
    struct gtq *gtq = side->fitted = calloc(1,
                                            sizeof *gtq + n_floats * sizeof(float) + H * sizeof *gtq->heads);
    float *rotation = malloc(D * D * sizeof *rotation);
    lowkey_status status = LOWKEY_OK;
    if (!gtq || !rotation)
        status = lowkey_fail(err, LOWKEY_ENOMEM, "no memory for rotations of %d", side->head_dim);
    else
        gtq->heads = (struct gtq_head *)(gtq->matrix + n_floats);
    for (int h = 0; status == LOWKEY_OK && h < side->n_heads; h++) {
        int bits[MAX_PAIRS], sum = 0;
        choose_bits(side, sample, h, bits);
        status = build_head(side, bits, h, rotation, err);
        for (int i = 0; i < side->head_dim / 2; i++) sum += 2 * bits[i];
        side->bits += (sum + 16.0 * gtq->heads[h].n_groups) / (double)(D * H);
    }
    free(rotation);
    return status;
}

static double norm_of(const float *x, int n)
{
    double sum = 0;
    for (int c = 0; c < n; c++) sum += (double)x[c] * (double)x[c];
    return sqrt(sum);
}

static void quantize_group(const struct width *width, int bits, float *x, int n)
{
    const double norm = norm_of(x, n);
    const float factor = norm > 0 ? (float)(sqrt(n) / norm) : 0;
    for (int c = 0; c < n; c++) x[c] *= factor;
    lowkey_nearest_entries(x, n, width->value, width->boundary, 1 << bits);
    const double stored = (double)lowkey_f16_to_f32(lowkey_f32_to_f16_saturate((float)norm, NULL));
    const float back = (float)(stored / norm_of(x, n)); /* no entry is 0 */
    for (int c = 0; c < n; c++) x[c] *= back;
}

static void quantize(const struct lowkey_peer_side *side, float *x, int n_tokens)
{
    const struct gtq *gtq = side->fitted;
    const size_t D = (size_t)side->head_dim, H = (size_t)side->n_heads;
    for (size_t i = 0; i < (size_t)n_tokens * H; i++) {
        const struct gtq_head *head = &gtq->heads[i % H];
        const float *matrix = gtq->matrix + i % H * 2 * D * D;
        float turned[LOWKEY_MAX_HEAD_DIM];
        lowkey_multiply_rows(x + i * D, 1, side->head_dim, matrix, turned);
        for (int g = 0; g < head->n_groups; g++) {
            const struct group *group = &head->group[g];
            quantize_group(&gtq->width[group->bits], group->bits, turned + group->first, group->n);
        }
        lowkey_multiply_rows(turned, 1, side->head_dim, matrix + D * D, x + i * D);
    }
}

const struct lowkey_peer_method lowkey_peer_block_gtq = { prepare, NULL, quantize };
