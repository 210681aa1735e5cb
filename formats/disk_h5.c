/* disk_h5.c - the driver through which HDF5 writes our files. It differs from HDF5's own in one thing: after
 * the first write that fails, it remembers why and drops all further ones. HDF5 itself cannot close a file
 * that it cannot write out (a full disk leaves it open until the program's end, and then complains aloud). */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "formats/parts_h5.h"
#include "runtime/error.h"
#if H5_VERSION_GE(1, 13, 0)
#include <H5FDdevelop.h>
#endif

struct disk {
    H5FD_t base; /* HDF5 fills it in */
    int fd;
    int *error;
    haddr_t eoa, eof; /* end of what HDF5 has allocated; of what is in the file */
};

struct disk_info {
    int fd;
    int *error;
};

static H5FD_t *disk_open(const char *name, unsigned flags, hid_t access, haddr_t max_address)
{
    (void)name, (void)flags, (void)max_address;
    const struct disk_info *info = H5Pget_driver_info(access);
    struct stat status;
    if (!info || fstat(info->fd, &status) != 0) return NULL;
    struct disk *disk = calloc(1, sizeof *disk);
    if (!disk) {
        *info->error = ENOMEM;
        return NULL;
    }
    disk->fd = info->fd;
    disk->error = info->error;
    disk->eof = (haddr_t)status.st_size;
    return &disk->base;
}

static herr_t disk_close(H5FD_t *file)
{
    free(file);
    return 0;
}

static herr_t disk_query(const H5FD_t *file, unsigned long *flags)
{
    (void)file;
    *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA | H5FD_FEAT_DATA_SIEVE |
             H5FD_FEAT_AGGREGATE_SMALLDATA;
    return 0;
}

static haddr_t disk_get_eoa(const H5FD_t *file, H5FD_mem_t type)
{
    (void)type;
    return ((const struct disk *)file)->eoa;
}

static herr_t disk_set_eoa(H5FD_t *file, H5FD_mem_t type, haddr_t address)
{
    (void)type;
    ((struct disk *)file)->eoa = address;
    return 0;
}

static haddr_t disk_get_eof(const H5FD_t *file, H5FD_mem_t type)
{
    (void)type;
    return ((const struct disk *)file)->eof;
}

static herr_t disk_read(H5FD_t *file, H5FD_mem_t type, hid_t transfer, haddr_t address, size_t size,
                        void *buffer)
{
    (void)type, (void)transfer;
    const struct disk *disk = (const struct disk *)file;
    char *to = buffer;
    while (size > 0) {
        const ssize_t n = pread(disk->fd, to, size, (off_t)address);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return -1;
        if (n == 0) break;
        to += n, address += (haddr_t)n, size -= (size_t)n;
    }
    memset(to, 0, size); /* behind the end of the file: as in a hole */
    return 0;
}

static herr_t disk_write(H5FD_t *file, H5FD_mem_t type, hid_t transfer, haddr_t address, size_t size,
                         const void *buffer)
{
    (void)type, (void)transfer;
    struct disk *disk = (struct disk *)file;
    const char *from = buffer;
    if (address + size > disk->eof) disk->eof = address + size;
    while (size > 0 && !*disk->error) {
        const ssize_t n = pwrite(disk->fd, from, size, (off_t)address);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            *disk->error = n < 0 ? errno : ENOSPC;
        else
            from += n, address += (haddr_t)n, size -= (size_t)n;
    }
    return 0;
}

static herr_t disk_truncate(H5FD_t *file, hid_t transfer, hbool_t closing)
{
    (void)transfer, (void)closing;
    struct disk *disk = (struct disk *)file;
    if (disk->eof != disk->eoa && !*disk->error && ftruncate(disk->fd, (off_t)disk->eoa) != 0)
        *disk->error = errno;
    disk->eof = disk->eoa;
    return 0;
}

static const H5FD_class_t disk_class = {
#if H5_VERSION_GE(1, 13, 0)
    .version = H5FD_CLASS_VERSION,
    .value = (H5FD_class_value_t)511, /* of the range for tests and private use */
#endif
    .name = "lowkey_disk",
    .maxaddr = ((haddr_t)1 << 62) - 1,
    .fc_degree = H5F_CLOSE_STRONG,
    .fapl_size = sizeof(struct disk_info),
    .open = disk_open,
    .close = disk_close,
    .query = disk_query,
    .get_eoa = disk_get_eoa,
    .set_eoa = disk_set_eoa,
    .get_eof = disk_get_eof,
    .read = disk_read,
    .write = disk_write,
    .truncate = disk_truncate,
    .fl_map = H5FD_FLMAP_DICHOTOMY,
};

lowkey_status lowkey_h5_use_disk(lowkey_h5 *file, hid_t access, lowkey_error *err)
{
    const struct disk_info info = { file->fd, &file->disk_error };
    file->driver = H5FDregister(&disk_class);
    if (file->driver < 0 || H5Pset_driver(access, file->driver, &info) < 0)
        return lowkey_fail(err, LOWKEY_ENOMEM, "%s: HDF5 takes no driver", file->path);
    return LOWKEY_OK;
}

lowkey_status lowkey_h5_check_disk(const lowkey_h5 *file, lowkey_error *err)
{
    if (!file->disk_error) return LOWKEY_OK;
    return lowkey_fail(err, file->disk_error == ENOMEM ? LOWKEY_ENOMEM : LOWKEY_EIO,
                       "%s: cannot be written: %s", file->path, strerror(file->disk_error));
}
