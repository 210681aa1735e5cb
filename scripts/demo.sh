#!/bin/sh
# The main job on real activations that ship with the project: fit formats on the first samples, pack the last one into
# caches, attend with its queries, and show what that did to attention. Leaves quantizers, rows and a plot in build/demo.
#   demo.sh [FOLDER]        LOWKEY=command, instead of build/lowkey
set -eu
: "${LOWKEY:=build/lowkey}"
cd "$(dirname "$0")/.."
data=experiments/data/demo/smollm2-135m.activations.h5
out=${1:-build/demo}
fitted=0:3 held_out=3:4
common="--samples $fitted --sinks 1"
mkdir -p "$out"
rm -f "$out"/*.quantizer.h5 "$out"/demo.csv "$out"/demo.png
formats=

fit() { # fit NAME OPTION...
    name=$1
    shift
    printf '%-19s lowkey fit %s\n' "$name" "$*"
    # shellcheck disable=SC2086
    "$LOWKEY" fit $common "$@" --out "$out/$name.quantizer.h5" "$data" >"$out/fit.txt"
    formats="$formats $out/$name.quantizer.h5"
}

echo "Fitting on samples $fitted of $data, the first token of each kept in 16 bits ($common):"
for bits in 4 3 2; do fit "nuq$bits" --bits $bits; done
fit nuq2-1% --bits 2 --outliers 0.01
for bits in 3 2; do fit "nuq$bits+feedback" --bits $bits --feedback=keys; done
fit nuq2+feedback+gain --bits 2 --feedback=keys --gain=values
for bits in 4 3 2; do fit "kvquant$bits-1%" --preset kvquant-nuq$bits-1%; done
for bits in 4 3 2; do fit "uniform$bits" --bits $bits --codebook uniform --token-scale f16; done
for bits in 4 3 2; do fit "nf$bits" --bits $bits --codebook normal_float --token-scale f16; done
rm -f "$out/fit.txt"

echo
echo "Attention over sample $held_out, which no format has seen:"
# shellcheck disable=SC2086
"$LOWKEY" error --activations "$data" --samples $held_out --csv "$out/demo.csv" f16 $formats
build/venv/bin/python experiments/plot_error.py "$out/demo.csv" "$out/demo.png"
echo
echo "Quantizers, rows (demo.csv) and a plot (demo.png) are in $out; try: build/lowkey inspect $out/nuq2.quantizer.h5"
