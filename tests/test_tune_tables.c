/* Tables as parameters: Adam against its formulas, entries that meet, rounding to what may be stored, boundaries. */
#include "experiments/tune_tables.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "tests/check.h"
#include "tests/quantizers.h"
#include "tests/tuning.h"

struct machine {
    struct tuning tuning;
    struct lowkey_tuned_tables *tables;
    double *gradient;
};

static struct machine machine_make(const struct tuning_choice *choice)
{
    lowkey_error err;
    struct machine m = { .tuning = tuning_make(choice) };
    assert_ok(lowkey_tuned_tables_create(lowkey_quantizer_describe(m.tuning.quantizer), &m.tuning.record,
                                         &m.tables, &err),
              err);
    m.gradient = calloc(m.tables->n, sizeof *m.gradient);
    return m;
}

static void machine_free(struct machine *m)
{
    lowkey_tuned_tables_free(m->tables);
    free(m->gradient);
    tuning_free(&m->tuning);
}

static lowkey_quantizer *moved(const struct machine *m)
{
    lowkey_error err;
    lowkey_quantizer *quantizer;
    assert_ok(lowkey_tuned_tables_quantizer(m->tables, m->tables->move, &quantizer, &err), err);
    return quantizer;
}

static const lowkey_side_desc *side_of(const lowkey_quantizer *quantizer, int i)
{
    const lowkey_layer_desc *layer = &lowkey_quantizer_describe(quantizer)->layers[i / 2];
    return i % 2 ? &layer->value : &layer->key;
}

static void tables_that_do_not_move_make_the_same_quantizer(void **state)
{
    (void)state;
    struct tuning_choice choice = tuning_plain();
    choice.feedback = 1;
    struct machine m = machine_make(&choice);
    lowkey_quantizer *same = moved(&m);
    lowkey_test_desc_equal(lowkey_quantizer_describe(same), lowkey_quantizer_describe(m.tuning.quantizer));
    lowkey_quantizer_free(same);
    machine_free(&m);
}

/* One entry far from its neighbours, over some steps of changing gradients, in plain scalars. */
static void steps_are_those_of_adam(void **state)
{
    (void)state;
    const struct tuning_choice choice = tuning_plain();
    struct machine m = machine_make(&choice);
    const struct lowkey_tuned_side *side = &m.tables->sides[3];
    const size_t c = 2, j = side->first + c * side->n_table + 1;
    const double unit = sqrt(m.tuning.record.reports[1][1].mse[c]);
    double momentum = 0, square = 0, at = 0;
    assert_true(fabs(side->unit[c] - unit) < 1e-15);
    for (int step = 0; step < 7; step++) {
        const double g = sin(1 + 3 * step) * 1e-3, rate = 0.05 / (1 + step);
        m.gradient[j] = g;
        lowkey_tuned_tables_step(m.tables, m.gradient, rate, step);
        momentum = 0.9 * momentum + 0.1 * g * unit;
        square = 0.98 * square + 0.02 * g * unit * g * unit;
        at -= rate * (momentum / (1 - pow(0.9, step + 1))) / sqrt(square / (1 - pow(0.98, step + 1)));
        assert_true(fabs(m.tables->move[j] - at) < 1e-6);
    }
    for (size_t i = 0; i < m.tables->n; i++) assert_true(i == j || m.tables->move[i] == 0);
    machine_free(&m);
}

static void check_quantizer(const struct machine *m, const lowkey_quantizer *quantizer)
{
    for (int i = 0; i < 2 * m->tuning.model->n_layers; i++) {
        const lowkey_side_desc *side = side_of(quantizer, i), *from = side_of(m->tuning.quantizer, i);
        const struct lowkey_tuned_side *tuned = &m->tables->sides[i];
        const size_t E = tuned->n_table;
        for (size_t c = 0; c < tuned->n_channels; c++)
            for (size_t k = 0; k < from->n_entries[c]; k++) {
                const float *table = side->table + c * E, *was = from->table + c * E;
                const double low = (double)from->lower[c], high = (double)from->upper[c],
                             reach = 2 * (high - low);
                assert_true(k == 0 || table[k] > table[k - 1]);
                assert_true((double)table[k] >= low - reach && (double)table[k] <= high + reach);
                if (k == 0 || !side->boundary) continue;
                const double by = ((double)table[k] - (double)was[k] + (double)table[k - 1] -
                                   (double)was[k - 1]) /
                                  2,
                             want = (double)from->boundary[c * (E - 1) + k - 1] + by,
                             got = (double)side->boundary[c * (E - 1) + k - 1];
                assert_true(fabs(got - want) <= 0x1p-22 * fabs(want)); /* tables here have midpoints */
            }
    }
}

/* Moves of up to five rms errors: neighbours pass each other, and ends leave their range. */
static void moved_tables_are_good_ones_whatever_the_moves(void **state)
{
    (void)state;
    for (int trellis = 0; trellis < 3; trellis += 2) {
        struct tuning_choice choice = tuning_plain();
        choice.trellis = trellis;
        struct machine m = machine_make(&choice);
        uint64_t random = 1;
        for (int step = 0; step < 30; step++) {
            for (size_t i = 0; i < m.tables->n; i++) {
                random = random * 6364136223846793005u + 1442695040888963407u;
                m.gradient[i] = (double)(int64_t)random;
            }
            lowkey_tuned_tables_step(m.tables, m.gradient, step < 15 ? 0.2 : 5, step);
            lowkey_quantizer *quantizer = moved(&m);
            check_quantizer(&m, quantizer);
            lowkey_quantizer_free(quantizer);
        }
        machine_free(&m);
    }
}

static void entries_that_would_pass_each_other_meet_and_are_stored_apart(void **state)
{
    (void)state;
    const struct tuning_choice choice = tuning_plain();
    struct machine m = machine_make(&choice);
    const struct lowkey_tuned_side *side = &m.tables->sides[1];
    const size_t c = 0, first = side->first + c * side->n_table; /* 3 bits */
    const float *was = side->desc->table + c * side->n_table;
    m.gradient[first + 3] = -1; /* up */
    m.gradient[first + 4] = 1; /* down */
    for (int step = 0; step < 20; step++) lowkey_tuned_tables_step(m.tables, m.gradient, 1, step);
    const double third = (double)was[3] + side->unit[c] * m.tables->move[first + 3],
                 fourth = (double)was[4] + side->unit[c] * m.tables->move[first + 4];
    assert_true(fabs(third - fourth) < 1e-12 && fabs(third - ((double)was[3] + (double)was[4]) / 2) < 1e-6);
    lowkey_quantizer *quantizer = moved(&m);
    const float *table = side_of(quantizer, 1)->table + c * side->n_table;
    assert_true(table[3] < table[4] && table[4] - table[3] <= 0x1p-9f * fabsf(table[4]));
    assert_true(table[2] == was[2] && table[5] == was[5]);
    check_quantizer(&m, quantizer);
    lowkey_quantizer_free(quantizer);
    machine_free(&m);
}

/* A boundary that is no midpoint (tables stretched by the gain correction) keeps its distance, and never falls. */
static void boundaries_move_with_their_neighbours(void **state)
{
    (void)state;
    const struct tuning_choice choice = tuning_plain();
    struct machine m = machine_make(&choice);
    const struct lowkey_tuned_side *side = &m.tables->sides[1];
    const size_t c = 4, first = side->first + c * side->n_table;
    float *boundary = (float *)side->desc->boundary + c * (side->n_table - 1);
    const float off = 0.25f *
                      (side->desc->table[c * side->n_table + 1] - side->desc->table[c * side->n_table]);
    for (int k = 0; k < 7; k++) boundary[k] += k % 2 ? -off : off;
    const float *was = side->desc->table + c * side->n_table;
    m.tables->move[first + 2] = 0.5;
    lowkey_quantizer *quantizer = moved(&m);
    const lowkey_side_desc *now = side_of(quantizer, 1);
    const double by = (double)now->table[c * side->n_table + 2] - (double)was[2];
    for (int k = 0; k < 7; k++)
        assert_true(fabs((double)now->boundary[c * (side->n_table - 1) + (size_t)k] -
                         ((double)boundary[k] + (k == 1 || k == 2 ? by / 2 : 0))) < 1e-6);
    lowkey_quantizer_free(quantizer);
    /* All entries meet in one place: boundaries that stood off it may not cross. */
    for (size_t k = 0; k < 8; k++)
        m.tables->move[first + k] = ((double)was[3] - (double)was[k]) / side->unit[c];
    quantizer = moved(&m);
    now = side_of(quantizer, 1);
    for (size_t k = 1; k < 7; k++)
        assert_true(now->boundary[c * (side->n_table - 1) + k] >=
                    now->boundary[c * (side->n_table - 1) + k - 1]);
    lowkey_quantizer_free(quantizer);
    machine_free(&m);
}

static void what_is_no_static_table_is_refused(void **state)
{
    (void)state;
    static const struct {
        struct lowkey_test_side side;
        const char *words;
    } cases[] = {
        { { .bits = { 2 }, .n_bits = 1, .token_scale = LOWKEY_SCALE_F16, .scale_block = 8 },
          "a scale for each token" },
        { { .bits = { 2 }, .n_bits = 1, .outlier_rule = LOWKEY_OUTLIER_LIMIT }, "outliers" },
        { { .bits = { 2, 16 }, .n_bits = 2, .rule_16 = LOWKEY_RULE_F16 }, "8 or 16 bits" },
    };
    double mse[64] = { 0 };
    struct lowkey_side_report reports[1][2] = { { { .mse = mse }, { .mse = mse } } };
    const struct lowkey_fit_record record = { .reports = reports };
    lowkey_error err;
    for (size_t i = 0; i <= sizeof cases / sizeof *cases; i++) {
        struct lowkey_test_spec spec = { .n_layers = 1,
                                         .n_q_heads = 2,
                                         .n_kv_heads = 2,
                                         .key_head_dim = 16,
                                         .value_head_dim = 16,
                                         .rope_dims = 16,
                                         .side = { { .bits = { 2 }, .n_bits = 1 },
                                                   { .bits = { 2 }, .n_bits = 1 } } };
        struct lowkey_tuned_tables *tables;
        if (i < 3) spec.side[i % 2] = cases[i].side;
        lowkey_quantizer_desc *desc = lowkey_test_desc_make(&spec);
        assert_refused(lowkey_tuned_tables_create(desc, &record, &tables, &err),
                       i < 3 ? LOWKEY_EUNSUPPORTED : LOWKEY_EINVAL, err,
                       i < 3 ? cases[i].words : "nothing to tune");
        assert_null(tables);
        lowkey_test_desc_free(desc);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_that_do_not_move_make_the_same_quantizer),
        cmocka_unit_test(steps_are_those_of_adam),
        cmocka_unit_test(moved_tables_are_good_ones_whatever_the_moves),
        cmocka_unit_test(entries_that_would_pass_each_other_meet_and_are_stored_apart),
        cmocka_unit_test(boundaries_move_with_their_neighbours),
        cmocka_unit_test(what_is_no_static_table_is_refused),
    };
    return lowkey_run_tests(tests);
}
