/* whole_file.c - tables that commands write for scripts: an older one stays until the new one is whole. */
#include "experiments/whole_file.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/error.h"

static lowkey_status cannot_write(const struct lowkey_whole_file *file, lowkey_error *err)
{
    return lowkey_fail(err, LOWKEY_EIO, "%s: cannot write: %s", file->path, strerror(errno));
}

lowkey_status lowkey_whole_file_open(struct lowkey_whole_file *file, const char *path, lowkey_error *err)
{
    struct stat status;
    *file = (struct lowkey_whole_file) { .path = path };
    const int in_place = stat(path, &status) == 0 && !S_ISREG(status.st_mode);
    const int length = in_place ? 0
                                : snprintf(file->temporary, sizeof file->temporary, "%s.%ld.tmp", path,
                                           (long)getpid());
    if (length >= (int)sizeof file->temporary)
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: the name is too long", path);
    file->to = fopen(in_place ? path : file->temporary, "w");
    return file->to ? LOWKEY_OK : cannot_write(file, err);
}

lowkey_status lowkey_whole_file_commit(struct lowkey_whole_file *file, lowkey_error *err)
{
    const int written = fflush(file->to) == 0 && !ferror(file->to);
    if (written &&
        (!file->temporary[0] || (fsync(fileno(file->to)) == 0 && rename(file->temporary, file->path) == 0))) {
        fclose(file->to);
        file->to = NULL;
        return LOWKEY_OK;
    }
    const lowkey_status status = cannot_write(file, err);
    lowkey_whole_file_abandon(file);
    return status;
}

void lowkey_whole_file_abandon(struct lowkey_whole_file *file)
{
    if (!file->to) return;
    fclose(file->to);
    file->to = NULL;
    if (file->temporary[0]) unlink(file->temporary);
}
