"""FedCompass and FedQueue in real time: what they come to is what simulated time makes of the same arrivals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_arrivals_wall import _unhurried  # noqa: F401
from test_rounds import agree, personal, real, replay

from hpcfl import store
from hpcfl.base.errors import ErrorOnOtherRank, UsageError
from hpcfl.testing.runs import play, resume
from hpcfl.testing.schedules import SCHEDULERS

pytestmark = pytest.mark.mpi

COMPASS, QUEUE = SCHEDULERS
PACES = {"model": "lognormal", "mean": 0.1, "between": 0.8, "within": 0.3}
METHOD = {"name": "fedavg", "batch": 16, "epochs": 0, "steps": 9, "momentum": 0.5, "persist_optimizer": True}


def scheduled(world: Any, rule: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A rank for each client."""
    return real(1, **{"algorithm": METHOD, "clients": world.size - 1, "rounds": 12, "speed": PACES, **rule, **more})


@pytest.mark.parametrize("rule", [COMPASS, QUEUE], ids=["fedcompass", "fedqueue"])
@pytest.mark.parametrize("led", [False, True])
def test_a_replay_of_a_resumed_run_has_the_same_bits(
    world: Any, shared_dir: Path, rule: dict[str, Any], led: bool
) -> None:
    more = {"lane_width": "two-level", "leaders": min(2, world.size - 1)} if led else {}
    values = scheduled(world, rule, **more)
    run = play(world, values, shared_dir / "run", world.comm)
    resume(world, run, 7, world.comm)
    drawn = {name: section for name, section in values.items() if name != "queue"}
    again = play(world, replay(drawn, run), shared_dir / "again", None)
    if world.rank == 0:
        agree(run, again, exact=True, clients=world.size - 1)
        data = store.open_run(run)
        steps, whose = data["arrival_steps"].values, data["arrival_client"].values
        came = whose >= 0
        assert came.any(1).all()
        assert ((steps[came] >= 2) & (steps[came] <= 9)).all()
        assert (steps[0][came[0]] == (9 if rule is COMPASS else 2)).all()  # of first visits
        if rule is QUEUE:
            rates = data["arrival_rate"].values[came]
            assert ((rates > 0) & (rates <= 1)).all()
            assert (rates[came[0].sum() :] == 1).any()  # of who takes the fewest steps
        assert np.isfinite(data["loss"].values).all()


@pytest.mark.parametrize("rule", [COMPASS, QUEUE], ids=["fedcompass", "fedqueue"])
def test_a_visit_that_is_rejected_leaves_nothing(world: Any, shared_dir: Path, rule: dict[str, Any]) -> None:
    # somebody begins with the state of rounds 1, 4 and 7; no three clients can be at such visits up to the last round
    method = {**METHOD, "name": "helpers.strange.again:Third"}
    values = scheduled(world, rule, algorithm=method, guard={"most": 1.0})
    run = play(world, values, shared_dir / "run", world.comm)
    drawn = {name: section for name, section in values.items() if name != "queue"}
    again = play(world, replay(drawn, run), shared_dir / "again", None)
    if world.rank == 0:
        data, other = store.open_run(run), store.open_run(again)
        came, version = data["arrival_client"].values >= 0, data["arrival_version"].values
        rejected = data["arrival_depth"].values > data.sizes["layer"]
        np.testing.assert_array_equal(rejected, came & (version % 3 == 1))
        assert rejected.any()
        states = [store.load(store.latest(each), personal=False).shared for each in (run, again)]  # type: ignore[arg-type]
        for name, value in states[0].items():
            np.testing.assert_array_equal(value, states[1][name], err_msg=name)
        mine, theirs = (personal(each, world.size - 1) for each in (run, again))
        for client, state in mine.items():
            for name, value in state.items():
                np.testing.assert_array_equal(value, theirs[client][name], err_msg=f"{client} {name}")
        np.testing.assert_array_equal(data["loss"].values, other["loss"].values)


def test_clients_that_share_a_rank_are_refused(world: Any, shared_dir: Path) -> None:
    values = scheduled(world, COMPASS, clients=world.size)
    with pytest.raises(
        (UsageError, ErrorOnOtherRank), match=rf"of its own: expected {world.size + 1} ranks, got {world.size}"
    ):
        play(world, values, shared_dir / "run", world.comm)
