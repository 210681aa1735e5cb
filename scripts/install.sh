#!/bin/sh
# Install what was built: install.sh BUILD PREFIX [DESTDIR]. Libraries, the public header, pkg-config files, the command.
#   lowkey.pc      liblowkey: quantizers from memory, caches, attention; needs the C library alone
#   lowkey-h5.pc   and the reader of quantizer.h5, which needs HDF5
set -eu
build=$1 prefix=$2 root=${3:-}$2

version() {
    sed -n "s/^#define LOWKEY_VERSION_$1 *//p" runtime/lowkey.h
}
major=$(version MAJOR) full=$(version MAJOR).$(version MINOR)

install -d "$root/bin" "$root/include" "$root/lib/pkgconfig"
install -m 755 "$build/lowkey" "$root/bin/lowkey"
install -m 644 runtime/lowkey.h "$root/include/lowkey.h"
for library in liblowkey liblowkey-h5; do
    install -m 644 "$build/$library.a" "$root/lib/$library.a"
    install -m 755 "$build/$library.so" "$root/lib/$library.so.$full"
    ln -sf "$library.so.$full" "$root/lib/$library.so.$major"
    ln -sf "$library.so.$major" "$root/lib/$library.so"
done

pkg_config() { # NAME DESCRIPTION REQUIRES LIBS PRIVATE-REQUIRES PRIVATE-LIBS
    cat >"$root/lib/pkgconfig/$1.pc" <<END
prefix=$prefix
libdir=\${prefix}/lib
includedir=\${prefix}/include

Name: $1
Description: $2
Version: $full
Requires: $3
Requires.private: $5
Libs: -L\${libdir} $4
Libs.private: $6
Cflags: -I\${includedir}
END
}
pkg_config lowkey 'A paged KV cache of 1 to 16 bits, and attention over it' '' -llowkey '' -lm
pkg_config lowkey-h5 'Quantizers of lowkey from HDF5 files' lowkey -llowkey-h5 'hdf5 libcrypto' -lm
