"""FedDyn from its paper: Algorithm 1 of Acar et al. (ICLR 2021), with gradient steps for its local minimisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from helpers.loops import Client, Params, dense, leaves, passes, slopes


def feddyn(
    start: Params,
    data: list[Client],
    cohorts: Sequence[Sequence[int]],
    seed: int,
    *,
    layers: list[str],
    lr: float,
    alpha: float,
    batch: int,
    epochs: int,
) -> tuple[Params, dict[int, Params], Params]:
    """Return θ, each client's ∇L_k(θ_k) and h after as many rounds as there are cohorts."""
    theta, m = dict(start), len(data)
    zero = {name: torch.zeros_like(value) for name, value in start.items()}
    slope, h = dict.fromkeys(range(m), zero), zero
    for round_, cohort in enumerate(cohorts):
        found = {}
        for k in cohort:
            x, y = data[k]
            own = leaves(theta)
            for rows in passes(seed, round_, k, 0, len(y), batch, epochs):
                gradient = slopes(F.cross_entropy(dense(own, x[rows], layers), y[rows]), own)
                for name, value in own.items():
                    value.data -= lr * (gradient[name] - slope[k][name] + alpha * (value.data - theta[name]))
            found[k] = {name: value.detach() for name, value in own.items()}
            slope[k] = {name: slope[k][name] - alpha * (found[k][name] - theta[name]) for name in theta}
        h = {name: h[name] - alpha / m * sum(found[k][name] - theta[name] for k in cohort) for name in theta}
        theta = {name: sum(found[k][name] for k in cohort) / len(cohort) - h[name] / alpha for name in theta}
    return theta, slope, h
