"""A quorum in real time: the slow, the stuck and the dead hold up nobody, and what they had sent counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.launcher import ROOT, job
from hpcfl import store
from hpcfl.testing.runs import play, toml

pytestmark = pytest.mark.launch

RANKS, ROUNDS, STUCK, DIES, FREE = 5, 10, 2, 4, 6
SALF = {"lr": 0.2, "batch": 64, "missing": "none", "momentum": 0.5, "persist_optimizer": True}
QUORUM = {"close": "quorum", "quorum": 1, "grace": 0.2}
RUN: dict[str, Any] = {
    "rounds": ROUNDS,
    "clients": RANKS - 1,
    "seed": 1,
    "evaluate": {"every": 5},
    "checkpoint": {"every": ROUNDS},
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": [32, 16]},
}


def test_a_quorum_with_a_slow_a_stuck_and_a_dead_client(solo: Any, tmp_path: Path) -> None:
    run, marks = tmp_path / "run", tmp_path / "marks"
    marks.mkdir()
    when = {"stuck_in": STUCK, "dies_in": DIES, "free_in": FREE, "marks": str(marks)}
    faulty = {"name": "helpers.strange.faulty:Faulty", **SALF, **when}
    real = {"clock": "wall", "threads": 1, "lane_width": 1, "speed": {"model": "none"}}
    file = toml({**RUN, **real, "algorithm": faulty, "participation": QUORUM}, tmp_path / "my.toml")
    driver = [str(ROOT / "tests" / "helpers" / "driver.py"), "run", str(file), "--out", str(run)]
    ended = job("openmpi", RANKS, driver, options=("--with-ft", "ulfm"))
    assert ended.code == 0, ended.err
    data = store.open_run(run)
    assert data.attrs["status"] == "done"
    assert [event["client"] for event in store.events(run) if event["kind"] == "lost"] == [3]
    cohort, depth, layers = data["cohort"].values == 1, data["depth"].values, data.sizes["layer"]
    assert (depth == 1).any(1).all()
    assert cohort[: STUCK + 1].all()
    assert not cohort[STUCK + 1 : FREE, 2].any()  # it is at the visit of an earlier round
    assert not cohort[DIES + 1 :, 3].any()
    for who in (depth[cohort[:, 1], 1], depth[STUCK, 2], depth[DIES, 3]):
        assert (who >= layers).all()  # the last layer, or nothing where even a grace was too short for it
    assert (depth[:, 1] == layers).any()
    trace = {**RUN, "algorithm": {"name": "salf", **SALF}, "speed": {"model": "trace", "run": str(run)}}
    again = play(solo, trace, tmp_path / "again", None)
    for name in ("depth", "loss", "layer_weight", "round_seconds", "test_loss"):
        np.testing.assert_array_equal(store.open_run(again)[name].values, data[name].values, err_msg=name)
    states = [store.load(store.latest(each), personal=False).shared for each in (run, again)]
    for name, value in states[0].items():
        np.testing.assert_array_equal(value, states[1][name], err_msg=name)
