"""Chunks in real time: visits that are computed together give what simulated time gives, and end together.

Their sums are exact on lanes of any width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_rounds import (  # noqa: F401
    CLIENTS,
    FEDAVG,
    FEDREP,
    WIDTHS,
    _unhurried,
    agree,
    real,
    replay,
    rounds_are_sound,
    simulated,
)

from helpers.runs import after_each_round
from hpcfl import store
from hpcfl.testing.runs import play, resume
from sums.test_guard import POISONED, config, digits

pytestmark = pytest.mark.mpi

MANY = 24  # "auto" gives chunks of 3
PAIRS = [{0, 1}, {2, 3}, {4, 5}, {6}]  # 7 clients in chunks of 2


def by_pairs(run: Path) -> np.ndarray:
    """Assert that the visits of a chunk counted together or not at all; return who counted, [rounds, clients]."""
    data = store.open_run(run)
    arrived, cohort = (data[name].values == 1 for name in ("arrived", "cohort"))
    for pair in PAIRS:
        members = sorted(pair)
        for invited, counted in zip(cohort[:, members], arrived[:, members]):
            assert len({*counted[invited].tolist()}) <= 1
    return arrived


@pytest.mark.parametrize(
    ("algorithm", "width", "partition"),
    [(FEDAVG, "all", {"partition": "dirichlet", "alpha": 5.0}), (FEDREP, 1, {"partition": "iid"})],
    ids=["fedavg-all", "fedrep-1"],
)
def test_chunks_give_what_they_give_in_simulated_time(
    world: Any, shared_dir: Path, algorithm: dict[str, Any], width: Any, partition: dict[str, Any]
) -> None:
    """So do a resumption, and a replay that is not told of chunks; one by one it is nearly the same.

    Of clients of alike sizes several chunks are computed at once.
    """
    few = {"name": "digits", **partition}
    values = real(width, algorithm=algorithm, clients=MANY, batch_clients="auto", data=few)
    run = play(world, values, shared_dir / "run", world.comm)
    twin = play(world, simulated(values), shared_dir / "twin", None)
    resume(world, run, 2, world.comm)
    again = play(world, replay(values, run), shared_dir / "again", None)
    single = play(world, simulated(values, batch_clients=False), shared_dir / "single", None)
    if world.rank == 0:
        assert store.run_attributes(run)["chunk"] == store.run_attributes(again)["chunk"] == "3"
        agree(run, twin, exact=True, seconds=False, clients=MANY)
        agree(run, again, exact=True, clients=MANY)
        agree(run, single, exact=False, seconds=False, clients=MANY)
        rounds_are_sound(run)
        data = store.open_run(run)
        assert (data["arrived"].values == 1).all()
        assert data["visits"].values.sum(1).tolist() == [MANY] * len(data["visits"])
        assert np.isfinite(data["visit_seconds"].values).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_visit_that_is_rejected_takes_no_other_of_its_chunk_with_it(world: Any, shared_dir: Path, width: Any) -> None:
    file = shared_dir / "poisoned.h5"
    if world.rank == 0:
        digits(file, 3e38)
    world.meet()
    more = {"lane_width": width, "batch_clients": 2, "threads": 1, "rounds": 2}
    values = {**config(file, "fedrep", clock="wall"), **more}
    run = play(world, values, shared_dir / "run", world.comm)
    twin = play(world, simulated(values), shared_dir / "twin", None)
    if world.rank == 0:
        data = store.open_run(run)
        clients = data.sizes["client"]
        wanted = np.arange(clients) == POISONED
        np.testing.assert_array_equal(data["rejected"].values == 1, [wanted] * data.sizes["round"])
        np.testing.assert_array_equal(data["arrived"].values == 1, [~wanted] * data.sizes["round"])
        agree(run, twin, exact=True, seconds=False, clients=clients)


def test_the_first_visits_count_chunk_by_chunk(world: Any, shared_dir: Path) -> None:
    first = {"close": "first", "first": 3}
    values = real(1, algorithm=FEDAVG, participation=first, batch_clients=2)
    run = play(world, values, shared_dir / "run", world.comm)
    again = play(world, replay(values, run, batch_clients="auto"), shared_dir / "again", None)
    if world.rank == 0:
        agree(run, again, exact=True)
        rounds_are_sound(run)
        counted = by_pairs(run).sum(1)
        invited = (store.open_run(run)["cohort"].values == 1).sum(1)
        assert (counted >= np.minimum(3, invited)).all()
        assert (counted <= 4).all()


def late(shared_dir: Path, width: Any, rules: dict[str, Any]) -> dict[str, Any]:
    """Chunks of 2 of which that of client 2 is stuck in round 0, until the gate is there."""
    stuck = {"name": "helpers.strange.late:Late", "victim": 2, "gate": str(shared_dir / "gate"), "stall": 1e6}
    return real(width, algorithm={**FEDAVG, **stuck}, participation=rules, batch_clients=2)


@pytest.mark.parametrize("width", WIDTHS)
def test_of_a_chunk_that_is_too_late_nothing_counts(
    world: Any, shared_dir: Path, width: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_each_round(monkeypatch, lambda done, row: (shared_dir / "gate").touch())
    values = {**late(shared_dir, width, {"close": "deadline", "deadline": 0.3}), "rounds": 2}
    run = play(world, values, shared_dir / "run", world.comm)
    again = play(world, replay(values, run), shared_dir / "again", None)
    if world.rank == 0:
        agree(run, again, exact=True)
        rounds_are_sound(run)
        assert not by_pairs(run)[0, [2, 3]].any()
        invited = store.open_run(run)["cohort"].values == 1
        assert invited[0].all()


def test_nothing_of_a_void_round_is_kept(world: Any, shared_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt at round 0 lacks a chunk; the others' personal state does not advance by it."""
    if world.size > 1:
        from hpcfl.realtime.outcome import RoundOutcome

        void = RoundOutcome.void

        def opened(self: RoundOutcome) -> None:
            (shared_dir / "gate").touch()
            void(self)

        monkeypatch.setattr(RoundOutcome, "void", opened)
    values = {**late(shared_dir, 1, {"close": "deadline", "deadline": 0.3, "min_clients": CLIENTS}), "rounds": 2}
    run = play(world, values, shared_dir / "run", world.comm)
    twin = play(world, simulated(values, participation={"close": "all"}), shared_dir / "twin", None)
    if world.rank == 0:
        data = store.open_run(run)
        assert data["repeats"].values[0] >= 1
        assert (data["arrived"].values == 1).all()
        states = [store.load_personal(store.latest(folder), range(CLIENTS)) for folder in (run, twin)]
        for client, state in states[0].items():
            for name, value in state.items():
                np.testing.assert_array_equal(value, states[1][client][name])
