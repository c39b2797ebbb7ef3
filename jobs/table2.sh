#!/bin/sh
# Table II of the SALF paper at 90 % stragglers, MLP: three methods, the released code's rule and the paper's, SEEDS seeds.
#   HPCFL_DATA=folder-that-holds-mnist BIN=.venv/bin sh jobs/table2.sh
# About 10 s a run on one core. Finished runs are skipped.
set -eu
out=runs/table2
for seed in ${SEEDS:-1 2 3}; do
    for method in vanilla drop salf; do
        "$BIN/hpcfl" run "table2-mlp-$method" --set seed="$seed" --out "$out/$method-released-$seed" --resume --quiet
    done
    for method in drop salf; do
        "$BIN/hpcfl" run "table2-mlp-$method" --set seed="$seed" --set algorithm.rule=paper \
            --out "$out/$method-paper-$seed" --resume --quiet
    done
done
"$BIN/python" analysis/salf_table2.py "$out"/*
