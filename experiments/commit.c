/* commit.c - which commit the command was built from, so that results can say what made them. Part of the command alone:
 * nothing else has to be linked anew with every commit. */
#include "experiments/commands.h"

/* The Makefile has LOWKEY_COMMIT defined by a header that it writes. */
const char *lowkey_commit(void)
{
    return LOWKEY_COMMIT;
}
