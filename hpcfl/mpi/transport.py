"""What the round loop asks of whatever connects the ranks, and the transport of a single process.

The loop knows only this interface, and here is no MPI; `hpcfl.mpi.collective` has the transport over MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.errors import Stopped
from hpcfl.base.lazy import Tensor
from hpcfl.base.types import Floats, Ints, State
from hpcfl.mpi.placement import Chunk
from hpcfl.sums.message import ExactSums

Personal = dict[int, State]
"""Personal state of the chunks a rank hosts: ``{chunk number: {name: [c, …]}}``."""

Arrays = dict[str, NDArray[np.generic]]

Saved = tuple[Ints, Arrays]
"""One chunk's client ids and personal state as arrays, for a checkpoint."""

Like = Callable[[int], State]
"""Gives the names, shapes and types of a client's personal state."""


def arrays(state: Mapping[str, Tensor]) -> Arrays:
    return {name: value.cpu().numpy() for name, value in state.items()}


def as_chunk(client: int, state: Arrays) -> Saved:
    """Return one client's state as a chunk's."""
    return np.array([client], dtype=np.int64), {name: value[None] for name, value in state.items()}


class Transport:
    """How state reaches the clients and sums reach the server; rank 0 serves.

    This one connects nobody: its process is server and clients at once. `size`: ranks of which figures are kept, some
    being released.
    """

    rank = 0
    sent = 0  # bytes handed to the wire by this rank since `count` was last called
    received = 0

    def __init__(self, size: int = 1) -> None:
        self.size = size

    @property
    def serves(self) -> bool:
        return self.rank == 0

    def count(self) -> tuple[int, int]:
        """Return and reset the bytes sent and received."""
        counted = self.sent, self.received
        self.sent = self.received = 0
        return counted

    def invite(self, shared: State) -> State:
        """Give every rank the server's shared state."""
        return shared

    def close(self, sums: ExactSums) -> ExactSums:
        """Return the sums over all ranks (meaningful on the server); `sums` may be changed."""
        return sums

    def share(self, sums: ExactSums) -> ExactSums:
        """Return the sums over all ranks, the same on every rank; `sums` may be changed."""
        return sums

    def reduce(self, values: Floats) -> Floats:
        """Return the element-wise sum over ranks of a small array (meaningful on the server)."""
        return values

    def agree(self, values: Floats) -> Floats:
        """Return the element-wise sum over ranks of a small array, the same on every rank."""
        return values

    def collect(self, chunks: Sequence[Chunk], personal: Personal, like: Like) -> Iterator[Saved]:
        """Yield every chunk's personal state on the server, one at a time, and nothing elsewhere.

        Every rank must exhaust the iterator.
        """
        return ((chunk.clients, arrays(personal[chunk.number])) for chunk in chunks)

    def leave(self, stopped: Stopped | None = None) -> Stopped | None:
        """Part from the other ranks, for good; return how the rounds ended, on every rank.

        A rank that was released does not know whether it was `stopped`.
        """
        return stopped
