#!/bin/sh
# The formats side by side: fit each on some samples of a capture, pack the others into caches, attend with their queries,
# and show what that did to attention. Leaves quantizers, rows (damage.csv) and a plot (damage.png) in FOLDER; a quantizer
# that is there already is kept, so that a run that was stopped goes on.
#   damage.sh ACTIVATIONS.h5 FITTED HELD_OUT FOLDER     samples as FIRST:END; LOWKEY=command, instead of build/lowkey
set -eu
: "${LOWKEY:=build/lowkey}"
data=$1 fitted=$2 held_out=$3 out=$4
common="--samples $fitted --sinks 1"
mkdir -p "$out"
formats=

fit() { # fit NAME OPTION...
    name=$1
    shift
    printf '%-19s lowkey fit %s\n' "$name" "$*"
    formats="$formats $out/$name.quantizer.h5"
    [ -e "$out/$name.quantizer.h5" ] && return
    # shellcheck disable=SC2086
    "$LOWKEY" fit $common "$@" --out "$out/$name.quantizer.h5" "$data" >"$out/$name.fit.txt"
}

echo "Fitting on samples $fitted of $data, the first token of each kept in 16 bits ($common):"
for bits in 4 3 2; do fit "nuq$bits" --bits $bits; done
for bits in 4 3 2; do fit "nuq$bits-1%" --bits $bits --outliers 0.01; done
for bits in 4 3 2; do fit "nuq$bits+feedback" --bits $bits --feedback=keys; done
fit nuq2+feedback+gain --bits 2 --feedback=keys --gain=values
for bits in 4 3 2; do fit "kvquant$bits-1%" --preset kvquant-nuq$bits-1%; done
for bits in 4 3 2; do fit "uniform$bits" --bits $bits --codebook uniform --token-scale f16; done
for bits in 4 3 2; do fit "nf$bits" --bits $bits --codebook normal_float --token-scale f16; done

echo
echo "Attention over samples $held_out, which no format has seen:"
# shellcheck disable=SC2086
"$LOWKEY" error --activations "$data" --samples $held_out --csv "$out/damage.csv" f16 $formats
build/venv/bin/python experiments/plot_error.py "$out/damage.csv" "$out/damage.png"
