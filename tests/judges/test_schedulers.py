"""FedCompass, FedQueue and asynchronous Nesterov: loops from their papers do what code of their authors does."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from judges import schedulers
from judges.arrivals import hinge, polynomial
from judges.plain import Params
from judges.server import Momentum

RECORDED = Path(__file__).parent / "recorded"
LAWS: dict[str, Any] = {
    "constant": lambda x: 1.0,
    "polynomial": polynomial,
    "hinge": hinge,
    "harmonic": lambda x, beta: 1 / (1 + beta * x),
}
FIXED = {"about", "seconds", "queue", "samples", "start", "centres", "pull", "staleness"}
FIXED |= {"merges", "departures", "arrivals", "late"}


def runs(name: str) -> list[Any]:
    recorded = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    return [pytest.param(run, id=f"{name}-{number}") for number, run in enumerate(recorded["runs"])]


def law(run: dict[str, Any]) -> Any:
    name, keys = run["staleness"]
    return partial(LAWS[name], **keys)


def change(run: dict[str, Any]) -> Any:
    """Steps towards a client's centre."""

    def moved(i: int, w: schedulers.Vector, steps: int, factor: float = 1.0) -> schedulers.Vector:
        return (np.array(run["centres"][i]) - w) * (1 - (1 - run["pull"] * factor) ** steps)

    return moved


def same(found: Any, wanted: Any) -> None:
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted):
        assert mine == pytest.approx(tuple(theirs), rel=0, abs=1e-9)


def agrees(found: schedulers.Record, run: dict[str, Any], form: str) -> None:
    same(found.departures, run["departures"])
    same([(now,) for now, _, _ in found.merges], [(merge["time"],) for merge in run["merges"]])
    for (_, came, w), merge in zip(found.merges, run["merges"]):
        same(came, merge["came"])
        np.testing.assert_allclose(w, merge[form], rtol=0, atol=1e-9)


@pytest.mark.parametrize("form", ["changes", "models"])
@pytest.mark.parametrize("run", runs("fedcompass"))
def test_compass(run: dict[str, Any], form: str) -> None:
    keys = {key: value for key, value in run.items() if key not in FIXED}
    start = np.array(run["start"])
    found = schedulers.compass(run["seconds"], start, change(run), law(run), models=form == "models", **keys)
    agrees(found, run, form)
    same([(now, i) for now, i, in_time in found.arrivals if not in_time], run["late"])


@pytest.mark.parametrize("run", runs("fedcompass")[-2:])
def test_compass_that_loses_none(run: dict[str, Any]) -> None:
    """All that was sent counts once; the newest of each client is what counts without, at the same times."""
    keys = {key: value for key, value in run.items() if key not in FIXED}
    given = run["seconds"], np.array(run["start"]), change(run), law(run)
    found = schedulers.compass(*given, every=True, **keys)
    same(found.departures, run["departures"])
    newest = [{i: [i, x, steps] for i, x, steps in came} for _, came, _ in found.merges]
    assert newest == [{each[0]: each for each in merge["came"]} for merge in run["merges"]]
    counted = sorted(i for _, came, _ in found.merges for i, _, _ in came)
    last = found.merges[-1][0]
    before = sorted(i for now, i, _ in found.arrivals if now <= last)
    waiting = list(before)
    for i in counted:
        waiting.remove(i)
    assert len(waiting) <= len(run["seconds"])  # in groups that have not merged yet
    assert len(counted) > sum(len(merge["came"]) for merge in run["merges"])


@pytest.mark.parametrize("form", ["changes", "models"])
@pytest.mark.parametrize("run", runs("fedqueue"))
def test_queue(run: dict[str, Any], form: str) -> None:
    keys = {key: value for key, value in run.items() if key not in FIXED}
    given = run["seconds"], run["queue"], run["samples"], np.array(run["start"]), change(run), law(run)
    found = schedulers.queue(*given, models=form == "models", **keys)
    agrees(found, run, form)
    same(found.arrivals, [arrival[:3] for arrival in run["arrivals"]])


@pytest.mark.parametrize("run", runs("async-nesterov"))
def test_nesterov(run: dict[str, Any]) -> None:
    def changed(i: int, w: Params) -> Params:
        return {"w": (run["centres"][i] - w["w"]) * (1 - (1 - run["pull"]) ** run["steps"])}

    outer = run["outer"]
    found = schedulers.nesterov(
        [run["steps"] * each for each in run["seconds"]],
        {"w": torch.tensor(run["start"], dtype=torch.float64)},
        changed,
        Momentum(outer["lr"], outer["momentum"], nesterov=outer.get("nesterov", False)),
        partial(polynomial, a=0.5 if run["weight"] == "polynomial" else 0.0),
        **{"arrivals": run["arrivals"], "grace": run["grace"], "every": 4 if run["method"] == "delayed_sgd" else 1},
    )
    same([(now, i, x, float(w["w"])) for now, i, x, w in found], run["reached"])
