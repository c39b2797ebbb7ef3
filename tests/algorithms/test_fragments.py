"""Fragments of methods that send layers, parts or compressed changes: the same on any ranks, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcfl.testing.runs import play, resume, same, table

CASES: dict[str, dict[str, Any]] = {
    "layers": {"algorithm": {"name": "salf", "missing": "none"}, "server": {"optimizer": "nesterov"}},
    "parts": {
        "algorithm": {"name": "heterofl", "rates": [1.0, 0.5], "batch": 20},
        "message": {"compress": "top-k", "share": 0.2},
        "participation": {"close": "all"},
        "speed": {"model": "none"},
    },
    "arrivals": {
        "algorithm": {"name": "fedavg", "batch": 20},
        "participation": {"close": "arrivals", "buffer": 3},
        "server": {"optimizer": "delayed-nesterov", "cycle": 2},
        "weighting": {"correct": "remembered"},
        "speed": {"model": "exponential"},
    },
}


@pytest.mark.mpi
@pytest.mark.parametrize("case", CASES)
def test_one_rank_equals_n_and_a_resumed_run(world: Any, shared_dir: Path, case: str) -> None:
    values = table("salf", "mlp", True, **CASES[case], fragments={"count": 3, "schedule": "shuffled"})
    run = play(world, values, shared_dir / "run", world.comm)
    alone = play(world, values, shared_dir / "alone", None)
    if world.rank == 0:
        same(run, alone)
    resume(world, run, 2, world.comm)
    if world.rank == 0:
        same(run, alone)
