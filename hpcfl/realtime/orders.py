"""What the server asks of a lane, in commands of fixed size, and what client ranks reply besides visits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from hpcfl.base.lazy import torch
from hpcfl.base.types import Floats, Ints, State
from hpcfl.mpi.placement import Chunk, Topology
from hpcfl.mpi.transport import Like, Saved, arrays, as_chunk
from hpcfl.sums.packing import Bytes, Packing, as_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from hpcfl.mpi.channel import Channel, Requests

NONE: Ints = np.zeros(0, dtype=np.int64)
HEAD = 7  # op, round, attempt, closes_after, stage, stopped, hard


class Op(IntEnum):
    """What a lane is to do."""

    VISIT = 1
    CLOSE = 2
    SCORE = 3
    SAVE = 4
    RELEASE = 5
    LEAVE = 6
    PROFILE = 7
    ADOPT = 8
    WRITE = 9


@dataclass(frozen=True)
class Command:
    """One control message.

    `counted` [h] has, for each client that the lane hosts, the first layer of its last visit that counted (L + 1:
    none); 0 where there is nothing to acknowledge.
    """

    op: Op
    round: int = 0
    attempt: int = 0  # how many at this round were void
    closes_after: float = 0.0  # seconds from the round's start after which it closes at the latest
    stage: int = 0  # of doubling participant sets
    stopped: int = 0  # when leaving: the exit code of a run that did not come to its end, else 0
    hard: bool = False  # when leaving: end without MPI's farewell, which the dead would have to take part in
    counted: Ints = field(default_factory=lambda: NONE)
    cohort: Ints = field(default_factory=lambda: NONE)  # who is invited on all lanes, ascending client ids

    @staticmethod
    def empty(hosted: int, clients: int) -> Ints:
        """Return room for a message on a lane that hosts `hosted` of `clients` clients, int64."""
        return np.zeros(HEAD + hosted + -(-clients // 64), dtype=np.int64)

    def packed(self, hosted: int, clients: int) -> Ints:
        data = self.empty(hosted, clients)
        closes_after = np.float64(self.closes_after).view(np.int64)
        data[:HEAD] = self.op, self.round, self.attempt, closes_after, self.stage, self.stopped, self.hard
        data[HEAD : HEAD + len(self.counted)] = self.counted
        invited = np.zeros(64 * (len(data) - HEAD - hosted), dtype=bool)
        invited[self.cohort] = True
        data[HEAD + hosted :] = np.packbits(invited).view(np.int64)
        return data

    @classmethod
    def unpacked(cls, data: Ints, hosted: int) -> Command:
        op, round_, attempt, _, stage, stopped, hard = (int(value) for value in data[:HEAD])
        closes_after = float(data[3:4].view(np.float64)[0])
        cohort = np.flatnonzero(np.unpackbits(data[HEAD + hosted :].view(np.uint8)))
        counted = data[HEAD : HEAD + hosted]
        return cls(Op(op), round_, attempt, closes_after, stage, stopped, bool(hard), counted, cohort)


RANK_STATES = "idle", "active", "late", "dead", "silent"
"""As a `Notice` numbers them; who is silent is a leader that is late and has not replied at the end of a round."""


class Notice:
    """What a leader tells, whenever it has changed, of the ranks below it and of the visits that it was asked for.

    It is all in `data`, int64: ``[round, attempt, closing, over, left]``, then for each rank its state (of
    `RANK_STATES`) and how many bytes it has received and sent so far, then how many groups of each client's visits have
    come, then in how many parts each large block comes (`SumFormat.parts`).

    Attributes
    ----------
    closing : int
        1: it has heard that the round is closed; 2: and has added up what counts, so that all `parts` are known.
    over : bool
        Whether it has sent all that counts.
    left : int
        Bytes that are still to come after the closing, at most.
    """

    HEAD = 5
    LAST = -2  # as a round: nothing comes after it

    def __init__(self, ranks: int, clients: int, large: int) -> None:
        sizes = self.HEAD, 3 * ranks, clients, large
        self.data: Ints = np.zeros(sum(sizes), dtype=np.int64)
        _, states, self.came, self.parts = np.split(self.data, np.cumsum(sizes)[:-1])
        self.ranks: Ints = states.reshape(ranks, 3)

    @property
    def attempt(self) -> tuple[int, int]:
        """The round and the attempt at it that this is about."""
        return int(self.data[0]), int(self.data[1])

    @property
    def closing(self) -> int:
        return int(self.data[2])

    @property
    def over(self) -> bool:
        return bool(self.data[3])

    @property
    def left(self) -> int:
        return int(self.data[4])

    def tells_more(self, said: Ints, groups: int) -> bool:
        """Whether it tells more than what was `said` last: of rounds, of ranks, or of visits that are complete."""
        if len(said) != len(self.data):
            return True
        last = Notice(len(self.ranks), len(self.came), len(self.parts))
        last.data[:] = said
        if (self.data[: self.HEAD] != last.data[: self.HEAD]).any() or (self.ranks[:, 0] != last.ranks[:, 0]).any():
            return True
        return bool(((self.came == groups) != (last.came == groups)).any())

    def told(self) -> list[str]:
        """Return the state of each rank, of `RANK_STATES`."""
        return [RANK_STATES[number] for number in self.ranks[:, 0].tolist()]

    def states(self) -> list[str]:
        """Return the same as those of a `Lane`: who is silent is late."""
        return ["late" if state == "silent" else state for state in self.told()]


class TableReply:
    """Numbers about a lane's clients, or its ranks, a column for each; each rank fills in its own."""

    def __init__(self, numbers: int, columns: int) -> None:
        self.data: Floats = np.zeros((numbers, columns))

    def carried(self, channel: Channel) -> Requests:
        """Begin to receive it, or to send a rank's own part."""
        return channel.summed(self.data)


class StateReply:
    """The personal state of a lane's clients, packed rank by rank and client by client: their shapes may differ."""

    def __init__(self, topology: Topology, like: Like, led: bool = False) -> None:
        self.topology = topology
        self.packings = [Packing(_named({client: like(client) for client in clients})) for clients in topology.hosted]
        self.counts = [packing.nbytes for packing in self.packings]
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.there = TableReply(1, len(topology.ranks)) if led else None

    def receive(self, channel: Channel) -> Requests:
        """Begin to receive it; what a leader sends is behind a table of whose it has."""
        self.buffer = torch.empty(sum(self.counts), dtype=torch.uint8)
        if self.there is None:
            return channel.up(as_bytes(self.buffer), self.counts)
        return [*self.there.carried(channel), *channel.up(as_bytes(self.buffer), self.counts)]

    def send_on(self, channel: Channel, there: TableReply, buffer: Tensor) -> Requests:
        """Begin to send what a leader has received, rank after rank."""
        self.there, self.buffer = there, buffer
        return [*there.carried(channel), *channel.up(as_bytes(buffer))]

    def send(self, channel: Channel, local_rank: int, states: Mapping[int, State]) -> Requests:
        """Begin to send a rank's own part, ``{client: {name: […]}}``."""
        self.fill(states, local_rank)
        return channel.up(as_bytes(self.buffer))

    def fill(self, states: Mapping[int, State], local_rank: int = 0) -> None:
        """Pack a rank's own part."""
        self.buffer = self.packings[local_rank].packed(_named(states))

    def lacking(self) -> list[int]:
        """Return the clients of whom nothing has been received."""
        there = [1.0] * len(self.counts) if self.there is None else self.there.data[0].tolist()
        return [client for clients, came in zip(self.topology.hosted, there) if came != 1 for client in clients]

    def saved(self) -> Iterator[Saved]:
        """Yield what has been received, client by client."""
        parts = torch.split(self.buffer, self.counts)
        lacking = {*self.lacking()}
        for packing, clients, part in zip(self.packings, self.topology.hosted, parts):
            if not lacking.isdisjoint(clients):
                continue
            states = _by_client(clients, packing.views(part.clone()))
            yield from (as_chunk(client, arrays(state)) for client, state in states.items())


class Handover:
    """The personal state of some chunks' clients, as it goes from the server to the rank that takes them over."""

    def __init__(self, chunks: Sequence[Chunk], like: Like) -> None:
        self.clients = [client for chunk in chunks for client in chunk.clients.tolist()]
        self.packing = Packing(_named({client: like(client) for client in self.clients}))
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def sent(self, states: Mapping[int, State]) -> list[Bytes]:
        """Return what is sent, in parts; `states` are ``{client: {name: […]}}``."""
        return self.packing.sent(_named(states))

    def received(self) -> list[Bytes]:
        """Return the room into which the parts are received."""
        self.buffer = self.packing.zeros()
        return self.packing.received(self.buffer)

    def states(self) -> dict[int, State]:
        """Return what has been received, client by client."""
        return _by_client(self.clients, self.packing.views(self.buffer))


def _named(states: Mapping[int, State]) -> State:
    """Return the tensors of several clients under names of their own."""
    return {f"{client}/{name}": value for client, state in states.items() for name, value in state.items()}


def _by_client(clients: Sequence[int], named: State) -> dict[int, State]:
    """Return the tensors of each of some clients under their own names."""
    states: dict[int, State] = {client: {} for client in clients}
    for name, value in named.items():
        client, _, short = name.partition("/")
        states[int(client)][short] = value
    return states
