"""One visit by each of a lane's ranks, as it is received."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from hpcfl.base.types import Ints
from hpcfl.comm.guard import NO_GROUP
from hpcfl.engine.wall.framing import REJECTED, Parcel, computed

if TYPE_CHECKING:
    from hpcfl.engine.wall.lane import Lane


class Slot:
    """The buffers that are being received, and when each group was there."""

    def __init__(self, lane: Lane, clients: list[int], data: list[Parcel]) -> None:
        self.clients, self.ranks, self.visits = clients, lane.bench.ranks, real(clients)
        self.wire, self.data = lane.wire, data
        self.requests = [lane.receive(parcel) for parcel in data]
        self.signs = [group.signs(parcel) for group, parcel in zip(self.wire, data)]
        self.times: list[float] = []

    def poll(self) -> bool:
        """Note what has arrived since; return whether everything has."""
        while len(self.times) < len(self.requests) and MPI.Request.Testall(self.requests[len(self.times)]):
            self.times.append(time.monotonic())
        return self.complete

    @property
    def complete(self) -> bool:
        """Whether every group has arrived."""
        return len(self.times) == len(self.requests)

    def sent(self, groups: int) -> Ints:
        """Return how many of the first `groups` groups each rank really sent before it gave up, int64 [width]."""
        flags = np.array([*(signs[0] for signs in self.signs[:groups]), np.zeros(len(self.ranks))])
        count: Ints = np.argmin(flags > 0, axis=0)
        return count

    def rejected(self, groups: int) -> Ints:
        """Return by which of the first `groups` groups each visit was rejected, int64 [width]; `NO_GROUP`: by none."""
        flags = np.array([*(signs[0] for signs in self.signs[:groups]), np.full(len(self.ranks), REJECTED)])
        first: Ints = np.argmax(flags == REJECTED, axis=0)
        return np.where(first < groups, first, NO_GROUP)

    def seconds(self, seat: int) -> float:
        """Return the seconds that a rank's visit had taken when it sent the last group that arrived."""
        return max((float(signs[1, seat]) for signs in self.signs[: len(self.times)]), default=0.0)

    def gradients(self, seat: int, groups: int) -> int:
        """Return how many gradients a rank's visit had computed for the first `groups` groups."""
        return max((computed(signs, seat) for signs in self.signs[:groups]), default=0)


def real(clients: list[int]) -> int:
    """Return how many of a slot's places are somebody's visit."""
    return sum(client >= 0 for client in clients)
