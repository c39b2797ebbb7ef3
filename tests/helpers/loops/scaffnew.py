"""Scaffnew from its paper: Algorithm 2 of Mishchenko et al. (ICML 2022), communicating after every 1/p-th step."""

from __future__ import annotations

from helpers.loops import Clients, Params, leaves, slopes, weighted


def scaffnew(start: Params, clients: Clients, rounds: int, *, lr: float, steps: int) -> tuple[Params, list[Params]]:
    """Return what is shared, and each client's model before the last communication; all clients take part."""
    shared, variates, ends = dict(start), [{name: 0 * value for name, value in start.items()} for _ in clients.data], []
    for round_ in range(rounds):
        ends = []
        for k, h in enumerate(variates):
            x = leaves(shared)
            for loss in clients.losses(round_, k):
                found = slopes(loss(x), x)
                for name in x:
                    x[name].data -= lr * (found[name] - h[name])
            ends.append({name: value.detach() for name, value in x.items()})
        shared = {name: weighted([x[name] for x in ends], [1] * len(ends)) for name in shared}
        for h, x in zip(variates, ends):
            for name in h:
                h[name] = h[name] + (shared[name] - x[name]) / (steps * lr)
    return shared, ends
