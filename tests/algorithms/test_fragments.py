"""Fragments of methods that send layers, parts or compressed changes: the same on any ranks, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcfl import store
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


@pytest.mark.mpi
def test_in_real_time_large_tensors_travel_in_their_turn_alone(world: Any, shared_dir: Path) -> None:
    """Of 64 · 5000 and 10 · 5000 numbers: every other round the first are in nobody's frames."""
    if world.size == 1:
        pytest.skip("needs a server and a client")
    keys = {"clock": "wall", "lane_width": 1, "threads": 1, "speed": {"model": "none"}, "rounds": 4}
    more = {"participation": {"close": "all"}, "fragments": {"count": 2}, "algorithm": {"name": "fedavg", "batch": 64}}
    values = table("salf", "mlp", False, **keys, **more) | {"model": {"name": "mlp", "hidden": [5000]}}
    run = play(world, values, shared_dir / "run", world.comm)
    twin = play(world, {**values, "clock": "simulated"}, shared_dir / "twin", None)
    if world.rank == 0:
        data, visits = store.open_run(run), values["clients"]
        up = data["wire_bytes_in"].values[:, 0]
        assert (up[::2] > visits * 4 * 64 * 5000).all()
        assert (up[1::2] < visits * 4 * 32 * 5000).all()
        for name in ("loss", "message_bytes", "layer_weight"):
            np.testing.assert_array_equal(data[name].values, store.open_run(twin)[name].values, err_msg=name)
        states = [store.load(store.latest(each), personal=False).shared for each in (run, twin)]  # type: ignore[arg-type]
        for name, value in states[0].items():
            np.testing.assert_array_equal(value, states[1][name], err_msg=name)


@pytest.mark.mpi
def test_in_real_time_parts_of_large_tensors_are_written_by_codes_in_their_turn(world: Any, shared_dir: Path) -> None:
    """A rank's wide and narrow clients send 1 MB and less, by codes of other lengths."""
    if world.size == 1:
        pytest.skip("needs a server and a client")
    keys = {"clock": "wall", "lane_width": 1, "threads": 1, "speed": {"model": "none"}, "rounds": 4}
    keys |= {
        "batch_clients": 1,
        "participation": {"close": "deadline", "deadline": 600.0},
        "message": {"compress": "top-k", "share": 0.9},
    }
    values = table("salf", "mlp", False, **keys, fragments={"count": 2}) | {"model": {"name": "mlp", "hidden": [5000]}}
    rates = [1.0, 0.5] * values["clients"]
    method = {"name": "heterofl", "assign": "clients", "rates": rates[: values["clients"]], "mask_labels": False}
    values |= {"algorithm": {**method, "batch": 64}}
    run = play(world, values, shared_dir / "run", world.comm)
    twin = play(world, {**values, "clock": "simulated"}, shared_dir / "twin", None)
    if world.rank == 0:
        states = [store.load(store.latest(each), personal=False).shared for each in (run, twin)]  # type: ignore[arg-type]
        for name, value in states[0].items():
            np.testing.assert_array_equal(value, states[1][name], err_msg=name)
