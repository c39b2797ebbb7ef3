"""Federated averaging: McMahan et al., AISTATS 2017, Algorithm 1 (arXiv 1602.05629)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from judges.plain import Client, Params, descend, mean


def fedavg(
    w: Params,
    data: list[Client],
    arrived: list[list[int]],
    batches: Callable[[int, int], list[Tensor]],
    *,
    lr: float,
    momentum: float = 0.0,
    decay: float = 0.0,
    slower: float = 0.0,
    uniform: bool = False,
) -> tuple[Params, list[float]]:
    """Return the model after all rounds, and each round's mean training loss.

    A round's local step size is ``lr / (1 + slower · round)``; clients count by their samples, or `uniform`.
    """
    losses = []
    for round_, clients in enumerate(arrived):
        how = {"lr": lr / (1 + slower * round_), "momentum": momentum, "decay": decay}
        visits = [descend(w, data[i], batches(round_, i), **how) for i in clients]
        n = [1 if uniform else len(data[i][1]) for i in clients]
        losses.append(sum(p * loss for p, (_, loss) in zip(n, visits)) / sum(n))
        w = mean([model for model, _ in visits], n)
    return w, losses
