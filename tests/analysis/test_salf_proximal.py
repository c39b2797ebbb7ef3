"""FedProx by layers: without stragglers FedProx, without a proximal term FedAvg whose layers count one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import hpcfl

OURS = "salf_proximal:LayeredProx"
STEPS = {"rounds": 4, "clients": 6, "evaluate.every": 1, "algorithm.lr": 0.3, "algorithm.batch": 8}
STEPS |= {"algorithm.epochs": 0, "algorithm.steps": 3, "algorithm.weights": "uniform"}
LATE = {"participation.close": "deadline", "participation.partial": "layers", "participation.deadline": 1.0}
LATE |= {"speed.model": "uniform-depth", "speed.stragglers": 0.5}


def losses(folder: Path, name: str, keys: dict[str, Any]) -> Any:
    settings = STEPS | {"algorithm.name": name} | keys
    return hpcfl.run("fedavg-digits", settings=settings, out=folder, quiet=True).data["test_loss"].values


def test_all_in_time_is_fedprox(tmp_path: Path) -> None:
    ours = losses(tmp_path / "ours", OURS, {"algorithm.mu": 0.5})
    np.testing.assert_allclose(ours, losses(tmp_path / "fedprox", "fedprox", {"algorithm.mu": 0.5}), rtol=1e-5)
    assert abs(ours - losses(tmp_path / "plain", OURS, {"algorithm.mu": 0.0})).max() > 1e-4


def test_without_a_proximal_term_it_is_fedavg_by_layers(tmp_path: Path) -> None:
    ours = losses(tmp_path / "ours", OURS, LATE | {"algorithm.mu": 0.0})
    np.testing.assert_allclose(ours, losses(tmp_path / "fedavg", "fedavg", LATE), rtol=1e-5)
