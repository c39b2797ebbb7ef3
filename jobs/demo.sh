#!/bin/sh
# The demo: three presets on RANKS ranks, a table and a picture. A second start finds the runs done and only shows them.
#   BIN=.venv/bin MPIRUN=mpirun RANKS=5 sh jobs/demo.sh
set -eu
out=runs/demo
for preset in salf-digits fedavg-digits drop-digits; do
    echo "demo: $preset on $RANKS ranks"
    sh -c "$MPIRUN -n $RANKS $BIN/hpcfl run $preset --out $out/$preset --resume" </dev/null
done
"$BIN/hpcfl" show "$out/salf-digits" "$out/fedavg-digits" "$out/drop-digits"
"$BIN/hpcfl" plot "$out/salf-digits" "$out/fedavg-digits" "$out/drop-digits" -o "$out/accuracy.png"
