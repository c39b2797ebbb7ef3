"""FedHeNN (Makhija et al., ICML 2022): models of the clients' own whose kernels of common samples are aligned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from judges.plain import Client, Params, mean
from judges.steps import Adam, Sgd, gradient, mlp


def represented(w: Params, x: Tensor) -> Tensor:
    """What the layers before the last one make of the samples."""
    last = [name for name in w if name.endswith("weight")][-1]
    lower = {name: value for name, value in w.items() if not name.startswith(last.removesuffix("weight"))}
    return F.relu(mlp(lower, x))


def centred(z: Tensor) -> Tensor:
    """``H Z Zᵀ H``."""
    H = torch.eye(len(z), dtype=z.dtype) - 1 / len(z)
    return H @ z @ z.T @ H


def cka(k: Tensor, other: Tensor) -> Tensor:
    return (k * other).sum() / (k.square().sum().sqrt() * other.square().sum().sqrt())


def fedhenn(
    data: Sequence[Client],
    own: Sequence[Params],
    rounds: Sequence[Sequence[int]],
    samples: Callable[[int, int], Tensor],
    batches: Callable[[int, int], list[Tensor]],
    optimiser: Callable[[], Sgd | Adam],
    weights: dict[int, float],
    eta: float,
) -> tuple[list[Params], Tensor, list[float]]:
    """Return the clients' models, the mean kernel and each round's mean objective.

    `samples` are those of a round that a client is given to align by. Those who are visited align, by their strength
    ``η_t = η √t``, to the mean kernel of who was visited in the round before, on the samples of that round.
    """
    kept, losses, target, before = [dict(w) for w in own], [], torch.zeros(0), -1
    for t, active in enumerate(rounds):
        kernels, loss = [], {}
        for i in active:
            how, seen = optimiser(), []
            for rows in batches(t, i):
                strength, common = (eta * sqrt(t + 1), samples(before, i)) if t else (0.0, data[i][0])
                objective = partial(aligned, data[i][0][rows], data[i][1][rows], common, target, strength)
                seen.append(float(objective(kept[i])))
                kept[i] = how.step(kept[i], gradient(objective, kept[i]))
            kernels.append(centred(represented(kept[i], samples(t, i))))
            loss[i] = sum(seen) / len(seen)
        losses.append(mean(loss, weights))
        target, before = torch.stack(kernels).mean(0), t
    return kept, target, losses


def aligned(x: Tensor, y: Tensor, common: Tensor, target: Tensor, strength: float, w: Params) -> Tensor:
    """The loss, and the strength times ``1 − CKA(K̄, K_i)``."""
    loss = F.cross_entropy(mlp(w, x), y)
    return loss + strength * (1 - cka(target, centred(represented(w, common)))) if strength else loss
