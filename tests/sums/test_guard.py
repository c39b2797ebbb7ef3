"""What is not finite, or far too large, counts for nothing, on any ranks and in both clocks; what that ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from hpcfl import store
from hpcfl.base.errors import Diverged
from hpcfl.commands.show import summary
from hpcfl.data.bundled import loaded
from hpcfl.sums.guard import NO_GROUP, NOT_FINITE, TOO_LARGE, Guard, Norms, RunGuard, Sieve
from hpcfl.sums.message import Block, Layers
from hpcfl.testing.runs import play

pytestmark = pytest.mark.filterwarnings("ignore:Mean of empty slice")
LAYOUT = ({"loss": Block(())}, {"b": Block((2,))}, {"a": Block((3,))})
CLIENTS, POISONED = 6, 4


def messages(large: float = 1.0):
    """Yield three visits' loss and layers; b of the second is infinite, a of the third `large`."""
    ones = torch.ones(3, dtype=torch.float64)
    b, a = torch.ones(3, 2), torch.ones(3, 3)
    b[1, 0], a[2] = torch.inf, large
    yield {"loss": (torch.ones(3), ones)}
    yield {"b": (b, ones)}
    yield {"a": (a, ones)}
    return {"state": torch.arange(3)}


def sieved(sieve: Sieve, large: float = 1.0) -> dict[str, tuple[list[Any], list[float]]]:
    work = sieve.through(messages(large))
    found = {}
    while True:
        try:
            for name, (value, weight) in next(work).items():
                found[name] = value.tolist(), weight.tolist()
        except StopIteration:
            return found


@pytest.mark.parametrize("whole", [False, True])
def test_a_block_that_is_not_finite_is_taken_out_with_all_below_it(whole: bool) -> None:
    sieve = Sieve(3, LAYOUT, whole)
    found = sieved(sieve)
    assert sieve.first.tolist() == [NO_GROUP, 1, NO_GROUP]
    assert sieve.reason.tolist() == [0, NOT_FINITE, 0]
    assert found["loss"] == ([1.0, float(not whole), 1.0], [1.0, float(not whole), 1.0])
    assert found["b"] == ([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]], [1.0, 0.0, 1.0])
    assert found["a"] == ([[1.0] * 3, [0.0] * 3, [1.0] * 3], [1.0, 0.0, 1.0])


def test_a_square_that_overflows_is_not_finite() -> None:
    sieve = Sieve(3, LAYOUT, whole=False)
    sieved(sieve, large=1e20)
    assert sieve.first.tolist() == [NO_GROUP, 1, 2]


@pytest.mark.parametrize(("whole", "norm"), [(False, 3**0.5), (True, 5**0.5)])
def test_what_is_larger_than_the_limit_is_taken_out(whole: bool, norm: float) -> None:
    limits = np.array([2.5]) if whole else np.array([np.inf, np.inf, 2.0])
    sieve = Sieve(3, LAYOUT, whole, limits)
    found = sieved(sieve, large=2.0)
    assert sieve.first.tolist() == [NO_GROUP, 1, 2]
    assert sieve.reason.tolist() == [0, NOT_FINITE, TOO_LARGE]
    assert found["a"][1] == [1.0, 0.0, 0.0]
    np.testing.assert_allclose(sieve.norms[:, -1], [norm, 0, 0], rtol=1e-6)


def test_limits_follow_the_median_of_ten_rounds_and_outlive_a_checkpoint() -> None:
    norms = Norms()
    np.testing.assert_array_equal(norms.limits(3.0, 2), [np.inf, np.inf])
    for round_ in range(12):
        norms.saw(np.array([[round_, 0.0], [round_, 1.0], [0.0, 0.0], [5.0, 0.0]]))
    np.testing.assert_array_equal(norms.limits(3.0, 2), [15.0, 3.0])  # of 2 … 11 twice, and ten times 5
    again = Norms.restored(norms.saved())
    again.saw(np.full((4, 2), 7.0))
    norms.saw(np.full((4, 2), 7.0))
    np.testing.assert_array_equal(again.limits(3.0, 2), norms.limits(3.0, 2))


def test_what_grows_from_nothing_is_no_divergence() -> None:
    """As inverses that a server works out in its first round beside a model, which grows as it may."""
    guard = RunGuard(Guard(), Layers((("a",),), LAYOUT[2:]), LAYOUT[2:], True)
    model, nothing = torch.ones(9), torch.zeros(4)
    before = {"a": model, "inverse": nothing}

    def said(**after: torch.Tensor) -> str:
        return guard.stepped(before, before | after, torch.zeros(()))[0]

    assert not said(a=2 * model, inverse=nothing + 1e9)
    assert "'inverse' of the shared state is not finite" in said(inverse=nothing / 0)
    assert "from 3 to 6e+03, most in layer 'a'" in said(a=2e3 * model, inverse=nothing + 1e9)


def test_a_step_that_keeps_all_norms_has_moved() -> None:
    """As of an orthonormal representation, whose norm is the root of its rank in every round."""
    guard = RunGuard(Guard(), Layers((("a",),), LAYOUT[2:]), LAYOUT[2:], True)
    before = {"a": torch.eye(3)[:2], "rounds": torch.zeros(())}

    def moved(**after: torch.Tensor) -> bool:
        return guard.stepped(before, before | after, torch.zeros(()))[1]

    assert moved(a=torch.eye(3)[1:])
    assert not moved(rounds=torch.ones(()))


def digits(path: Path, poisoned: float = 0.0, scale: float = 1 / 16) -> Path:
    """Write the digits of some clients; the features of one are `poisoned`."""
    images, labels, *_ = loaded("digits", 0)
    with h5py.File(path, "w") as file:
        for client in range(CLIENTS):
            rows = slice(client * 100, client * 100 + 100)
            for part, own in (("train", images[rows][:80]), ("test", images[rows][80:])):
                own = (
                    np.full_like(own, poisoned) if poisoned and client == POISONED and part == "train" else own * scale
                )
                file[f"clients/{client}/{part}/features"] = own.astype(np.float32)
                file[f"clients/{client}/{part}/labels"] = labels[rows][:80] if part == "train" else labels[rows][80:]
        file["test/features"], file["test/labels"] = (images[600:900] * scale).astype(np.float32), labels[600:900]
    return path


def config(file: Path, method: str = "fedrep", **more: Any) -> dict[str, Any]:
    algorithm = {
        "fedavg": {"name": "fedavg", "lr": 0.3, "epochs": 3},
        "fedrep": {"name": "fedrep", "lr": 0.2, "epochs": 3},
        "salf": {"name": "salf", "missing": "none", "momentum": 0.5, "persist_optimizer": True, "lr": 0.3},
    }[method]
    return {
        "rounds": 4,
        "clients": CLIENTS,
        "batch_clients": 1,
        "evaluate": {"every": 2, "last": 1},
        "checkpoint": {"every": 2},
        "algorithm": algorithm,
        "participation": {"close": "all"},
        "speed": {"model": "none"},
        "data": {"name": "hdf5", "file": str(file)},
        "model": {"name": "mlp", "hidden": [16]},
        **more,
    }


WALL = {"clock": "wall"}
SHARED = {"clock": "wall", "lane_width": "all"}


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("method", "clock"), [("fedrep", {}), ("salf", {}), ("salf", WALL), ("fedrep", SHARED), ("salf", SHARED)]
)
def test_a_poisoned_client_counts_for_nothing(world: Any, shared_dir: Path, method: str, clock: dict[str, Any]) -> None:
    if clock and world.size == 1:
        pytest.skip("real time needs two ranks")
    file = shared_dir / "poisoned.h5"
    if world.rank == 0:
        digits(file, 3e38)
    run = play(world, config(file, method, **clock), shared_dir / "run", world.comm)
    if world.rank:
        return
    data, row = store.open_run(run), summary(run)
    wanted = np.zeros((4, CLIENTS), int)
    wanted[:, POISONED] = 1
    np.testing.assert_array_equal(data["rejected"], wanted)
    np.testing.assert_array_equal(data["arrived"], 1 - wanted)
    assert (row["status"], row["rejected"], data.attrs["reason"]) == ("done", 4, "")
    events = [event for event in store.events(run) if event["kind"] == "rejected"]
    assert [(event["round"], event["client"]) for event in events] == [(round_, POISONED) for round_ in range(4)]
    assert events[0]["text"] == f"layer '{'fc1' if method == 'fedrep' else 'fc2'}' is not finite"
    newest = store.latest(run)
    assert newest is not None
    saved = store.load(newest)
    assert all(np.isfinite(value).all() for value in saved.shared.values())
    states = store.load_personal(newest, range(CLIENTS))
    before = store.load_personal(run / "checkpoints" / "round-000002", [POISONED])
    for name, value in states[POISONED].items():  # it has never advanced, the others have
        np.testing.assert_array_equal(value, before[POISONED][name])
        assert np.abs(states[0][name] - value).max() > 1e-3
    assert float(data["loss"][-1]) < float(data["loss"][0])


@pytest.mark.mpi
@pytest.mark.parametrize("clock", [{}, WALL])
def test_raw_bytes_diverge(world: Any, shared_dir: Path, clock: dict[str, Any]) -> None:
    if clock and world.size == 1:
        pytest.skip("real time needs two ranks")
    file = shared_dir / "raw.h5"
    if world.rank == 0:
        digits(file, scale=255 / 16)
    values = config(file, "fedavg", **clock, checkpoint={"every": 1})
    with pytest.raises(Diverged) as caught:
        play(world, values, shared_dir / "run", world.comm)
    assert caught.value.code == 1
    if world.rank:
        return
    data = store.open_run(shared_dir / "run")
    assert data.attrs["status"] == "diverged"
    assert data.attrs["reason"].startswith(f"round {data.sizes['round'] - 1}: ")
    assert "layer 'fc" in data.attrs["reason"]
    newest = store.latest(shared_dir / "run")
    assert (store.load(newest).round if newest else 0) == data.sizes["round"] - 1


@pytest.mark.mpi
@pytest.mark.parametrize(("clock", "most"), [({}, 0.5), (WALL, 0.1)])
def test_a_message_that_is_far_too_large_counts_for_nothing(
    world: Any, shared_dir: Path, clock: dict[str, Any], most: float
) -> None:
    """A client whose features are large sends gradients as large; more than `most` of such clients end the run."""
    if clock and world.size == 1:
        pytest.skip("real time needs two ranks")
    file = shared_dir / "large.h5"
    if world.rank == 0:
        digits(file, 8.0)
    values = config(file, "salf", **clock, guard={"max_norm": 5.0, "most": most})
    values["algorithm"]["lr"] = 0.01
    if most == 0.1:
        with pytest.raises(Diverged):
            play(world, values, shared_dir / "run", world.comm)
    else:
        play(world, values, shared_dir / "run", world.comm)
    if world.rank:
        return
    data = store.open_run(shared_dir / "run")
    rejected = data["rejected"].values
    assert not rejected[0].any()  # nothing is known yet
    assert rejected[1:].sum() == rejected[1:, POISONED].sum() >= 1
    if most == 0.1:
        assert data.attrs["reason"] == (
            "round 1: 1 of 6 visits that arrived were rejected: layer 'fc2' has a norm beyond guard.max_norm"
        )
