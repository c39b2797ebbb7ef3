"""Local training: every client for itself."""

from __future__ import annotations

from judges.plain import Batches, Client, Params, Step, descend, loss_on, mean


def local(
    w: list[Params],
    data: list[Client],
    arrived: list[list[int]],
    batches: Batches,
    step: Step,
    weights: dict[int, float],
) -> tuple[list[Params], list[float]]:
    """Return each client's model after all rounds, and each round's mean training loss."""
    w, losses = list(w), []
    for round_, clients in enumerate(arrived):
        loss = {}
        for i in clients:
            w[i], loss[i] = descend(w[i], loss_on(data[i]), batches(round_, i), step)
        losses.append(mean(loss, weights) if clients else float("nan"))
    return w, losses
