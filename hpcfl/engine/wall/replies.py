"""What client ranks answer besides visits: scores, and the personal state that they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from hpcfl.base.types import Floats, State
from hpcfl.comm.packing import Packing, as_bytes
from hpcfl.comm.placement import Topology
from hpcfl.comm.transport import Arrays, Like, Saved


class Scoring:
    """The scores of a lane's clients, ``[scores, h]``, see `Job.scores`; each rank fills in its own."""

    def __init__(self, scores: int, hosted: int) -> None:
        self.data: Floats = np.zeros((scores, hosted))

    def receive(self, comm: Any) -> Any:
        """Begin to receive at the server."""
        return comm.Ireduce(MPI.IN_PLACE, self.data, MPI.SUM, root=0)

    def send(self, comm: Any) -> Any:
        """Begin to send."""
        return comm.Ireduce(self.data, None, MPI.SUM, root=0)


class Saving:
    """The personal state of a lane's clients, packed rank by rank and client by client: their shapes may differ."""

    def __init__(self, bench: Topology, like: Like) -> None:
        self.bench = bench
        self.packings = [Packing(named({client: like(client) for client in own})) for own in bench.hosted]
        self.counts = [0, *(packing.nbytes for packing in self.packings)]
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def receive(self, comm: Any) -> Any:
        """Begin to receive at the server."""
        self.buffer = torch.empty(sum(self.counts), dtype=torch.uint8)
        starts = np.cumsum([0, *self.counts[:-1]]).tolist()
        data = as_bytes(self.buffer)
        return comm.Igatherv([data[:0], MPI.BYTE], [data, (self.counts, starts), MPI.BYTE], root=0)

    def send(self, comm: Any, seat: int, states: Mapping[int, State]) -> Any:
        """Begin to send a rank's own part, ``{client: {name: […]}}``."""
        self.buffer = self.packings[seat].empty()
        self.packings[seat].write(self.buffer, named(states))
        return comm.Igatherv([as_bytes(self.buffer), MPI.BYTE], None, root=0)

    def saved(self) -> Iterator[Saved]:
        """Yield what has been received, client by client."""
        parts = torch.split(self.buffer, self.counts)[1:]
        for packing, own, part in zip(self.packings, self.bench.hosted, parts):
            states: dict[int, Arrays] = {client: {} for client in own}
            for name, value in packing.views(part.clone()).items():
                client, _, short = name.partition("/")
                states[int(client)][short] = value.numpy()
            yield from (alone(client, state) for client, state in states.items())


def named(states: Mapping[int, State]) -> State:
    """Return the tensors of several clients under names of their own."""
    return {f"{client}/{name}": value for client, state in states.items() for name, value in state.items()}


def alone(client: int, state: Arrays) -> Saved:
    """Return one client's state as a chunk's."""
    return np.array([client], dtype=np.int64), {name: value[None] for name, value in state.items()}
