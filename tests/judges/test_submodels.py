"""HeteroFL and FedRolex are what their papers say."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from judges import world
from judges.heterofl import Units, heterofl

RATES = [1.0, 0.5, 0.7, 0.3, 1.0, 0.5]
FIT = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "epochs": 2, "batch": world.BATCH}


def rate(round_: int, client: int) -> float:
    return RATES[client]


def first(round_: int, client: int, units: int) -> Tensor:
    return torch.arange(ceil(rate(round_, client) * units))


def rolling(round_: int, client: int, units: int) -> Tensor:
    return (round_ + torch.arange(max(1, int(rate(round_, client) * units)))) % units


def released(round_: int, client: int, units: int) -> Tensor:
    return (torch.arange(ceil(rate(round_, client) * units)) - round_) % units


CASES: dict[str, tuple[dict[str, Any], Units]] = {
    "heterofl": ({"name": "heterofl"}, first),
    "plain": ({"name": "heterofl", "scaler": False, "mask_labels": False, "weights": "samples"}, first),
    "fedrolex": ({"name": "fedrolex"}, rolling),
    "released": ({"name": "fedrolex", "windows": "released", "weights": "samples"}, released),
}


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_submodels(tmp_path: Path, case: str, chunk: int) -> None:
    keys, units = CASES[case]
    algorithm = {**FIT, "assign": "clients", "rates": RATES, **keys}
    found = world.play(tmp_path, algorithm=algorithm, participation=world.SOME, batch_clients=chunk)
    by = world.weights(keys.get("weights", "uniform"))
    w, losses = heterofl(
        *(world.start(), world.clients(), found.who(), world.batches, by, rate, units),
        **{"lr": 0.1, "momentum": 0.9, "decay": 0.01},
        **{"scaler": keys.get("scaler", True), "masked": keys.get("mask_labels", True)},
    )
    world.near(found.shared, w)
    world.equal(found.rows["loss"], losses)
