"""What judges share: a network of linear layers, local steps, and means. It imports no hpcfl either."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Params = dict[str, Tensor]
Client = tuple[Tensor, Tensor]
"""Training features, float64 [n, d], and classes, int64 [n]."""
Batches = Callable[[int, int], list[Tensor]]
"""The samples of each step of a visit, by round and client."""
Objective = Callable[[Params, Tensor], Tensor]
"""The loss of parameters on some samples."""
Step = Callable[[Params, Params, dict[str, Any]], Params]
"""What parameters become by their gradients and what the optimiser remembers, which it changes."""


def network(w: Params, x: Tensor) -> Tensor:
    """Linear layers fc1, fc2, ... with ReLU between them."""
    for layer in range(1, 1 + len(w) // 2):
        x = F.linear(x if layer == 1 else F.relu(x), w[f"fc{layer}.weight"], w[f"fc{layer}.bias"])
    return x


def loss_on(data: Client) -> Objective:
    """The mean cross-entropy of a client's samples."""
    return lambda w, rows: F.cross_entropy(network(w, data[0][rows]), data[1][rows])


def gradients(objective: Objective, w: Params, rows: Tensor) -> tuple[Params, float]:
    """Return the gradients of an objective at w, and its value."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in w.items()}
    value = objective(leaves, rows)
    return dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())))), float(value.detach())


def descend(
    w: Params, objective: Objective, steps: Iterable[Tensor], step: Step, memory: dict[str, Any] | None = None
) -> tuple[Params, float]:
    """Take a local step on each batch; return where they lead and the mean of the losses on the way."""
    memory, losses = {} if memory is None else memory, []
    for rows in steps:
        g, loss = gradients(objective, w, rows)
        w = step(w, g, memory)
        losses.append(loss)
    return w, sum(losses) / len(losses)


def sgd(lr: float, momentum: float = 0.0, decay: float = 0.0) -> Step:
    """Heavy ball, ``v ← βv + g + λw; w ← w − ηv``; λ is 0 for biases."""

    def step(w: Params, g: Params, v: dict[str, Any]) -> Params:
        for name in w:
            v[name] = momentum * v.get(name, 0.0) + g[name] + decay * w[name] * name.endswith("weight")
        return {name: w[name] - lr * v[name] for name in w}

    return step


def adam(lr: float, betas: tuple[float, float], epsilon: float, decay: float, decoupled: bool) -> Step:
    """Adam (Kingma & Ba, ICLR 2015, Algorithm 1); decoupled: AdamW (Loshchilov & Hutter, ICLR 2019, Algorithm 2)."""
    b1, b2 = betas

    def step(w: Params, g: Params, memory: dict[str, Any]) -> Params:
        memory["t"] = t = memory.get("t", 0) + 1
        after = {}
        for name in w:
            penalty = decay * w[name] * name.endswith("weight")
            slope = g[name] + (0 if decoupled else penalty)
            m, v = memory.get(name, (0.0, 0.0))
            m, v = memory[name] = b1 * m + (1 - b1) * slope, b2 * v + (1 - b2) * slope**2
            direction = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + epsilon)
            after[name] = w[name] - lr * (direction + (penalty if decoupled else 0))
        return after

    return step


def mean(values: dict[int, Any], weights: dict[int, float]) -> Any:
    """The mean of clients' values by their weights."""
    return sum(weights[i] * values[i] for i in values) / sum(weights[i] for i in values)


def change(after: Params, before: Params) -> Params:
    return {name: after[name] - before[name] for name in after}
