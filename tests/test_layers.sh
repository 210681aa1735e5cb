#!/bin/bash
# test_layers.sh - the include arrows, who may touch HDF5 and malloc, and what the libraries need and show. Every rule
# is first tried on a line that breaks it, so that a rule that sees nothing is seen.
set -u
cd "$(dirname "$0")/.." || exit 1
: "${B:=build/opt}"
n=0

report() { # report NAME OFFENDERS: good where there are none
    n=$((n + 1))
    if [ -z "$2" ]; then echo "ok $n - $1"; else
        echo "not ok $n - $1"
        printf '%s\n' "$2" | head -20 | sed 's/^/#   /'
    fi
}

# What each folder may include of ours, besides the floor, runtime/lowkey.h and runtime/error.h. calib/command.h and
# calib/threads.h are the manners of the commands.
allowed() {
    case $1 in
    formats) echo 'formats/' ;;
    kernels) echo 'kernels/|formats/' ;;
    runtime) echo 'runtime/|formats/|kernels/' ;;
    calib) echo 'calib/|formats/|kernels/' ;;
    experiments) echo 'experiments/|calib/|formats/|kernels/' ;;
    notebooks-export) echo 'notebooks-export/|calib/|formats/|kernels/' ;;
    tests) echo '[a-z-]*/' ;;
    esac
}

arrows() { # lines FILE:NUMBER:#include "..." on stdin; print those that FOLDER may not have
    grep -vE "^[^:]*:[0-9]+:[[:space:]]*#[[:space:]]*include[[:space:]]*\"($(allowed "$1")|runtime/(lowkey|error)\.h\")"
}

sources() { # the C and CUDA files of a folder
    find "$1" -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null | LC_ALL=C sort
}

includes() { # every #include "..." of the files on stdin
    xargs -r grep -HnE '^[[:space:]]*#[[:space:]]*include[[:space:]]*"'
}

bad=$(
    for pair in formats:kernels/kernels.h formats:runtime/cache.h kernels:runtime/cache.h kernels:calib/fit.h runtime:calib/command.h \
        calib:runtime/cache.h calib:experiments/measure.h experiments:runtime/cache.h formats:page.h; do
        folder=${pair%%:*}
        [ -n "$(echo "x/y.c:3:#include \"${pair#*:}\"" | arrows "$folder")" ] || echo "$pair is not seen"
    done
)
report "the arrow rule sees includes that break it" "$bad"

for folder in formats kernels runtime calib experiments notebooks-export tests; do
    [ -n "$(sources $folder)" ] || continue
    report "$folder includes only what its arrows allow" "$(sources $folder | includes | arrows $folder)"
done

report "only *_h5.c and *_h5.h include HDF5" \
    "$(sources . | grep -v '^./build/' | grep -vE '_h5\.[ch]$' | xargs -r grep -nE '^[[:space:]]*#[[:space:]]*include[[:space:]]*[<"](hdf5|H5)')"

calls='(^|[^a-zA-Z0-9_>.])(malloc|calloc|realloc|aligned_alloc|posix_memalign|strdup|free|alloca|fopen|printf|fprintf|getenv|exit|abort)[[:space:]]*\('
strip() { # FILE:TEXT of files on stdin without comments and strings
    while read -r f; do
        sed -E 's/"([^"\\]|\\.)*"/""/g; s://.*$::' "$f" | perl -0pe 's{/\*.*?\*/}{}gs' | sed "s|^|$f:|"
    done
}
report "the call rule sees malloc and no member of that name" "$(
    [ "$(printf 'x = malloc (3);\na.free(b);\na->free(b);\n  free(p);\nmy_malloc(3);\n' | grep -cE "$calls")" = 2 ] || echo "it does not"
)"
report "kernels take no memory, open no file and print nothing" "$(sources kernels | strip | grep -E "$calls")"
report "the library prints nothing, reads no environment and does not exit" \
    "$(for f in formats kernels runtime; do sources $f; done | grep -v '^formats/probe_h5.c$' | strip | # a child process
        grep -E "(^|[^a-zA-Z0-9_>.])(printf|fprintf|puts|fputs|perror|getenv|secure_getenv|setenv|exit|_exit|abort|system)[[:space:]]*\(")"

undefined() {
    nm -D --undefined-only "$1" | awk '{ print $NF }'
}
report "liblowkey.so needs no HDF5, GSL, BLAS, OpenSSL, Jansson or standard output" \
    "$(undefined "$B/liblowkey.so" | grep -E '^(H5|gsl_|cblas_|openblas_|[sdcz]gemm_|EVP_|SHA|json_|printf|puts|stdout|stderr|getenv|exit|abort)')"
report "liblowkey-h5.so does need HDF5, so the rule above can see it" \
    "$(undefined "$B/liblowkey-h5.so" | grep -qE '^H5' || echo 'no symbol H5...')"
report "liblowkey.so links nothing but the C library" \
    "$(readelf -d "$B/liblowkey.so" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | grep -vE '^(libc|libm|libasan|libubsan|ld-linux-.*|libgcc_s)\.so')"

declared=$(sed -n '/LOWKEY_API/s/.*[ *]\(lowkey_[a-z0-9_]*\)(.*/\1/p' runtime/lowkey.h | LC_ALL=C sort -u)
report "runtime/lowkey.h declares functions" "$([ "$(echo "$declared" | wc -l)" -gt 15 ] || echo "only: $declared")"
for library in liblowkey liblowkey-h5; do
    shown=$(nm -D --defined-only "$B/$library.so" | awk '{ print $NF }' | LC_ALL=C sort -u)
    report "$library.so shows only what runtime/lowkey.h declares" \
        "$(comm -23 <(echo "$shown") <(echo "$declared") | grep -vE '^(__asan_|__ubsan_|__odr_asan|_init|_fini|__bss_start|_edata|_end)')"
done
missing=$(comm -13 <(nm -D --defined-only "$B/liblowkey.so" | awk '{ print $NF }' | LC_ALL=C sort -u) <(echo "$declared") |
    grep -vx lowkey_quantizer_open)
report "liblowkey.so has all that runtime/lowkey.h declares but the reader of files" "$missing"
report "liblowkey-h5.so has the reader of files" \
    "$(nm -D --defined-only "$B/liblowkey-h5.so" | grep -qw lowkey_quantizer_open || echo lowkey_quantizer_open)"
report "no function of ours lacks the prefix lowkey_" \
    "$(nm -g --defined-only "$B/liblowkey.a" "$B/libtools.a" 2>/dev/null | awk 'NF == 3 { print $3 }' | grep -vE '^(lowkey_|__asan|__odr_asan|__ubsan)')"

echo "1..$n"
