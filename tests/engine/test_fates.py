"""What becomes of every visit: each client that was invited has a fate in each round, and their numbers add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpcfl import store
from hpcfl.base.errors import RunError
from hpcfl.commands.show import summary
from hpcfl.engine.record import Recorder
from hpcfl.schedule.plan import Fate
from hpcfl.testing.runs import play

EXPONENTIAL = {"model": "exponential", "rate": 1.0}
DEADLINE = {"close": "deadline", "deadline": 1.0, "min_clients": 0}
ARRIVALS = {"close": "arrivals", "buffer": 2, "max_staleness": 1}


def table(**values: Any) -> dict[str, Any]:
    data, model = {"name": "digits"}, {"name": "mlp", "hidden": [4]}
    given = {"clients": 7, "seed": 3, "rounds": 3, "threads": 1, "algorithm": {"name": "fedavg", "batch": 16}}
    return given | {"data": data, "model": model} | values


def fates_of(world: Any, folder: Path, **values: Any) -> Any:
    run = play(world, table(**values), folder, world.comm)
    return store.open_run(run) if world.rank == 0 else None


def test_of_layers_that_come_one_by_one_some_may_count(world: Any, shared_dir: Path) -> None:
    salf = {"name": "salf", "batch": 16}
    data = fates_of(world, shared_dir / "run", algorithm=salf, participation=DEADLINE, speed=EXPONENTIAL, rounds=6)
    if data is None:
        return
    depth, layers = data["depth"].values, data.sizes["layer"]
    expected = np.where(depth == 1, Fate.COUNTED, np.where(depth <= layers, Fate.PARTIAL, Fate.LATE))
    np.testing.assert_array_equal(data["fate"].values, np.where(data["cohort"].values == 1, expected, -1))
    assert {0, 1, 2} == {*np.unique(data["fate"].values).tolist()} - {-1}
    told = summary(shared_dir / "run")["fates"]
    assert list(told) == ["counted", "partial", "late"]
    assert sum(told.values()) == (data["cohort"].values == 1).sum()


def test_files_say_what_the_numbers_mean(world: Any, shared_dir: Path) -> None:
    fates_of(world, shared_dir / "run")
    if world.rank:
        return
    with h5py.File(shared_dir / "run" / "run.h5") as file:
        assert file["fate"].dtype == np.int8
        assert file["fate"].attrs["flag_values"].tolist() == [*range(7)]
        assert file["fate"].attrs["flag_meanings"].split() == [fate.name.lower() for fate in Fate]


def test_visits_that_arrivals_end_are_late_cancelled_or_go_on(world: Any, shared_dir: Path) -> None:
    """Whoever is at work when the run ends is stopped; who is too old is stopped, or comes in vain."""
    for stops in (False, True):
        rules = ARRIVALS | {"stop_stale": stops}
        speed = {"model": "exponential", "kind": "fixed", "rate": 1.0}
        data = fates_of(world, shared_dir / str(stops), participation=rules, speed=speed, rounds=12)
        if data is None:
            continue
        fate, work = data["fate"].values, data["cohort"].values == 1
        assert (fate[work] >= 0).all()
        assert (fate[:-1] == Fate.UNDER_WAY).any()
        assert not (fate[-1] == Fate.UNDER_WAY).any()
        assert (fate[-1] == Fate.CANCELLED).any()
        assert (fate[:-1] == Fate.CANCELLED).any() == stops
        assert (fate == Fate.LATE).any() != stops
        counted = np.zeros_like(work)
        for round_, clients in enumerate(data["arrival_client"].values):
            counted[round_, clients[clients >= 0]] = True
        np.testing.assert_array_equal(fate == Fate.COUNTED, counted)


def test_a_run_that_does_not_say_what_became_of_somebody_is_refused(
    world: Any, shared_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fates = Recorder._fates
    monkeypatch.setattr(Recorder, "_fates", lambda *given: np.where(fates(*given) == Fate.COUNTED, -1, fates(*given)))
    run = play(world, table(), shared_dir / "run", world.comm)
    if world.rank == 0:
        with pytest.raises(RunError, match="expected to hear what became of everyone who was invited"):
            store.open_run(run)
