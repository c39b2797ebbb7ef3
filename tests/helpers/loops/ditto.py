"""Ditto from its paper: Algorithm 1 of Li et al. (ICML 2021), both models on the same batches.

With momentum for the personal model, and the mean weighted by samples, in which its authors' code draws clients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from helpers.loops import Clients, Params, leaves, slopes, weighted


def ditto(
    start: Params, clients: Clients, cohorts: Sequence[Sequence[int]], *, lr: float, pull: float, momentum: float
) -> tuple[Params, dict[int, Params], dict[int, Params]]:
    """Return w, each client's v_k and its velocity after as many rounds as there are cohorts."""
    w = dict(start)
    v = {k: leaves(start) for k in range(len(clients.data))}
    velocity = {k: {name: torch.zeros_like(value) for name, value in start.items()} for k in v}
    for round_, cohort in enumerate(cohorts):
        found = []
        for k in cohort:
            own = leaves(w)
            for loss in clients.losses(round_, k):
                theirs, ours = (slopes(loss(params), params) for params in (v[k], own))
                for name in w:
                    velocity[k][name] = momentum * velocity[k][name] + theirs[name] + pull * (v[k][name].data - w[name])
                    v[k][name].data -= lr * velocity[k][name]
                    own[name].data -= lr * ours[name]
            found.append(own)
        weights = [len(clients.data[k][1]) for k in cohort]
        w = {name: weighted([own[name] for own in found], weights) for name in w}
    return w, {k: {name: value.detach() for name, value in each.items()} for k, each in v.items()}, velocity
