"""What an iteration of the anchors' barycenters costs, against a raw all-reduce and one decomposition per covariance.

    python benchmarks/barycenter.py [--mpi openmpi|mpich] [--ranks 4] [--classes 20] [--dimension 64] [--clients 1]

Every client has changed every anchor; each rank but the server holds so many clients' messages. In turns, in one job:

- ``hpcfl``: one iteration by further sums, from the end of one all-reduce to the end of the next, at the server;
- ``reference``: on each client rank the eigenvectors of one covariance per class and client, float64, then one blocking
  ``Allreduce`` of the same bytes.

``compute`` is what the slowest rank computes of it, by its own clock, ``communication`` all else: waiting too. An
iteration needs two decompositions per class with one client (of S, on every rank, and of what its client adds), the
reference one. Medians of 10 turns of 10 iterations, after one turn that does not count. Half a minute on 2 cores.
Prints a table and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import launching
import numpy as np

if TYPE_CHECKING:
    from hpcfl.base.types import Floats
    from hpcfl.sums.message import ExactSums, Message

if launching.inside():
    import torch
    from mpi4py import MPI

    from hpcfl.algorithms.flic.barycenters import Barycenters, sent
    from hpcfl.algorithms.flic.config import FACTORS
    from hpcfl.base.rng import keyed
    from hpcfl.engine.iterated import iterate
    from hpcfl.mpi.collective import Collective
    from hpcfl.mpi.cores import cores
    from hpcfl.mpi.waiting import Patience

ITERATIONS = 10


def main() -> None:
    """Start the job, or be one of its ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mpi", choices=tuple(launching.LIBRARIES), default="openmpi")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--classes", type=int, default=20)
    parser.add_argument("--dimension", type=int, default=64)
    parser.add_argument("--clients", type=int, default=1, help="per client rank")
    parser.add_argument("--turns", type=int, default=10)
    asked = parser.parse_args()
    if launching.inside():
        on_a_rank(asked)
        return
    print(f"{asked.mpi}, {asked.ranks} ranks, load {launching.load():.1f}; milliseconds", flush=True)
    got = launching.run(asked.mpi, asked.ranks, [__file__, *sys.argv[1:]], 600)
    print(json.dumps({**vars(asked), "load": launching.load(), **got}))


def on_a_rank(asked: argparse.Namespace) -> None:
    """Measure both in turns; the server prints."""
    comm = MPI.COMM_WORLD
    Patience.crowd = comm.Get_size() / len(cores())
    tree, rows, size = Collective(comm), [], 0
    clients = asked.clients if comm.Get_rank() else 0
    messages = [message(asked, comm.Get_rank(), client) for client in range(clients)]
    for _ in range(1 + asked.turns):
        own, size = iterated(asked, tree, messages)
        rows.append(np.stack([own, referred(asked, comm, clients, size)]))
    seconds = np.array(rows[1:], order="C")
    slowest = np.empty_like(seconds)
    comm.Allreduce(seconds, slowest, MPI.MAX)
    tree.leave()
    if tree.serves:
        print(json.dumps({"megabytes": round(size / 1e6, 2), **figures(seconds[..., 0], slowest[..., 1])}))


def message(asked: argparse.Namespace, rank: int, client: int) -> Message:
    """Return how a client has changed all anchors."""
    shape = asked.classes, 1, asked.dimension, asked.dimension
    changes = keyed(1, "changes", rank, client).standard_normal(shape, dtype="float32") / (2 * asked.dimension**0.5)
    return {sent(number): (torch.from_numpy(own), torch.ones(1).double()) for number, own in enumerate(changes)}


class Timed:
    """An all-reduce that notes, call by call, how long it is since the last one ended, and what of that it took itself.

    Attributes
    ----------
    rows : list of (float, float)
        Seconds from the end of the call before to the end of this one, and to its beginning.
    size : int
        Bytes of a call.
    """

    def __init__(self, tree: Collective) -> None:
        self.tree = tree
        self.rows: list[tuple[float, float]] = []
        self.left, self.size = time.perf_counter(), 0

    def __call__(self, sums: ExactSums) -> ExactSums:
        """Return the sums over all ranks."""
        entered = time.perf_counter()
        total = self.tree.share(sums)
        left = time.perf_counter()
        self.rows.append((left - self.left, entered - self.left))
        self.left, self.size = left, sum(buffer.data.nbytes for buffer in total.buffers)
        return total


def iterated(asked: argparse.Namespace, tree: Collective, messages: list[Message]) -> tuple[Floats, int]:
    """Iterate by further sums; return seconds ``[iterations, 2]``, see `Timed`, and the bytes of a sum."""
    timed, reduction = Timed(tree), Barycenters(asked.classes, asked.dimension, 1e-300, ITERATIONS)
    served = {FACTORS: torch.eye(asked.dimension).repeat(asked.classes, 1, 1)}
    iterate(reduction, served, messages, timed)
    rows = timed.rows[1:]  # the first sum is that of the covariances
    assert len(rows) == ITERATIONS
    return np.array(rows), timed.size


def referred(asked: argparse.Namespace, comm: MPI.Intracomm, clients: int, size: int) -> Floats:
    """Do what an iteration needs at least; return seconds ``[iterations, 2]``, as `Timed`."""
    points = torch.from_numpy(keyed(1, "points").standard_normal((asked.classes, asked.dimension, asked.dimension)))
    covs, numbers = points @ points.mT, np.zeros((2, size // 8))
    rows = []
    for _ in range(ITERATIONS):
        comm.Barrier()
        start = time.perf_counter()
        for cov in clients * list(covs):
            torch.linalg.eigh(cov)
        computed = time.perf_counter()
        comm.Allreduce(numbers[0], numbers[1])
        rows.append((time.perf_counter() - start, computed - start))
    return np.array(rows)


def figures(totals: Floats, compute: Floats) -> dict[str, Any]:
    """Return median milliseconds and their ratios, from seconds ``[turns, 2, iterations]`` of both ways."""
    rows = {"total": totals, "compute": compute, "communication": totals - compute}
    found = {}
    for name, seconds in rows.items():
        own, reference = 1000 * np.median(seconds, (0, 2))
        found[name] = {"hpcfl": round(own, 2), "reference": round(reference, 2), "ratio": round(own / reference, 2)}
        print(f"{name:14s}", *(f"{kind} {value:8.2f}" for kind, value in found[name].items()), sep="  ", flush=True)
    return found


if __name__ == "__main__":
    main()
