"""Statistics of batch normalisations that training keeps none of: gathered for a test (HeteroFL's static ones).

With parameters as they are a pass over the training data tells, for each normalisation, mean and variance of each of
its batches; tests use the means over batches, as ``torch.nn.BatchNorm2d(momentum=None)`` accumulates them. The batches
are of one client each, as in HeteroFL's text; the authors' code mixes all clients' samples.
"""

from __future__ import annotations

from math import prod

import numpy as np
import torch

from hpcfl.base.types import Floats, Ints, State
from hpcfl.learning.build import unpacked
from hpcfl.learning.task import Task
from hpcfl.models.modules.narrow import NORMS

BATCH = 250
"""Samples of a batch at most; a client's batches are as equal as can be."""


@torch.no_grad()
def client_statistics(task: Task, shared: State, clients: Ints) -> Floats:
    """Return the sums of all buffers over each client's batches, float64 ``[numbers, c]``.

    Numbers of batches are among the buffers.
    """
    assert task.whole is not None
    module, pieces = task.whole.module(shared), task.federation.pieces
    norms = {name: part for name, part in module.named_modules() if isinstance(part, NORMS)}
    for norm in norms.values():
        norm.train().momentum = None
    sums = np.zeros((sum(value.numel() for value in task.whole.buffers.values()), len(clients)))
    for column, client in enumerate(clients.tolist()):
        for norm in norms.values():
            norm.reset_running_stats()
        x = task.samples(client).x
        for rows in x.tensor_split(-(-len(x) // BATCH)) if len(x) else ():
            module(*(unpacked(pieces, None, (rows,)) if pieces else (rows,)))
        means = dict(module.named_buffers())
        parts = []
        for name in task.whole.buffers:
            count = means[_count(name)]
            parts.append(means[name].double() * (1 if means[name] is count else count))
        sums[:, column] = torch.cat([part.flatten() for part in parts]).cpu().numpy()
    return sums


def with_statistics(task: Task, shared: State, sums: Floats) -> State:
    """Return what is shared with buffers of these sums ``[numbers, clients]``; where there is no batch, as it was."""
    assert task.whole is not None
    sizes = [prod(value.shape) for value in task.whole.buffers.values()]
    totals = dict(zip(task.whole.buffers, np.split(sums.sum(1), np.cumsum(sizes)[:-1])))
    found = dict(shared)
    for name, total in totals.items():
        count = totals[_count(name)]
        if count.all():
            mean = total if name == _count(name) else total / count
            found[name] = torch.from_numpy(mean).view(shared[name].shape).to(shared[name])
    return found


def _count(name: str) -> str:
    """Return the name of the number of batches beside another buffer."""
    return f"{name.rpartition('.')[0]}.num_batches_tracked".removeprefix(".")
