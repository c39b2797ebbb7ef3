"""What the round loop asks of whatever connects the ranks, and the transport of a single process.

The loop knows only this interface. `Alone` hosts every client in one process and imports no MPI;
`hpcfl.comm.collective` has the transport over MPI.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.errors import Stopped
from hpcfl.base.types import Floats, Ints, State
from hpcfl.comm.message import Deposits
from hpcfl.comm.placement import Chunk

Personal = dict[int, State]
"""Personal state of the chunks a rank hosts: ``{chunk number: {name: [c, …]}}``."""

Arrays = dict[str, NDArray[np.generic]]

Saved = tuple[Ints, Arrays]
"""One chunk's client ids and personal state as arrays, for a checkpoint."""

Like = Callable[[int], State]
"""Gives the names, shapes and types of a client's personal state."""


def idle() -> None:
    """Do nothing while waiting."""


class Transport(ABC):
    """How state reaches the clients and sums reach the server.

    Attributes
    ----------
    rank, size : int
        This rank and how many there are; rank 0 serves.
    sent, received : int
        Bytes handed to and taken from the wire by this rank since `count` was last called.
    """

    rank = 0
    size = 1
    sent = 0
    received = 0

    @property
    def serves(self) -> bool:
        """Whether this rank is the server."""
        return self.rank == 0

    def count(self) -> tuple[int, int]:
        """Return and reset the bytes sent and received."""
        counted = self.sent, self.received
        self.sent = self.received = 0
        return counted

    @abstractmethod
    def invite(self, shared: State) -> State:
        """Return the server's shared state, on every rank."""

    @abstractmethod
    def close(self, sums: Deposits) -> Deposits:
        """Return the sums over all ranks (meaningful on the server)."""

    @abstractmethod
    def share(self, sums: Deposits) -> Deposits:
        """Return the sums over all ranks, the same on every rank."""

    @abstractmethod
    def reduce(self, values: Floats) -> Floats:
        """Return the element-wise sum over ranks of a small array (meaningful on the server)."""

    @abstractmethod
    def agree(self, values: Floats) -> Floats:
        """Return the element-wise sum over ranks of a small array, the same on every rank."""

    @abstractmethod
    def collect(self, chunks: Sequence[Chunk], personal: Personal, like: Like) -> Iterator[Saved]:
        """Yield every chunk's personal state on the server, one at a time, and nothing elsewhere.

        Every rank must exhaust the iterator.
        """

    def leave(self, stopped: Stopped | None = None, rest: Callable[[], None] = idle) -> Stopped | None:
        """Part from the other ranks; nothing can be sent afterwards.

        Parameters
        ----------
        stopped : Stopped, optional
            Why this rank has not done all rounds; a rank that was released does not know.
        rest : callable
            Called now and then while the server is waited for, as long as it may take.

        Returns
        -------
        Stopped or None
            How the rounds ended, on every rank.
        """
        return stopped


class Alone(Transport):
    """One process that is server and clients at once.

    Parameters
    ----------
    size : int
        Ranks of which figures are kept: others may have been released.
    """

    def __init__(self, size: int = 1) -> None:
        self.size = size

    def invite(self, shared: State) -> State:
        """Return the state as it is."""
        return shared

    def close(self, sums: Deposits) -> Deposits:
        """Return the sums as they are."""
        return sums

    def share(self, sums: Deposits) -> Deposits:
        """Return the sums as they are."""
        return sums

    def reduce(self, values: Floats) -> Floats:
        """Return the values as they are."""
        return values

    def agree(self, values: Floats) -> Floats:
        """Return the values as they are."""
        return values

    def collect(self, chunks: Sequence[Chunk], personal: Personal, like: Like) -> Iterator[Saved]:
        """Yield the chunks' own state."""
        for chunk in chunks:
            yield chunk.clients, {name: value.cpu().numpy() for name, value in personal[chunk.number].items()}
