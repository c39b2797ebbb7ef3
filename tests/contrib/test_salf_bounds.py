"""What `hpcfl check` says of SALF's theory, on ridge regression in layers, against NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers.toys import Rounds, mlp_task, planned
from hpcfl.algorithms.salf import Salf
from hpcfl.commands.check import report
from hpcfl.config import load
from hpcfl.contrib.theory import salf_bounds as theorem
from hpcfl.contrib.theory.salf_bounds import convergence, moments, uniform_reach, variance_factors
from hpcfl.engine.job import Job
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.speeds.drawn import UniformDepth

RIDGE = 0.1
ROUNDS = 100
DEADLINE = Participation(close="deadline")


@pytest.fixture(scope="module")
def job():
    return Job.of(load("salf-ridge"), None, 1)


@pytest.fixture(scope="module")
def found(job):
    return convergence(job)


@pytest.fixture(scope="module")
def normal(job):
    """Per user H and h of ``F_u(w) = wᵀ H w / 2 − hᵀ w + c``, w the three layers' weights; and c."""
    users = []
    for client in range(8):
        held = job.task.federation.client(client)
        x, y = held.train_features.astype(float), held.train_labels.astype(float)
        users.append((2 * x.T @ x / 40 + RIDGE * np.eye(6), 2 * x.T @ y / 40, y @ y / 40))
    return tuple(np.array(part) for part in zip(*users))


def value(w, hessian, slope, constant):
    return w @ hessian @ w / 2 - slope @ w + constant


def test_the_constants_are_those_of_the_normal_equations(found, normal):
    hessians, slopes, _ = normal
    eigenvalues = np.linalg.eigvalsh(hessians)
    best = np.linalg.solve(hessians.mean(0), slopes.mean(0))
    least = np.mean([value(np.linalg.solve(h, s), h, s, c) for h, s, c in zip(*normal)])
    assert (found.users, found.layers) == (8, 3)
    assert found.smooth == pytest.approx(eigenvalues.max(), rel=1e-9)
    assert found.convex == pytest.approx(eigenvalues.min(), rel=1e-9)
    assert found.distance == pytest.approx(best @ best, rel=1e-9)
    assert found.gap == pytest.approx(value(best, *(part.mean(0) for part in normal)) - least, rel=1e-9)
    largest = max(np.linalg.norm(h @ best - s) for h, s, _ in zip(*normal))
    assert found.gradient == pytest.approx((largest + eigenvalues.max() * np.linalg.norm(best)) ** 2, rel=1e-8)


def test_the_variance_takes_the_users_gradients(job, normal):
    _, slopes, _ = normal  # gradients at 0 are -h
    parts = [slopes[:, 0:2], slopes[:, 2:4], slopes[:, 4:6]]
    mean, sample, most = moments(job.task, job.algorithm)
    np.testing.assert_allclose(mean, [(part.mean(0) ** 2).sum() for part in parts], rtol=1e-9)
    np.testing.assert_allclose(sample, [part.var(0, ddof=1).sum() for part in parts], rtol=1e-9)
    assert most == pytest.approx((slopes**2).sum(1).max(), rel=1e-9)


def said(name="salf-ridge", *settings):
    config = load(name, settings)
    lines = [line.split(maxsplit=1) for line in report(config, config.check(None), None, 1)]
    return {name: text for name, text in lines if name in ("variance", "theorem", "bound")}


def test_what_check_says_of_the_ridge(job, found):
    lines = said()
    own, spread = variance_factors(8, np.array([0.25, 0.5, 0.75]))
    mean, sample, _ = moments(job.task, job.algorithm)
    assert f"in all {(own * mean + spread * sample).sum():.3g}, where (14)" in lines["variance"]
    assert f"γ = {8 * found.smooth / found.convex:.4g};" in lines["theorem"]
    assert f"≤ {found.bound(1000, 0.06, 0.025):.3g} on average after 1000 rounds" in lines["bound"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["algorithm.rule=released"], set()),
        (["algorithm.missing=none"], set()),
        (["speed.stragglers=0.5"], set()),  # p = 0, but not of independent users
        (["participation.invite=uniform", "participation.size=5"], set()),
        (["participation.min_clients=1"], set()),
        (["algorithm.batch=4"], {"variance"}),
        (["model.ridge=0", "model.link=tanh"], {"variance"}),
        (["algorithm.momentum=0.5", "algorithm.persist_optimizer=true"], {"variance", "theorem", "bound"}),
    ],
)
def test_it_is_silent_where_nothing_is_known(settings, expected):
    lines = said("salf-ridge", *settings)
    assert lines.keys() == expected
    assert "does not hold" in lines.get("bound", "does not hold")


def test_it_has_the_variance_of_users_that_are_alike_at_any_speed():
    lines = said("salf-digits")
    assert lines.keys() == {"variance"}
    assert "(14)" not in lines["variance"]  # the paper's bound is of depths that are uniform


def test_where_gradients_are_dear_it_has_factors_alone(monkeypatch):
    monkeypatch.setattr(theorem, "PASSED", 6 * 320 - 1)
    lines = said()
    assert lines.keys() == {"variance"}
    own, spread = (", ".join(f"{each:.3g}" for each in part) for part in variance_factors(8, uniform_reach(3)))
    assert lines["variance"].strip().endswith(f"{own} times |ḡ|², and {spread} times S²")


def test_the_gap_is_below_the_bound_and_falls(job, found, normal):
    hessian, slope, constant = (part.mean(0) for part in normal)
    least = value(np.linalg.solve(hessian, slope), hessian, slope, constant)
    lr, decay = found.step
    rounds, gaps = Rounds(Salf(lr=lr, decay=decay, batch=0), job.task), []
    for number in range(ROUNDS):
        w = torch.cat([each.flatten() for each in rounds.state.values()]).numpy()
        gaps.append(value(w, hessian, slope, constant) - least)
        rounds.step(rounds.plan(UniformDepth(stragglers=1.0), DEADLINE, 1, number))
    assert (gaps < found.bound(np.arange(ROUNDS), lr, decay)).all()
    assert 0 < np.mean(gaps[-20:]) < gaps[0] / 10


def test_each_round_s_step_is_the_first_over_one_plus_decay_times_rounds():
    task = mlp_task([4] * 2)
    plan = planned([1, 1], 3)
    shrunk, whole = Rounds(Salf(lr=0.5, decay=0.25, batch=0), task), Rounds(Salf(lr=0.5, batch=0), task)
    for number in range(3):
        whole.now.shared = before = shrunk.state
        for rounds in (shrunk, whole):
            rounds.step(replace(plan, round=number))
        for name, start in before.items():
            moves = (rounds.state[name] - start for rounds in (shrunk, whole))
            torch.testing.assert_close(next(moves) * (1 + 0.25 * number), next(moves), atol=1e-7, rtol=1e-5)
