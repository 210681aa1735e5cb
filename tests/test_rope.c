/* The table of angles against making them anew, as layers and lengths change. */
#include "experiments/lm/rope.h"

#include "tests/check.h"
#include "tests/random.h"

static const double first[4] = { 1, 0.1, 0.01, 0.001 }, second[4] = { 1, 0.1, 0.01, 0.002 };
static const lowkey_layer_desc layers[] = {
    { .key_head_dim = 8, .rope_dims = 8, .rope_attention_factor = 1, .rope_inv_freq = first },
    { .key_head_dim = 8, .rope_dims = 8, .rope_attention_factor = 1, .rope_inv_freq = second },
    { .key_head_dim = 8, .rope_dims = 8, .rope_attention_factor = 1.5, .rope_inv_freq = second },
    { .key_head_dim = 24, .rope_dims = 6, .rope_pairing = LOWKEY_PAIR_INTERLEAVED, .rope_inv_freq = first },
    { .key_head_dim = 16, .rope_dims = 0, .rope_inv_freq = NULL },
};
enum { N_LAYERS = sizeof layers / sizeof *layers, N = 50 };

static void a_table_turns_as_angles_made_anew(void **state)
{
    (void)state;
    struct lowkey_random random = { 1 };
    struct lowkey_rope_table table;
    assert_true(lowkey_rope_table_init(&table, N));
    for (int step = 0; step < 300; step++) {
        const lowkey_layer_desc *layer = &layers[step < 100 ? step % N_LAYERS : step / 40 % N_LAYERS];
        const int end = 1 + lowkey_random_below(&random, N), position = lowkey_random_below(&random, end);
        float x[24], got[24], want[24], cosine[4], sine[4];
        lowkey_random_fill(&random, LOWKEY_NORMAL, x, 24);
        lowkey_rope_table_make(&table, layer, end);
        lowkey_rope_table_turn(&table, layer, position, x, got);
        lowkey_rope_angles(layer, position, cosine, sine);
        lowkey_rope_turn(layer, cosine, sine, x, want);
        assert_memory_equal(got, want, (size_t)layer->key_head_dim * sizeof *got);
        lowkey_rope_table_turn(&table, layer, position, x, x); /* in place */
        assert_memory_equal(x, want, (size_t)layer->key_head_dim * sizeof *x);
    }
    lowkey_rope_table_free(&table);
    lowkey_rope_table_free(&table);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(a_table_turns_as_angles_made_anew) };
    return lowkey_run_tests(tests);
}
