/* reference_states.c - a file for each window, named after what it is of: a head that says so in full, then the states. */
#include "experiments/reference_states.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "experiments/whole_file.h"
#include "formats/sha256.h"
#include "runtime/error.h"

struct head { /* no padding: it is hashed, and compared as bytes */
    char magic[16];
    unsigned char model_sha256[32], text_sha256[32], states_sha256[32];
    int64_t window, index, hidden_size;
};

static lowkey_status make_head(const struct lowkey_reference_window *of, struct head *head, char path[4096],
                               lowkey_error *err)
{
    unsigned char digest[32];
    char name[65];
    memset(head, 0, sizeof *head);
    snprintf(head->magic, sizeof head->magic, "lowkey %s f32", lowkey_version());
    memcpy(head->model_sha256, of->model->sha256, sizeof head->model_sha256);
    memcpy(head->text_sha256, of->tokens->text_sha256, sizeof head->text_sha256);
    head->window = of->window;
    head->index = of->index;
    head->hidden_size = of->model->hidden_size;
    LOWKEY_TRY(lowkey_sha256_of(head, sizeof *head, digest, err)); /* the states' own hash is 0 here */
    lowkey_sha256_print(digest, name);
    if (snprintf(path, 4096, "%s/%.24s.states", of->folder, name) >= 4096)
        return lowkey_fail(err, LOWKEY_EINVAL, "%s: too long a name", of->folder);
    return LOWKEY_OK;
}

static size_t n_states(const struct head *head)
{
    return (size_t)head->window * (size_t)head->hidden_size;
}

lowkey_status lowkey_reference_read(const struct lowkey_reference_window *of, float *hidden, int *found,
                                    lowkey_error *err)
{
    struct head wanted, head;
    char path[4096];
    *found = 0;
    LOWKEY_TRY(make_head(of, &wanted, path, err));
    FILE *file = fopen(path, "rb");
    if (!file)
        return errno == ENOENT ? LOWKEY_OK
                               : lowkey_fail(err, LOWKEY_EIO, "%s: cannot open: %s", path, strerror(errno));
    const int whole = fread(&head, sizeof head, 1, file) == 1 &&
                      fread(hidden, sizeof *hidden, n_states(&wanted), file) == n_states(&wanted) &&
                      fgetc(file) == EOF;
    fclose(file);
    LOWKEY_TRY(lowkey_sha256_of(hidden, n_states(&wanted) * sizeof *hidden, wanted.states_sha256, err));
    if (!whole || memcmp(&head, &wanted, sizeof head) != 0)
        return lowkey_fail(err, LOWKEY_EFORMAT,
                           "%s: not what was written for window %lld of %s; without it, it is made anew",
                           path, (long long)of->index, of->tokens->text_name);
    *found = 1;
    return LOWKEY_OK;
}

lowkey_status lowkey_reference_write(const struct lowkey_reference_window *of, const float *hidden,
                                     lowkey_error *err)
{
    struct head head;
    char path[4096];
    struct lowkey_whole_file file = { 0 };
    LOWKEY_TRY(make_head(of, &head, path, err));
    LOWKEY_TRY(lowkey_sha256_of(hidden, n_states(&head) * sizeof *hidden, head.states_sha256, err));
    if (mkdir(of->folder, 0777) != 0 && errno != EEXIST)
        return lowkey_fail(err, LOWKEY_EIO, "%s: cannot make the folder: %s", of->folder, strerror(errno));
    LOWKEY_TRY(lowkey_whole_file_open(&file, path, err));
    fwrite(&head, sizeof head, 1, file.to); /* commit sees what went wrong */
    fwrite(hidden, sizeof *hidden, n_states(&head), file.to);
    const lowkey_status status = lowkey_whole_file_commit(&file, err);
    lowkey_whole_file_abandon(&file);
    return status;
}
