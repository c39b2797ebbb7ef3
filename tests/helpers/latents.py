"""Clients with feature spaces of their own, and FLIC's phases by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from helpers.toys import Rounds, Toy, plain, visits_of
from hpcfl.algorithms.flic.algorithm import Flic
from hpcfl.algorithms.flic.phases import Learner
from hpcfl.base.types import State
from hpcfl.data import ClientData
from hpcfl.engine.job import stacked
from hpcfl.learning.batches import Batch
from hpcfl.learning.task import Task
from hpcfl.models.latent import Latent

HELD = ((0, 1), (1, 2), (2, 0))
"""Which classes clients hold, in turns; a fourth class is nobody's."""


def federation(
    sizes: Sequence[int],
    widths: Sequence[int],
    held: Sequence[Sequence[int]] = HELD,
    classes: int = 4,
    targets: bool = False,
) -> Toy:
    """Return clients of so many samples and features, their test parts being their first two samples."""
    rng = np.random.default_rng(1)
    own = []
    for client, (size, width) in enumerate(zip(sizes, widths)):
        y: Any = rng.permutation(np.resize(held[client % len(held)], size)).astype(np.int64)
        x = (rng.normal(size=(classes, width))[y] + rng.normal(size=(size, width))).astype(np.float32)
        if targets:
            y = rng.random(size).astype(np.float32)
        own.append(ClientData(x, y, x[:2], y[:2]))
    count = len(own)
    return Toy(1 if targets else classes, np.array(sizes), np.full(count, 2), [(width,) for width in widths], own)


def latent_task(sizes: Sequence[int], widths: Sequence[int], hidden: tuple[int, ...] = (4,), **more: Any) -> Task:
    """Return a task with embeddings of two layers into three dimensions."""
    return Task(Latent(widths=(4,), dimension=3, hidden=hidden), federation(sizes, widths, **more), 0)


def flic(**keys: Any) -> Flic:
    """Return FLIC with plain gradient steps, short visits, and all its terms at work."""
    short = {"optimizer": "sgd", "lr": 0.1, "batch": 4, "epochs": 1, "lambda1": 0.3, "lambda2": 0.2, "draws": 3}
    return Flic(**{**short, **keys})


def learner(keys: Flic, task: Task, clients: Sequence[int], round_: int = 0, moved: bool = True) -> Learner:
    """Return what some clients of one width begin a visit with; all values moved, so that none is special."""
    personal = stacked([keys.init_client(task, client) for client in clients])
    shared = keys.init_server(task)
    found = keys._learner(task, shared, personal, visits_of(task, clients, round_=round_))
    if moved:
        noise = torch.Generator().manual_seed(4)
        for name in sorted(found.params.keys() - {"pretrained"}):  # a set's order differs from process to process
            found.params[name] += 0.3 * torch.randn(found.params[name].shape, generator=noise)
    return found


def halves(learner: Learner, row: int) -> tuple[nn.Sequential, nn.Sequential]:
    """Return one client's embedding and what is above it as ordinary networks, float64."""
    task = learner.task
    net = plain(task, {name: learner.params[name][row] for name in task.initial()}).requires_grad_(False)
    below = sum(len(layer.modules) for layer in task.layers[: learner.terms.parts.above])
    return net[:below].double(), net[below:].double()


def real(batch: Batch, row: int) -> tuple[Tensor, Tensor]:
    """Return one client's own samples of a step, float64, and their labels."""
    valid = slice(None) if batch.valid is None else batch.valid[row]
    y = batch.y[row][valid]
    return batch.x[row][valid].double(), y.double() if y.is_floating_point() else y


def copied(params: State) -> State:
    """Return copies that do not learn any more."""
    return {name: value.clone() for name, value in params.items()}


def changed(before: State, after: State) -> set[str]:
    """Return the names of what is not the same to the bit."""
    return {name for name in before if not torch.equal(before[name], after[name])}


def everybody(rounds: Rounds) -> dict[int, State]:
    """Return each client's personal state, of rounds in memory."""
    return {
        int(client): {name: value[row] for name, value in rounds.now.personal[chunk.number].items()}
        for chunk in rounds.job.chunks
        for row, client in enumerate(chunk.clients)
    }
