"""Rounds that arrivals end, in real time: what they come to is what simulated time makes of the same arrivals.

Nothing here depends on how fast anything is: which visits come first is recorded, and replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_rounds import agree, real, replay, simulated

from hpcfl import store
from hpcfl.engine import stopping
from hpcfl.testing.runs import play, resume

pytestmark = pytest.mark.mpi

CLIENTS, ROUNDS = 7, 4
KEPT = {"momentum": 0.5, "persist_optimizer": True}
FEDAVG = {"name": "fedavg", "batch": 64, **KEPT}
SALF = {"name": "salf", "missing": "none", **KEPT}
FAST = {"model": "exponential", "kind": "dynamic", "rate": 50.0}
OLD = {"weight": "polynomial"}


@pytest.fixture(autouse=True)
def _unhurried(world: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wait for answers and for personal state however long they take."""
    if world.size == 1:
        pytest.skip("needs a server and a client")
    from hpcfl.engine.wall import arrivals, lanes, server

    for module, name in ((lanes, "ANSWER_SECONDS"), (server, "SAVE_SECONDS"), (arrivals, "SAVE_SECONDS")):
        monkeypatch.setattr(module, name, 1e6)
    monkeypatch.setattr(server, "LEAVE_SECONDS", 1e6)
    yield
    stopping.uninstall()


def arriving(rules: dict[str, Any], **more: Any) -> dict[str, Any]:
    participation = {"close": "arrivals", "buffer": 2, **rules}
    return real(1, **{"algorithm": FEDAVG, "staleness": OLD, "rounds": 6, **more, "participation": participation})


def replays(world: Any, values: dict[str, Any], run: Path, folder: Path) -> None:
    """Replay a run in simulated time, and compare to the bit."""
    again = play(world, replay(values, run), folder / "again", None)
    if world.rank == 0:
        agree(run, again, exact=True)


def test_all_at_once_are_fedavg(world: Any, shared_dir: Path) -> None:
    """K = concurrency = all, at most once with the same state: nobody is ever stale."""
    values = arriving({"buffer": CLIENTS, "once_per_version": True}, rounds=ROUNDS)
    run = play(world, values, shared_dir / "run", world.comm)
    twin = play(world, simulated(values, participation={"close": "all"}, staleness={}), shared_dir / "twin", None)
    if world.rank == 0:
        for name in ("loss", "accuracy", "layer_weight", "message_bytes", "arrived"):
            pair = (store.open_run(each)[name].values for each in (run, twin))
            np.testing.assert_array_equal(*pair, err_msg=name)
        assert (store.open_run(run)["arrival_staleness"].values == 0).all()


@pytest.mark.parametrize(
    "case", [({"buffer": 1}, {}), ({"concurrency": 3}, {"speed": FAST}), ({"buffer": 3}, {"algorithm": SALF})]
)
def test_a_replay_in_simulated_time_has_the_same_bits(world: Any, shared_dir: Path, case: Any) -> None:
    rules, more = case
    values = arriving(rules, **more)
    run = play(world, values, shared_dir / "run", world.comm)
    replays(world, values, run, shared_dir)
    if world.rank == 0:
        data = store.open_run(run)
        assert (data["arrival_client"].values >= 0).all()
        assert (np.diff(data["arrival_seconds"].values.ravel()) >= 0).all()
        assert data["round_seconds"].values.sum() == pytest.approx(data["arrival_seconds"].values[-1, -1])
        if world.size > 3:  # more than one at work while another one reports, over and over
            assert (data["arrival_staleness"].values > 0).any()


def test_a_resumed_run_goes_on_with_who_was_at_work(world: Any, shared_dir: Path) -> None:
    values = arriving({})
    run = play(world, values, shared_dir / "run", world.comm)
    resume(world, run, 4, world.comm)
    replays(world, values, run, shared_dir)
