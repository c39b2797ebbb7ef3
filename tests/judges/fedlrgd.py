"""FedLRGD (Jadbabaie, Makur, Shah, Algorithm 1), coordinate by coordinate, with an inverse for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Client = tuple[Tensor, Tensor]
Gradient = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``∂f(x; θ)/∂θ`` of one sample: ``(x, y, θ) → [p]``."""


def matrices(own: Client, points: Tensor, g: Gradient) -> Tensor:
    """``G^(i)``, [p, r, r]: row j is of the server's sample j, column k of the parameter vector ϑ_k."""
    return torch.stack([torch.stack([g(x, y, point) for point in points], 1) for x, y in zip(*own)], 1)


def weights(
    G: Tensor, clients: Sequence[Client], points: Tensor, g: Gradient, truncation: float = 0.0, damping: float = 0.0
) -> Tensor:
    """``Σ_c v^(i,c)``, [p, r]: what the server's samples stand for beside themselves, in each coordinate i.

    ``v G = a``, or beyond the paper the least v that makes ``|v G − a|² + (damping·|G|)² |v|²`` least, or that of a G
    without singular values of at most ``truncation·|G|``.
    """
    total = torch.zeros(len(G), len(points), dtype=G.dtype)
    for client in clients:
        a = torch.stack([sum(g(x, y, point) for x, y in zip(*client)) for point in points])  # [k, p]
        for i, each in enumerate(G):
            if damping:
                ridge = (damping * torch.linalg.matrix_norm(each, 2)) ** 2 * torch.eye(len(each), dtype=G.dtype)
                total[i] += torch.linalg.solve(each @ each.T + ridge, each @ a[:, i])
            elif truncation:
                total[i] += a[:, i] @ torch.linalg.pinv(each, rtol=truncation)
            else:
                total[i] += a[:, i] @ torch.linalg.inv(each)
    return total


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
