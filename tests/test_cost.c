/* Predicted costs: numbers done by hand, and sums written out element by element. */
#include "experiments/cost.h"

#include <math.h>
#include <stdlib.h>

#include "tests/check.h"

static void assert_close(double got, double want)
{
    if (!(fabs(got - want) <= 1e-12 * (1 + fabs(want)))) fail_msg("got %.15g, wanted %.15g", got, want);
}

/* One head of two channels, samples of 2 and 1 tokens. Products g e: sample 0 (1, -2) and (3, 0.5), sample 1 (-1, 4). */
static void costs_are_those_done_by_hand(void **state)
{
    (void)state;
    const float exact[3][2] = { { 1, 2 }, { 3, 4 }, { 5, 6 } },
                stored[3][2] = { { 2, 1 }, { 2, 4.5f }, { 4, 8 } },
                grad[3][2] = { { 1, 2 }, { -3, 1 }, { 1, 2 } };
    double sums[2][2] = { { 7, 7 }, { 7, 7 } }, squares[2] = { 0 }, first[2] = { 0 }, scratch[2];
    lowkey_cost_add(2, 2, exact[0], stored[0], grad[0], 2, &sums[0][0], squares);
    lowkey_cost_add(1, 2, exact[2], stored[2], grad[2], 2, &sums[0][1], squares);
    assert_close(sums[0][0], 4); /* channel 0, sample 0: 1 + 3 */
    assert_close(sums[0][1], -1);
    assert_close(sums[1][0], -1.5);
    assert_close(sums[1][1], 4);
    assert_close(squares[0], 11); /* 1 + 9 + 1 */
    assert_close(squares[1], 20.25); /* 4 + 1/4 + 16 */

    struct lowkey_cost_total total = { .n_samples = 2, .first = first };
    lowkey_cost_add_unit(&total, 2, sums[0], squares, scratch); /* F = 2.5, 3 */
    const struct lowkey_cost head = lowkey_cost_of(&total, 3);
    assert_close(head.first_order, 5.5 / 3);
    assert_close(head.standard_error, sqrt(2 * 0.125) / 3); /* var(2.5, 3) = 1/8 */
    assert_close(head.diagonal, 31.25 / 6);
    assert_close(head.coherent, (6.25 + 9) / 6);
}

static void channels_apart_are_units_of_their_own(void **state)
{
    (void)state;
    const double sums[2][2] = { { 4, -1 }, { -1.5, 4 } }, squares[2] = { 11, 20.25 };
    double first[2] = { 0 }, scratch[2];
    struct lowkey_cost_total total = { .n_samples = 2, .first = first };
    lowkey_cost_add_unit(&total, 1, sums[0], squares, scratch);
    lowkey_cost_add_unit(&total, 1, sums[1], squares + 1, scratch);
    const struct lowkey_cost cost = lowkey_cost_of(&total, 3);
    assert_close(cost.coherent, (16 + 1 + 2.25 + 16) / 6); /* not of the head: 15.25 / 6 */
    assert_close(cost.diagonal, 31.25 / 6);
    assert_close(cost.first_order, 5.5 / 3);
    assert_close(cost.standard_error, sqrt(2 * 0.125) / 3); /* of the sums over both, 2.5 and 3 */
}

static void one_sample_has_no_standard_error(void **state)
{
    (void)state;
    const double sums[1] = { 2 }, squares[1] = { 4 };
    double first[1] = { 0 }, scratch[1];
    struct lowkey_cost_total total = { .n_samples = 1, .first = first };
    lowkey_cost_add_unit(&total, 1, sums, squares, scratch);
    assert_true(isnan(lowkey_cost_of(&total, 8).standard_error));
    assert_close(lowkey_cost_of(&total, 8).coherent, 0.25);
}

/* H heads of D channels, S samples: every figure from one matrix of products g e. */
static void many_heads_agree_with_sums_written_out(void **state)
{
    (void)state;
    enum { H = 3, D = 8, C = H * D, S = 5, MOST = 40 };
    static float exact[S][MOST][C], stored[S][MOST][C], grad[S][MOST][C];
    static double sums[C][S], squares[C];
    int lengths[S], n_tokens = 0;
    srand(3);
    for (int s = 0; s < S; s++) {
        lengths[s] = 1 + rand() % MOST;
        n_tokens += lengths[s];
        for (int t = 0; t < lengths[s]; t++)
            for (int c = 0; c < C; c++) {
                exact[s][t][c] = (float)rand() / (float)RAND_MAX;
                stored[s][t][c] = exact[s][t][c] + (float)rand() / (float)RAND_MAX - 0.4f;
                grad[s][t][c] = (float)rand() / (float)RAND_MAX - 0.5f;
            }
        lowkey_cost_add(lengths[s], C, exact[s][0], stored[s][0], grad[s][0], S, &sums[0][s], squares);
    }
    double first[S] = { 0 }, scratch[S], all[S] = { 0 }, diagonal = 0, coherent = 0, mean = 0, spread = 0;
    struct lowkey_cost_total total = { .n_samples = S, .first = first };
    for (int h = 0; h < H; h++) lowkey_cost_add_unit(&total, D, sums[h * D], squares + h * D, scratch);
    for (int s = 0; s < S; s++)
        for (int h = 0; h < H; h++) {
            double of_head = 0;
            for (int t = 0; t < lengths[s]; t++)
                for (int c = h * D; c < (h + 1) * D; c++) {
                    const double p = (double)grad[s][t][c] *
                                     ((double)stored[s][t][c] - (double)exact[s][t][c]);
                    of_head += p;
                    diagonal += p * p / 2 / n_tokens;
                }
            coherent += of_head * of_head / 2 / n_tokens;
            all[s] += of_head;
        }
    for (int s = 0; s < S; s++) mean += all[s] / S;
    for (int s = 0; s < S; s++) spread += pow(all[s] - mean, 2) / (S - 1);
    const struct lowkey_cost cost = lowkey_cost_of(&total, n_tokens);
    assert_close(cost.first_order, mean * S / n_tokens);
    assert_close(cost.standard_error, sqrt(S * spread) / n_tokens);
    assert_close(cost.diagonal, diagonal);
    assert_close(cost.coherent, coherent);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(costs_are_those_done_by_hand),
        cmocka_unit_test(channels_apart_are_units_of_their_own),
        cmocka_unit_test(one_sample_has_no_standard_error),
        cmocka_unit_test(many_heads_agree_with_sums_written_out),
    };
    return lowkey_run_tests(tests);
}
