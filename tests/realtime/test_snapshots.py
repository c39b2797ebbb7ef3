"""Snapshots in real time: a client that gets stuck in a step has sent what it had done before."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from helpers.launcher import ROOT, job
from helpers.runs import job_in_real_time, put_together
from hpcfl import store
from hpcfl.base.errors import UsageError
from hpcfl.config import from_table
from hpcfl.engine.executor import Executor
from hpcfl.engine.job import Job
from hpcfl.sums.frames import VisitFormats
from hpcfl.testing.runs import play, table, toml

pytestmark = pytest.mark.launch

RANKS, ROUNDS, STUCK, DIES, FREE, STEPS = 5, 6, 1, 2, 4, 8
FEDAVG = {"lr": 0.2, "epochs": 0, "steps": STEPS, "batch": 32, "momentum": 0.5, "persist_optimizer": True}
RULE = {"close": "deadline", "deadline": 2.0, "partial": "steps", "snapshot": 1}
RUN: dict[str, Any] = {
    **{"rounds": ROUNDS, "clients": RANKS - 1, "seed": 1, "evaluate": {"every": 1}, "checkpoint": {"every": ROUNDS}},
    **{"data": {"name": "digits"}, "model": {"name": "mlp", "hidden": [16]}, "participation": RULE},
}


def test_a_slow_a_stuck_and_a_dead_client(solo: Any, tmp_path: Path) -> None:
    run, marks = tmp_path / "run", tmp_path / "marks"
    marks.mkdir()
    when = {"stuck_in": STUCK, "dies_in": DIES, "free_in": FREE, "marks": str(marks)}
    real = {"clock": "wall", "threads": 1, "lane_width": 1, "speed": {"model": "none"}}
    weary = {"name": "helpers.strange.faulty:Weary", **FEDAVG, **when}
    file = toml({**RUN, **real, "algorithm": weary}, tmp_path / "my.toml")
    driver = [str(ROOT / "tests" / "helpers" / "driver.py"), "run", str(file), "--out", str(run)]
    ended = job("openmpi", RANKS, driver, options=("--with-ft", "ulfm"))
    assert ended.code == 0, ended.err
    data = store.open_run(run)
    assert data.attrs["status"] == "done"
    assert [event["client"] for event in store.events(run) if event["kind"] == "lost"] == [3]
    steps, cohort = data["steps"].values, data["cohort"].values == 1
    assert steps[STUCK, 2] == 2  # the snapshot; its third step goes on
    assert not cohort[STUCK + 2 : FREE, 2].any()
    assert steps[DIES, 3] == 0  # what the dead had not sent is gone
    assert not cohort[DIES + 1 :, 3].any()
    assert (steps[:, 1] < STEPS).all()  # eight pauses do not fit
    assert (steps[:, 1] > 0).any()
    assert (steps[:, 0] == STEPS).any()
    assert np.isinf(data["visit_seconds"].values[STUCK, 2])
    trace = {**RUN, "algorithm": {"name": "fedavg", **FEDAVG}, "speed": {"model": "trace", "run": str(run)}}
    again = play(solo, trace, tmp_path / "again", None)
    for name in ("steps", "depth", "loss", "layer_weight", "round_seconds", "test_loss"):
        np.testing.assert_array_equal(store.open_run(again)[name].values, data[name].values, err_msg=name)
    states = [store.load(store.latest(each)) for each in (run, again)]
    for name, value in states[0].shared.items():
        np.testing.assert_array_equal(value, states[1].shared[name], err_msg=name)
    kept = [store.load_personal(store.latest(each), [0, 1, 2]) for each in (run, again)]
    for client, state in kept[0].items():
        for name, value in state.items():
            np.testing.assert_array_equal(value, kept[1][client][name], err_msg=f"{client} {name}")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"participation": {**RULE, "partial": "discard"}},
            "participation.snapshot = 1 has no meaning with .*partial = 'discard': remove it, or set .* = 'steps'",
        ),
        (
            {"participation": {"partial": "steps", "snapshot": 1}},
            "participation.partial = 'steps' has no meaning",
        ),
        (
            {"algorithm": {"name": "fedrep"}},
            r".*snapshot = 1 has no meaning with .*'fedrep', which learns in several phases",
        ),
    ],
)
def test_snapshots_that_nobody_could_take_are_refused(keys: dict[str, Any], words: str) -> None:
    values = table("fedavg", "mlp", False, **{"algorithm": {"name": "fedavg"}, "participation": RULE, **keys})
    with pytest.raises(UsageError, match=rf"^{words}"):
        put_together(from_table(values))


METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg", "momentum": 0.5, "persist_optimizer": True},
    "fednova": {"name": "fednova", "momentum": 0.5},
    "scaffold": {"name": "scaffold"},
    "lg_fedavg": {"name": "lg_fedavg", "shared_layers": 1, "newcomer": "averaged"},
    "fedhenn": {"name": "fedhenn", "alignment": 12},
}


@pytest.mark.parametrize("method", METHODS)
def test_a_snapshot_is_a_visit_that_stopped_there_and_disturbs_nothing(method: str) -> None:
    """After 1, 2 and 3 of four steps, and the visit itself; whatever the method has around its training is in it."""
    algorithm = {**METHODS[method], "epochs": 0, "steps": 4, "batch": 16}
    job = job_in_real_time(2, algorithm=algorithm, participation={**RULE, "deadline": 1e6})
    snapshots = sent(job, None)
    assert len(snapshots) == 4  # after 1, 2 and 3 steps, and the visit itself
    for taken, (frames, state) in enumerate(snapshots, start=1):
        wanted, other = sent(job, taken)[-1]
        for one, two in zip(frames, wanted, strict=True):
            one[0][1] = two[0][1]  # seconds
            for mine, theirs in zip(one, two, strict=True):
                np.testing.assert_array_equal(mine, theirs)
        for name, value in other.items():
            np.testing.assert_array_equal(state[name], value, err_msg=name)


def sent(job: Job, stop: int | None) -> list[tuple[Any, Any]]:
    """What snapshots, and at last the visit, of client 2 send and keep; `stop`: it takes so many steps."""
    executor = Executor(job, job.hosted(1), job.begin(1).personal)
    asked, formats, put, kept = job.planner.attempt(0), VisitFormats(job.layout, 1), [], []
    stopped = executor._stopped

    def noted(*given: Any) -> Any:
        sender = given[2]
        state = stopped(*given)
        kept.append(([parts(frame) for frame in sender.frames], arrays(state)))
        return state

    executor._stopped = noted  # type: ignore[method-assign]
    if stop is not None:
        steps = job.planner.visit_steps
        job.planner.visit_steps = np.full_like(steps[0], stop), steps[1]
    shared = job.algorithm.init_server(job.task)
    executor.visits(asked, shared, [[np.array([2])]], formats, 0, Event(), put.append)
    if stop is not None:
        job.planner.visit_steps = steps
    state, row, _ = executor._new[2]
    whole = {name: value[row : row + 1] for name, value in state.items()}
    return [*kept, ([parts(frame) for frame in put], arrays(whole))]


def parts(frame: Any) -> list[Any]:
    return [part.clone().numpy() for part in frame.parts]


def arrays(state: Any) -> dict[str, Any]:
    return {name: value.clone().numpy() for name, value in state.items()}
