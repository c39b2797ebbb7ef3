"""In real time the slow, the stuck and the dead hold up nobody, and what they had sent counts, by whatever rules."""

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
DEADLINE = {"close": "deadline", "deadline": 0.4, "min_clients": 1}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "remembered": (
        *("FaultyFedAvg", "fedavg", {"lr": 0.1, "batch": 64}),
        {"weighting": {"correct": "remembered"}, "server": {"optimizer": "adam", "lr": 0.05}},
    ),
    "heterofl": ("FaultyHeteroFl", "heterofl", {"rates": [1.0, 0.5, 0.5, 0.25], "assign": "clients", "batch": 64}, {}),
}
RUN: dict[str, Any] = {
    "rounds": ROUNDS,
    "clients": RANKS - 1,
    "seed": 1,
    "evaluate": {"every": 5},
    "checkpoint": {"every": ROUNDS},
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": [32, 16]},
}


def faulty_run(folder: Path, cls: str, keys: dict[str, Any], **more: Any) -> Path:
    """Return a run with a slow, a stuck and a dead client."""
    run, marks = folder / "run", folder / "marks"
    marks.mkdir()
    when = {"stuck_in": STUCK, "dies_in": DIES, "free_in": FREE, "marks": str(marks)}
    algorithm = {"name": f"helpers.strange.faulty:{cls}", **keys, **when}
    real = {"clock": "wall", "threads": 1, "lane_width": 1, "speed": {"model": "none"}}
    file = toml({**RUN, **real, "algorithm": algorithm, **more}, folder / "my.toml")
    driver = [str(ROOT / "tests" / "helpers" / "driver.py"), "run", str(file), "--out", str(run)]
    ended = job("openmpi", RANKS, driver, options=("--with-ft", "ulfm"))
    assert ended.code == 0, ended.err
    assert store.open_run(run).attrs["status"] == "done"
    assert [event["client"] for event in store.events(run) if event["kind"] == "lost"] == [3]
    return run


def same_again(solo: Any, run: Path, folder: Path, algorithm: dict[str, Any], **more: Any) -> None:
    """Replay a run, and compare to the bit."""
    trace = {**RUN, "algorithm": algorithm, "speed": {"model": "trace", "run": str(run)}, **more}
    again = play(solo, trace, folder / "again", None)
    for name in ("depth", "loss", "layer_weight", "round_seconds", "test_loss"):
        pair = (store.open_run(each)[name].values for each in (again, run))
        np.testing.assert_array_equal(*pair, err_msg=name)
    states = [store.load(store.latest(each), personal=False).shared for each in (run, again)]
    for name, value in states[0].items():
        np.testing.assert_array_equal(value, states[1][name], err_msg=name)


def test_a_quorum_with_a_slow_a_stuck_and_a_dead_client(solo: Any, tmp_path: Path) -> None:
    run = faulty_run(tmp_path, "Faulty", SALF, participation=QUORUM)
    data = store.open_run(run)
    cohort, depth, layers = data["cohort"].values == 1, data["depth"].values, data.sizes["layer"]
    assert (depth == 1).any(1).all()
    assert cohort[: STUCK + 1].all()
    assert not cohort[STUCK + 1 : FREE, 2].any()  # it is at the visit of an earlier round
    assert not cohort[DIES + 1 :, 3].any()
    for who in (depth[cohort[:, 1], 1], depth[STUCK, 2], depth[DIES, 3]):
        assert (who >= layers).all()  # the last layer, or nothing where even a grace was too short for it
    assert (depth[:, 1] == layers).any()
    same_again(solo, run, tmp_path, {"name": "salf", **SALF})


@pytest.mark.parametrize("case", CASES)
def test_whole_visits_under_a_deadline_with_the_same_clients(solo: Any, tmp_path: Path, case: str) -> None:
    cls, name, keys, more = CASES[case]
    run = faulty_run(tmp_path, cls, keys, participation=DEADLINE, **more)
    data = store.open_run(run)
    counted = data["arrived"].values == 1
    assert counted.any(1).all()
    assert not counted[:, 1].any()
    assert not counted[STUCK, 2]
    assert not counted[DIES:, 3].any()
    same_again(solo, run, tmp_path, {"name": name, **keys}, **more)


def test_arrivals_wait_for_neither_a_slow_nor_a_stuck_nor_a_suspended_nor_a_dead_client(
    solo: Any, tmp_path: Path
) -> None:
    rules = {"rounds": 20, "participation": {"close": "arrivals", "buffer": 1}, "staleness": {"weight": "polynomial"}}
    rules["checkpoint"] = {"every": 20}  # it would ask for the suspended client's state
    keys = {"lr": 0.1, "batch": 64, "momentum": 0.5, "persist_optimizer": True}
    run = faulty_run(tmp_path, "Unawaited", keys, **rules)
    data = store.open_run(run)
    client, version, staleness = (data[f"arrival_{name}"].values[:, 0] for name in ("client", "version", "staleness"))
    assert sorted(set(client.tolist())) in ([0, 1, 2], [0, 1, 2, 3])
    assert (staleness[client == 1] >= 1).all()
    assert staleness[client == 2].max() >= FREE
    assert (tmp_path / "marks" / "awake").exists()  # it was suspended until others had gone on
    assert (version[client == 3] < DIES).all()
    same_again(solo, run, tmp_path, {"name": "fedavg", **keys}, **rules)
