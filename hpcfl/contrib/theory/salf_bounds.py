"""What the theory of SALF says of a config: the variance of a step, and Theorem III.1 where the objective is convex."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from hpcfl.algorithms import Algorithm
from hpcfl.algorithms.salf import Salf
from hpcfl.base.errors import RunError
from hpcfl.base.types import Floats, State
from hpcfl.contrib.theory.optimum import PooledObjective
from hpcfl.contrib.theory.salf_formulas import Convergence, uniform_reach, variance_bound, variance_factors
from hpcfl.engine.job import Job
from hpcfl.learning.batches import Visits
from hpcfl.learning.task import Task
from hpcfl.models.glm import Glm

PASSED = 10**8
"""Samples times parameters up to which the users' gradients are computed."""
SOLVED = 10**6
"""Users times squared parameters up to which the users' minima are computed."""


def facts(job: Job) -> Iterator[tuple[str, str]]:
    """Yield lines for `hpcfl check`; none where users are not alike, or steps are not eq. 9's."""
    reach = _reach(job)
    if reach is None:
        return
    users, layers = job.config.clients, len(reach)
    own, spread = variance_factors(users, reach)
    allowed, as4 = variance_bound(users, layers), np.allclose(reach, uniform_reach(layers))
    if job.task.parameter_count * job.task.federation.train_sizes.sum() > PASSED:
        yield "variance", f"of layer 1 … L's step over η²: {_listed(own, '|ḡ|²')}, and {_listed(spread, 'S²')}"
        return
    mean, sample, most = moments(job.task, job.algorithm)
    each = own * mean + spread * sample
    text = f"of the first step by all samples, over η², layer 1 … L: {_numbers(each)}; in all {each.sum():.3g}"
    yield "variance", text + (f", where (14) allows {allowed * most:.3g}" if as4 else "")
    keys, found = job.config.algorithm, convergence(job) if as4 else None
    if found is not None and isinstance(keys, Salf):
        yield from _theorem(keys, job.config.rounds, found)


def _reach(job: Job) -> Floats | None:
    """Return π_l, float64 [L], where steps are eq. 9's of all users, alike and independent, and none is late always."""
    algorithm, config = job.algorithm, job.config
    if not isinstance(algorithm, Salf) or algorithm.rule != "paper" or not config.speed.known(config.clock):
        return None
    if config.participation.min_clients:
        return None
    plan = job.planner.plan(job.planner.attempt(0))
    reach, users = plan.arrival[0], len(plan.cohort)
    alike = users == config.clients and np.allclose(plan.arrival, reach)
    if not alike or reach.min() <= 0 or not np.allclose(plan.miss_probability, (1 - reach) ** users):
        return None
    corrected = {"exact": True, "paper": np.allclose(reach, uniform_reach(len(reach)))}
    return reach if corrected.get(algorithm.missing, False) and reach.min() < 1 else None


def _theorem(keys: Salf, rounds: int, found: Convergence) -> Iterator[tuple[str, str]]:
    lr, decay = found.step
    known = f"ρ_c = {found.convex:.4g}, ρ_s = {found.smooth:.4g}, γ = {found.gamma:.4g}"
    yield "theorem", f"III.1: {known}; 2/(ρ_c (γ + t)) is algorithm.lr = {lr:.4g}, algorithm.decay = {decay:.4g}"
    constants = f"(15): B = {found.b:.3g}, with Γ = {found.gap:.3g}; C = {found.c:.3g}, with G² = {found.gradient:.3g}"
    if keys.momentum or not found.covers(keys.lr, keys.decay):
        expected = f"lr ≤ {lr:.4g}, 0 < decay ≤ {found.convex / 2:.4g} lr, no momentum"
        yield "bound", f"{constants}; it does not hold for these steps, expected {expected}"
        return
    below = f"F − F* ≤ {found.bound(rounds, keys.lr, keys.decay):.3g} on average after {rounds} rounds"
    yield "bound", f"{constants}; {below}"


def moments(task: Task, algorithm: Algorithm, at: State | None = None) -> tuple[Floats, Floats, float]:
    """Return what the exact variance takes of the users' gradients, by all their samples, at a model.

    Parameters
    ----------
    at : State, optional
        The model; the initial one by default.

    Returns
    -------
    mean, sample : float64 [L]
        Per layer, the square of the mean gradient's length, and the sample variance over users, 0 for a single one.
    most : float
        The largest square of a user's whole gradient, G² at this model.
    """
    layers, users = algorithm.layers(task), task.federation.clients
    total = [np.zeros(())] * len(layers)
    squares = np.zeros((users, len(layers)))
    for client in range(users):
        visits = Visits.for_test(0, np.array([client]))
        batch = next(task.batches(visits, 0, steps=1))
        gradients, _ = task.gradients(task.replicate(at or task.initial(), visits), batch)
        for number, names in enumerate(layers):
            own = np.concatenate([gradients[name].double().flatten().cpu().numpy() for name in names])
            total[number] = total[number] + own
            squares[client, number] = own @ own
    mean = np.array([np.square(each / users).sum() for each in total])
    sample = (squares.sum(0) - users * mean) / max(users - 1, 1)
    return mean, np.maximum(sample, 0), float(squares.sum(1).max())


def convergence(job: Job) -> Convergence | None:
    """Return the constants of Theorem III.1; None where they are not known.

    They are for a generalised linear model whose objective is strongly convex, of users that hold equally many samples
    and take them all in each step. G² is that of the ball around the minimum on which the initial model lies:
    ``max_u (|∇F_u(w*)| + ρ_s |w_1 − w*|)²``.
    """
    task, model, algorithm = job.task, job.config.model, job.algorithm
    sizes = task.federation.train_sizes
    if job.config.task.loss != "auto":  # the curvature is that of the model's own loss
        return None
    if not isinstance(model, Glm) or model.curvature is None or not isinstance(algorithm, Salf) or algorithm.batch:
        return None
    if task.federation.server_train() or len(set(sizes)) > 1 or len(sizes) * task.parameter_count**2 > SOLVED:
        return None
    users = [PooledObjective(task, [client], server=False) for client in range(len(sizes))]
    least, most = np.array([_curvatures(model, user) for user in users]).T
    if least.min() <= 0:
        return None
    layers = len(algorithm.layers(task))
    with suppress(RunError):  # a minimum that rounding does not allow to be found
        return _constants(layers, PooledObjective(task), users, float(most.max()), float(least.min()))
    return None


def _constants(
    layers: int, pooled: PooledObjective, users: list[PooledObjective], smooth: float, convex: float
) -> Convergence:
    start = pooled.flat(pooled.task.initial())
    best = pooled.polished(start)
    gap = pooled.value(best) - float(np.mean([user.value(user.polished(start)) for user in users]))
    distance = float(np.square(best - start).sum())
    gradient = (max(user.norm(best) for user in users) + smooth * distance**0.5) ** 2
    return Convergence(len(users), layers, smooth, convex, max(gap, 0.0), gradient, distance)


def _curvatures(model: Glm, user: PooledObjective) -> tuple[float, float]:
    """Return bounds of the eigenvalues of a user's Hessian: those of the features' moments, and the link's."""
    x = user.x.flatten(1).numpy()
    x = np.hstack([x, np.ones((len(x), 1))]) if model.bias else x
    eigenvalues = np.linalg.eigvalsh(x.T @ x / len(x))
    assert model.curvature is not None
    low, high = model.curvature
    return model.ridge + low * max(float(eigenvalues[0]), 0.0), model.ridge + high * float(eigenvalues[-1])


def _numbers(values: Floats) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


def _listed(values: Floats, unit: str) -> str:
    return f"{_numbers(values)} times {unit}"
