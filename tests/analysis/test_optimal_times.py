"""Times against the optimal laws: what theorems say holds of drawn workers, and the script's steps are the engine's."""

from __future__ import annotations

from itertools import islice, pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from helpers.scripts import ANALYSIS, script
from helpers.toys import Arriving, quadratics
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.ringleader import Ringleader

DRAWN = 25
"""Sets of workers, 2 to 8 of paces of 1 to 20 seconds that never change."""


@pytest.fixture(scope="module")
def study() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ANALYSIS)
        return script("optimal_times")


def workers() -> list[list[float]]:
    rng = np.random.default_rng(7)
    return [np.exp(rng.uniform(0, 3, int(rng.integers(2, 9)))).tolist() for _ in range(DRAWN)]


def least(paces: list[float], gradients: int) -> float:
    """``min_m (1/m Σ_(i≤m) 1/τ_i)⁻¹ (1 + S/m)``: so long, twice, do any S gradients take at most that are not old."""
    rates = np.cumsum(1 / np.sort(paces))
    return min(m / rate * (1 + gradients / m) for m, rate in enumerate(rates, start=1))


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("size", [1, 3, 10])
def test_rennala_and_ringmaster_take_no_longer_than_their_theorems_say(
    study: ModuleType, size: int, stops: bool
) -> None:
    """A step of B gradients, and any R steps in a row, none of them by a gradient that is R steps old."""
    for paces in workers():
        for method, together in (("rennala", 1), ("ringmaster", size)):
            rules = study.closing(method, len(paces), size).model_copy(update={"stop_stale": stops})
            plans = list(islice(study.plans(rules, paces), 60))
            ends = np.cumsum([0.0, *(plan.duration for plan in plans)])
            assert (ends[together:] - ends[:-together]).max() <= 2 * least(paces, size) + 1e-9
            oldest = max(plan.round - int(plan.arrivals.versions.min()) for plan in plans)
            assert oldest < (size if method == "ringmaster" else 1)


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("share", [1, 2, 5])
def test_malenia_takes_no_longer_than_its_theorem_says(study: ModuleType, share: int, stops: bool) -> None:
    """A step: in twice the slowest one's time and S/n mean ones all have reported, and often enough."""
    for paces in workers():
        rules = study.closing("malenia", len(paces), share).model_copy(update={"stop_stale": stops})
        for plan in islice(study.plans(rules, paces), 12):
            counts = np.bincount(plan.cohort, minlength=len(paces))
            assert len(paces) / (1 / counts).sum() >= share * (1 - 1e-9)
            assert plan.duration <= 2 * max(paces) + share * np.mean(paces) + 1e-9
            assert (plan.arrivals.versions == plan.round).all()


def test_ringleader_takes_no_longer_than_its_theorem_says(study: ModuleType) -> None:
    """n steps in twice the slowest one's time, along gradients of points that are at most 2n − 2 steps old."""
    for paces in workers():
        n = len(paces)
        now, later, done = [[] for _ in paces], [[] for _ in paces], set[int]()
        taken, seconds, ends, oldest = [0], 0.0, [0.0], 0
        server = study.Tables(n, np.zeros(()))
        for plan in study.plans(study.closing("ringleader", n, 1), paces):
            (client,), (version,) = plan.cohort.tolist(), plan.arrivals.versions.tolist()
            seconds += plan.duration
            (later if client in done else now)[client].append(taken[version])
            stepped = client not in done and all(now)
            assert server.takes(client, np.array(float(taken[version]))) == stepped
            if stepped:
                oldest = max(oldest, taken[-1] - min(map(min, now)))
                assert server.mean == pytest.approx(np.mean([np.mean(own) for own in now]))
                done.add(client)
            if len(done) == n:
                now, later, done = later, [[] for _ in paces], set()
                ends.append(seconds)
            taken.append(taken[-1] + stepped)
            if len(ends) > 6:
                break
        assert max(after - before for before, after in pairwise(ends)) <= 2 * max(paces) + 1e-9
        assert n - 1 <= oldest <= 2 * n - 2


@pytest.mark.parametrize("name", ["ringleader", "malenia"])
def test_its_steps_are_those_of_the_engine(study: ModuleType, name: str) -> None:
    """In one dimension ∇f_i = w/2 − 1/4 + a_i: as f_i = ½(v + 2a_i)² with v = w − ½ at half the step size."""
    problem, seconds = study.Quadratic(dimension=1, noise=0.0), [1.0, 2.0, 5.5]
    apart = np.random.default_rng(2).standard_normal((3, 1))
    centres = (-2 * 0.1 * (apart - apart.mean(0))[:, 0]).tolist()
    keys: dict[str, Any] = {"buffer": 1, "dispatch": "reporter"}
    method: Any = Ringleader(batch=0, lr=0.25)
    if name == "malenia":
        method = FedAvg(epochs=0, steps=1, batch=0, lr=0.25, weights="uniform")
        keys = {"buffer": 6, "every_client": True, "max_staleness": 0, "stop_stale": True}
    path = Arriving(method, quadratics(centres, start=-0.5), seconds, **keys).path(30)
    for epsilon in (0.04, 0.02, 0.01, 1e-3):
        wanted = next(end for end, v in path if (v / 2) ** 2 <= epsilon)
        found = study.times(problem, name, 2, seconds, epsilon, (0.5,), 1, 400, 0.1)
        assert found.tolist() == [pytest.approx(wanted)]


def test_the_law_of_unlike_data_by_hand(study: ModuleType) -> None:
    """τ = (1, 3), LΔ/ε = 10, σ²/ε = 4: 10 (3 + 2 · 4/2)."""
    assert study.unlike_time([1.0, 3.0], 2.0, 0.5, 0.4, 0.1) == pytest.approx(70.0)
    assert study.optimal_time([1.0, 3.0], 2.0, 0.5, 0.4, 0.1) == pytest.approx(45.0)


def test_seconds_follow_the_laws(study: ModuleType) -> None:
    """Up to a constant, as noise grows or workers become slower."""
    problem = {noise: study.Quadratic(dimension=20, noise=noise) for noise in (1e-4, 4e-3)}
    for law, methods in study.LAWS.items():
        least = study.optimal_time if law == "alike" else study.unlike_time
        for method in methods:
            quotients = [
                study.best(each, method, paces, 2e-3, 4000, 0.1 * (law == "unlike"))["seconds"]
                / least(paces, 1.0, each.gap, noise, 2e-3)
                for noise, each in problem.items()
                for paces in ([1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 1.0, 40.0])
            ]
            assert max(quotients) < 6 * min(quotients), method
