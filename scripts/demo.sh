#!/bin/sh
# The main job on real activations that ship with the project. Leaves quantizers, rows and a plot in build/demo.
#   demo.sh [FOLDER]
set -eu
cd "$(dirname "$0")/.."
out=${1:-build/demo}
rm -f "$out"/*.quantizer.h5 "$out"/*.fit.txt "$out"/damage.csv "$out"/damage.png
scripts/damage.sh experiments/data/demo/smollm2-135m.activations.h5 0:3 3:4 "$out"
echo
echo "Quantizers, rows (damage.csv) and a plot (damage.png) are in $out; try: ${LOWKEY:-build/lowkey} inspect $out/nuq2.quantizer.h5"
