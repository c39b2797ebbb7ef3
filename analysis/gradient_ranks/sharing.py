"""The study shared out among ranks: each takes a share of the weights, and forms and decomposes their slices.

Derivatives are computed by columns, each rank having some of the parameter vectors, and change hands afterwards: nearly
all weights are in one layer, so that whoever computed those of its own weights alone would have to go forward and back
through all of it with every parameter vector.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from gradient_ranks.network import Array, Network
from gradient_ranks.slices import derivatives, perturbed


@dataclass(frozen=True)
class Draw:
    """What a rank has to know to compute derivatives.

    Attributes
    ----------
    facts : dict
        network (what `Network` takes); peak (what pixels are divided by); seed and perturbation (of `perturbed`).
    arrays : dict
        theta float32 ``[p]``; pixels ``[k, channels, height, width]`` and labels int64 ``[k]`` of the test samples;
        samples int64 ``[k]``, their places in the test set; weights int64 ``[q]``, places in theta.
    """

    facts: dict[str, Any]
    arrays: dict[str, Array]


def shared(comm: Any, draw: Draw | None) -> Draw:
    """Return rank 0's draw on every rank, as buffers."""
    if comm is None:
        assert draw is not None
        return draw
    from hpcfl.mpi.waiting import tell, wait

    kinds = {name: [str(a.dtype), a.shape] for name, a in draw.arrays.items()} if draw else {}
    facts, kinds = json.loads(tell(comm, json.dumps([draw.facts if draw else {}, kinds])))
    own = {name: np.ascontiguousarray(a) for name, a in draw.arrays.items()} if draw else {}
    arrays = {name: own.get(name, np.empty(shape, kind)) for name, (kind, shape) in kinds.items()}
    wait([comm.Ibcast(values, root=0) for values in arrays.values()])
    return Draw(facts, arrays)


def columns(draw: Draw, own: Sequence[int]) -> Array:
    """Return columns `own` of all slices, float64 ``[len(own), q, k]``.

    In a single thread: how many share a matrix product may change its last digits.
    """
    facts, arrays, threads = draw.facts, draw.arrays, torch.get_num_threads()
    net = Network(**facts["network"])
    x, y, weights = arrays["pixels"] / np.float64(facts["peak"]), arrays["labels"], arrays["weights"]
    found = np.empty((len(own), len(weights), len(y)))
    torch.set_num_threads(1)
    for row, j in enumerate(own):
        found[row] = derivatives(
            net, perturbed(facts["seed"], arrays["theta"], j, facts["perturbation"]), x, y, weights
        )
    torch.set_num_threads(threads)
    return found


def slices(comm: Any, draw: Draw) -> Array:
    """Return the matrices ``[q_own, i, j]`` of this rank's share of the weights.

    Each rank computes its share of the columns, of all weights; then they change hands.
    """
    k, q = len(draw.arrays["labels"]), len(draw.arrays["weights"])
    size, rank = (1, 0) if comm is None else (comm.Get_size(), comm.Get_rank())
    mine = [len(part) for part in np.array_split(np.arange(k), size)]
    own = [len(part) for part in np.array_split(np.arange(q), size)]
    first = sum(mine[:rank])
    found = columns(draw, range(first, first + mine[rank]))
    if comm is not None:
        from mpi4py import MPI

        from hpcfl.mpi.waiting import wait

        sent = np.concatenate([part.ravel() for part in np.split(found, np.cumsum(own)[:-1], axis=1)])
        found = np.empty((k, own[rank], k))  # those of rank 0 first, as the columns are
        counts = [mine[rank] * each * k for each in own], [each * own[rank] * k for each in mine]
        wait([comm.Ialltoallv([sent, counts[0], MPI.DOUBLE], [found, counts[1], MPI.DOUBLE])])
    return np.ascontiguousarray(found.transpose(1, 2, 0))


def gathered(comm: Any, own: Array, count: int) -> Array:
    """Return all ranks' float64 ``[q_own, …]`` as ``[count, …]`` on rank 0, nothing elsewhere."""
    if comm is None:
        return own
    from mpi4py import MPI

    from hpcfl.mpi.waiting import wait

    shape, size, serves = own.shape[1:], comm.Get_size(), comm.Get_rank() == 0
    counts = [len(part) * prod(shape) for part in np.array_split(np.arange(count), size)]
    whole = np.empty((count if serves else 0, *shape))
    wait([comm.Igatherv([own, MPI.DOUBLE], [whole, counts, MPI.DOUBLE] if serves else None, root=0)])
    return whole
