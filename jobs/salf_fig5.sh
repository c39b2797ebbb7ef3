#!/bin/sh
# Figure 5 of the SALF paper: accuracy against the deadline. At the paper's size in simulated time, and with 4 clients and
# 80 rounds in simulated and in real time on 5 ranks. Finished runs are skipped, others gone on with. Some 50
# minutes on two free cores, by the time of its parts; 30 of them in real time.
#   HPCFL_DATA=folder-that-holds-mnist BIN=.venv/bin MPIRUN=mpirun sh jobs/salf_fig5.sh
set -eu
export OMP_NUM_THREADS=1
out=${OUT:-runs/salf-fig5}
shares="algorithm.shares=[0.1,0.9],[0.3,0.7],[0.5,0.5],[0.7,0.3]"
sweep() {
    "$BIN/hpcfl" sweep "$@" --seeds "${SEEDS:-1-3}"
}
few="--set clients=4 --set rounds=80 --set evaluate.every=80 --set evaluate.last=3"
late="--set speed.longest=1.6 --grid participation.deadline=0.16,0.48,0.8,1.12,1.6"
simulated() {
    sweep "$@" $few --jobs 2 --out "$out/simulated"
}
simulated salf-fig5-salf salf-fig5-drop salf-fig5-async $late
simulated table2-cnn-heterofl-text --grid "$shares"
simulated table2-cnn-vanilla-text
real() {
    sweep "$@" $few --set clock=wall --launcher "$MPIRUN -n 5" --jobs 2 --out "$out/real"
}
real salf-fig5-salf salf-fig5-drop salf-fig5-async $late
real table2-cnn-heterofl-text --grid "$shares"
real table2-cnn-vanilla-text
paper() {
    sweep "$@" --jobs 2 --out "$out/paper"
}
paper salf-fig5-salf salf-fig5-drop salf-fig5-async --grid participation.deadline=0.1,0.3,0.5,0.7,1.0
paper table2-cnn-heterofl-text --grid "$shares"
paper table2-cnn-vanilla-text
"$BIN/python" analysis/salf_deadlines.py -o "$out/fig5.png" "$out"/*/*/
