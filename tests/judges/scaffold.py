"""SCAFFOLD: Karimireddy et al., ICML 2020, Algorithm 1 with option II."""

from __future__ import annotations

from collections.abc import Callable

import torch

from judges.corrections import Correction, plain
from judges.plain import Batches, Client, Params, Step, change, descend, loss_on, mean
from judges.server import Server, move


def scaffold(
    w: Params,
    data: list[Client],
    arrived: list[list[int]],
    batches: Batches,
    weights: dict[int, float],
    lr: Callable[[int], float],
    server: Server = move,
    correct: Correction = plain,
    counts: Callable[[int, int], float] = lambda client, step: 1.0,
) -> tuple[Params, Params, list[Params], list[float]]:
    """Return the model x, c, each client's c_i, and each round's mean training loss.

    ``y ← y − η (g(y) − c_i + c)``; ``c_i⁺ = c_i − c + (x − y) / (τη)``; ``c ← c + Σ_S (c_i⁺ − c_i) / N``.
    """
    c = {name: torch.zeros_like(value) for name, value in w.items()}
    own, losses = [c for _ in data], []
    for round_, clients in enumerate(arrived):
        eta, changes, loss, before = lr(round_), {}, {}, list(own)
        for i in clients:
            steps = batches(round_, i)
            y, moves, seen = w, dict.fromkeys(w, 0.0), []
            for k, rows in enumerate(steps):
                after, one = descend(y, loss_on(data[i]), [rows], corrected(eta, own[i], c))
                moves = {name: moves[name] + counts(i, k) * d for name, d in change(after, y).items()}
                y = after
                seen.append(one)
            changes[i], loss[i] = moves, sum(seen) / len(seen)
            own[i] = {n: own[i][n] - c[n] + (w[n] - y[n]) / (len(steps) * eta) for n in w}
        losses.append(mean(loss, weights) if clients else float("nan"))
        w = server(w, correct(round_, changes, weights))
        c = {name: c[name] + sum(own[i][name] - before[i][name] for i in clients) / len(data) for name in c}
    return w, c, own, losses


def corrected(eta: float, own: Params, c: Params) -> Step:
    return lambda y, g, memory: {name: y[name] - eta * (g[name] - own[name] + c[name]) for name in y}
