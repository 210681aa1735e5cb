#!/bin/bash
# test_demo.sh - the demo as make demo runs it, into a folder of its own: its table, rows, plot, and how long it takes.
set -u
cd "$(dirname "$0")/.." || exit 1
: "${B:=build/opt}"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
data=experiments/data/demo/smollm2-135m.activations.h5
n=0

check() { # check NAME COMMAND...
    n=$((n + 1))
    if "${@:2}" >"$folder/why" 2>&1; then echo "ok $n - $1"; else
        echo "not ok $n - $1"
        sed 's/^/#   /' "$folder/why" | tail -20
    fi
}

echo 1..6
TIMEFORMAT='%U %S'
{ time LOWKEY=$B/lowkey scripts/demo.sh "$folder/demo" >"$folder/out" 2>"$folder/err"; } 2>"$folder/time"
rc=$?

ran() { cat "$folder/err" && [ $rc = 0 ] && [ ! -s "$folder/err" ]; }
check "demo: it runs and complains of nothing" ran

# f16, and nineteen formats in the order of the script; three figures of each that do not depend on the data
table() {
    cat "$folder/out"
    for row in "f16 16.00" "nuq4 4.00" "nuq3 3.00" "nuq2 2.00" "nuq4-1% 4.[34]" "nuq3-1% 3.[34]" "nuq2-1% 2.[34]" \
        "nuq4.feedback 4.00" "nuq3.feedback 3.00" "nuq2.feedback 2.00" \
        "nuq2.feedback.gain 2.00" "kvquant4-1% 4.4" "kvquant3-1% 3.4" "kvquant2-1% 2.4" "uniform4 4.17" "uniform3 3.17" \
        "uniform2 2.17" "nf4 4.17" "nf3 3.17" "nf2 2.17"; do
        grep -qE "^${row% *} +${row#* }" "$folder/out" || { echo "no row: $row"; return 1; }
    done
}
check "demo: the table has every format with its bits" table

# Feedback more than halves the softmax KL of 2-bit keys, and all that is fitted beats what is not.
order() {
    awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) column[$i] = i; next }
             { kl[$column["format"]] = $column["softmax_kl"]; overlap += $column["fit_overlap"] }
             END { print NR, kl["nuq2"], kl["nuq2+feedback"], kl["uniform2"], kl["nuq4"]
                   exit !(NR == 21 && overlap == 0 && kl["f16"] < 1e-6 && kl["nuq2+feedback"] < kl["nuq2"] / 2 &&
                          kl["nuq2"] < kl["nf2"] && kl["nf2"] < kl["uniform2"] && kl["nuq4"] < kl["nuq3"] && kl["nuq3"] < kl["nuq2"]) }' \
        "$folder/demo/damage.csv"
}
check "demo: the rows say what the formats are known for, on samples that none was fitted on" order

plot() { [ "$(head -c 8 "$folder/demo/damage.png" | od -An -tx1 | tr -d ' \n')" = 89504e470d0a1a0a ] &&
    [ "$(wc -c <"$folder/demo/damage.png")" -gt 20000 ]; }
check "demo: the plot is a PNG" plot

quick() { cat "$folder/time" && awk '{ exit !($1 + $2 < 50) }' "$folder/time"; }
if [ "${SAN:-0}" = 1 ]; then
    n=$((n + 1))
    echo "ok $n - demo: it takes less than a minute # SKIP sanitizers slow it down"
else
    check "demo: it takes less than a minute of one CPU" quick
fi

same() { # a fit on some samples of a file is the fit on a file of those samples
    build/venv/bin/python experiments/cut_activations.py $data "$folder/cut.activations.h5" --samples 1:3 &&
        "$B/lowkey" fit --samples 1:3 --bits 3 --feedback --out "$folder/some.h5" $data &&
        "$B/lowkey" fit --bits 3 --feedback --out "$folder/cut.h5" "$folder/cut.activations.h5" && cmp "$folder/some.h5" "$folder/cut.h5"
}
check "demo: fitting on some samples of a file equals fitting on a file of them" same
