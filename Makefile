# make demo | test | test-all | tutorials | test-slurm | test-hosts | test-hosts-all | check | judges | docs | atlas | atlas-quick | papers | papers-quick | flamby | table2 | salf-fig5 | bench | bench-wall | bench-gpu | package | test-package | clean
# Everything is installed below this folder: .venv (packages) and .mpi/<name> (each MPI under a prefix of its own).

PYTHON ?= python3
TORCH ?= torch>=2.4
RANKS ?= 5

# read by Open MPI's launcher: containers often run as root
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1

BIN = .venv/bin
MPIRUN = MPI4PY_LIBMPI=$(CURDIR)/.mpi/openmpi/lib/libmpi.so.40 .mpi/openmpi/bin/mpiexec --map-by :oversubscribe

.PHONY: demo test test-all tutorials test-slurm test-hosts test-hosts-all check judges docs atlas atlas-quick papers papers-quick flamby table2 salf-fig5 bench bench-wall bench-gpu package test-package setup clean

setup: .venv/ready .mpi/openmpi/ready .mpi/mpich/ready

demo: .venv/runs .mpi/openmpi/ready
	@MPI4PY_LIBMPI=$(CURDIR)/.mpi/openmpi/lib/libmpi.so.40 $(BIN)/hpcfl demo --ranks $(RANKS)

# of tests that take half a second or more, a quarter: others with each commit (tests/helpers/draw.py)
test: setup check
	HPCFL_DRAWN=$${HPCFL_DRAWN:-$$(git rev-parse HEAD 2>/dev/null || date +%F)} $(BIN)/python -m pytest -n 3 --dist worksteal

test-all: setup check
	$(BIN)/python -m pytest -n 3 --dist worksteal

# run the notebooks anew, and keep what they put out; tests run them with fewer rounds
tutorials: .venv/ready
	env -u HPCFL_DATA $(BIN)/python tests/tutorials.py

# needs Debian's packages of Slurm, and says so; not a part of test
test-slurm:
	@PYTHONPATH=tests $(PYTHON) -m slurm.cluster
	@$(MAKE) --no-print-directory setup
	$(BIN)/python -m pytest -m slurm tests/slurm

# needs root, and Debian's iproute2, ethtool and openssh-server; not a part of test
test-hosts: setup
	@PYTHONPATH=tests $(BIN)/python -m hosts.cluster 1
	$(BIN)/python -m pytest -m "hosts and not slow" tests/hosts

test-hosts-all: setup
	@PYTHONPATH=tests $(BIN)/python -m hosts.cluster 1
	$(BIN)/python -m pytest -m hosts tests/hosts

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/lines.py
	$(BIN)/python tests/sentences.py

# the site, in runs/site: warnings are errors
docs: .venv/ready
	$(BIN)/python -m sphinx -b html -q -W docs runs/site
	@echo "runs/site/index.html"

# server steps beside APPFL's, Flower's and POT's, as pip installs these; docs/measured/judges.md follows the last lines
judges: .venv/ready .venv-judges/ready
	rm -rf runs/judges
	PYTHONPATH=tests $(BIN)/python -m judges.outside.write runs/judges
	for judge in appfl flower pot; do \
	    PYTHONPATH=tests .venv-judges/bin/python -m judges.outside.$$judge runs/judges docs/measured/judges.jsonl || failed=1; \
	    done; exit $${failed:-0}

# what jobs/atlas/grid.toml has and no line yet; hours on two cores, in as many sittings as one likes
atlas: .venv/ready
	for study in digits mnist deep combined combined-mnist; do \
	    for shard in 0/2 1/2; do OMP_NUM_THREADS=1 $(BIN)/python analysis/atlas.py run $$study --shard $$shard & done; wait; done
	$(BIN)/python analysis/atlas_page.py

# ten minutes of it anew, held against the lines
atlas-quick: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python analysis/atlas.py again digits --minutes 10 --draw "$$(date)"

# what jobs/papers has and no line yet, or PAPER=salf alone; needs mnist/ in HPCFL_DATA, and hours on two cores
papers: .venv/ready
	for shard in 0/2 1/2; do OMP_NUM_THREADS=1 $(BIN)/python analysis/papers.py run $(PAPER) --shard $$shard & done; wait

# ten minutes of it anew, held against the lines
papers-quick: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python analysis/papers.py again $(PAPER) --minutes 10 --draw "$$(date)"

# needs flamby/ in HPCFL_DATA (docs/studies/flamby.md); a few minutes where no lines are there
flamby: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python analysis/flamby.py
	OMP_NUM_THREADS=1 $(BIN)/python analysis/flamby_heart.py

table2: .venv/ready
	BIN="$(BIN)" sh jobs/table2.sh

salf-fig5: setup
	BIN="$(BIN)" MPIRUN="env $(MPIRUN)" sh jobs/salf_fig5.sh

bench: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/clients_per_second.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/looped.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/convolutions.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/reweighting.py
	$(BIN)/python benchmarks/recording.py

bench-wall: setup
	for mpi in openmpi mpich; do \
	    for script in deadline "deadline --width all" first_n round_overhead real_time_chunks barycenter memory many_ranks polling \
	        arrivals puppets; do \
	        set -- $$script; name=$$1; shift; $(BIN)/python benchmarks/$$name.py "$$@" --mpi $$mpi || exit 1; done; done

bench-gpu: setup
	$(BIN)/python benchmarks/gpu.py

# the source distribution and, from it, the wheel: in dist
package: .package/ready
	rm -rf dist
	.package/bin/python -m build
	.package/bin/python -m twine check --strict dist/*

# the wheel in empty environments, one with each MPI, where nothing of this folder is seen; ten minutes, not a part of test
test-package: package
	TORCH="$(TORCH)" PYTHON="$(PYTHON)" sh tests/package.sh openmpi
	TORCH="$(TORCH)" PYTHON="$(PYTHON)" sh tests/package.sh mpich

.package/ready:
	$(PYTHON) -m venv .package
	.package/bin/python -m pip install --disable-pip-version-check --quiet "build>=1.2" "twine>=6.1"
	@touch $@

# what runs need; pip says what it fetches
.venv/runs: pyproject.toml CITATION.cff
	@echo "setup: an environment in .venv with PyTorch and what hpcfl needs, about two minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --disable-pip-version-check --editable .
	@touch $@

# what tests, linters and analysis need besides
.venv/ready: .venv/runs
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable ".[dev,docs]"
	@touch $@

.venv-judges/ready: tests/judges/outside/requirements.txt tests/judges/outside/requirements-alone.txt
	@echo "setup: other packages for federated learning in .venv-judges, a few minutes"
	$(PYTHON) -m venv .venv-judges
	.venv-judges/bin/python -m pip install --disable-pip-version-check --quiet --requirement $<
	.venv-judges/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --requirement $(lastword $^)
	@touch $@

.mpi/%/ready: | .venv/runs
	@echo "setup: $* in .mpi/$*"
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --ignore-installed --prefix .mpi/$* "$*>=5.0"
	@touch $@

clean:
	rm -rf .venv .venv-judges .mpi runs

	rm -rf .venv .venv-judges .mpi .package dist runs
