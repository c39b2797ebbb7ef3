"""Channels: what a lane speaks over. Everything is nonblocking, and in the same order at both ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from hpcfl.base.lazy import MPI
from hpcfl.base.types import Ints
from hpcfl.mpi.placement import TWO_LEVEL, lane_ranks
from hpcfl.mpi.transfers import Near
from hpcfl.mpi.waiting import wait

PIECE_BYTES = 2**30  # Open MPI refuses 2^31 bytes and more in one message
DOWN_BYTES = 2**24  # what goes down goes in such pieces: a rank that leads others passes each on as it comes
CONTROL, DATA, NOTICES, WORDS = range(4)
TAGS = 4
NOTHING = np.zeros(0, dtype=np.uint8)
Requests: TypeAlias = "list[Any]"
"""MPI's, or `Near` ones: what can be tested."""


def in_pieces(data: Any, down: bool = False) -> list[Any]:
    """Return a contiguous array or tensor in flat pieces that one message carries, `down` or up: at least one view."""
    most = min(PIECE_BYTES, DOWN_BYTES) if down else PIECE_BYTES
    data, entries = data.reshape(-1), max(1, most // data.itemsize)
    return [data[start : start + entries] for start in range(0, max(1, len(data)), entries)]


class Channel(ABC):
    """One end of a way between a rank that leads and the ranks that it leads.

    All of them begin the same operations in the same order. Each returns the requests that it has begun; what it is
    given, contiguous in memory, has to live and to stay as it is until these are complete. Data may be of any size.
    """

    @abstractmethod
    def down(self, data: Any) -> Requests:
        """Carry the leader's data to the others."""

    @abstractmethod
    def up(self, data: Any, sizes: Sequence[int] = ()) -> Requests:
        """Carry everybody's data to the leader, which receives them one after the other.

        The leader says how many entries come from each of the others.
        """

    @abstractmethod
    def summed(self, data: Any) -> Requests:
        """Carry the sum of everybody's data to the leader, whose own part, in the place of the sum, has to be zero.

        A sum over one rank are its data, to the bit.
        """

    def absent(self, data: Any) -> Requests:
        """Carry zeros up of which nobody will take note, as `summed` does, or as many empty messages if they do."""
        return self.summed(data)

    @abstractmethod
    def agree(self, own: Ints, found: Ints) -> Requests:
        """Find everybody's largest number: the larger one of `own` [1] and what is `found` [1] in the end."""

    @abstractmethod
    def meet(self) -> Requests:
        """Meet: complete once all have come here."""

    @abstractmethod
    def revoke(self) -> None:
        """Let whatever is under way fail at every rank. Not where one leads one: others share their communicator.

        A rank that is reached by way of another one is told to give up that way.
        """


class Group(Channel):
    """A channel to several ranks, over a communicator of its own of which rank 0 leads."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.leads = comm, comm.Get_rank() == 0

    def down(self, data: Any) -> Requests:
        return [self.comm.Ibcast(piece, root=0) for piece in in_pieces(data)]

    def up(self, data: Any, sizes: Sequence[int] = ()) -> Requests:
        if not self.leads:
            return [self.comm.Isend(piece, 0) for piece in in_pieces(data)]
        parts = np.split(data, np.cumsum(sizes)[:-1])
        return [self.comm.Irecv(piece, rank) for rank, part in enumerate(parts, 1) for piece in in_pieces(part)]

    def summed(self, data: Any) -> Requests:
        ends = [(MPI.IN_PLACE, piece) if self.leads else (piece, None) for piece in in_pieces(data)]
        return [self.comm.Ireduce(own, total, MPI.SUM, root=0) for own, total in ends]

    def agree(self, own: Ints, found: Ints) -> Requests:
        return [self.comm.Iallreduce(own, found, MPI.MAX)]

    def meet(self) -> Requests:
        return [self.comm.Ibarrier()]

    def revoke(self) -> None:
        self.comm.Revoke()


class Direct(Channel):
    """A channel to one rank: messages of one tag on a communicator that many channels share, so it costs nothing.

    Between two ranks, messages of one tag keep their order.

    Parameters
    ----------
    peer : int
        The rank at the other end.
    leads : bool
        Whether this end leads.

    Attributes
    ----------
    passing : Intracomm
        On which messages leave; on `comm` they come.
    """

    def __init__(self, comm: MPI.Intracomm, peer: int, tag: int, leads: bool) -> None:
        self.comm, self.peer, self.tag, self.leads, self.passing = comm, peer, tag, leads, comm

    def down(self, data: Any) -> Requests:
        return [request for piece in in_pieces(data, down=True) for request in self._carried(piece, self.leads)]

    def up(self, data: Any, sizes: Sequence[int] = ()) -> Requests:
        return self._carried(data, not self.leads)

    def summed(self, data: Any) -> Requests:
        return self._carried(data, not self.leads)

    def absent(self, data: Any) -> Requests:
        return [request for piece in in_pieces(data) for request in self._carried(piece[:0], not self.leads)]

    def agree(self, own: Ints, found: Ints) -> Requests:
        return [*self._carried(own, True), *self._carried(found, False)]

    def meet(self) -> Requests:
        return [*self._carried(NOTHING, True), *self._carried(NOTHING, False)]

    def revoke(self) -> None:
        pass

    def _carried(self, data: Any, sends: bool) -> Requests:
        begin = self.passing.Isend if sends else self.comm.Irecv
        return [begin(piece, self.peer, self.tag) for piece in in_pieces(data)]


class Relayed(Direct):
    """A channel to a rank by way of another one, which passes on what comes on its other communicator, see `relay`.

    Parameters
    ----------
    comms : (Intracomm, Intracomm)
        For what has come to where it goes, and for what is to be passed on.
    by, rank : int
        Who passes it on, and whose lane it is.
    """

    def __init__(self, comms: Sequence[MPI.Intracomm], by: int, rank: int, kind: int, leads: bool) -> None:
        super().__init__(comms[0], by, TAGS * rank + kind, leads)
        self.passing, self.rank, self.kind = comms[1], rank, kind
        self._told: Requests = []

    def revoke(self) -> None:
        if self.kind == CONTROL:
            self._told = word(self.comm, self.rank, leads=True).down(NOTHING)


class Way:
    """Messages in one direction within a process: each meets room for it, in their order."""

    def __init__(self) -> None:
        self._given: dict[bool, deque[tuple[Near, Any]]] = {True: deque(), False: deque()}  # what is sent, and room

    def take(self, data: Any, sends: bool) -> Near:
        request = Near()
        self._given[sends].append((request, data))
        while all(self._given.values()):
            (sent, message), (received, room) = (each.popleft() for each in (self._given[True], self._given[False]))
            flat = (message.cpu() if hasattr(message, "cpu") else message).reshape(-1)
            room.reshape(-1)[: len(flat)] = flat
            sent.done = received.done = True
        return request


class Within(Direct):
    """A channel of a rank to its own clients, which compute beside it; `ways` go down and up."""

    def __init__(self, leads: bool, ways: tuple[Way, Way]) -> None:
        self.leads, self.ways = leads, ways

    def _carried(self, data: Any, sends: bool) -> Requests:
        return [self.ways[sends != self.leads].take(data, sends)]


Pair = tuple[Channel, Channel]
"""A lane's channels: for commands, and for everything large."""


@dataclass
class Connected:
    """A rank's `lanes` by number, and the communicators that were made for them."""

    lanes: dict[int, Pair]
    comms: list[MPI.Intracomm]

    def free(self) -> None:
        """Free the communicators: MPI has few, and a process may run many runs."""
        for comm in self.comms:
            comm.Free()


def connect(
    comm: MPI.Intracomm, width: int | str, hosts: Sequence[str], apart: bool, relays: bool = False
) -> Connected:
    """Make this rank's lanes, of the server and some client ranks each, as `lane_ranks` cuts them.

    All ranks call it at once. Where lanes may fall `apart`, as MPI tells of dead ranks, each rank of one with several
    has another one by itself, of the number `single`.

    Lanes of two levels are not among them: all are between two ranks, and share one communicator, see `direct`. Where
    some ranks are `relays`, there is another one for what they pass on.
    """
    if width == TWO_LEVEL:
        return Connected({}, [_duplicate(comm) for _ in range(1 + relays)])
    size, rank = comm.Get_size(), comm.Get_rank()
    rows = dict(enumerate(lane_ranks(width, hosts)))
    if apart:
        rows |= {single(each, size): (each,) for row in [*rows.values()] if len(row) > 1 for each in row}
    made = Connected({}, [])
    if any(len(row) == 1 for row in rows.values()):
        shared = _duplicate(comm)
        made.comms.append(shared)
    for number, row in rows.items():
        if rank not in (0, *row):
            continue
        if len(row) == 1:
            made.lanes[number] = direct(shared, 0 if rank else row[0], leads=rank == 0)
            continue
        group = comm.Get_group().Incl([0, *row])
        own = [comm.Create_group(group, 2 * number + kind) for kind in (CONTROL, DATA)]
        group.Free()
        made.comms += own
        made.lanes[number] = Group(own[CONTROL]), Group(own[DATA])
    wait([comm.Ibarrier()])  # who dies before the last lane is made keeps the others from making it
    return made


def _duplicate(comm: MPI.Intracomm) -> MPI.Intracomm:
    made, request = comm.Idup()
    wait([request])
    return made


def within() -> tuple[Pair, Pair]:
    """Return both ends of a lane within this process, its own first: the other one's clients are its own."""
    ways = [(Way(), Way()) for _ in range(2)]
    own, other = ([Within(leads, each) for each in ways] for leads in (True, False))
    return (own[0], own[1]), (other[0], other[1])


def direct(comm: MPI.Intracomm, peer: int, leads: bool, number: int = 0) -> Pair:
    """Return a lane to one rank; `number` tells lanes between the same two ranks apart."""
    tag = TAGS * number
    return Direct(comm, peer, tag + CONTROL, leads), Direct(comm, peer, tag + DATA, leads)


def relayed(comms: Sequence[MPI.Intracomm], by: int, rank: int, leads: bool) -> Pair:
    """Return the lane of a rank that is reached by way of another one."""
    return Relayed(comms, by, rank, CONTROL, leads), Relayed(comms, by, rank, DATA, leads)


def notices(comm: MPI.Intracomm, peer: int, leads: bool, number: int = 0) -> Channel:
    """Return the channel beside such a lane on which a rank that leads others tells what it has to tell."""
    return Direct(comm, peer, TAGS * number + NOTICES, leads)


def words(comm: MPI.Intracomm, peer: int, leads: bool) -> Channel:
    """Return a channel between the server and any rank, whoever leads that one."""
    return Direct(comm, peer, WORDS, leads)


def word(comm: MPI.Intracomm, rank: int, leads: bool) -> Channel:
    """Return the channel on which the server tells a rank to give up the way by which it is reached."""
    return Direct(comm, rank if leads else 0, TAGS * rank + WORDS, leads)


def farewell(comms: Sequence[MPI.Intracomm], by: int, rank: int) -> Channel:
    """Return the channel on which a rank tells the one that passes its messages on that there are no more."""
    return Relayed(comms, by, rank, NOTICES, leads=False)


def single(rank: int, size: int) -> int:
    """Return the number of a rank's lane of its own; those of other lanes are below the number of ranks, `size`."""
    return size + rank
