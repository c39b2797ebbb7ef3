"""HeteroFL and FedRolex are what their papers say."""

from __future__ import annotations

from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hpcfl
from judges import arrivals, world
from judges.heterofl import Numbers, Units, heterofl, numbers, visit, whole
from judges.server import FedOpt, move

RATES = [0.8, 0.5, 0.7, 0.3, 0.8, 1.0]
"""Of the client that is never invited the largest: the last units of each layer stay."""
YOGI = {"optimizer": "yogi", "lr": 0.1, "betas": [0.8, 0.9], "tau": 0.05}
FIT = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "epochs": 2, "batch": world.BATCH}


def fixed(round_: int, client: int) -> float:
    return RATES[client]


def dealt(round_: int, client: int) -> float:
    """The rates are dealt anew in each round, by hpcfl's keyed generator."""
    return RATES[hpcfl.keyed(world.SEED, "rates", round_).permutation(len(RATES))[client]]


def first(round_: int, rate: float, units: int) -> Tensor:
    return torch.arange(ceil(rate * units))


def rolling(round_: int, rate: float, units: int) -> Tensor:
    return (round_ + torch.arange(max(1, int(rate * units)))) % units


def released(round_: int, rate: float, units: int) -> Tensor:
    return (torch.arange(ceil(rate * units)) - round_) % units


CASES: dict[str, tuple[dict[str, Any], Units]] = {
    "heterofl": ({"name": "heterofl"}, first),
    "scaled": ({"name": "heterofl", "mask_labels": False}, first),
    "masked": ({"name": "heterofl", "scaler": False, "weights": "samples"}, first),
    "redrawn": ({"name": "heterofl", "redraw": True}, first),
    "yogi": ({"name": "heterofl"}, first),
    "fedrolex": ({"name": "fedrolex", "redraw": True}, rolling),
    "rolling": ({"name": "fedrolex", "mask_labels": False}, rolling),
    "released": ({"name": "fedrolex", "windows": "released", "weights": "samples"}, released),
    "rolling yogi": ({"name": "fedrolex"}, rolling),
}


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_submodels(tmp_path: Path, case: str, chunk: int) -> None:
    keys, units = CASES[case]
    algorithm = {**FIT, "assign": "clients", "rates": RATES, **keys}
    more = {"server": YOGI} if "yogi" in case else {}
    found = world.play(tmp_path, algorithm=algorithm, participation=world.SOME, batch_clients=chunk, **more)
    by = world.weights(keys.get("weights", "uniform"))
    w, losses = heterofl(
        *(world.start(), world.clients(), found.who(), world.batches, by, dealt if "redraw" in keys else fixed, units),
        **{"lr": 0.1, "momentum": 0.9, "decay": 0.01},
        server=FedOpt("yogi", 0.1, 0.8, 0.9, 0.05) if more else move,
        **{"scaler": keys.get("scaler", True), "masked": keys.get("mask_labels", True)},
    )
    world.near(found.shared, w)
    world.equal(found.rows["loss"], losses)


PACES = np.array([0.9, 3.5, 1.7, 0.4, 2.6, 90.0])


@pytest.mark.parametrize("name", ["heterofl", "fedrolex"])
@pytest.mark.parametrize(("chunk", "redraw", "masked"), [(1, False, True), (4, True, False)])
def test_submodels_in_a_buffer(tmp_path: Path, chunk: int, redraw: bool, masked: bool, name: str) -> None:
    """FedBuff number by number: the mean is over the visits that hold it, whatever windows there are by now."""
    keys = {"redraw": redraw, "mask_labels": masked}
    units = first if name == "heterofl" else rolling
    found = world.play(
        tmp_path,
        rounds=6,
        algorithm={"name": name, **FIT, "assign": "clients", "rates": RATES, "weights": "samples", **keys},
        participation={"close": "arrivals", "buffer": 3, "concurrency": 4},
        staleness={"weight": "polynomial", "a": 0.7},
        speed=PACES,
        batch_clients=chunk,
    )

    def work(w: Numbers, i: int, version: int, number: int) -> Numbers:
        rate, steps = (dealt if redraw else fixed)(version, i), world.batches(version, i, phase=2**16 * number)
        how: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "decay": 0.01, "masked": masked}
        return visit(whole(w, start), world.clients()[i], steps, rate, partial(units, version, rate), **how)[0]

    start, rule = world.start(), arrivals.fedbuff(lambda x: arrivals.polynomial(x, 0.7), world.weights(), move)
    world.near(found.shared, whole(arrivals.played(numbers(start), arrivals.trace(found.rows), work, rule), start))
