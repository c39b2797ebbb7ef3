"""The scripts on FLIC's theorems: limits against one dimension by hand and derivatives, FedRep against the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flic_clt
import flic_linear
import flic_pretraining
import numpy as np
import pytest
from scipy.linalg import sqrtm

from hpcfl import store


def w2(gap: np.ndarray, own: np.ndarray, anchor: np.ndarray) -> float:
    """W2² as the formula has it."""
    root = sqrtm(anchor)
    return float(gap @ gap + np.trace(own + anchor - 2 * sqrtm(root @ own @ root)).real)


def covariances(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    roots = rng.normal(size=(2, 3, 3))
    own, anchor = roots @ roots.transpose(0, 2, 1) + np.eye(3)
    return rng.normal(size=3), own, anchor


def test_limits_in_one_dimension() -> None:
    """W2² = δ² + (a − b)²; δ̂ varies by a²/n, â² by 2a⁴/n: 4δ²a² + 2a²(a − b)² in all."""
    found = flic_clt.limits(np.array([0.5]), np.array([[4.0]]), np.array([[9.0]]))  # δ = ½, a = 2, b = 3
    assert found["whole"] == pytest.approx(4 * 0.25 * 4 + 2 * 4 * 1)
    assert found["inner"] == pytest.approx(4 + 2 * 36 - 4 * 6 * 4)
    assert found["printed"] == pytest.approx(4 + 2 * 36 - 4 * 2 * 4)


@pytest.mark.parametrize("seed", range(3))
def test_the_whole_limit_is_that_of_the_derivative(seed: int) -> None:
    """A statistic with derivatives g by m and G by Σ varies by ``gᵀΣg + 2 tr (GΣ)²``, over n."""
    gap, own, anchor = covariances(seed)
    by_covariance = np.zeros((3, 3))
    for i in range(3):
        for j in range(3):
            step = np.zeros((3, 3))
            step[i, j] += 1e-5 / 2
            step[j, i] += 1e-5 / 2
            by_covariance[i, j] = (w2(gap, own + step, anchor) - w2(gap, own - step, anchor)) / 2e-5
    turned = by_covariance @ own
    wanted = 4 * gap @ own @ gap + 2 * np.trace(turned @ turned)
    assert flic_clt.limits(gap, own, anchor)["whole"] == pytest.approx(wanted, rel=1e-5)


def test_distances_are_those_of_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flic_clt, "PART", 2)
    gap, own, anchor = covariances(5)
    found, rng = flic_clt.distances(gap, own, anchor, 7, 3), np.random.default_rng(7)
    for each in found:
        points = gap + rng.standard_normal((7, 3)) @ np.linalg.cholesky(own).T
        assert each == pytest.approx(w2(points.mean(0), np.cov(points.T, ddof=0), anchor))


def test_errors_and_distances_of_a_short_run(tmp_path: Path) -> None:
    found = flic_linear.figures(3, 5, tmp_path / "run")
    recorded = store.open_run(tmp_path / "run")["distance"].dropna("round").values
    assert found["distance"][1] == pytest.approx(recorded[-1])
    assert found["apart"] < 1e-12
    assert found["error"][0] > found["last_error"][0] > 0
    assert (found["above"], found["printed"]) == (0, 4)
    assert found["factor"] ** 4 * found["distance"][0] == pytest.approx(found["distance"][1])


def test_what_fedrep_sees_is_what_targets_are_made_of() -> None:
    source: Any = flic_linear.load(flic_linear.PRESET, {"seed": 2})
    clients = flic_linear.Clients(source.data.federate(source.clients, 2, None), true=True)
    for client in (0, 7):
        x, y = clients.drawn(client, 3)
        np.testing.assert_allclose(x @ clients.data.truth @ clients.data.heads[client], y, atol=1e-9)
    assert clients.distance(clients.data.truth) == pytest.approx(0, abs=1e-12)
    assert clients.error(clients.data.truth) == pytest.approx(0, abs=1e-12)


def test_nearness_by_hand() -> None:
    """Class 0 at (1, 0), 1 from its anchor and 3 and 5 from the others; class 2 half at its own, half at class 0's."""
    anchors = np.array([[0.0, 0], [4, 0], [6, 0]])
    z, labels = np.array([[1.0, 0], [1, 0], [6, 0], [0, 0]]), np.array([0, 0, 2, 2])
    distance, nearest = flic_pretraining.nearness(z, labels, anchors)
    assert distance == pytest.approx(np.mean([1, 3]) / np.mean([3, 5, 3, 1]))
    assert nearest == 0.75


def test_embeddings_before_the_first_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flic_pretraining, "PRESET", "flic-toy")
    untrained, aligned = flic_pretraining.figures(3, 1, tmp_path / "run")
    assert (untrained["epochs"], aligned["epochs"]) == (0, 3)
    assert aligned["train"]["distance"] < untrained["train"]["distance"]
