"""The script of times to small gradients: its rounds are the engine's, and slow workers hold up who waits for them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from helpers.scripts import script
from helpers.toys import Arriving, quadratics
from hpcfl.algorithms.fedasync import FedAsync
from hpcfl.algorithms.ringmaster import Ringmaster
from hpcfl.schedule.participation import Staleness


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return script("arrival_times")


def test_the_gradient_is_that_of_the_quadratic(study: ModuleType) -> None:
    problem = study.Quadratic(dimension=5)
    a = (2 * np.eye(5) - np.eye(5, k=1) - np.eye(5, k=-1)) / 4
    b = np.array([0.25, 0, 0, 0, 0])
    w = np.random.default_rng(1).standard_normal((2, 3, 5))
    np.testing.assert_allclose(problem.gradient(w), w @ a - b, atol=1e-15)
    least = np.linalg.solve(a, b)
    np.testing.assert_allclose(least, 1 - np.arange(1, 6) / 6)
    assert problem.gap == pytest.approx(-(least @ a @ least / 2 - b @ least))
    assert np.linalg.eigvalsh(a).max() < 1


@pytest.mark.parametrize("delay", [2, 4])
def test_its_steps_are_those_of_the_engine(study: ModuleType, delay: int) -> None:
    """In one dimension ∇f = w/2 − 1/4: as f = ½v² with v = w − ½ at half the step size."""
    problem, seconds = study.Quadratic(dimension=1, noise=0.0), [1.0, 2.5]
    rules = study.rules("ringmaster", delay)
    keys: dict[str, Any] = {"buffer": 1, "dispatch": "reporter", "max_staleness": delay - 1, "stop_stale": True}
    path = Arriving(Ringmaster(batch=0, lr=0.25), quadratics([0.0, 0.0], start=-0.5), seconds, **keys).path(6)
    for epsilon in (0.04, 0.02, 0.01, 0.005):
        wanted = next((end for end, v in path if (v / 2) ** 2 <= epsilon), np.inf)
        found = study.times(problem, rules, seconds, epsilon, steps=(0.5,), seeds=1, gradients=6)
        assert found.tolist() == [wanted]


def test_it_mixes_models_as_the_engine_does(study: ModuleType) -> None:
    problem, seconds = study.Quadratic(dimension=1, noise=0.0), [1.0, 2.5]
    method, old = FedAsync(epochs=0, steps=1, batch=0, lr=0.25, mu=0.0, alpha=0.5), Staleness(weight="polynomial")
    path = Arriving(method, quadratics([0.0, 0.0], start=-0.5), seconds, old, buffer=1, dispatch="reporter").path(9)
    for epsilon in (0.05, 0.04, 0.03):
        wanted = next((end for end, v in path if (v / 2) ** 2 <= epsilon), np.inf)
        rules = study.rules("fedasync", 2)
        found = study.times(problem, rules, seconds, epsilon, steps=(0.5,), seeds=1, gradients=9, alpha=0.5)
        assert found.tolist() == [wanted] != [np.inf]


def test_who_waits_for_all_is_as_slow_as_the_slowest(study: ModuleType) -> None:
    problem, epsilon = study.Quadratic(dimension=20, noise=1e-3), 1e-3
    found = {}
    for slow in (1.0, 30.0, 300.0):
        paces = [1.0] * 3 + [slow]
        found[slow] = {
            name: study.best(problem, name, paces, epsilon, 3000)["seconds"]
            for name in ("synchronous", "fedasync", "rennala", "ringmaster")
        }
    assert found[300.0]["synchronous"] == 10 * found[30.0]["synchronous"] == 300 * found[1.0]["synchronous"]
    for method in ("fedasync", "rennala", "ringmaster"):
        assert found[300.0][method] <= 1.2 * found[30.0][method] < found[30.0]["synchronous"] / 4
    laws = {slow: study.optimal_time([1.0] * 3 + [slow], 1.0, problem.gap, 1e-3, epsilon) for slow in found}
    for method in ("rennala", "ringmaster"):  # a constant away from the law, whatever the slow worker
        quotients = [found[slow][method] / law for slow, law in laws.items()]
        assert max(quotients) <= 1.5 * min(quotients)
    assert found[300.0]["synchronous"] / laws[300.0] > 100 * found[1.0]["synchronous"] / laws[1.0]
