"""FOCUS: Ying, Li & Yang (NeurIPS 2025), with its authors' server, which stays where it is while nobody comes."""

from __future__ import annotations

import torch

from judges.plain import Batches, Client, Params, gradients, loss_on


def focus(
    w: Params, data: list[Client], arrived: list[list[int]], batches: Batches, lr: float
) -> tuple[Params, Params, list[Params], list[float]]:
    """Return the model, the server's sum Y, each client's last gradient, and each round's mean training loss."""
    zero = {name: torch.zeros_like(value) for name, value in w.items()}
    total, last, losses = zero, [zero for _ in data], []
    for round_, clients in enumerate(arrived):
        told, seen = [], []
        for i in clients:
            u, y, steps = w, zero, batches(round_, i)
            for k, rows in enumerate(steps):
                if k:
                    u = {name: u[name] - lr * y[name] for name in u}
                slope, loss = gradients(loss_on(data[i]), u, rows)
                y = {name: y[name] + slope[name] - last[i][name] for name in y}
                last[i] = slope
                seen.append(loss / len(steps))
            told.append(y)
        losses.append(sum(seen) / len(clients) if clients else float("nan"))
        if clients:
            total = {name: total[name] + sum(y[name] for y in told) for name in total}
            w = {name: w[name] - lr * total[name] for name in w}
    return w, total, last, losses
