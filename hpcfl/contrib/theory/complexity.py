"""What federated oracle complexity a config will have, and what Theorem 2 would have of FedLRGD."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log, prod

import numpy as np

from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.fedlrgd import FedLrgd, smoothness
from hpcfl.base.errors import UsageError
from hpcfl.contrib.theory.fedlrgd import Constants, log_least_rank, shown
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
