"""What judges share: a network of linear layers, its gradients, and local steps. It imports no hpcfl either."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

Params = dict[str, Tensor]
Client = tuple[Tensor, Tensor]
"""Training features, float64 [n, d], and classes, int64 [n]."""


def network(w: Params, x: Tensor) -> Tensor:
    """Linear layers fc1, fc2, ... with ReLU between them."""
    for layer in range(1, 1 + sum(name.endswith("bias") for name in w)):
        x = F.linear(x if layer == 1 else F.relu(x), w[f"fc{layer}.weight"], w[f"fc{layer}.bias"])
    return x


def cross_entropy(w: Params, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(network(w, x), y)


def gradients(loss: Callable[[Params], Tensor], w: Params) -> tuple[Params, float]:
    """Return the gradients of a loss at w, and its value."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in w.items()}
    value = loss(leaves)
    return dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())))), float(value.detach())


def decayed(g: Params, w: Params, decay: float) -> Params:
    """Add the gradient of ``decay/2 |w|²`` over the weights; biases have no penalty."""
    return {name: g[name] + decay * w[name] * name.endswith("weight") for name in w}


def descend(
    w: Params,
    data: Client,
    steps: Iterable[Tensor],
    *,
    lr: float,
    momentum: float = 0.0,
    decay: float = 0.0,
    v: Params | None = None,
    term: Callable[[Params, Params], Params] = lambda g, w: g,
) -> tuple[Params, float]:
    """Take SGD steps with heavy-ball momentum over batches; return where they lead and the mean of their losses.

    `v` is the velocity to begin with and changes in place; `term` makes another gradient of that of a batch.
    """
    x, y = data
    v, losses = {} if v is None else v, []
    for rows in steps:
        g, loss = gradients(lambda w, rows=rows: cross_entropy(w, x[rows], y[rows]), w)
        g = decayed(term(g, w), w, decay)
        for name in w:
            v[name] = momentum * v.get(name, 0.0) + g[name]
        w = {name: w[name] - lr * v[name] for name in w}
        losses.append(loss)
    return w, sum(losses) / len(losses)


def mean(states: list[Params], weights: list[float]) -> Params:
    """The mean of several clients' tensors by some weights."""
    return {name: sum(p * state[name] for p, state in zip(weights, states)) / sum(weights) for name in states[0]}
