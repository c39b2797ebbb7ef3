"""What the theory of SALF says of a config: the variance of a step, and Theorem III.1 where the objective is convex.

Lang, Cohen & Shlezinger assume that users are alike and independent (AS4): user u reaches layer l with chance π_l, in
the paper ``l/(L+1)``. Then ``|U^l| ~ Bin(U, π_l)`` (eq. 12), nobody reaches layer l with chance ``p_l = (1 − π_l)^U``
(eq. 10), and eq. 9 takes FedAvg's step on average (Lemma 2). Rounds count from 0: `rounds` = k is the model after k
steps, the paper's w_(k+1).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from hpcfl.algorithms import Algorithm
from hpcfl.algorithms.salf import Salf
from hpcfl.base.errors import RunError
from hpcfl.base.types import Floats
from hpcfl.contrib.theory.optimum import PooledObjective
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
        text = f"{_listed(own)} times |ḡ|², and {_listed(spread)} times S²"
        yield "variance", f"of layer 1 … L's step over η²: {text}"
        return
    mean, sample, most = moments(job.task, job.algorithm)
    each = own * mean + spread * sample
    text = f"of the first step by all samples, over η², layer 1 … L: {_listed(each)}; in all {each.sum():.3g}"
    yield "variance", text + (f", where (14) allows {allowed * most:.3g}" if as4 else "")
    keys, found = job.config.algorithm, convergence(job) if as4 else None
    if found is None or not isinstance(keys, Salf):
        return
    lr, decay = found.step
    known = f"ρ_c = {found.convex:.4g}, ρ_s = {found.smooth:.4g}, γ = {found.gamma:.4g}"
    yield "theorem", f"III.1: {known}; 2/(ρ_c (γ + t)) is algorithm.lr = {lr:.4g}, algorithm.decay = {decay:.4g}"
    constants = f"(15): B = {found.b:.3g}, with Γ = {found.gap:.3g}; C = {found.c:.3g}, with G² = {found.gradient:.3g}"
    rounds = job.config.rounds
    if keys.momentum or not found.covers(keys.lr, keys.decay):
        expected = f"lr ≤ {lr:.4g}, 0 < decay ≤ {found.convex / 2:.4g} lr, no momentum"
        yield "bound", f"{constants}; it does not hold for these steps, expected {expected}"
    else:
        below = f"F − F* ≤ {found.bound(rounds, keys.lr, keys.decay):.3g} on average after {rounds} rounds"
        yield "bound", f"{constants}; {below}"


def _reach(job: Job) -> Floats | None:
    """Return π_l, float64 [L], where steps are eq. 9's of all users, alike and independent, and none is late always."""
    algorithm, config = job.algorithm, job.config
    if not isinstance(algorithm, Salf) or algorithm.rule != "paper" or not config.times_known:
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


def moments(task: Task, algorithm: Algorithm) -> tuple[Floats, Floats, float]:
    """Return what the exact variance takes of the users' gradients, by all their samples, at the initial model.

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
        gradients, _ = task.gradients(task.replicate(task.initial(), visits), batch)
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
    samples = task.federation.train_sizes
    if job.config.task.loss != "auto":  # the curvature is that of the model's own loss
        return None
    if not isinstance(model, Glm) or model.curvature is None or not isinstance(algorithm, Salf) or algorithm.batch:
        return None
    if task.federation.server_train() or len(set(samples)) > 1 or len(samples) * task.parameter_count**2 > SOLVED:
        return None
    users = [PooledObjective(task, [client], server=False) for client in range(len(samples))]
    least, most = np.array([_curvatures(model, user) for user in users]).T
    if least.min() <= 0:
        return None
    pooled, smooth = PooledObjective(task), float(most.max())
    start = pooled.flat(task.initial())
    with suppress(RunError):  # a minimum that rounding does not allow to be found
        best = pooled.polished(start)
        gap = pooled.value(best) - float(np.mean([user.value(user.polished(start)) for user in users]))
        distance = float(np.square(best - start).sum())
        gradient = (max(user.norm(best) for user in users) + smooth * distance**0.5) ** 2
        sizes = len(users), len(algorithm.layers(task))
        return Convergence(*sizes, smooth, float(least.min()), max(gap, 0.0), gradient, distance)
    return None


def _curvatures(model: Glm, user: PooledObjective) -> tuple[float, float]:
    """Return bounds of the eigenvalues of a user's Hessian: those of the features' moments, and the link's."""
    x = user.x.flatten(1).numpy()
    x = np.hstack([x, np.ones((len(x), 1))]) if model.bias else x
    eigenvalues = np.linalg.eigvalsh(x.T @ x / len(x))
    assert model.curvature is not None
    low, high = model.curvature
    return model.ridge + low * max(float(eigenvalues[0]), 0.0), model.ridge + high * float(eigenvalues[-1])


def _listed(values: Floats) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


def uniform_reach(layers: int) -> Floats:
    """Return ``π_l = l/(L+1)`` for l = 1 … L: depths uniform on 1 … L + 1 (AS4)."""
    return np.arange(1, layers + 1) / (layers + 1)


def variance_factors(users: int, reach: Floats) -> tuple[Floats, Floats]:
    """Return what ``|ḡ|²`` and ``S²`` are multiplied by in the variance of eq. 9's step over η², per layer.

    With ḡ the mean of the users' gradients of layer l and S² their sample variance (over U − 1, summed over
    coordinates), and K the number of users who reach it,

        E|step − mean step|² / η² = p/(1 − p) · |ḡ|² + Σ_(K≥1) P(K) (1/K − 1/U) / (1 − p)² · S².

    The first term: a layer that nobody reaches stays, one that is reached moves by 1/(1 − p) as much. The second: K of
    U users drawn without replacement. The paper bounds both (eqs. B.2 to B.6); this is exact. With q = 1 − π_l,
    ``Σ_(K≥1) P(K)/K = Σ_(j=1)^U (q^(U−j) − q^U)/j``: both are the integral of ``((q + s π_l)^U − q^U)/s`` over (0, 1).

    Parameters
    ----------
    users : int
        U.
    reach : float64 [L]
        π_l, above 0.

    Returns
    -------
    tuple of float64 [L]
        ``p/(1 − p)``, and ``Σ …/(1 − p)²``.
    """
    missed, j = (1 - reach) ** users, np.arange(1, users)[:, None]  # the term j = U is what is taken off, (1 − p)/U
    fewer = (((1 - reach) ** (users - j) - missed) / j).sum(0)
    return missed / (1 - missed), fewer / (1 - missed) ** 2


def variance_bound(users: int, layers: int) -> float:
    """Return the bound (14) of the variance of the whole step over ``η² G²``, which is C/G² (16b); inf for one user."""
    if users == 1:
        return float("inf")
    missed = (1 - 1 / (layers + 1)) ** users
    return 4 * users * layers / (users - 1) * (1 + missed) / (1 - missed)


@dataclass(frozen=True)
class Convergence:
    """Theorem III.1: after k rounds ``E F − F* ≤ κ/(γ + k) · (2 (B + C)/ρ_c + ρ_c γ/2 · |w_1 − w*|²)`` (15).

    It follows from ``Δ_(k+1) ≤ (1 − η_k ρ_c) Δ_k + η_k² (B + C)`` for the mean square distances Δ_k from w*, where
    ``η_k = 2/(ρ_c (γ + k))`` and ``η_0 ≤ 1/(4 ρ_s)``. So it holds for any ρ_c up to the objectives' own, and for any γ
    from ``8 ρ_s/ρ_c`` on, of which the paper takes the least.

    Attributes
    ----------
    users, layers : int
        U and L.
    smooth, convex : float
        ρ_s and ρ_c, of every user's objective (AS1).
    gap : float
        ``Γ = F* − mean_u min F_u`` (11).
    gradient : float
        G², which the mean square of a user's gradients never exceeds (AS3). No strongly convex objective has one
        everywhere: it has to hold where the iterates are.
    distance : float
        ``|w_1 − w*|²``.
    noise : float
        ``Σ_u σ_u²/U²`` (AS2): 0 where users take all their samples.
    """

    users: int
    layers: int
    smooth: float
    convex: float
    gap: float
    gradient: float
    distance: float
    noise: float = 0.0

    @property
    def gamma(self) -> float:
        """The theorem's γ = 8 κ; κ is at least 1."""
        return 8 * self.smooth / self.convex

    @property
    def step(self) -> tuple[float, float]:
        """Keys `lr` and `decay` of the theorem's step sizes ``2/(ρ_c (γ + k))``."""
        return 2 / (self.convex * self.gamma), 1 / self.gamma

    @property
    def b(self) -> float:
        """B (16a)."""
        return self.noise + 6 * self.smooth * self.gap

    @property
    def c(self) -> float:
        """C (16b)."""
        return variance_bound(self.users, self.layers) * self.gradient

    def covers(self, lr: float, decay: float) -> bool:
        """Whether the theorem holds for the step sizes ``lr/(1 + decay·k)``, up to rounding of the keys."""
        return decay > 0 and 2 * decay / lr <= self.convex * (1 + 1e-6) and lr * 4 * self.smooth <= 1 + 1e-6

    def bound(self, rounds: Floats | int, lr: float, decay: float, variance: float | None = None) -> Floats:
        """Return (15) after so many rounds of steps ``lr/(1 + decay·k)`` that it covers, float64.

        Where users take all their samples, a known bound of a step's `variance` over η² may stand for ``B + C``.
        """
        convex, gamma = 2 * decay / lr, 1 / decay
        noise = self.b + self.c if variance is None else variance
        start = 2 * noise / convex + convex * gamma / 2 * self.distance
        found: Floats = self.smooth / convex / (gamma + np.asarray(rounds)) * start
        return found
