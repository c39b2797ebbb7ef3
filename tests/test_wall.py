"""Rounds in real time: the same numbers as in simulated time, and a replay that gives them again.

Nothing here depends on how fast anything is: where ranks are slow, other visits count, or the test takes longer.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcfl import stopping, store
from hpcfl.errors import Stopped, UsageError
from hpcfl.launch import launch
from hpcfl.orders import ordered_resume, ordered_run
from hpcfl.progress import Speaker
from runs import play, recorded, resume, table, toml

pytestmark = pytest.mark.mpi

CLIENTS, ROUNDS = 7, 4
KEPT = {"momentum": 0.5, "persist_optimizer": True}
FEDAVG = {"name": "fedavg", "batch": 64, **KEPT}
SALF = {"name": "salf", "missing": "none", **KEPT}
UNEQUAL = {"name": "digits", "partition": "dirichlet", "alpha": 5.0}  # weights n_i that differ
HALF = {"model": "uniform-depth", "stragglers": 0.7}
DYNAMIC = {"model": "exponential", "kind": "dynamic", "rate": 20.0}
SOON = {"close": "deadline", "deadline": 0.1, "min_clients": 1}
SECONDS = ("visit_seconds", "round_seconds", "sim_seconds")
WIDTHS = (1, "all")


def real(width: Any, **more: Any) -> dict[str, Any]:
    """A small run in real time: 7 clients on however many ranks, evaluated after rounds 2 and 4."""
    plain = {"participation": {"close": "all"}, "speed": {"model": "none"}, "data": UNEQUAL}
    return table("salf", "mlp", False, **{**plain, "clock": "wall", "lane_width": width, "threads": 1, **more})


def simulated(values: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**values, "clock": "simulated", **more}


def replay(values: dict[str, Any], run: Path, **more: Any) -> dict[str, Any]:
    return simulated(values, speed={"model": "trace", "run": str(run)}, **more)


@pytest.fixture(autouse=True)
def _unhurried(world: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wait for answers however long they take, and for late lanes where personal state is saved."""
    if world.size == 1:
        if "refused" not in request.node.name:
            pytest.skip("needs a server and a client")
        yield
        return
    from hpcfl.wall import fleet, server

    for module, name in ((fleet, "ANSWER_SECONDS"), (server, "SAVE_SECONDS"), (server, "LEAVE_SECONDS")):
        monkeypatch.setattr(module, name, 1e6)
    personal = server.Server.personal

    def settled(self: server.Server, *given: Any) -> Iterator[Any]:
        self.fleet.settled(inf)
        return personal(self, *given)

    monkeypatch.setattr(server.Server, "personal", settled)
    yield
    stopping.uninstall()


def personal(folder: Path, clients: int = CLIENTS) -> dict[int, dict[str, np.ndarray]]:
    newest = store.latest(folder)
    assert newest is not None
    found = store.load_personal(newest, range(clients))
    assert sorted(found) == list(range(clients))
    return found


def agree(one: Path, other: Path, exact: bool, seconds: bool = True, clients: int = CLIENTS) -> None:
    """Assert that two runs recorded the same and ended in the same state: to the bit, or nearly.

    Clients whose lane was late have no scores in `one`.
    """
    left, right = recorded(one), recorded(other)
    assert left.keys() == right.keys()
    for name in left:
        if name in SECONDS and not seconds:
            continue
        mine, theirs = left[name], right[name]
        if name.startswith("client_"):
            theirs = np.where(np.isnan(mine), mine, theirs)
        if exact or mine.dtype.kind != "f":
            np.testing.assert_array_equal(mine, theirs, err_msg=name)
        elif "accuracy" not in name:  # a score may jump where the state has moved by its last bit
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5, err_msg=name)
    close = {"rtol": 0, "atol": 0 if exact else 1e-6}
    states = [store.load(store.latest(run), personal=False).shared for run in (one, other)]
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
        np.testing.assert_allclose(states[0][name], states[1][name], **close, err_msg=name)
    states = [personal(run, clients) for run in (one, other)]
    for client, state in states[0].items():
        assert state.keys() == states[1][client].keys() != set()
        for name in state:
            np.testing.assert_allclose(state[name], states[1][client][name], **close, err_msg=f"{client} {name}")


def is_exact(world: Any, width: Any) -> bool:
    """Whether every rank has a lane of its own; sums over ranks are rounded on the way."""
    return width == 1 or world.size == 2


def test_one_rank_is_refused(world: Any, shared_dir: Path) -> None:
    if world.size > 1:
        pytest.skip("is about one rank")
    with pytest.raises(UsageError, match="^clock = 'wall' needs .* at least 2 ranks, got 1; nearest: mpirun -n 2"):
        play(world, real(1), shared_dir / "run", world.comm)
    assert not (shared_dir / "run").exists()


# ---- the same as in simulated time


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("algorithm", [FEDAVG, SALF], ids=["fedavg", "salf"])
def test_without_a_deadline_it_is_the_simulated_run(
    world: Any, shared_dir: Path, algorithm: dict[str, Any], width: Any
) -> None:
    values = real(width, algorithm=algorithm)
    run = play(world, values, shared_dir / "run", world.comm)
    twin = play(world, simulated(values), shared_dir / "twin", None)
    if world.rank == 0:
        agree(run, twin, is_exact(world, width), seconds=False)
        scores = store.open_run(run)["client_accuracy"].values
        assert np.isfinite(scores).all(1).tolist() == [False, True, False, True]
        assert (store.open_run(run)["arrived"].values == 1).all()


# ---- replays


RULES: dict[str, dict[str, Any]] = {
    "parts": {"algorithm": SALF, "speed": HALF, "participation": SOON},
    "whole": {"algorithm": FEDAVG, "speed": HALF, "participation": SOON},
    "drawn": {"algorithm": SALF, "speed": DYNAMIC, "participation": {**SOON, "deadline": 0.05}},
    "whole layers": {"algorithm": SALF, "speed": DYNAMIC, "participation": {**SOON, "partial": "discard"}},
    "first": {"algorithm": FEDAVG, "speed": DYNAMIC, "participation": {"close": "first", "first": 3}},
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rule", RULES)
def test_a_replay_ends_in_the_same_state(world: Any, shared_dir: Path, rule: str, width: Any) -> None:
    values = real(width, **RULES[rule])
    run = play(world, values, shared_dir / "run", world.comm)
    again = play(world, replay(values, run), shared_dir / "again", None)
    if world.rank == 0:
        agree(run, again, is_exact(world, width))
