#!/bin/bash
# test_install.sh - make install into folders of its own: programs in C and C++ built with pkg-config alone, against the
# shared and the static library, and Python through ctypes, make a cache, append, attend.
set -u
cd "$(dirname "$0")/.." || exit 1
: "${B:=build/opt}"
export SAN=${SAN:-0}
unset MAKEFLAGS MAKELEVEL MFLAGS
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
n=0 sanitize=() preload=
if [ "$SAN" = 1 ]; then
    sanitize=(-fsanitize=address,undefined)
    preload=$(cc -print-file-name=libasan.so):$(cc -print-file-name=libubsan.so)
fi

check() { # check NAME COMMAND...
    local name=$1
    shift
    n=$((n + 1))
    if "$@" >"$work/log" 2>&1; then echo "ok $n - $name"; else
        echo "not ok $n - $name"
        tail -20 "$work/log" | sed 's/^/#   /'
    fi
}

cat >"$work/program.c" <<'END'
#include <lowkey.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* 70 tokens of one head of 8 channels in 16 bits: every value of channel c is c, so the output is. */
int main(void)
{
    uint8_t bits[8];
    float lower[8], upper[8], rows[70 * 8], out[8];
    int i, sequence = 0, n = 70;
    lowkey_layer_desc layer;
    lowkey_quantizer_desc desc;
    lowkey_context_config context_config;
    lowkey_cache_config cache_config;
    lowkey_attend_args args;
    lowkey_quantizer *quantizer = NULL;
    lowkey_context *context = NULL;
    lowkey_cache *cache = NULL;
    lowkey_rows given;
    lowkey_error err;
    for (i = 0; i < 8; i++) bits[i] = 16, lower[i] = -8, upper[i] = 8;
    for (i = 0; i < 70 * 8; i++) rows[i] = (float)(i % 8);
    memset(&layer, 0, sizeof layer), memset(&desc, 0, sizeof desc), memset(&args, 0, sizeof args);
    memset(&context_config, 0, sizeof context_config), memset(&cache_config, 0, sizeof cache_config);
    memset(&given, 0, sizeof given);
    layer.struct_size = sizeof layer, layer.n_q_heads = layer.n_kv_heads = 1;
    layer.key_head_dim = layer.value_head_dim = 8;
    layer.key.struct_size = sizeof layer.key, layer.key.bits = bits, layer.key.lower = lower, layer.key.upper = upper;
    layer.key.rule_16 = LOWKEY_RULE_F16;
    layer.value = layer.key;
    desc.struct_size = sizeof desc, desc.n_layers = 1, desc.layers = &layer;
    context_config.struct_size = sizeof context_config;
    cache_config.struct_size = sizeof cache_config, cache_config.n_pages = 2, cache_config.max_sequences = 1;
    given.data = rows;
    if (lowkey_quantizer_create(&desc, NULL, &quantizer, &err) || lowkey_context_create(&context_config, &context, &err) ||
        lowkey_cache_create(context, quantizer, &cache_config, &cache, &err) || lowkey_cache_reserve(cache, 0, n, &err) ||
        lowkey_cache_append(cache, 0, 1, &sequence, &n, given, given, &err))
        return fprintf(stderr, "%s\n", err.message), 1;
    args.struct_size = sizeof args, args.n = 1, args.sequences = &sequence, args.q = given, args.out = out;
    args.workspace_bytes = lowkey_attend_workspace_bytes(cache, &args);
    args.workspace = aligned_alloc(64, args.workspace_bytes);
    if (lowkey_attend(cache, &args, &err)) return fprintf(stderr, "%s\n", err.message), 1;
    for (i = 0; i < 8; i++)
        if (fabs(out[i] - i) > 1e-4) return fprintf(stderr, "channel %d: %g\n", i, (double)out[i]), 1;
    free(args.workspace);
    lowkey_cache_free(cache), lowkey_context_free(context), lowkey_quantizer_free(quantizer);
#ifdef READS_FILES
    if (lowkey_quantizer_open("/nowhere.h5", NULL, &quantizer, &err) != LOWKEY_EIO || !strstr(err.message, "/nowhere.h5"))
        return fprintf(stderr, "open: %s\n", err.message), 1;
#endif
    printf("lowkey %s\n", lowkey_version());
    return 0;
}
END
cp "$work/program.c" "$work/program.cc"
cat >"$work/program.py" <<'END'
import ctypes, sys
lowkey = ctypes.CDLL(sys.argv[1])
lowkey.lowkey_version.restype = ctypes.c_char_p
class Error(ctypes.Structure):
    _fields_ = [("status", ctypes.c_int), ("message", ctypes.c_char * 508)]
class Config(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("device", ctypes.c_char_p), ("isa", ctypes.c_char_p),
                ("device_index", ctypes.c_int), ("stream", ctypes.c_void_p), ("allocator", ctypes.c_void_p * 3),
                ("parallel_for", ctypes.c_void_p), ("parallel_user", ctypes.c_void_p)]
error, context = Error(), ctypes.c_void_p()
config = Config(struct_size=ctypes.sizeof(Config), device=b"cuda")
assert lowkey.lowkey_context_create(ctypes.byref(config), ctypes.byref(context), ctypes.byref(error)) == 5
assert b"cuda" in error.message and not context
config.device = b"cpu"
assert lowkey.lowkey_context_create(ctypes.byref(config), ctypes.byref(context), ctypes.byref(error)) == 0, error.message
lowkey.lowkey_context_isa.restype = ctypes.c_char_p
assert lowkey.lowkey_context_isa(context)
lowkey.lowkey_context_free(context)
print(lowkey.lowkey_version().decode())
END

root=$work/root prefix=$work/usr
check "make install with DESTDIR and PREFIX" make -s install DESTDIR="$root" PREFIX=/opt/lowkey
check "make install with PREFIX alone" make -s install PREFIX="$prefix"
check "nothing is written outside of DESTDIR" test ! -e /opt/lowkey
check "both trees hold the same files, and .pc files name their own prefix" bash -c "
    diff <(cd '$root/opt/lowkey' && find . | sort) <(cd '$prefix' && find . | sort) &&
    grep -qx prefix=/opt/lowkey '$root/opt/lowkey/lib/pkgconfig/lowkey.pc' &&
    grep -qx 'prefix=$prefix' '$prefix/lib/pkgconfig/lowkey-h5.pc'"
check "shared libraries are links by soname" bash -c "
    cd '$prefix/lib' && for l in liblowkey liblowkey-h5; do
        [ -L \$l.so ] && [ -L \$l.so.0 ] && [ -f \$l.so.0.1 ] &&
        readelf -d \$l.so.0.1 | grep -q \"SONAME.*\[\$l.so.0\]\" || exit 1; done"
check "the installed command runs" bash -c "'$prefix/bin/lowkey' --version | grep -qE '^lowkey 0\.1 [0-9a-z-]+$'"

export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
c=(cc -std=c11 -pedantic -Wall -Wextra -Werror "${sanitize[@]}" "$work/program.c")
cxx=(c++ -std=c++17 -pedantic -Wall -Wextra -Werror "${sanitize[@]}" "$work/program.cc")
runs() { # runs PROGRAM: with the installed shared libraries
    LD_LIBRARY_PATH=$prefix/lib "$1" | grep -qx 'lowkey 0.1'
}
build() { # build OUTPUT COMMAND...
    local out=$1
    shift
    "$@" -o "$out" && runs "$out"
}
# shellcheck disable=SC2046
{
    check "C, shared" build "$work/c" "${c[@]}" $(pkg-config --cflags --libs lowkey) -lm
    check "C++, shared" build "$work/cc" "${cxx[@]}" $(pkg-config --cflags --libs lowkey)
    check "C, shared, reading files" build "$work/ch5" "${c[@]}" -DREADS_FILES $(pkg-config --cflags --libs lowkey-h5) -lm
    if [ "$SAN" = 1 ]; then
        n=$((n + 1)); echo "ok $n - C, everything static # SKIP the sanitizers' runtime is shared"
        n=$((n + 1)); echo "ok $n - C++, everything static # SKIP the sanitizers' runtime is shared"
    else
        check "C, everything static" build "$work/static" "${c[@]}" -static $(pkg-config --static --cflags --libs lowkey)
        check "C++, everything static" build "$work/staticc" "${cxx[@]}" -static $(pkg-config --static --cflags --libs lowkey)
    fi
    check "C, static lowkey and shared HDF5, reading files" build "$work/ch5s" "${c[@]}" -DREADS_FILES \
        $(pkg-config --cflags lowkey-h5) -Wl,-Bstatic $(pkg-config --libs lowkey-h5) -Wl,-Bdynamic $(pkg-config --libs hdf5 libcrypto) -lm
}
check "programs that link the shared library need it by soname" bash -c "readelf -d '$work/c' | grep -q 'NEEDED.*liblowkey.so.0'"
check "programs that link the static library need none" bash -c "! readelf -d '$work/ch5s' | grep -q 'NEEDED.*liblowkey'"
check "a tree under DESTDIR is found through PKG_CONFIG_SYSROOT_DIR" bash -c "
    export PKG_CONFIG_PATH='$root/opt/lowkey/lib/pkgconfig' PKG_CONFIG_SYSROOT_DIR='$root'
    cc ${sanitize[*]} '$work/program.c' -o '$work/moved' \$(pkg-config --cflags --libs lowkey) -lm &&
    LD_LIBRARY_PATH='$root/opt/lowkey/lib' '$work/moved'"
check "Python, through ctypes" env LD_PRELOAD="$preload" ASAN_OPTIONS=detect_leaks=0 python3 "$work/program.py" "$prefix/lib/liblowkey.so.0"

echo "1..$n"
