/* whole_file.h - a text file that appears whole or not at all: written beside its place, renamed when it is
 * done. */
#ifndef LOWKEY_WHOLE_FILE_H
#define LOWKEY_WHOLE_FILE_H

#include <stdio.h>

#include "runtime/lowkey.h"

struct lowkey_whole_file {
    FILE *to;           /* NULL: not open */
    const char *path;
    char temporary[4096]; /* "": written in place, as path is a device or a pipe */
};

lowkey_status lowkey_whole_file_open(struct lowkey_whole_file *file, const char *path, lowkey_error *err);
/* Every write is checked here; where one failed, what stood at path before still does. */
lowkey_status lowkey_whole_file_commit(struct lowkey_whole_file *file, lowkey_error *err);
void lowkey_whole_file_abandon(struct lowkey_whole_file *file); /* one not open is fine */

#endif
