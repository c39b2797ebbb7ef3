"""Real time on a device that is not the CPU: what leaves is what leaves a CPU, and nobody waits to look at it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcfl import store
from hpcfl.launch import host as launched
from hpcfl.testing import fake_device
from hpcfl.testing.runs import play, table
from realtime.test_units import Visit

pytestmark = pytest.mark.skipif(not fake_device.available(), reason="this torch has no back ends in Python")
if fake_device.available():  # as tests are collected: torch counts its devices in a process's first backward pass
    fake_device.registered()
NAN = float("nan")
MESSAGES: dict[str, list[dict[str, float]]] = {
    "complete": [{"loss": 0.5}, {"b_bias": 1.0, "b_weight": 3.0}, {"a_weight": 4.0}],
    "a block missing": [{"loss": 0.5}, {"b_weight": 3.0}, {"a_weight": 4.0}],
    "a layer that is not finite": [{"loss": 0.5}, {"b_bias": NAN, "b_weight": 3.0}, {"a_weight": 4.0}],
    "the last one": [{"loss": 0.5}, {"b_bias": 1.0, "b_weight": 3.0}, {"a_weight": float("inf")}],
    "a loss": [{"loss": NAN}, {"b_bias": 1.0, "b_weight": 3.0}, {"a_weight": 4.0}],
    "a loss and a layer": [{"loss": NAN}, {"b_bias": 1.0, "b_weight": NAN}, {"a_weight": 4.0}],
}


def sent(visit: Visit, message: list[dict[str, float]]) -> None:
    for blocks in message:
        visit.take(**blocks)
    visit.finish()


@pytest.mark.parametrize("apart", [2**20, 12])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("message", MESSAGES)
def test_the_same_frames_leave(
    message: str, whole: bool, width: int, apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcfl.sums.frames.APART_BYTES", apart)
    one, other = Visit(whole, width), Visit(whole, width, device=fake_device.registered())
    sent(one, MESSAGES[message])
    with fake_device.counted() as waits:
        sent(other, MESSAGES[message])
    assert waits.total() == (1 if whole else 0)  # a visit that is whole is judged before any of it leaves
    first = [frame.Test() for frame in other.put]
    assert not any(first)
    assert all(frame.Test() for frame in other.put)
    assert len(one.put) == len(other.put) == 3
    for left, right in zip(one.put, other.put):
        for ours, theirs in zip(left.parts, right.parts, strict=True):
            np.testing.assert_array_equal(theirs.numpy(), ours.numpy())


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("method", "batched", "compress"),
    [
        *(("salf", False, "none"), ("fedavg", False, "none"), ("fedavg", True, "none")),
        *(("salf", False, "random-k"), ("fedavg", False, "top-k"), ("fedavg", False, "qsgd")),
    ],
)
@pytest.mark.parametrize("server", ["cpu", "fake"])
def test_a_run_on_ranks(
    method: str,
    batched: bool,
    compress: str,
    server: str,
    world: Any,
    shared_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if world.size < 2:
        pytest.skip("needs client ranks")
    fake = fake_device.registered()
    given = table(method, "mlp", batched, clock="wall", speed={"model": "none"}, ranks_per_device=64)
    given |= {"participation": {"close": "all"}, "algorithm": {"name": method}, "message": {"compress": compress}}
    kinds = {"server_device": fake if server == "fake" else "cpu", "device": fake}
    runs = play(world, given, shared_dir / "cpu", world.comm), shared_dir / "fake"
    monkeypatch.setattr(launched, "chosen", lambda wanted, key, number: kinds[key])
    play(world, given, runs[1], world.comm)
    one, two = (store.load(store.latest(run)) for run in runs)  # type: ignore[arg-type]
    assert (one.round, one.shared.keys()) == (two.round, two.shared.keys())
    for name in one.shared:
        np.testing.assert_array_equal(one.shared[name], two.shared[name], err_msg=name)


def test_pinned_memory_is_for_gpus_alone() -> None:
    staging = Visit(device=fake_device.registered()).staging
    assert (staging.far, staging.pinned) == (True, False)
    assert not torch.cuda.is_available() or Visit(device="cuda").staging.pinned
