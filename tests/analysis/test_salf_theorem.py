"""The picture of Theorem III.1: the exact expectation against all outcomes, slopes, and figures of short runs."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from salf_theorem import Quadratic, figures, outcomes, scatter, simulated, slope

USERS, LAYERS = 2, 2


@pytest.fixture
def quadratic() -> Quadratic:
    rng = np.random.default_rng(3)
    roots, slopes = rng.normal(size=(USERS, 3, 3)), rng.normal(size=(USERS, 3))
    hessians = roots @ roots.transpose(0, 2, 1) + np.eye(3)
    return Quadratic(hessians, slopes - slopes.mean(0), rng.normal(size=3), np.array([0, 1, 1]))


def stepped(quadratic: Quadratic, e: np.ndarray, depths: tuple[int, ...], step: float) -> np.ndarray:
    """Eq. 9 for one outcome of depths."""
    gradients, after = quadratic.hessians @ e + quadratic.slopes, e.copy()
    for layer in range(LAYERS):
        came = [user for user in range(USERS) if depths[user] <= layer + 1]
        own = quadratic.layer == layer
        missed = (1 - (layer + 1) / (LAYERS + 1)) ** USERS
        if came:
            after[own] -= step / (1 - missed) * gradients[came].mean(0)[own]
    return after


def test_the_expected_gap_is_that_over_all_outcomes_of_two_rounds(quadratic: Quadratic) -> None:
    steps, all_depths = np.array([0.05, 0.03]), list(product(range(1, LAYERS + 2), repeat=USERS))
    points = [quadratic.start]
    expected = quadratic.expected(steps)
    for number in range(3):
        hessian = quadratic.hessians.mean(0)
        assert expected["gap"][number] == pytest.approx(np.mean([e @ hessian @ e / 2 for e in points]), rel=1e-12)
        squares = [((quadratic.hessians @ e + quadratic.slopes) ** 2).sum(1) for e in points]
        assert expected["gradient"][number] == pytest.approx(np.mean(squares, axis=0).max(), rel=1e-12)
        if number < 2:
            spread = [np.var([stepped(quadratic, e, d, 1.0) for d in all_depths], axis=0).sum() for e in points]
            assert expected["variance"][number] == pytest.approx(np.mean(spread), rel=1e-12)
            points = [stepped(quadratic, e, depths, steps[number]) for e in points for depths in all_depths]


def test_the_outcomes_of_a_round_are_all_there_are() -> None:
    found = list(outcomes(8, 3))
    assert sum(chance for _, chance in found) == pytest.approx(1)
    mean = sum(chance * reached for reached, chance in found)
    np.testing.assert_allclose(mean, 8 * np.array([1, 2, 3]) / 4)


def test_runs_by_numpy_alone_are_as_expected(quadratic: Quadratic) -> None:
    steps = np.array([0.05, 0.03, 0.02])
    gaps, expected = simulated(quadratic, steps, 4000), quadratic.expected(steps)["gap"][1:]
    error = gaps.std(0, ddof=1) / 4000**0.5
    assert (error < expected / 20).all()
    assert (np.abs(gaps.mean(0) - expected) < 4 * error).all()
    x = np.array([1.0, 2.0, 4.0])
    found = scatter(np.array([1 / x, 1 / x, 1 / x**2, 1 / x**2]), x, 2)
    assert (found["runs"], found["scatter"]) == (4, pytest.approx(0.5))


def test_a_slope_has_an_interval_over_seeds() -> None:
    x = np.geomspace(10, 1000, 30)
    even = np.outer([1.0, 2.0, 4.0], 3 / x)
    np.testing.assert_allclose(slope(even, x), [-1, -1, -1])
    steeper = np.array([3 / x, 3 / x, 30 / x**2])
    found, low, high = slope(steeper, x)
    assert low < found < high == pytest.approx(-1)


def test_short_runs_are_below_the_bound_and_near_their_expectation(tmp_path: Path) -> None:
    found = figures(2, 20, 10, tmp_path, 1, tmp_path / "picture.png", 6)
    assert found["runs_above_bound"] == 0
    assert found["gap"] < found["bound_exact_variance"] < found["bound"]
    assert found["simulated"]["runs"] == 6
    assert 0.2 < found["gap"] / found["expected"] < 5
    (row,) = [row for row in found["by_layers"] if row["layers"] == 3]  # the preset's own number
    assert (row["gap"], row["bound"]) == (found["expected"], found["bound"])
    assert found["gradient"][0] < found["gradient"][1]
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
