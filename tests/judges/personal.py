"""FedRep, LG-FedAvg and their form with doubling (SRPFL, Tziotis et al., Algorithm 1); HF-MAML (Fallah et al.)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from judges.plain import Client, Params, mean
from judges.server import Server, move
from judges.steps import Loss, Sgd, gradient, mean_loss

Turn = tuple[tuple[str, ...], int, int]
"""Layers that learn, which of a visit's orders of samples, epochs."""


def fastest(invited: Sequence[int], seconds: Sequence[float], first: int, stage: int) -> list[int]:
    """The participants of a round: n0 of the invited at first, twice as many from stage to stage."""
    n = min(len(invited), first * 2**stage)
    return sorted(sorted(invited, key=lambda i: seconds[i])[:n])


def visit(
    w: Params, client: Client, turns: Sequence[Turn], sgd: Sgd, draws: Callable[..., list[Tensor]], most: int | None
) -> tuple[Params, list[float]]:
    """Each turn lets some layers learn, all else being fixed; one optimiser, and at most so many steps in all.

    Return where that leads, and the mean loss of each turn that was begun.
    """
    (x, y), left, losses = client, most, []
    for layers, phase, epochs in turns:
        learning, seen = [name for name in w if name.startswith(layers)], []
        for rows in draws(epochs=epochs, phase=phase)[:left]:
            loss = mean_loss(x[rows], y[rows])
            seen.append(float(loss(w)))
            w = sgd.step(w, gradient(loss, w, learning))
        left = None if left is None else left - len(seen)
        losses += [sum(seen) / len(seen)] if seen else []
    return w, losses


@dataclass
class Srpfl:
    """Clients, and which of their model's layers learn in turn; those of `own` are personal, and begin so.

    `averaged`: a client's first visit begins with the mean of those that were sent last, `shared` before there is one.
    """

    data: Sequence[Client]
    shared: Params
    own: list[Params]
    turns: Sequence[Turn]
    draws: Callable[..., list[Tensor]]
    weights: dict[int, float]
    local: Callable[[int], Sgd]
    averaged: bool = False
    move: Server = move
    seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.first = list(self.own)

    def round(
        self, t: int, active: Sequence[int], most: dict[int, int] | None = None,
        missing: Collection[tuple[int, str]] = (),
    ) -> float:  # fmt: skip
        """Return the mean over clients of their loss in the turns in which what is shared learns.

        Of what is `missing`, by client and tensor, nothing counts, and nothing of the client's personal layers either.
        """
        sent, loss = {}, {}
        for i in active:
            begins = self.model(i)
            w, losses = visit(
                begins, self.data[i], self.turns, self.local(t), partial(self.draws, t, i), most and most[i]
            )
            sent[i] = {name: value for name, value in w.items() if (i, name) not in missing}
            self.own[i] = {name: w[name] for name in self.own[i]} if len(sent[i]) == len(w) else self.own[i]
            body = [
                mean for mean, (layers, *_) in zip(losses, self.turns) if any(n.startswith(layers) for n in self.bare)
            ]
            loss[i] = sum(body) / len(body)
        self.seen |= set(active)
        if not active:
            return float("nan")
        there = {name: {i: w[name] for i, w in sent.items() if name in w} for name in self.shared}
        average = {name: mean(each, self.weights) for name, each in there.items() if each}
        delta = {name: average[name] - self.shared[name] for name in self.bare if name in average}
        self.shared = self.move(self.shared, delta) | {n: average[n] for n in self.own[0] if n in average}
        return mean(loss, self.weights)

    @property
    def bare(self) -> list[str]:
        """What is shared."""
        return [name for name in self.shared if name not in self.own[0]]

    def model(self, i: int) -> Params:
        """What a client's next visit begins with, and what it is tested with as it is."""
        return self.shared | (self.own[i] if i in self.seen or not self.averaged else {})


def tuned(w: Params, client: Client, layers: tuple[str, ...], sgd: Sgd, batches: Sequence[Tensor]) -> Params:
    """Let a client's own layers learn before a test."""
    return visit(w, client, [(layers, 0, 0)], sgd, lambda epochs, phase: list(batches), None)[0]


def hf_maml(
    data: Sequence[Client], w: Params, rounds: Sequence[Sequence[int]],
    draws: Callable[[int, int], list[tuple[Tensor, Tensor, Tensor]]], weights: dict[int, float], move: Server = move,
    *, alpha: float, beta: float, delta: float | None = None,
) -> tuple[Params, list[float]]:  # fmt: skip
    """Three batches a step; the Hessian is that at the model before its adaptation, on the third one."""
    losses = []
    for t, active in enumerate(rounds):
        sent, loss = {}, {}
        for i in active:
            u, (x, y), seen = dict(w), data[i], []
            for batches in draws(t, i):
                one, two, three = (mean_loss(x[b], y[b]) for b in batches)
                seen.append(float(one(u)))
                g2 = gradient(two, adapted(u, one, alpha))
                h = hessian_times(three, u, g2) if delta is None else differences(three, u, g2, delta)
                u = {name: u[name] - beta * (g2[name] - alpha * h[name]) for name in u}
            sent[i], loss[i] = u, sum(seen) / len(seen)
        losses.append(mean(loss, weights))
        w = move(w, {name: mean({i: u[name] for i, u in sent.items()}, weights) - w[name] for name in w})
    return w, losses


def adapted(w: Params, loss: Loss, alpha: float) -> Params:
    """``w − α ∇f(w)``."""
    g = gradient(loss, w)
    return {name: w[name] - alpha * g[name] for name in w}


def hessian_times(loss: Loss, w: Params, v: Params) -> Params:
    names = list(w)

    def flat(*values: Tensor) -> Tensor:
        return loss(dict(zip(names, values)))

    _, found = torch.autograd.functional.hvp(flat, tuple(w.values()), tuple(v[name] for name in names))
    return dict(zip(names, found))


def differences(loss: Loss, w: Params, v: Params, delta: float) -> Params:
    up, down = (gradient(loss, {name: w[name] + s * delta * v[name] for name in w}) for s in (1, -1))
    return {name: (up[name] - down[name]) / (2 * delta) for name in w}
