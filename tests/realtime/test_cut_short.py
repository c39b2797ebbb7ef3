"""Visits that stop by their own clock after the local steps that fit, in real time.

No visit can be whole: the speed model keeps them from it. A round is repeated until every client has delivered, so that
a slow machine takes longer and no more.
"""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from test_rounds import _unhurried, agree, is_exact, replay, rounds_are_sound  # noqa: F401

from helpers.runs import job_in_real_time
from hpcfl import store
from hpcfl.base.errors import UsageError
from hpcfl.engine import pace as sending
from hpcfl.engine.pace import Pace, StepClock
from hpcfl.schedule.plan import Timeline
from hpcfl.testing.runs import play, resume, table

pytestmark = pytest.mark.mpi

ROUNDS, STEPS = 3, 4
FEDAVG = {"name": "fedavg", "epochs": 0, "steps": STEPS, "batch": 16, "momentum": 0.5, "persist_optimizer": True}
FEDREP = {"name": "fedrep", "epochs": 0, "steps": STEPS - 1, "batch": 0, "head_epochs": 1}
UNEQUAL = {"name": "digits", "partition": "dirichlet", "alpha": 5.0}


def real(world: Any, shared_dir: Path, width: Any = 1, **more: Any) -> dict[str, Any]:
    """Rounds of 0.6 s, and whole visits of 0.8 s, 0.9 s and so on; a client on each rank."""
    file, clients = shared_dir / "speeds.csv", world.size - 1
    if world.rank == 0:
        file.write_text("\n".join(["client,seconds", *(f"{client},{0.8 + 0.1 * client}" for client in range(clients))]))
    world.meet()
    participation = {"close": "deadline", "deadline": 0.6, "partial": "steps", "min_clients": clients}
    plain = {
        **{"clients": clients, "rounds": ROUNDS, "clock": "wall", "lane_width": width, "threads": 1},
        **{"participation": participation, "speed": {"model": "table", "file": str(file)}},
        **{"algorithm": FEDAVG, "data": UNEQUAL},
    }
    return table("salf", "mlp", False, **{**plain, **more})


@pytest.mark.parametrize(("algorithm", "width"), [(FEDAVG, 1), (FEDAVG, "all"), (FEDREP, 1)])
def test_visits_stop_in_time_and_a_replay_takes_as_many_steps(
    world: Any, shared_dir: Path, algorithm: dict[str, Any], width: Any
) -> None:
    values = real(world, shared_dir, width, algorithm=algorithm)
    run = play(world, values, shared_dir / "run", world.comm)
    resume(world, run, 2, world.comm)
    again = play(world, replay(values, run), shared_dir / "again", None)
    if world.rank == 0:
        agree(run, again, is_exact(world, width), clients=world.size - 1)
        rounds_are_sound(run)
        data = store.open_run(run)
        steps, least = data["steps"].values, 1 + (algorithm is FEDREP)
        assert (steps >= least).all()
        seconds = 0.8 + 0.1 * np.arange(world.size - 1)
        assert (steps <= 0.6 / seconds * STEPS).all()  # no step is done sooner than the speed model says
        assert np.isinf(data["visit_seconds"].values).all()


def test_chunks_are_refused() -> None:
    words = r"^batch_clients: .* stops each visit by its own clock: .* got 2; did you mean 1\?$"
    with pytest.raises(UsageError, match=words):
        job_in_real_time(
            3,
            algorithm=FEDAVG,
            batch_clients=2,
            participation={"close": "deadline", "partial": "steps"},
        )


# --- the clock of one visit ---------------------------------------------------------------------------------


class Clocked:
    """A visit whose steps take given seconds by a clock that only they move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes: list[float], pace: float, leaves: float, least: int = 1):
        self.now, self.takes = 0.0, takes
        monkeypatch.setattr(sending.time, "monotonic", lambda: self.now)
        job = job_in_real_time(2, algorithm=FEDAVG)
        over = Event()
        monkeypatch.setattr(over, "wait", self.sleep)
        self.fractions = job.planner.work_fractions
        self.pace = Pace(job, Timeline.computing(np.array([pace]), self.fractions), over, 0.0)
        self.steps = np.array([len(takes)])
        self.clock = StepClock(self.pace, self.steps, least, leaves)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def run(self) -> tuple[int, float]:
        """Return the steps that were taken, and when it has stopped."""
        for took in self.takes:
            if not self.clock.more():
                break
            self.now += took
        return int(self.steps[0]), self.now


def test_a_step_is_begun_if_it_fits_by_the_longest_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Clocked(monkeypatch, [1.0, 1.0, 1.0, 1.0], 0.0, leaves=3.0).run() == (3, 3.0)
    assert Clocked(monkeypatch, [1.0, 2.0, 1.0, 1.0], 0.0, leaves=4.5).run() == (2, 3.0)
    assert Clocked(monkeypatch, [1.0, 1.0, 1.0, 1.0], 0.0, leaves=4.0).run() == (4, 4.0)


def test_the_least_is_tried_in_any_case_and_a_stopped_visit_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    visit = Clocked(monkeypatch, [1.0, 1.0, 1.0, 1.0], 0.0, leaves=0.5, least=2)
    assert visit.run() == (2, 2.0)
    visit.now = 0.0
    assert not visit.clock.more()
    assert visit.steps.tolist() == [2]


def test_steps_are_no_faster_than_the_speed_model_and_what_is_left_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole visits take 8 s, so a step 2 s: by 5 s two are done, and the third would come too late."""
    visit = Clocked(monkeypatch, [0.5] * 4, 8.0, leaves=5.0)
    assert visit.run() == (2, 4.0)
    for number in range(len(visit.fractions)):
        visit.pace.wait(number)
    assert visit.now == 4.0
    assert Clocked(monkeypatch, [0.5] * 4, 8.0, leaves=8.0).run() == (4, 6.5)
