"""With `participation.every_client` clients count alike in a step, however often each has reported, of all methods."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from judges import world
from judges.arrivals import Visit, trace
from judges.fednova import length
from judges.heterofl import Numbers, numbers, visit, whole
from judges.plain import Params, change, descend, loss_on, sgd
from judges.scaffold import corrected
from judges.test_submodels import CASES, RATES, dealt, fixed

CLIENTS = range(len(world.SIZES))
LR, STEPS = 0.1, 3
RULES = {"close": "arrivals", "buffer": 9, "every_client": True, "max_staleness": 0}
SOON = np.array([0.9, 3.5, 1.7, 0.4, 2.6, 8.3])
DATA = world.clients()


def run(folder: Path, **method: Any) -> tuple[world.Outcome, list[list[Visit]]]:
    keys = {"lr": LR, "batch": world.BATCH, "epochs": 0, "steps": STEPS, "weights": "uniform", **method}
    found = world.play(folder, rounds=4, algorithm=keys, participation=RULES, speed=SOON)
    steps = trace(found.rows)
    times = [np.bincount([i for i, _, _ in visits], minlength=len(CLIENTS)) for visits in steps]
    assert min(each.min() for each in times) > 0  # everybody has reported
    assert max(each.max() for each in times) > 1  # some more than once
    return found, steps


def batches(where: Visit) -> list[Tensor]:
    i, version, number = where
    return world.batches(version, i, steps=STEPS, phase=2**16 * number)


def evenly(sent: dict[int, list[dict[Any, Tensor]]]) -> dict[Any, Tensor]:
    """For each number the mean over those who hold it of the mean of what each has sent."""
    means = [{n: sum(d[n] for d in each) / len(each) for n in each[0]} for each in sent.values()]
    names = {n: [mean[n] for mean in means if n in mean] for mean in means for n in mean}
    return {n: sum(values) / len(values) for n, values in names.items()}


@pytest.mark.parametrize("more", [{}, {"momentum": 0.9}, {"mu": 0.5}], ids=str)
def test_fednova(tmp_path: Path, more: dict[str, float]) -> None:
    found, steps = run(tmp_path, name="fednova", **more)
    w, mu, momentum = world.start(), more.get("mu", 0.0), more.get("momentum", 0.0)
    a = length(STEPS, momentum, LR * mu)
    for visits in steps:
        sent: dict[int, list[Params]] = {}
        for where in visits:
            loss = loss_on(DATA[where[0]])
            near = loss if not mu else partial(_near, w, loss, mu)
            after, _ = descend(w, near, batches(where), sgd(LR, momentum, 0.0))
            sent.setdefault(where[0], []).append({n: d / a for n, d in change(after, w).items()})
        w = {n: w[n] + (STEPS if mu else a) * d for n, d in evenly(sent).items()}
    world.near(found.shared, w)


def _near(w: Params, loss: Any, mu: float, y: Params, rows: Tensor) -> Tensor:
    return loss(y, rows) + mu / 2 * sum((y[n] - w[n]).square().sum() for n in w)


def test_scaffold(tmp_path: Path) -> None:
    """Only the model's mean is even: c stays the mean of all c_i, each visit of a client beginning with its last."""
    found, steps = run(tmp_path, name="scaffold")
    w = world.start()
    c = {n: torch.zeros_like(value) for n, value in w.items()}
    own = dict.fromkeys(CLIENTS, c)
    for visits in steps:
        sent: dict[int, list[Params]] = {}
        for where in sorted(visits, key=lambda each: each[2]):
            i = where[0]
            y, _ = descend(w, loss_on(DATA[i]), batches(where), corrected(LR, own[i], c))
            sent.setdefault(i, []).append(change(y, w))
            own[i] = {n: own[i][n] - c[n] + (w[n] - y[n]) / (STEPS * LR) for n in w}
        w = {n: w[n] + d for n, d in evenly(sent).items()}
        c = {n: sum(own[i][n] for i in CLIENTS) / len(own) for n in c}
    world.near(found.shared, {**w, **{f"control.{n}": value for n, value in c.items()}})


@pytest.mark.parametrize("case", ["scaled", "redrawn", "rolling"])
def test_heterofl_and_fedrolex(tmp_path: Path, case: str) -> None:
    keys, units = CASES[case]
    rates = dealt if "redraw" in keys else fixed
    more = {"assign": "clients", "rates": RATES, "mask_labels": False}
    found, steps = run(tmp_path, **more, **{key: value for key, value in keys.items() if key != "mask_labels"})
    w = world.start()
    for round_, visits in enumerate(steps):
        sent: dict[int, list[Numbers]] = {}
        for where in visits:
            rate = rates(round_, where[0])
            own = partial(units, round_, rate)
            d, _ = visit(w, DATA[where[0]], batches(where), rate, own, lr=LR, masked=False)
            sent.setdefault(where[0], []).append(d)
        now, moves = numbers(w), evenly(sent)
        w = whole({n: value + moves.get(n, 0.0) for n, value in now.items()}, w)
    world.near(found.shared, w)
