/* file_h5.c - opens HDF5 files of ours, finds and lists what is in them. Nothing a file says is trusted: what
 * is not a regular file of HDF5 is refused before HDF5 opens it, and objects are reached through hard links
 * alone. */
#include "formats/file_h5.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "formats/parts_h5.h"
#include "runtime/error.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers are decoded on little-endian machines");

struct lowkey_h5_quiet lowkey_h5_hush(void)
{
    struct lowkey_h5_quiet quiet = { 0 };
    quiet.saved = H5Eget_auto2(H5E_DEFAULT, &quiet.print, &quiet.data) >= 0;
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    return quiet;
}

void lowkey_h5_unhush(struct lowkey_h5_quiet *quiet)
{
    if (quiet->saved) H5Eset_auto2(H5E_DEFAULT, quiet->print, quiet->data);
}

void lowkey_h5_give_up(const hid_t *id)
{
    if (*id > 0) H5Idec_ref(*id);
}

static herr_t take_innermost(unsigned n, const H5E_error2_t *error, void *reason)
{
    if (n == 0) snprintf(reason, LOWKEY_H5_REASON, "%s", error->desc ? error->desc : "");
    return 0;
}

const char *lowkey_h5_reason(char reason[LOWKEY_H5_REASON])
{
    strcpy(reason, "no reason given");
    H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, take_innermost, reason);
    return reason;
}

const char *lowkey_h5_path(const lowkey_h5 *file)
{
    return file->path;
}

const char *lowkey_h5_schema(const lowkey_h5 *file)
{
    return file->schema;
}

void lowkey_h5_version(const lowkey_h5 *file, int *major, int *minor)
{
    *major = file->major;
    *minor = file->minor;
}

lowkey_status lowkey_h5_fail(const lowkey_h5 *file, lowkey_error *err, const char *format, ...)
{
    char words[sizeof err->message];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(words, sizeof words, format, arguments);
    va_end(arguments);
    return lowkey_fail(err, LOWKEY_EFORMAT, "%s: %s", file->path, words);
}

lowkey_status lowkey_h5_blame(const lowkey_h5 *file, lowkey_status status, lowkey_error *err)
{
    if (status == LOWKEY_OK || !err) return status;
    char words[sizeof err->message];
    snprintf(words, sizeof words, "%s", err->message);
    return lowkey_fail(err, status, "%s: %s", file->path, words);
}

/* ---- opening ---- */

lowkey_status lowkey_h5_check_regular(const char *path, lowkey_error *err)
{
    struct stat status;
    if (stat(path, &status) != 0) return lowkey_fail(err, LOWKEY_EIO, "%s: %s", path, strerror(errno));
    if (S_ISDIR(status.st_mode))
        return lowkey_fail(err, LOWKEY_EIO, "%s: expected an HDF5 file, found a directory", path);
    if (!S_ISREG(status.st_mode))
        return lowkey_fail(err, LOWKEY_EIO, "%s: expected an HDF5 file, found no regular file", path);
    FILE *stream = fopen(path, "rb");
    if (!stream) return lowkey_fail(err, LOWKEY_EIO, "%s: %s", path, strerror(errno));
    static const unsigned char signature[8] = { 0x89, 'H', 'D', 'F', '\r', '\n', 0x1a, '\n' };
    unsigned char begin[8];
    const size_t n = fread(begin, 1, sizeof begin, stream);
    fclose(stream);
    if (n < sizeof begin || memcmp(begin, signature, sizeof begin) != 0)
        return lowkey_fail(err, LOWKEY_EFORMAT, "%s: not an HDF5 file: expected its signature, found %s",
                           path,
                           n == 0             ? "an empty file"
                           : n < sizeof begin ? "a file of less than 8 bytes"
                                              : "other bytes");
    return LOWKEY_OK;
}

static lowkey_status open_hdf5(lowkey_h5 *file, lowkey_error *err)
{
    char reason[LOWKEY_H5_REASON];
    LOWKEY_CLOSED hid_t access = H5Pcreate(H5P_FILE_ACCESS);
    H5Pset_fclose_degree(access, H5F_CLOSE_STRONG);
#if H5_VERSION_GE(1, 10, 7)
    H5Pset_file_locking(access, 1, 1); /* where the file system knows locks */
#endif
    file->id = H5Fopen(file->path, H5F_ACC_RDONLY, access);
    if (file->id >= 0) return LOWKEY_OK;
    return lowkey_fail(err, LOWKEY_EFORMAT,
                       "%s: HDF5 cannot open it, is it cut off or damaged, or being written? (%s)",
                       file->path, lowkey_h5_reason(reason));
}

static lowkey_status check_schema(lowkey_h5 *file, const char *schema, lowkey_error *err)
{
    static const char *const ours[] = { "model", "tokens", "activations", "quantizer", NULL };
    LOWKEY_CLOSED hid_t root = H5Oopen(file->id, "/", H5P_DEFAULT);
    if (root < 0 || H5Aexists(root, "schema") <= 0)
        return lowkey_h5_fail(file, err, "/: attribute schema: missing; HDF5, but no file of lowkey");
    int which;
    LOWKEY_TRY(lowkey_h5_get_choice(file, "/", "schema", ours, &which, err));
    strcpy(file->schema, ours[which]);
    if (schema && strcmp(schema, file->schema) != 0)
        return lowkey_h5_fail(file, err, "/: attribute schema: expected %s, found %s", schema, file->schema);
    return LOWKEY_OK;
}

lowkey_status lowkey_h5_open(const char *path, const char *schema, lowkey_h5 **out, lowkey_error *err)
{
    LOWKEY_QUIET;
    *out = NULL;
    LOWKEY_TRY(lowkey_h5_check_regular(path, err));
    lowkey_h5 *file = calloc(1, sizeof *file);
    if (file) file->id = -1, file->fd = -1, file->path = strdup(path);
    lowkey_status status = file && file->path ? LOWKEY_OK
                                              : lowkey_fail(err, LOWKEY_ENOMEM, "%s: no memory", path);
    if (!status) status = open_hdf5(file, err);
    if (!status) status = check_schema(file, schema, err);
    if (!status) status = lowkey_h5_check_version(file, err);
    if (status)
        lowkey_h5_close(file);
    else
        *out = file;
    return status;
}

void lowkey_h5_close(lowkey_h5 *file)
{
    if (!file) return;
    LOWKEY_QUIET;
    lowkey_h5_give_up(&file->id);
    free(file->path);
    free(file);
}

/* ---- finding ---- */

struct listing {
    char *text;
    size_t size, used;
    int n_left; /* names for which there was no room */
};

static herr_t list_name(hid_t group, const char *name, const H5L_info_t *info, void *arg)
{
    (void)group, (void)info;
    struct listing *list = arg;
    const size_t length = strlen(name) + (list->used ? 2 : 0);
    if (list->n_left || list->used + length + 1 > list->size) return list->n_left++, 0;
    snprintf(list->text + list->used, list->size - list->used, "%s%s", list->used ? ", " : "", name);
    list->used += length;
    return 0;
}

/* Names in the group that holds path, or as many as fit. */
static void list_group_of(lowkey_h5 *file, const char *path, char *text, size_t size)
{
    char group[256];
    snprintf(group, sizeof group, "%s", path);
    char *slash = strrchr(group, '/');
    if (slash) slash[slash == group] = 0;
    struct listing list = { .text = text, .size = size - 24 };
    hsize_t at = 0;
    text[0] = 0;
    LOWKEY_CLOSED hid_t id = H5Gopen2(file->id, group, H5P_DEFAULT);
    if (id >= 0) H5Literate(id, H5_INDEX_NAME, H5_ITER_NATIVE, &at, list_name, &list);
    if (list.n_left) snprintf(text + list.used, size - list.used, " and %d more", list.n_left);
    if (!text[0]) strcpy(text, "nothing");
}

static const char *type_name(H5I_type_t type)
{
    return type == H5I_DATASET ? "a dataset" : type == H5I_GROUP ? "a group" : "another kind of object";
}

/* Are all links on the way there, and hard? */
static lowkey_status check_links(lowkey_h5 *file, const char *path, const char *expected, lowkey_error *err)
{
    char prefix[256];
    for (size_t i = 1;; i++) {
        if (i >= sizeof prefix) return lowkey_h5_fail(file, err, "%.200s...: path too long", path);
        if (path[i] && path[i] != '/') continue;
        memcpy(prefix, path, i);
        prefix[i] = 0;
        H5L_info_t info;
        if (H5Lexists(file->id, prefix, H5P_DEFAULT) <= 0) {
            char found[160];
            list_group_of(file, prefix, found, sizeof found);
            return lowkey_h5_fail(file, err, "%s: missing: expected %s, found %s there", path, expected,
                                  found);
        }
        if (H5Lget_info(file->id, prefix, &info, H5P_DEFAULT) < 0 || info.type != H5L_TYPE_HARD)
            return lowkey_h5_fail(file, err, "%s: expected %s, found a link to elsewhere", path, expected);
        if (!path[i]) return LOWKEY_OK;
    }
}

lowkey_status lowkey_h5_find(lowkey_h5 *file, const char *path, H5I_type_t type, const char *expected,
                             hid_t *out, lowkey_error *err)
{
    char reason[LOWKEY_H5_REASON];
    *out = -1;
    if (path[1]) LOWKEY_TRY(check_links(file, path, expected, err));
    const hid_t id = H5Oopen(file->id, path, H5P_DEFAULT);
    if (id < 0) return lowkey_h5_fail(file, err, "%s: cannot be opened (%s)", path, lowkey_h5_reason(reason));
    const H5I_type_t found = H5Iget_type(id);
    if (type != H5I_BADID && found != type) {
        H5Idec_ref(id);
        return lowkey_h5_fail(file, err, "%s: expected %s, found %s", path, expected, type_name(found));
    }
    *out = id;
    return LOWKEY_OK;
}

/* ---- listing ---- */

struct visit {
    lowkey_status (*visit)(void *arg, const char *name, lowkey_error *err);
    void *arg;
    lowkey_error *err;
    lowkey_status status;
};

static herr_t visit_link(hid_t group, const char *name, const H5L_info_t *info, void *arg)
{
    (void)group, (void)info;
    struct visit *visit = arg;
    visit->status = visit->visit(visit->arg, name, visit->err);
    return visit->status != LOWKEY_OK;
}

static herr_t visit_attribute(hid_t object, const char *name, const H5A_info_t *info, void *arg)
{
    (void)info;
    return visit_link(object, name, NULL, arg);
}

/* Links come in no order: for one HDF5 1.10 makes a table, and frees what it never filled where the file is
 * damaged. */
static lowkey_status visit_all(lowkey_h5 *file, const char *object, int attributes, struct visit *visit)
{
    LOWKEY_QUIET;
    LOWKEY_CLOSED hid_t id = -1;
    char reason[LOWKEY_H5_REASON];
    hsize_t at = 0;
    LOWKEY_TRY(lowkey_h5_find(file, object, attributes ? H5I_BADID : H5I_GROUP, "a group", &id, visit->err));
    const herr_t end = attributes ? H5Aiterate2(id, H5_INDEX_NAME, H5_ITER_INC, &at, visit_attribute, visit)
                                  : H5Literate(id, H5_INDEX_NAME, H5_ITER_NATIVE, &at, visit_link, visit);
    if (visit->status) return visit->status;
    if (end < 0)
        return lowkey_h5_fail(file, visit->err, "%s: cannot be listed (%s)", object,
                              lowkey_h5_reason(reason));
    return LOWKEY_OK;
}

lowkey_status lowkey_h5_for_each(lowkey_h5 *file, const char *group,
                                 lowkey_status (*visit)(void *arg, const char *name, lowkey_error *err),
                                 void *arg, lowkey_error *err)
{
    return visit_all(file, group, 0, &(struct visit) { .visit = visit, .arg = arg, .err = err });
}

struct allowed {
    lowkey_h5 *file;
    const char *object, *what;
    const char *const *names;
};

static lowkey_status refuse_unnamed(void *arg, const char *name, lowkey_error *err)
{
    const struct allowed *allowed = arg;
    char expected[200] = "";
    size_t used = 0;
    for (const char *const *n = allowed->names; *n; n++) {
        if (strcmp(*n, name) == 0) return LOWKEY_OK;
        if (used < sizeof expected)
            used += (size_t)snprintf(expected + used, sizeof expected - used, "%s%s", used ? ", " : "", *n);
    }
    return lowkey_h5_fail(allowed->file, err, "%s: unknown %s %.60s; expected %s%s", allowed->object,
                          allowed->what, name, expected[0] ? expected : "none",
                          used >= sizeof expected ? "..." : "");
}

static lowkey_status refuse_unnamed_attribute(void *arg, const char *name, lowkey_error *err)
{
    static const char *const every_root[] = { "schema", "schema_version", "created_by", NULL };
    const struct allowed *allowed = arg;
    if (!allowed->object[1])
        for (const char *const *n = every_root; *n; n++)
            if (strcmp(*n, name) == 0) return LOWKEY_OK;
    return refuse_unnamed(arg, name, err);
}

lowkey_status lowkey_h5_refuse_others(lowkey_h5 *file, const char *group, const char *const *objects,
                                      const char *const *attributes, lowkey_error *err)
{
    if (file->ignores_unknown) return LOWKEY_OK;
    struct allowed allowed = { file, group, "object", objects };
    if (objects)
        LOWKEY_TRY(visit_all(file, group, 0,
                             &(struct visit) { .visit = refuse_unnamed, .arg = &allowed, .err = err }));
    allowed.what = "attribute";
    allowed.names = attributes;
    if (attributes)
        LOWKEY_TRY(
            visit_all(file, group, 1,
                      &(struct visit) { .visit = refuse_unnamed_attribute, .arg = &allowed, .err = err }));
    return LOWKEY_OK;
}
