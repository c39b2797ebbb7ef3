"""FedDyn from its paper: Algorithm 1 of Acar et al. (ICLR 2021), with gradient steps for its local minimisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from helpers.loops import Clients, Params, leaves, slopes


def feddyn(
    start: Params, clients: Clients, cohorts: Sequence[Sequence[int]], *, lr: float, alpha: float
) -> tuple[Params, dict[int, Params], Params]:
    """Return θ, each client's ∇L_k(θ_k) and h after as many rounds as there are cohorts."""
    theta, m = dict(start), len(clients.data)
    zero = {name: torch.zeros_like(value) for name, value in start.items()}
    slope, h = dict.fromkeys(range(m), zero), zero
    for round_, cohort in enumerate(cohorts):
        found = {}
        for k in cohort:
            own = leaves(theta)
            for loss in clients.losses(round_, k):
                gradient = slopes(loss(own), own)
                for name, value in own.items():
                    value.data -= lr * (gradient[name] - slope[k][name] + alpha * (value.data - theta[name]))
            found[k] = {name: value.detach() for name, value in own.items()}
            slope[k] = {name: slope[k][name] - alpha * (found[k][name] - theta[name]) for name in theta}
        h = {name: h[name] - alpha / m * sum(found[k][name] - theta[name] for k in cohort) for name in theta}
        theta = {name: sum(found[k][name] for k in cohort) / len(cohort) - h[name] / alpha for name in theta}
    return theta, slope, h
