"""The methods once more: short loops of plain torch from the papers and what is known of the released codes.

They share no code with the package but its keyed random numbers, which say what is drawn when; each client's values are
computed by themselves, in double precision. A parameter is a float64 tensor by its name in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hpcfl.base.rng import keyed

Params = dict[str, Tensor]
Client = tuple[Tensor, Tensor]
"""Training features, float64 [n, d], and classes, int64 [n]."""


def passes(seed: int, round_: int, client: int, phase: int, n: int, size: int, epochs: int) -> Iterator[np.ndarray]:
    """Yield the samples of each batch: every pass has an order of its own, its last batch may be smaller."""
    rng = keyed(seed, "batches", round_, client, phase)
    for _ in range(epochs):
        order = rng.permutation(n)
        yield from np.split(order, range(size, n, size))


def leaves(*states: Mapping[str, Tensor]) -> Params:
    """Return copies that learn."""
    return {name: value.detach().clone().requires_grad_() for state in states for name, value in state.items()}


def slopes(loss: Tensor, params: Params, decay: float = 0.0, decayed: str = "weight") -> Params:
    """Return gradients by the parameters, with the penalty ``decay/2 · |w|²`` on those whose names end so."""
    found = dict(zip(params, torch.autograd.grad(loss, list(params.values()))))
    return {name: g + decay * params[name].detach() * name.endswith(decayed) for name, g in found.items()}


class Adam:
    """Adam with bias correction: steps in place."""

    def __init__(self, lr: float) -> None:
        self.lr, self.steps, self.m, self.v = lr, 0, {}, {}

    def step(self, params: Params, gradients: Params) -> None:
        self.steps += 1
        for name, g in gradients.items():
            self.m[name] = 0.9 * self.m.get(name, 0) + 0.1 * g
            self.v[name] = 0.999 * self.v.get(name, 0) + 0.001 * g * g
            m, v = self.m[name] / (1 - 0.9**self.steps), self.v[name] / (1 - 0.999**self.steps)
            params[name].data -= self.lr * m / (v.sqrt() + 1e-8)


def dense(params: Params, x: Tensor, names: list[str]) -> Tensor:
    """Return what linear layers make of x, with a ReLU between them."""
    for number, name in enumerate(names):
        x = F.linear(x if number == 0 else F.relu(x), params[f"{name}.weight"], params[f"{name}.bias"])
    return x


@dataclass(frozen=True)
class Clients:
    """Who holds which data, and how they learn from them."""

    data: list[Client]
    seed: int
    layers: list[str]
    batch: int
    epochs: int

    def losses(self, round_: int, client: int) -> Iterator[Callable[[Params], Tensor]]:
        """Yield the loss of parameters on each batch of a visit."""
        x, y = self.data[client]
        for rows in passes(self.seed, round_, client, 0, len(y), self.batch, self.epochs):
            yield lambda params, rows=rows: F.cross_entropy(dense(params, x[rows], self.layers), y[rows])


def weighted(values: list[Tensor], weights: list[int]) -> Tensor:
    return sum(weight * value.detach() for value, weight in zip(values, weights)) / sum(weights)
