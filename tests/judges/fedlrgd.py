"""FedLRGD (Jadbabaie, Makur, Shah, Algorithm 1), coordinate by coordinate, with an inverse for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Client = tuple[Tensor, Tensor]
Gradient = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``∂f(x; θ)/∂θ`` of one sample: ``(x, y, θ) → [p]``."""


def weights(own: Client, clients: Sequence[Client], points: Tensor, g: Gradient) -> Tensor:
    """``Σ_c v^(i,c)``, [p, r]: what the server's samples stand for beside themselves, in each coordinate i.

    `own` are the server's r samples, `points` the r parameter vectors ϑ_k.
    """
    G = torch.stack([torch.stack([g(x, y, point) for point in points]) for x, y in zip(*own)])  # [j, k, p]
    total = torch.zeros(G.shape[2], len(points), dtype=G.dtype)
    for client in clients:
        a = torch.stack([sum(g(x, y, point) for x, y in zip(*client)) for point in points])  # [k, p]
        for i in range(G.shape[2]):
            total[i] += a[:, i] @ torch.linalg.inv(G[:, :, i])
    return total


def condition(own: Client, points: Tensor, g: Gradient) -> float:
    """The worst condition number of the matrices that are inverted."""
    G = torch.stack([torch.stack([g(x, y, point) for point in points]) for x, y in zip(*own)])
    return max(float(torch.linalg.cond(G[:, :, i])) for i in range(G.shape[2]))


def descend(
    theta: Tensor, own: Client, v: Tensor, n: int, steps: int, lr: float, g: Gradient, exact: float = 0.0
) -> list[Tensor]:
    """θ after each step of inexact gradient descent; `exact`: μ of a penalty whose gradient is added as it is."""
    found = [theta]
    for _ in range(steps):
        theta = found[-1]
        each = torch.stack([g(x, y, theta) for x, y in zip(*own)])  # [k, p]
        gradient = torch.stack([(each[:, i] * (1 + v[i])).sum() / n for i in range(len(theta))])
        found.append(theta - lr * (gradient + exact * theta))
    return found
