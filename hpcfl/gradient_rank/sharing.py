"""The columns of all slices, shared out among ranks: a rank has the whole network but only some parameter vectors.

Sharing out the weights instead would spare nothing: nearly all weights are in one layer, so that every rank would have
to go forward and back through all of it with every parameter vector.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hpcfl.gradient_rank.network import Array, Network
from hpcfl.gradient_rank.slices import derivatives, perturbed


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
    from hpcfl.wire import tell, wait

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
    """Return all matrices ``[q, i, j]`` on rank 0, each rank having computed its share of the columns."""
    k, q = len(draw.arrays["labels"]), len(draw.arrays["weights"])
    size, rank = (1, 0) if comm is None else (comm.Get_size(), comm.Get_rank())
    shares = np.array_split(np.arange(k), size)
    found = columns(draw, shares[rank].tolist())
    if comm is not None:
        from mpi4py import MPI

        from hpcfl.wire import wait

        whole, counts = np.empty((k if rank == 0 else 0, q, k)), [len(share) * q * k for share in shares]
        wait([comm.Igatherv([found, MPI.DOUBLE], [whole, counts, MPI.DOUBLE] if rank == 0 else None, root=0)])
        found = whole
    return np.ascontiguousarray(found.transpose(1, 2, 0))
