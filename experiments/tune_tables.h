/* tune_tables.h - the tables of a quantizer as parameters: how far each entry has moved, how a gradient moves it further,
 * and the quantizer that the moved tables make. */
#ifndef LOWKEY_TUNE_TABLES_H
#define LOWKEY_TUNE_TABLES_H

#include "formats/quantizer_file.h"

struct lowkey_tuned_side {
    const lowkey_side_desc *desc; /* of the quantizer as it was */
    size_t n_channels, n_table, first; /* its parameters are [n_channels][n_table], from number first on */
    double *
        unit; /* [n_channels] rms error of the channel as fitted: what moves are counted in. 0: it stays as it is */
};

struct lowkey_tuned_tables {
    const lowkey_quantizer_desc *desc; /* borrowed, as the record is */
    struct lowkey_tuned_side *sides; /* [n_layers][key, value] */
    size_t n; /* parameters, those too that stand for no entry in use */
    double *move, *momentum, *square; /* [n] each, one block: sums of Adam beside the moves */
    double *best; /* [n] moves that were kept */
};

/* Every entry where it was. Anything but static tables is refused: scales of tokens, outliers, channels of 8 or 16 bits. */
lowkey_status lowkey_tuned_tables_create(const lowkey_quantizer_desc *desc,
                                         const struct lowkey_fit_record *record,
                                         struct lowkey_tuned_tables **out, lowkey_error *err);
void lowkey_tuned_tables_free(struct lowkey_tuned_tables *tables); /* takes NULL */

/* Step number step, from 0, of Adam (0.9, 0.98): an entry moves by up to about rate units against its gradient. gradient:
 * [n], with respect to entries in the units of x. Entries that would pass each other meet at their mean. */
void lowkey_tuned_tables_step(struct lowkey_tuned_tables *tables, const double *gradient, double rate,
                              int step);

/* The quantizer with its tables moved: rounded to what the channel's center and exponent can say, strictly rising, within
 * what lower and upper allow. A boundary moves by the mean of what its two neighbours were moved by: a midpoint stays
 * one. Channels that have not moved keep every bit. */
lowkey_status lowkey_tuned_tables_quantizer(const struct lowkey_tuned_tables *tables, const double *move,
                                            lowkey_quantizer **out, lowkey_error *err);

#endif
