"""Starts the rank-parametrised tests: one job per MPI and number of ranks runs many of them."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.launcher import ROOT, job, mpis
from hpcfl.testing.runs import SINGLES
from hpcfl.testing.world import RESULTS

WHOLE = [("openmpi", 3), ("mpich", 4)]
"""Run all of them, the second one but for arithmetic."""
ARITHMETIC = {
    "test_adapt",
    "test_algorithms",
    "test_any_module",
    "test_asynchronous",
    "test_batched",
    "test_buffers",
    "test_complexity",
    "test_corrected",
    "test_cut_short",
    "test_dataset",
    "test_device",
    "test_embedding",
    "test_fedlrgd",
    "test_flic_linear",
    "test_flic_released",
    "test_frozen",
    "test_from_outside",
    "test_gradient_rank",
    "test_hold_out",
    "test_initial",
    "test_last_step",
    "test_loss",
    "test_newcomer",
    "test_partial",
    "test_participation",
    "test_realtime",
    "test_server_optimizer",
    "test_splits",
    "test_steps",
    "test_table",
    "test_trace",
}
"""What is the same whatever the MPI, most of it simulated rounds. What is about lanes and messages runs under both."""
LAUNCHES = [*WHOLE, ("openmpi", 2), ("openmpi", 1)]
ON_ANY_NUMBER = {"test_placement", "test_flic_anchors", "test_launcher", "test_arrivals"}
"""Run on every number of ranks: one rank equals n, who is where."""
LANES = {"test_rounds"}
"""Lanes of one rank and of several: run on every number of ranks, on each by one MPI."""
LIMIT = 1800.0  # seconds after which it hangs, on a busy machine too
ALL = sorted([*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "hpcfl" / "testing").glob("test_*.py")])
MODULES = [path for path in ALL if "mark.mpi" in path.read_text()]

pytestmark = pytest.mark.launch


@pytest.mark.parametrize(("mpi", "ranks"), LAUNCHES)
def test_on_ranks(mpi: str, ranks: int, common: Path, tmp_path: Path) -> None:
    assert mpi in mpis(), f"{mpi} is not installed: make setup"
    command = ["-m", "mpi4py", "-m", "pytest", "--with-mpi", "-m", "mpi", "-x", "-q", "-p", "no:cacheprovider"]
    left_out = ARITHMETIC if mpi == "mpich" else set()
    taken = {path.stem for path in MODULES} - left_out if (mpi, ranks) in WHOLE else ON_ANY_NUMBER | LANES
    modules = [str(path) for path in MODULES if path.stem in taken]
    (common / "singles").mkdir(exist_ok=True)
    found = {RESULTS: str(tmp_path), SINGLES: str(common / "singles")}
    ended = job(mpi, ranks, [*command, *modules], LIMIT, found)
    assert ended.code == 0, ended.out[-6000:] + ended.err[-3000:]
    results = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    outcomes = results[0]["outcomes"]
    assert all(each["outcomes"] == outcomes for each in results)
    skipped = [name for name, outcome in outcomes.items() if outcome == "skipped" and "test_placement" in name]
    assert len(skipped) <= (1 if ranks == 1 else 0), skipped  # one test needs two ranks
    assert set(outcomes.values()) <= {"passed", "skipped"}
    least = 5 if os.environ.get("HPCFL_DRAWN") else 15
    assert sum(outcome == "passed" for outcome in outcomes.values()) >= least
    assert results[0]["facts"] == first(common / "facts.json", results[0]["facts"], tmp_path / "facts.json") != {}


def first(file: Path, facts: dict[str, str], own: Path) -> dict[str, str]:
    """Return the facts of the launch that ended first: all launches agree to the bit."""
    own.write_text(json.dumps(facts))
    with suppress(FileExistsError):
        os.link(own, file)
    found: dict[str, str] = json.loads(file.read_text())
    return found


def test_the_modules_are_found() -> None:
    names = {path.stem for path in MODULES}
    assert names > ON_ANY_NUMBER | LANES | ARITHMETIC
    assert len(names) >= 20
