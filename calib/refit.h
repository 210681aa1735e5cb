/* refit.h - tables fitted again, to what packing quantizes once errors are fed back. */
#ifndef LOWKEY_REFIT_H
#define LOWKEY_REFIT_H

#include "calib/side_fit.h"

/* One round of Lloyd's: all kept tokens are packed with the side's tables as the quantizer (side) has them; entry k of a
 * channel becomes the weighted mean of t = x less the errors fed back to it over the tokens of code k, and boundaries
 * the midpoints. Tables stay within a range of their limits. What is stored is not touched. */
lowkey_status lowkey_refit(struct lowkey_side_fit *fit, const struct lowkey_side *side, lowkey_error *err);

#endif
