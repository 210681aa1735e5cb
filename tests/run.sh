#!/bin/bash
# Run every test file and count: C programs ($B/tests/test_*), Python (tests/test_*.py), shell (tests/test_*.sh).
# Each prints TAP ("ok 1 - name", "not ok 1 - name", "... # SKIP reason", plan "1..n"); a program that dies or prints
# fewer results than its plan has failed. With a word: only files whose name holds it. FULL=1: what takes long too.
set -u
cd "$(dirname "$0")/.." || exit 1
: "${B:=build/opt}"
export B FULL="${FULL:-0}" CMOCKA_MESSAGE_OUTPUT=TAP OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-2}"
word=${1:-}
passed=0 failed=0 skipped=0
log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT

run() { # run NAME COMMAND...
    local name=$1 start=$SECONDS
    shift
    "$@" >"$log/out" 2>"$log/err" </dev/null
    local rc=$?
    local s f p n
    s=$(grep -cE '^(not )?ok .*# SKIP' "$log/out")
    f=$(grep -E '^not ok' "$log/out" | grep -vcE '# SKIP')
    p=$(grep -E '^ok' "$log/out" | grep -vcE '# SKIP')
    n=$(sed -n 's/^1\.\.\([0-9]*\).*/\1/p' "$log/out" | awk '{ n += $1 } END { print n + 0 }')
    if [ "$f" = 0 ] && { [ "$rc" != 0 ] || [ "$n" != $((s + f + p)) ] || [ "$n" = 0 ]; }; then
        f=1
        echo "not ok - $name: exit $rc, $((s + p)) of $n results" >>"$log/out"
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    printf '%-44s %4d passed %3d failed %3d skipped %5d s\n' "$name" "$p" "$f" "$s" $((SECONDS - start))
    grep -E '# SKIP|^# skipped because' "$log/out" | sed 's/^/    /'
    if [ "$f" != 0 ]; then
        grep -vE '^ok' "$log/out" | tail -60 | sed 's/^/    /'
        tail -60 "$log/err" | sed 's/^/    /'
    fi
}

for t in tests/test_*.c; do
    stem=$(basename "$t" .c)
    case $stem in *"$word"*) run "$stem.c" "$B/tests/$stem" ;; esac
done
for t in tests/test_*.py; do
    [ -e "$t" ] || continue
    case $(basename "$t") in *"$word"*) run "$(basename "$t")" build/venv/bin/python "$t" ;; esac
done
for t in tests/test_*.sh; do
    [ -e "$t" ] || continue
    case $(basename "$t") in *"$word"*) run "$(basename "$t")" bash "$t" ;; esac
done

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ] && [ "$passed" != 0 ]
