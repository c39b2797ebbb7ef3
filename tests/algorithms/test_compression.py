"""Compressed messages of methods that send layers or parts: the same on any ranks, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcfl import store
from hpcfl.testing.runs import play, resume, same, table

CASES: dict[str, dict[str, Any]] = {
    "layers": {"message": {"compress": "top-k", "share": 0.1}, "algorithm": {"name": "salf", "missing": "none"}},
    "parts": {
        "message": {"compress": "random-k", "share": 0.2},
        "algorithm": {"name": "heterofl", "rates": [1.0, 0.5], "batch": 20},
        "participation": {"close": "all"},
        "speed": {"model": "none"},
    },
    "drawn": {
        "message": {"compress": "qsgd"},
        "algorithm": {"name": "fedavg", "batch": 20},
        "weighting": {"correct": "estimated"},
        "participation": {"close": "deadline", "deadline": 1.0},
        "speed": {"model": "exponential"},
    },
}


@pytest.mark.mpi
@pytest.mark.parametrize("case", CASES)
def test_one_rank_equals_n_and_a_resumed_run(world: Any, shared_dir: Path, case: str) -> None:
    values = table("salf", "mlp", True, **CASES[case])
    run = play(world, values, shared_dir / "run", world.comm)
    alone = play(world, values, shared_dir / "alone", None)
    if world.rank == 0:
        same(run, alone)
    resume(world, run, 2, world.comm)
    if world.rank == 0:
        same(run, alone)


@pytest.mark.parametrize("case", CASES)
def test_all_layers_take_fewer_bytes(solo: Any, tmp_path: Path, case: str) -> None:
    sections = dict(CASES[case])
    whole = store.open_run(play(solo, table("salf", "mlp", True, **sections), tmp_path / "run", None))
    del sections["message"]
    plain = store.open_run(play(solo, table("salf", "mlp", True, **sections), tmp_path / "plain", None))
    less, all_of_it = (run["message_bytes"].values.astype(float) for run in (whole, plain))
    np.testing.assert_array_equal(whole["arrived"].values, plain["arrived"].values)
    assert (less[all_of_it > 0] < 0.5 * all_of_it[all_of_it > 0]).all()
    assert not np.array_equal(whole["loss"].values[1:], plain["loss"].values[1:])
