"""pFedMe from its paper: Algorithm 1 of Dinh et al. (NeurIPS 2020); the proximal point by gradient steps from w."""

from __future__ import annotations

from collections.abc import Sequence

from helpers.loops import Clients, Params, leaves, slopes


def pfedme(
    start: Params,
    clients: Clients,
    cohorts: Sequence[Sequence[int]],
    *,
    lr: float,
    eta: float,
    pull: float,
    beta: float,
    inner: int,
) -> tuple[Params, dict[int, Params]]:
    """Return w and each client's θ after as many rounds as there are cohorts; a visit's batches are those of epochs."""
    w, theta = dict(start), dict.fromkeys(range(len(clients.data)), start)
    for round_, cohort in enumerate(cohorts):
        locals_ = []
        for k in cohort:
            own, near = dict(w), leaves(w)
            for loss in clients.losses(round_, k):
                for _ in range(inner):
                    slope = slopes(loss(near), near)
                    for name, value in near.items():
                        value.data -= lr * (slope[name] + pull * (value.data - own[name]))
                own = {name: own[name] - eta * pull * (own[name] - near[name].detach()) for name in own}
            locals_.append(own)
            theta[k] = {name: value.detach() for name, value in near.items()}
        w = {name: (1 - beta) * w[name] + beta * sum(own[name] for own in locals_) / len(cohort) for name in w}
    return w, theta
