"""HeteroFL: Diao, Ding & Tarokh, ICLR 2021, Algorithm 1. FedRolex: Alam et al., NeurIPS 2022, Algorithm 1 and eq. 3."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from judges.plain import Batches, Client, Objective, Params, descend, mean, sgd
from judges.server import Server, move

Units = Callable[[int, float, int], Tensor]
"""Which of a layer's units a client holds: by round, the client's rate and how many there are."""


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


def heterofl(
    w: Params,
    data: list[Client],
    arrived: list[list[int]],
    batches: Batches,
    weights: dict[int, float],
    rates: Callable[[int, int], float],
    units: Units,
    *,
    lr: float,
    momentum: float = 0.0,
    decay: float = 0.0,
    scaler: bool = True,
    masked: bool = True,
    server: Server = move,
) -> tuple[Params, list[float]]:
    """Return the model after all rounds, and each round's mean training loss.

    Each number is averaged over those who hold it and came, and stays where nobody does; of the last layer a client
    holds the rows of its classes. `server` takes its step number by number.
    """
    widths = [w["fc1.weight"].shape[1], *(value.shape[0] for name, value in w.items() if name.endswith("bias"))]
    losses = []
    for round_, clients in enumerate(arrived):
        total = {name: torch.zeros_like(value) for name, value in w.items()}
        over, loss = {name: torch.zeros_like(value) for name, value in w.items()}, {}
        for i in clients:
            hidden = [units(round_, rates(round_, i), width) for width in widths[1:-1]]
            own = [torch.arange(widths[0]), *hidden, torch.arange(widths[-1])]
            places = held(w, own)
            task = objective(data[i], rates(round_, i) if scaler else 1.0, masked)
            start = {name: w[name][place] for name, place in places.items()}
            after, loss[i] = descend(start, task, batches(round_, i), sgd(lr, momentum, decay))
            rows = data[i][1].unique() if masked else own[-1]
            for name, place in held(w, [*own[:-1], rows]).items():
                whole = w[name].clone()
                whole[places[name]] = after[name]
                total[name][place] += weights[i] * whole[place]
                over[name][place] += weights[i]
        losses.append(mean(loss, weights) if clients else float("nan"))
        came = {name: value > 0 for name, value in over.items()}
        proposed = {name: total[name][came[name]] / over[name][came[name]] for name in w}
        after = server(numbers(w), numbers({n: proposed[n] - w[n][came[n]] for n in w}, came))
        w = {n: torch.stack([after[n, k] for k in range(w[n].numel())]).view(w[n].shape) for n in w}
    return w, losses


def numbers(values: Params, where: Params | None = None) -> dict[tuple[str, int], Tensor]:
    """The single numbers of tensors by their places; `where` says which places they are of."""
    places = {
        n: range(v.numel()) if where is None else where[n].flatten().nonzero()[:, 0].tolist() for n, v in values.items()
    }
    return {(n, k): value for n, v in values.items() for k, value in zip(places[n], v.flatten())}
