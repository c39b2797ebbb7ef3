"""HeteroFL and FedRolex are what their papers say."""

from __future__ import annotations

from functools import partial
from math import ceil, exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hpcfl
from judges import arrivals, world
from judges.corrections import FedAU, Known, Remembered
from judges.heterofl import Numbers, Units, heterofl, holding, numbers, visit, whole
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


CORRECTED: dict[str, tuple[str, dict[str, Any], Any]] = {
    "estimated": ("heterofl", {"correct": "estimated"}, partial(FedAU, list(numbers(world.start())), of_visits=True)),
    "remembered": (
        "heterofl",
        {"correct": "remembered"},
        partial(Remembered, numbers(world.start()), lambda round_: 0.1, everybody=False),
    ),
    "mifa": (
        "heterofl",
        {"correct": "remembered", "mean": "all"},
        partial(Remembered, numbers(world.start()), lambda round_: 0.1, everybody=True),
    ),
    "rolling": ("fedrolex", {"correct": "estimated"}, partial(FedAU, list(numbers(world.start())), of_visits=True)),
}


@pytest.mark.parametrize("by", ["uniform", "samples"])
@pytest.mark.parametrize("case", CORRECTED)
def test_submodels_corrected_number_by_number(tmp_path: Path, case: str, by: str) -> None:
    """Of all clients those who hold a number."""
    (name, weighting, correct), units = CORRECTED[case], rolling if case == "rolling" else first
    algorithm = {**FIT, "name": name, "assign": "clients", "rates": RATES, "mask_labels": False, "weights": by}
    found = world.play(tmp_path, algorithm=algorithm, participation=world.SOME, weighting=weighting, batch_clients=4)
    holds = holding(world.start(), fixed, units)
    w, losses = heterofl(
        *(world.start(), world.clients(), found.who(), world.batches, world.weights(by), fixed, units),
        **{"lr": 0.1, "momentum": 0.9, "decay": 0.01, "masked": False, "correct": correct(holds=holds)},
    )
    world.near(found.shared, w)
    world.equal(found.rows["loss"], losses)


def test_submodels_by_known_chances(tmp_path: Path) -> None:
    groups = {"model": "groups", "means_of": [0.8, 2.0], "shares_of": [0.5, 0.5], "kind": "dynamic", "sorted": True}
    rules = {"close": "deadline", "deadline": 1.5, "partial": "discard", **world.SOME}
    algorithm = {**FIT, "name": "fedrolex", "assign": "clients", "rates": RATES, "mask_labels": False}
    found = world.play(
        tmp_path,
        algorithm=algorithm,
        participation=rules,
        weighting={"correct": "known"},
        speed=groups,
        batch_clients=4,
    )
    holds = holding(world.start(), fixed, rolling)
    known = Known(lambda i, _: 1 - exp(-1.5 / groups["means_of"][i // 3]), found.who("cohort"), holds)
    w, _ = heterofl(
        *(world.start(), world.clients(), found.who(), world.batches, world.weights("uniform"), fixed, rolling),
        **{"lr": 0.1, "momentum": 0.9, "decay": 0.01, "masked": False, "correct": known},
    )
    world.near(found.shared, w)


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
