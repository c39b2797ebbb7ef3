#!/bin/bash
# One run as a batch job under Flux: rank 0 serves, every other rank hosts clients.
#
#   flux batch jobs/flux/run.flux CONFIG [options of hpcfl run]
#
# Shortly before its time is up the job writes a checkpoint, leaves and hands itself in again, with the #flux: lines
# below; so it does when its ranks are gone without a word. It then goes on after the last checkpoint, on whatever nodes
# it gets, and ends in the same state. `hpcfl stop` and `flux cancel` end it for good; `OUT=<its folder> flux batch ...`
# goes on with it, also after a lost node.
#
#   HPCFL    the command (hpcfl)
#   OUT      the run folder, which all nodes have to see (runs/<config>-<job>)
#   STAGE    a tar of the Python environment (tar -C .venv -cf env.tar .): it and HPCFL_DATA are copied to each node
#   SCRATCH  the folder on each node's own disk for that ($TMPDIR, or /tmp)
#   LAUNCH   what starts the ranks; by itself flux run, with PMIx for Open MPI: hpcfl doctor --launcher
#   MPI4PY_LIBMPI    the MPI library, where mpi4py does not find the right one by itself
#
#flux: --job-name=hpcfl
#flux: --nodes=1
#flux: --nslots=1
#flux: --cores-per-slot=5
#flux: --time-limit=60m
#flux: --output=hpcfl-{{id}}.log
# a slot is a node's share; on GPUs (without the second #) the ranks of a node share them out, one each
#flux: # --gpus-per-slot=4
set -euo pipefail
ranks=5 # on each node

config=${1:?expected: flux batch run.flux CONFIG [options of hpcfl run]}
shift
: "${HPCFL:=hpcfl}" "${STAGE:=}" "${SCRATCH:=${TMPDIR:-/tmp}}"
job=$(flux job id --to=dec "$(flux getattr jobid)") nodes=$(flux getattr hostlist) restarted=${HPCFL_RESTARTED:-}
: "${OUT:=runs/$(basename "$config" .toml)-$job}"
export OUT # also of the job that goes on
whole=("$0" "$config" "$@")

queue_again() {
    HPCFL_RESTARTED=1 flux --parent batch "${whole[@]}"
}
each_node() {
    flux exec "$@"
}

# told so many seconds before the time is up: time for a round and a checkpoint
warn() {
    trap 'kill $!; wait; exit' TERM
    sleep $(($1 > 120 ? $1 - 120 : 0)) &
    wait $! && kill -USR1 $$
}
warn "$(flux job timeleft)" &>/dev/null &
clock=$!

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
size=$(flux getattr size)
LAUNCH=${LAUNCH:-$("$HPCFL" doctor --launcher) --nodes=$size --ntasks=$((size * ranks))}
eval "launch=($LAUNCH)"

# --- from here on scripts for other schedulers are the same
stage='set -e; mkdir -p "${1%/*}"; new=$(mktemp -d "$1.XXXXXX"); trap "rm -rf \"\$new\"" EXIT
mkdir "$new/env"; tar -xf "$2" -C "$new/env"; [ -z "$3" ] || cp -rL "$3" "$new/data"
mv -T "$new" "$1" 2>/dev/null || true; [ -x "$1/env/bin/python" ]' # what is there is whole
hpcfl=("$HPCFL") data=${HPCFL_DATA:+$(realpath "$HPCFL_DATA")} here=$SCRATCH/hpcfl-$job staged=''
leave() { # and clear the nodes' disks
    [ -z "$staged" ] || each_node rm -rf "$here" || true
    [ -z "$clock" ] || { kill "$clock" && wait "$clock"; } 2>/dev/null || true
    for each in $(pgrep -s 0 -x srun); do # by which Open MPI's daemons ran: Slurm without cgroups may forget it
        grep -qzx "STARTED_BY=$$" "/proc/$each/environ" && kill -KILL "$each" || true
    done 2>/dev/null
    staged='' clock=''
}
trap leave EXIT
if [ "$STAGE" ]; then
    staged=yes
    if ! each_node bash -c "$stage" stage "$here" "$(realpath "$STAGE")" "$data"; then
        echo "hpcfl job: $STAGE was not unpacked in $here: expected a tar with bin/python, and room" >&2
        exit 2
    fi
    hpcfl=("$here/env/bin/python" -m hpcfl)
    data=${data:+$here/data}
fi

for word; do
    if [[ $word = --out* ]]; then
        echo "hpcfl job: $word: the folder is named by OUT" >&2
        exit 2
    fi
done

saved() { # the newest checkpoint
    { ls "$OUT/checkpoints" 2>/dev/null || true; } | grep -o '^round-[0-9]*' | sort | tail -n 1 || true
}

again='' told='' launcher=''
trap 'again=yes; [ -z "$launcher" ] || kill -USR1 "$launcher"' USR1
trap 'told=yes' TERM # preempted or cancelled: the scheduler has told the ranks itself, and does the rest

echo "hpcfl job: $OUT on $nodes, started by $LAUNCH"
before=$(saved)
# mpiexec over ssh takes no environment along; a restarted job knows that its earlier self is gone, even if that self
# could not say so (a lost node); by STARTED_BY leave() knows what it may end
STARTED_BY=$$ "${launch[@]}" env "OMP_NUM_THREADS=$OMP_NUM_THREADS" ${data:+"HPCFL_DATA=$data"} \
    ${MPI4PY_LIBMPI:+"MPI4PY_LIBMPI=$MPI4PY_LIBMPI"} ${PYTHONPATH:+"PYTHONPATH=$PYTHONPATH"} \
    "${hpcfl[@]}" run "$config" --out "$OUT" --resume ${restarted:+--force} "$@" &
launcher=$!

code=0
wait "$launcher" || code=$?
while kill -0 "$launcher" 2>/dev/null; do # that was a trap
    code=0
    wait "$launcher" || code=$?
done
# what the run says counts, not the exit code: launchers have codes of their own
state=$(head -n 1 "$OUT/status" 2>/dev/null) || true
if [ "$state" = stopped ] && [ "$again" ]; then
    leave
    queue_again
elif [ "$state" = running ] && [ -z "$told" ] && [ "$(saved)" != "$before" ]; then
    echo "hpcfl job: the ranks are gone without a word ($code), a node may be lost: queued again after $(saved)"
    leave
    queue_again
fi
[ "$state" = done ] || [ "$code" != 0 ] || code=1 # Open MPI's mpiexec returns 0 for a lost node
exit "$code"
