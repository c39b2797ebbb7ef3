"""FedRep-SRPFL and LG-SRPFL (Tziotis et al., Algorithm 1), stages of a given number of rounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from helpers.loops import Client, Params, dense, leaves, passes, slopes, weighted

LAYERS = ["fc1", "fc2", "fc3"]


@dataclass(frozen=True)
class Visit:
    """How a client trains: which layers are its own; which layers learn in turn, by which batches, for how long."""

    personal: tuple[str, ...]
    turns: tuple[tuple[tuple[str, ...], int, int], ...]  # layers, which order of samples, epochs
    lr: float
    momentum: float
    weight_decay: float
    batch: int


def trained(params: Params, client: int, data: Client, how: Visit, seed: int, round_: int) -> Params:
    velocity, (x, y) = {name: torch.zeros_like(value) for name, value in params.items()}, data  # anew in each visit
    for learning, phase, epochs in how.turns:
        part = {name: value for name, value in params.items() if name.startswith(learning)}
        for rows in passes(seed, round_, client, phase, len(y), how.batch, epochs):
            loss = F.cross_entropy(dense(params, x[rows], LAYERS), y[rows])
            for name, gradient in slopes(loss, part, how.weight_decay).items():
                velocity[name] = how.momentum * velocity[name] + gradient
                params[name].data -= how.lr * velocity[name]
    return params


def srpfl(
    start: Params, own: list[Params], data: list[Client], paces: np.ndarray, how: Visit,
    *, first: int, stage: int, rounds: int, seed: int, averaged: bool,
) -> tuple[Params, list[Params]]:  # fmt: skip
    """Return what is shared and what each client keeps; `averaged`: newcomers begin with the mean of the last round."""
    mean, taken, order = dict(start), set(), np.argsort(paces)
    for round_ in range(rounds):
        n = min(len(data), first * 2 ** (round_ // stage))
        visits, sizes = [], []
        for client in order[:n].tolist():
            begins = own[client] if client in taken or not averaged else {name: mean[name] for name in own[client]}
            visits.append(trained(leaves(mean | begins), client, data[client], how, seed, round_))
            sizes.append(len(data[client][1]))
            own[client] = {name: visits[-1][name].detach() for name in own[client]}
            taken.add(client)
        mean = {name: weighted([params[name] for params in visits], sizes) for name in start}
    return {name: value for name, value in mean.items() if averaged or not name.startswith(how.personal)}, own
