"""What federated oracle complexity a config will have, and what Theorem 2 would have of FedLRGD.

The theorem asks for a rank r (eq. 47) and steps S (eq. 48) for an accuracy ε. Features lie in [0, 1]^d and parameters
in [-1, 1]^p, as in the paper's own example (Appendix A): beyond, a penalty's gradient has no bound. Of α, which
assumption 5 leaves open, 1 is the least, and asks for the lowest rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, lgamma, log, log1p, pi, prod

import numpy as np

from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.fedlrgd import FedLrgd, smoothness
from hpcfl.base.errors import UsageError
from hpcfl.engine.job import Job
from hpcfl.models.glm import Glm
from hpcfl.schedule.plan import Plan

EPSILONS = 1e-2, 1e-6


def theory(job: Job) -> Iterator[tuple[str, str]]:
    """Yield lines for `hpcfl check`: the constants of Theorem 2, S (eq. 48) and r (eq. 47) beside the config's."""
    keys = job.config.algorithm
    if not isinstance(keys, FedLrgd):
        return
    dimension = prod(job.task.federation.shapes[0])
    least = f"eq. 47 asks for more than {shown(log_least_rank(dimension))} with d = {dimension}, whatever ε and loss"
    try:
        known = constants(job, keys)
    except UsageError as error:
        yield "theory", f"Theorem 2: its constants are not known: {error}; {least}"
        return
    near = f"1/L1 = {1 / known.smooth:.4g} (algorithm.lr = {keys.lr:g})"
    text = f"{near}, μ = {known.convex:g}, κ = {known.condition:.4g}, B = {known.bound:.3g}"
    yield "theory", f"Theorem 2: {text}, F(θ0) − F* ≤ {known.start:.3g}"
    wanted = ", ".join(f"{known.steps(epsilon):,} for ε = {epsilon:g}" for epsilon in EPSILONS)
    yield "steps", f"S by eq. 48: {wanted}; here {descent(keys, job.config.rounds):,}"
    link = getattr(job.config.model, "link", "")
    ranks = [(*known.best_log_rank(epsilon), epsilon) for epsilon in (EPSILONS if link == "logistic" else ())]
    wanted = "".join(f"{shown(rank)} for ε = {epsilon:g} (η = {eta}), " for rank, eta, epsilon in ranks)
    low, held = log_least_rank(dimension), _held(job)
    yield "rank", f"r by eq. 47 with α = 1: {wanted}more than {shown(low)} for any ε and loss; here {keys.rank}"
    if max([low, *(rank for rank, _, _ in ranks)]) > log(held):
        yield "", f"that is of no use, the server holding {held} samples: the rank is to be tried out"


def constants(job: Job, keys: FedLrgd) -> Constants:
    """Return the constants of Theorem 2; UsageError where they are not known."""
    task, model = job.task, job.config.model
    convex = isinstance(model, Glm) and model.link in ("logistic", "softmax") and model.ridge > 0
    convex = convex and job.config.task.loss == "auto"
    if not convex or not isinstance(model, Glm) or model.curvature is None:
        raise UsageError("expected model.name = 'glm' with link = 'logistic' or 'softmax' and a ridge above 0")
    smoothness.check_unit_cube(task, smoothness.server_samples(task, "Theorem 2"), "Theorem 2")
    dimension = prod(task.federation.shapes[0])
    smooth = model.curvature[1] * (dimension + model.bias) + model.ridge
    bound = 1 + (model.ridge if keys.penalty == "reweighted" else 0.0)
    return Constants(dimension, task.parameter_count, smooth, model.ridge, bound, log(task.federation.classes))


def _held(job: Job) -> int:
    return int(smoothness.server_samples(job.task, "algorithm.name = 'fedlrgd'").y.shape[1])


def descent(keys: FedLrgd, rounds: int) -> int:
    """Return S: steps in the rounds that come after the clients'."""
    return keys.steps * sum(keys.clients_done(number) for number in range(rounds))


def gamma(job: Job, plans: Sequence[Plan]) -> str:
    """Return Γ of a whole run in words, as far as it is known before: of FedAvg and FedLRGD; else ""."""
    keys, phi = job.config.algorithm, job.config.oracle.phi or 0.0
    most = int(job.task.federation.train_sizes[job.planner.members].max())
    active = [int(plan.counted.sum()) for plan in plans]
    if isinstance(keys, FedAvg):
        b, rounds = keys.epochs * most or keys.steps * min(keys.batch or most, most), job.config.rounds
        mean = float(np.mean(active))
        return f"Γ = T (b + φ τm) = {rounds} ({b} + {phi:g} · {mean:.4g}) = {rounds * (b + phi * mean):,.0f}"
    if not isinstance(keys, FedLrgd):
        return ""
    r, m, steps = keys.rank, max(active), descent(keys, job.config.rounds)
    held = _held(job)
    parts = [r * r, *([r * (held - r)] if held > r else []), r * most, r * steps, phi * m * r]
    words = "r² + r (R − r) + r s + r S + φ m r" if held > r else "r² + r s + r S + φ m r"
    return f"Γ = {words} = {' + '.join(f'{part:,.0f}' for part in parts)} = {sum(parts):,.0f}"


ALPHA = 1.0
ORDERS = 12
"""η is sought up to this times the least, 4 d: the best is at 5 to 10 times it."""


@dataclass(frozen=True)
class Constants:
    """What the theorem takes of a problem.

    Attributes
    ----------
    dimension, parameters : int
        d and p.
    smooth, convex : float
        L1 and μ.
    bound : float
        B, which no entry of a gradient exceeds.
    start : float
        A bound of F(θ0) - F*.
    """

    dimension: int
    parameters: int
    smooth: float
    convex: float
    bound: float
    start: float

    @property
    def condition(self) -> float:
        """κ."""
        return self.smooth / self.convex

    @property
    def far(self) -> float:
        """``F(θ0) - F* + 9 (B + 3)⁴ p / 2μ``."""
        return self.start + 9 * (self.bound + 3) ** 4 * self.parameters / (2 * self.convex)

    def steps(self, epsilon: float) -> int:
        """S (eq. 48)."""
        return ceil(log(self.far / epsilon) / -log1p(-1 / self.condition))

    def log_rank(self, epsilon: float, eta: float, log_holder: float) -> float:
        """Return log r (eq. 47), not rounded, for gradients that are (η, L2)-Hölder in the data; inf for too low η."""
        d, left = self.dimension, eta - (2 * ALPHA + 2) * self.dimension
        if left <= 0:
            return inf
        ahead = self.condition * self.far / ((self.condition - 1) * epsilon)
        power = d * (log_holder + log(eta) + eta * log((2 * eta + 2 * d) / (eta - 1)))
        power += eta * (d + 1) + eta / 2 * log(d) + d / 2 * log(ahead)
        return max(1 + log(d) / 2 + d * log(2 * (eta + d)), power / left)

    def best_log_rank(self, epsilon: float) -> tuple[float, int]:
        """Return log r and η where that is least, the link being logistic, and so of any order."""
        least = int((2 * ALPHA + 2) * self.dimension)
        return min((self.log_rank(epsilon, eta, log_holder(eta)), eta) for eta in range(least + 1, ORDERS * least + 1))


def log_holder(eta: int) -> float:
    """Return log L2 of ``x_i (σ(θᵀx) - y) + μ θ_i`` for an order η ≥ 2, with x in [0, 1]^d and θ in [-1, 1]^d.

    Derivatives of order η are at most ``sup |σ^(η)| + η sup |σ^(η-1)|``. From the poles of σ, at odd multiples of πi,
    ``sup |σ^(k)| ≤ k! / (4 π^(k-1))``.
    """
    return lgamma(eta + 1) + log((1 + pi) / 4) - (eta - 1) * log(pi)


def log_least_rank(dimension: int) -> float:
    """Return log of ``e √d (10 d)^d``, which eq. 47 exceeds for any loss and any ε, since η > (2α + 2) d ≥ 4 d."""
    return 1 + log(dimension) / 2 + dimension * log(10 * dimension)


def shown(log_rank: float) -> str:
    """Return a rank in digits, or its power of ten where it has many."""
    return f"{ceil(exp(log_rank)):,}" if log_rank < log(1e9) else f"1e{log_rank / log(10):.0f}"
