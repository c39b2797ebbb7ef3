"""SALF: Lang, Cohen & Shlezinger, stragglers-aware layer-wise federated learning, Algorithm 1, eqs. 9 and 10."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from judges.corrections import Correction, plain
from judges.plain import Batches, Client, Params, gradients, loss_on, mean
from judges.server import Server, move


def salf(
    w: Params,
    data: list[Client],
    depths: list[dict[int, int]],
    batches: Batches,
    layers: list[list[str]],
    *,
    lr: Callable[[int], float],
    momentum: float = 0.0,
    scale: Callable[[int, int, int], float] = lambda round_, layer, reached: 1.0,
    correct: Correction = plain,
    server: Server = move,
) -> tuple[Params, list[Params], list[float]]:
    """Return the model, each user's velocity, and each round's mean loss of those who delivered anything.

    `depths` are each invited user's first layer (1 … L) that is there in time; L + 1: none. `layers` are the tensors of
    each layer. ``w^l ← w^l − η · scale · mean_{U^l} ∇F_u^l``, with a `scale` of round, layer and |U^l|: 1/(1 − p_l) by
    eq. 9, |U^l|/U in the authors' code. Momentum advances where a gradient was reached.
    """
    velocity: list[dict[str, Any]] = [{} for _ in data]
    losses, ones = [], dict.fromkeys(range(len(data)), 1.0)
    for round_, depth in enumerate(depths):
        changes, loss = {}, {}
        for u, first in depth.items():
            if first <= len(layers):
                g, loss[u] = gradients(loss_on(data[u]), w, batches(round_, u)[0])
                reached = [name for layer in layers[first - 1 :] for name in layer]
                velocity[u] |= {name: momentum * velocity[u].get(name, 0.0) + g[name] for name in reached}
                changes[u] = {name: -lr(round_) * velocity[u][name] for name in reached}
        losses.append(mean(loss, ones) if loss else float("nan"))
        delta = correct(round_, changes, ones)
        for number, layer in enumerate(layers, 1):
            sent = sum(layer[0] in each for each in changes.values())
            for name in set(layer) & delta.keys():
                delta[name] = scale(round_, number, sent) * delta[name]
        w = server(w, delta)
    return w, velocity, losses
