"""The null world: all are equally fast, and no deadline is missed.

Then methods that differ in whom they wait for, and in what they make of what comes late, are one. Not SALF with eq. 10,
whose chances are those of another world.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcfl
from hpcfl import store

CLIENTS, ROUNDS = 6, 5
STEP = {"lr": 0.3, "batch": 16}
FEDAVG = {"name": "fedavg", "epochs": 0, "steps": 1, "weights": "uniform", **STEP}
IN_TIME = {"close": "deadline", "deadline": 2.0}
METHODS: dict[str, dict[str, Any]] = {
    "waits": {},
    "drop": {"participation": {**IN_TIME, "partial": "discard"}},
    "first n = N": {"participation": {"close": "first", "first": CLIENTS}},
    "quorum = all": {"participation": {"close": "quorum", "quorum": CLIENTS}},
    "the last step's layers": {"participation": {**IN_TIME, "partial": "layers"}},
    "local steps that fit": {"participation": {**IN_TIME, "partial": "steps"}},
    "FedBuff, K = N from one version": {
        "participation": {"close": "arrivals", "buffer": CLIENTS, "once_per_version": True},
        "staleness": {"weight": "polynomial"},
    },
    "SALF, eq. 9": {"algorithm": {"name": "salf", "missing": "exact", **STEP}, "participation": IN_TIME},
    "SALF, means of what came": {"algorithm": {"name": "salf", "missing": "none", **STEP}, "participation": IN_TIME},
    "SALF, inverse probability": {
        "algorithm": {"name": "salf", "rule": "inverse-probability", **STEP},
        "participation": IN_TIME,
    },
    "FedProx, mu = 0": {"algorithm": {**FEDAVG, "name": "fedprox", "mu": 0.0}},
    "FedNova": {"algorithm": {**FEDAVG, "name": "fednova"}, "participation": {**IN_TIME, "partial": "steps"}},
    "known chances": {"participation": {**IN_TIME, "partial": "discard"}, "weighting": {"correct": "known"}},
    "FedAU": {"participation": {**IN_TIME, "partial": "discard"}, "weighting": {"correct": "estimated"}},
    "FedVARP": {"participation": {**IN_TIME, "partial": "discard"}, "weighting": {"correct": "remembered"}},
    "MIFA": {
        "participation": {**IN_TIME, "partial": "discard"},
        "weighting": {"correct": "remembered", "mean": "all"},
    },
}
ROUNDED = "FedVARP", "MIFA"
"""Changes are added to what is remembered, in another order."""


@cache
def state(method: str, folder: Path) -> dict[str, np.ndarray]:
    config = {
        **{"rounds": ROUNDS, "clients": CLIENTS, "seed": 4, "precision": "double", "algorithm": FEDAVG},
        **{"data": {"name": "digits"}, "model": {"name": "mlp", "hidden": [8, 6]}},
        **{"speed": {"model": "lognormal", "mean": 1.0}},
        **METHODS[method],
    }
    out = folder / "".join(letter if letter.isalnum() else "-" for letter in method)
    assert (hpcfl.run(config, out=out, quiet=True).data["blocks"].sum("client") == CLIENTS * 3).all()
    return store.load(store.latest(out), personal=False).shared  # type: ignore[arg-type,return-value]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("null-world")


@pytest.mark.parametrize("method", list(METHODS)[1:])
def test_methods_are_one_where_all_are_alike(folder: Path, method: str) -> None:
    expected, got = state("waits", folder), state(method, folder)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-12 if method in ROUNDED else 0.0, err_msg=name)
