"""Compressed messages of methods that send layers or parts: the same on any ranks, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcfl import store
from hpcfl.algorithms.compression import Coded, Compression
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


RULES: list[dict[str, Any]] = [
    *({"compress": "top-k"}, {"compress": "random-k", "share": 0.2}, {"compress": "bf16"}),
    *({"compress": "qsgd", "levels": levels} for levels in (1, 2, 15, 16, 255)),
]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_what_is_written_is_read_to_the_bit(rule: dict[str, Any], dtype: torch.dtype) -> None:
    """Of sizes down to those that have few digits left; what is not finite has as many bytes."""
    code, visit = Coded(Compression(**rule), 3, "w"), (4, 5, 1)
    for seed in range(100):
        rng = np.random.default_rng(seed)
        n, least = int(rng.integers(1, 40 if seed % 3 else 3000)), -44 if dtype == torch.float32 else -320
        some = rng.standard_normal(n) * (rng.random(n) < 0.7) * rng.choice([1.0, 1e-4], n)
        value = torch.from_numpy(some * 10.0 ** rng.integers(least, 15)).to(dtype)
        left = code.rule.compressed(value[None], [code.rng(visit)])[0]
        data = code.encode(left, visit)
        assert (data.dtype, len(data)) == (torch.uint8, code.bytes(n, dtype.itemsize))
        assert torch.equal(code.decode(data, n, dtype, visit), left)
        assert not code.decode(torch.zeros_like(data), n, dtype, visit).any()
        for other in (float("nan"), float("inf")):
            left[0] = other
            assert len(code.encode(left, visit)) == len(data)
