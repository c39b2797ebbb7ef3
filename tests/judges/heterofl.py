"""HeteroFL: Diao, Ding & Tarokh, ICLR 2021, Algorithm 1. FedRolex: Alam et al., NeurIPS 2022, Algorithm 1 and eq. 3."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from judges.corrections import Correction, plain
from judges.plain import Batches, Client, Objective, Params, descend, mean, sgd
from judges.server import Server, move

Units = Callable[[int, float, int], Tensor]
"""Which of a layer's units a client holds: by round, the client's rate and how many there are."""
Numbers = dict[tuple[str, int], Tensor]
"""Single numbers of tensors, by tensor and place."""


def held(w: Params, units: list[Tensor]) -> dict[str, tuple[Tensor, ...]]:
    """Where a sub-model's tensors lie in the whole model's: rows, and for weights columns; `units` layer by layer."""
    places: dict[str, tuple[Tensor, ...]] = {}
    for layer, (inputs, outputs) in enumerate(pairwise(units), 1):
        places[f"fc{layer}.weight"], places[f"fc{layer}.bias"] = (outputs[:, None], inputs), (outputs,)
    return places


def objective(data: Client, rate: float, masked: bool) -> Objective:
    """Cross-entropy of a sub-model: hidden outputs over the rate, outputs of classes that the client lacks 0."""
    x, y = data

    def loss(w: Params, rows: Tensor) -> Tensor:
        z, count = x[rows], len(w) // 2
        for layer in range(1, 1 + count):
            z = F.linear(z, w[f"fc{layer}.weight"], w[f"fc{layer}.bias"])
            z = F.relu(z / rate) if layer < count else z
        if masked:
            z = torch.where(torch.isin(torch.arange(z.shape[1]), y), z, 0.0)
        return F.cross_entropy(z, y[rows])

    return loss


def visit(
    w: Params, data: Client, steps: Iterable[Tensor], rate: float, units: Callable[[int], Tensor],
    *, lr: float, momentum: float = 0.0, decay: float = 0.0, scaler: bool = True, masked: bool = True,
) -> tuple[Numbers, float]:  # fmt: skip
    """Return what a client sends, the changes of the numbers that it holds, and its mean training loss.

    Of the last layer it holds the rows of its classes if `masked`; `units` are those of a layer of so many.
    """
    widths = [w["fc1.weight"].shape[1], *(value.shape[0] for name, value in w.items() if name.endswith("bias"))]
    own = [torch.arange(widths[0]), *map(units, widths[1:-1]), torch.arange(widths[-1])]
    places, sent = held(w, own), held(w, [*own[:-1], data[1].unique() if masked else own[-1]])
    start = {name: w[name][place] for name, place in places.items()}
    after, loss = descend(start, objective(data, rate if scaler else 1.0, masked), steps, sgd(lr, momentum, decay))
    found: Numbers = {}
    for name, value in w.items():
        change, there = torch.zeros_like(value), torch.zeros_like(value)
        change[places[name]], there[sent[name]] = after[name] - start[name], 1
        found |= {(name, k): change.flatten()[k] for k in there.flatten().nonzero()[:, 0].tolist()}
    return found, loss


def heterofl(
    w: Params, data: list[Client], arrived: list[list[int]], batches: Batches, weights: dict[int, float],
    rates: Callable[[int, int], float], units: Units, *, server: Server = move, correct: Correction = plain, **how: Any,
) -> tuple[Params, list[float]]:  # fmt: skip
    """Return the model after all rounds, and each round's mean training loss.

    Each number is averaged over those who hold it and came, and stays where nobody does. `server` takes its step number
    by number.
    """
    losses = []
    for round_, clients in enumerate(arrived):
        changes, loss = {}, {}
        for i in clients:
            rate = rates(round_, i)
            changes[i], loss[i] = visit(w, data[i], batches(round_, i), rate, partial(units, round_, rate), **how)
        losses.append(mean(loss, weights) if clients else float("nan"))
        w = whole(server(numbers(w), correct(round_, changes, weights)), w)
    return w, losses


def holding(w: Params, rates: Callable[[int, int], float], units: Units) -> Callable[[int, int, tuple[str, int]], bool]:
    """Return whether a client holds a number of the model in a round; all hold all rows of the last layer."""
    widths = [w["fc1.weight"].shape[1], *(value.shape[0] for name, value in w.items() if name.endswith("bias"))]

    @cache
    def held_by(round_: int, client: int) -> set[tuple[str, int]]:
        own = [partial(units, round_, rates(round_, client))(width) for width in widths[1:-1]]
        places, found = held(w, [torch.arange(widths[0]), *own, torch.arange(widths[-1])]), set()
        for name, value in w.items():
            there = torch.zeros_like(value)
            there[places[name]] = 1
            found |= {(name, k) for k in there.flatten().nonzero()[:, 0].tolist()}
        return found

    return lambda round_, client, name: name in held_by(round_, client)


def numbers(w: Params) -> Numbers:
    """The single numbers of tensors by their places."""
    return {(name, k): number for name, value in w.items() for k, number in enumerate(value.flatten())}


def whole(found: Numbers, like: Params) -> Params:
    """The tensors again."""
    return {n: torch.stack([found[n, k] for k in range(value.numel())]).view(value.shape) for n, value in like.items()}
