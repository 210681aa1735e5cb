/* activations.c - the streams of a capture: their names, their shapes, and the attribute that lists them. */
#include "formats/activations.h"

#include <string.h>

#include "formats/activations_parts.h"
#include "runtime/error.h"

const char *const lowkey_stream_names[LOWKEY_N_STREAMS] = {
    "key", "value", "query", "key_grad", "value_grad", "key_weight", "value_weight",
};

const char *const lowkey_gradient_labels_names[LOWKEY_N_LABELS] = { "not said", "text", "model" };

int lowkey_stream_heads(const lowkey_layer_desc *layer, enum lowkey_stream stream)
{
    return stream == LOWKEY_QUERY ? layer->n_q_heads : layer->n_kv_heads;
}

int lowkey_stream_head_dim(const lowkey_layer_desc *layer, enum lowkey_stream stream)
{
    const int is_value = stream == LOWKEY_VALUE || stream == LOWKEY_VALUE_GRAD ||
                         stream == LOWKEY_VALUE_WEIGHT;
    return is_value ? layer->value_head_dim : layer->key_head_dim;
}

lowkey_status lowkey_contents_check(unsigned contents, lowkey_error *err)
{
    const unsigned both = 1u << LOWKEY_KEY | 1u << LOWKEY_VALUE;
    const unsigned key_twice = 1u << LOWKEY_KEY_GRAD | 1u << LOWKEY_KEY_WEIGHT;
    const unsigned value_twice = 1u << LOWKEY_VALUE_GRAD | 1u << LOWKEY_VALUE_WEIGHT;
    char text[LOWKEY_CONTENTS_SIZE];
    lowkey_contents_print(contents, text);
    if ((contents & both) != both || contents >> LOWKEY_N_STREAMS)
        return lowkey_fail(err, LOWKEY_EFORMAT, "contents: expected key and value, found '%s'", text);
    if ((contents & key_twice) == key_twice || (contents & value_twice) == value_twice)
        return lowkey_fail(err, LOWKEY_EFORMAT,
                           "contents: expected gradients or weights of a side, found both in '%s'", text);
    return LOWKEY_OK;
}

void lowkey_contents_print(unsigned contents, char text[LOWKEY_CONTENTS_SIZE])
{
    text[0] = 0;
    for (int s = 0; s < LOWKEY_N_STREAMS; s++) {
        if (!(contents >> s & 1)) continue;
        if (text[0]) strcat(text, " ");
        strcat(text, lowkey_stream_names[s]);
    }
}

lowkey_status lowkey_contents_parse(const char *text, unsigned *contents, lowkey_error *err)
{
    char again[LOWKEY_CONTENTS_SIZE];
    *contents = 0;
    for (const char *word = text; word; word = strchr(word, ' ') ? strchr(word, ' ') + 1 : NULL) {
        const size_t length = strcspn(word, " ");
        for (int s = 0; s < LOWKEY_N_STREAMS; s++)
            if (strlen(lowkey_stream_names[s]) == length &&
                strncmp(lowkey_stream_names[s], word, length) == 0)
                *contents |= 1u << s;
    }
    lowkey_contents_print(*contents, again);
    if (strcmp(again, text) != 0) { /* something unknown, twice, in another order, or spaces */
        lowkey_contents_print((1u << LOWKEY_N_STREAMS) - 1, again);
        return lowkey_fail(err, LOWKEY_EFORMAT,
                           "contents: expected names of '%s' in this order, found '%.80s'", again, text);
    }
    return lowkey_contents_check(*contents, err);
}

uint64_t lowkey_rows_checksum(const float *rows, size_t first, size_t n)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &rows[i], sizeof bits);
        sum += bits * (uint64_t)(2 * (first + i) + 1);
    }
    return sum;
}
