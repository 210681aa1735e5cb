/* fuzz_quantizer.c - opens any bytes as quantizer.h5. Whatever they are: an object that passes all checks again, or a
 * status with one line of words that names the file; never a crash. `make fuzz` links it with libFuzzer, and
 * tests/test_fuzz.c replays files and mutations through it. */
#include "tests/fuzz_quantizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/side.h"

#define PROMISE(condition)                                                                                   \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "broken: %s (%s)\n", #condition, error.message);                                 \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

/* What kernels would walk: every row's place lies in its page, every boundary count in its table. */
static int lies_within(const struct lowkey_side *side)
{
    for (int h = 0; h < side->n_heads; h++) {
        const struct lowkey_head *head = &side->heads[h];
        for (int r = 0; r < side->head_dim; r++) {
            const struct lowkey_row *row = &head->rows[r];
            if (row->channel >= side->head_dim ||
                head->n_boundary[r] > (side->table_entries ? side->table_entries - 1 : 0))
                return 0;
            if (row->wide_offset + (uint32_t)lowkey_row_bytes(row->wide_bits) > head->page_bytes) return 0;
            if (lowkey_has_top_bit(row->bits) && row->top_offset + 8 > head->page_bytes) return 0;
        }
    }
    return 1;
}

lowkey_status lowkey_fuzz_quantizer(const uint8_t *data, size_t size)
{
    lowkey_error error = { 0 };
    const char *folder = getenv("TMPDIR");
    char path[200]; /* a file in memory has none that HDF5 takes */
    snprintf(path, sizeof path, "%s/lowkey-fuzz-XXXXXX", folder ? folder : "/tmp");
    const int fd = mkstemp(path);
    if (fd < 0 || (size && write(fd, data, size) != (ssize_t)size) || close(fd)) abort();

    lowkey_quantizer *quantizer = (lowkey_quantizer *)path, *again = NULL;
    const lowkey_status status = lowkey_quantizer_open(path, NULL, &quantizer, &error);
    unlink(path);
    if (status == LOWKEY_OK) {
        const lowkey_quantizer_desc *desc = lowkey_quantizer_describe(quantizer);
        PROMISE(lowkey_quantizer_create(desc, NULL, &again, &error) == LOWKEY_OK);
        for (int i = 0; i < desc->n_layers; i++)
            for (int which = 0; which < 2; which++)
                PROMISE(lies_within(&lowkey_quantizer_layer_at(again, i)->side[which]));
        lowkey_quantizer_free(again);
        lowkey_quantizer_free(quantizer);
    } else {
        PROMISE(!quantizer && error.status == status);
        PROMISE(strncmp(error.message, path, strlen(path)) == 0 && !strchr(error.message, '\n'));
    }
    return status;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    lowkey_fuzz_quantizer(data, size);
    return 0;
}
