#!/bin/sh
# Table II and Figures 3 and 4 of the SALF paper: two models, five methods, four shares of stragglers, the settings of the
# released code and of the text, SEEDS seeds, JOBS runs at a time. Finished runs are skipped, others gone on with.
#   HPCFL_DATA=folder-that-holds-mnist BIN=.venv/bin sh jobs/table2.sh
# On one core a run takes about 8 s (MLP) or 20 s (CNN); MODELS=mlp, MODELS=cnn or SEEDS=1 for less.
set -eu
out=${OUT:-runs/table2}
export OMP_NUM_THREADS=1
sweep() {
    "$BIN/hpcfl" sweep "$@" --seeds "${SEEDS:-1-3}" --jobs "${JOBS:-2}" --out "$out"
}
for model in ${MODELS:-mlp cnn}; do
    table=table2-$model
    sweep "$table-vanilla" "$table-vanilla-text"
    for method in drop salf async; do
        sweep "$table-$method" "$table-$method-text" --grid speed.stragglers=0.3,0.5,0.7,0.9
    done
    sweep "$table-heterofl" "$table-heterofl-text" --grid "algorithm.shares=[0.7,0.3],[0.5,0.5],[0.3,0.7],[0.1,0.9]"
done
"$BIN/python" analysis/salf_table2.py -o "$out/fig3-4.png" "$out"/*/
