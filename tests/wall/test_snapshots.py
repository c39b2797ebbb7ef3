"""Snapshots in real time: a client that gets stuck in a step has sent what it had done before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.launcher import ROOT, job
from helpers.runs import put_together
from hpcfl import store
from hpcfl.base.errors import UsageError
from hpcfl.config import from_table
from hpcfl.testing.runs import play, table, toml

pytestmark = pytest.mark.launch

RANKS, ROUNDS, STUCK, DIES, FREE, STEPS = 5, 7, 1, 2, 4, 8
FEDAVG = {"lr": 0.2, "epochs": 0, "steps": STEPS, "batch": 32, "momentum": 0.5, "persist_optimizer": True}
RULE = {"close": "deadline", "deadline": 1.0, "partial": "steps", "snapshot": 1}
RUN: dict[str, Any] = {
    **{"rounds": ROUNDS, "clients": RANKS - 1, "seed": 1, "evaluate": {"every": 1}, "checkpoint": {"every": ROUNDS}},
    **{"data": {"name": "digits"}, "model": {"name": "mlp", "hidden": [16]}, "participation": RULE},
}


def test_a_slow_a_stuck_and_a_dead_client(solo: Any, tmp_path: Path) -> None:
    run, marks = tmp_path / "run", tmp_path / "marks"
    marks.mkdir()
    when = {"stuck_in": STUCK, "dies_in": DIES, "free_in": FREE, "marks": str(marks)}
    real = {"clock": "wall", "threads": 1, "lane_width": 1, "speed": {"model": "none"}}
    weary = {"name": "helpers.strange.weary:Weary", **FEDAVG, **when}
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
            "is only for .*partial = 'steps', got 'discard'",
        ),
        ({"participation": {"partial": "steps", "snapshot": 1}}, "is only for rounds that a deadline ends"),
        ({"algorithm": {"name": "fedrep"}}, "has no meaning with algorithm.name = 'fedrep', which learns in several"),
    ],
)
def test_snapshots_that_nobody_could_take_are_refused(keys: dict[str, Any], words: str) -> None:
    values = table("fedavg", "mlp", False, **{"algorithm": {"name": "fedavg"}, "participation": RULE, **keys})
    with pytest.raises(UsageError, match=rf"^participation\.snapshot = 1 {words}.*; did you mean 0\?$"):
        put_together(from_table(values))
