"""What is asked of ranks beside visits: a class for each says what it asks, what a rank does, and what it replies.

The server asks lanes; a leader asks those below it the same, and merges their replies into one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import inf, nan
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np

from hpcfl.base.lazy import torch
from hpcfl.base.types import Floats, State
from hpcfl.engine.checkpointing import begun
from hpcfl.engine.executor import Executor, Worker
from hpcfl.engine.job import Job
from hpcfl.engine.profile import Phases
from hpcfl.engine.watchdog import LEAVE_SECONDS
from hpcfl.mpi.channel import Channel, Requests
from hpcfl.mpi.placement import Chunk, Topology
from hpcfl.mpi.transport import Like, Saved, arrays, as_chunk
from hpcfl.realtime.orders import Command, Op
from hpcfl.sums.packing import Bytes, Packing, as_bytes

SAVE_SECONDS = 5.0  # for personal state to begin to come, beyond what its bytes may take
DISK = 2e7  # bytes per second that a rank writes at least


# what comes back


class Reply(ABC):
    """What comes back on a lane, where its ranks are those of the `topology`; of all below a leader if it is `led`."""

    topology: Topology
    nbytes = 0

    @abstractmethod
    def receive(self, channel: Channel) -> Requests:
        """Begin to receive it from all ranks of the lane."""

    def send(self, channel: Channel) -> Requests:
        """Begin to send a rank's own part, or, as a leader, what all have replied: in a sum all do the same."""
        return self.receive(channel)

    @abstractmethod
    def merge(self, replies: Sequence[Any], came: Sequence[bool]) -> None:
        """Take the replies on all lanes below a leader, in the topology's order, as far as they have come."""


class Table(Reply):
    """Numbers about a lane's ranks, or its clients, a column for each; NaN where nothing has come."""

    def __init__(self, topology: Topology, numbers: int, by_client: bool = False) -> None:
        self.topology, self.by_client = topology, by_client
        self.data: Floats = np.zeros((numbers, len(topology.clients if by_client else topology.ranks)))

    def receive(self, channel: Channel) -> Requests:
        return channel.summed(self.data)

    def put(self, local_rank: int, numbers: Floats) -> None:
        """Fill in a rank's own part."""
        self.data[:, self.topology.places(local_rank) if self.by_client else local_rank] = numbers

    def merge(self, replies: Sequence[Table], came: Sequence[bool]) -> None:
        parts = [each.data if here else np.full_like(each.data, nan) for each, here in zip(replies, came)]
        self.data = np.concatenate(parts, axis=1)


class Done(Reply):
    """That all ranks of a lane have done what was asked; of those below a leader, which ones have."""

    def __init__(self, topology: Topology, led: bool = False) -> None:
        self.topology, self.table = topology, Table(topology, 1) if led else None

    def receive(self, channel: Channel) -> Requests:
        return channel.meet() if self.table is None else self.table.receive(channel)

    def merge(self, replies: Sequence[Done], came: Sequence[bool]) -> None:
        did = {rank for each, here in zip(replies, came) if here for rank in each.did}
        assert self.table is not None
        self.table.data[0] = [rank in did for rank in self.topology.ranks]

    @property
    def did(self) -> set[int]:
        """The ranks that have, once the reply has come."""
        ranks = self.topology.ranks
        return {*ranks} if self.table is None else {rank for rank, did in zip(ranks, self.table.data[0]) if did}


class States(Reply):
    """The personal state of a lane's clients, packed rank by rank and client by client: their shapes may differ."""

    def __init__(self, topology: Topology, like: Like, led: bool = False) -> None:
        self.topology, self.there = topology, Done(topology, led)
        self.packings = [Packing(_named({client: like(client) for client in clients})) for clients in topology.hosted]
        self.counts = [packing.nbytes for packing in self.packings]
        self.nbytes = sum(self.counts)
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def receive(self, channel: Channel) -> Requests:
        """Begin to receive it; what a leader sends is behind a table of whose it has."""
        self.buffer = torch.empty(self.nbytes, dtype=torch.uint8)
        there = [] if self.there.table is None else self.there.receive(channel)
        return [*there, *channel.up(as_bytes(self.buffer), self.counts)]

    def send(self, channel: Channel) -> Requests:
        there = [] if self.there.table is None else self.there.send(channel)
        return [*there, *channel.up(as_bytes(self.buffer))]

    def put(self, local_rank: int, states: Mapping[int, State]) -> None:
        """Pack a rank's own part, ``{client: {name: […]}}``."""
        self.buffer = self.packings[local_rank].packed(_named(states))

    def merge(self, replies: Sequence[States], came: Sequence[bool]) -> None:
        self.there.merge([each.there for each in replies], came)
        nothing = partial(torch.zeros, dtype=torch.uint8)
        self.buffer = torch.cat([each.buffer if here else nothing(each.nbytes) for each, here in zip(replies, came)])

    def lacking(self) -> list[int]:
        """Return the clients of whom nothing has been received."""
        there = self.there.did
        return [client for rank, own in self.topology.by_rank.items() if rank not in there for client in own]

    def saved(self) -> Iterator[Saved]:
        """Yield what has been received, client by client."""
        parts, there = torch.split(self.buffer, self.counts), self.there.did
        for (rank, clients), packing, part in zip(self.topology.by_rank.items(), self.packings, parts):
            if rank in there:
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


# what is asked

Store: TypeAlias = Callable[[int, Mapping[int, State]], None] | None
"""What writes personal state, ``{client: {name: […]}}``, to the checkpoint after so many rounds, if it is this rank."""


class Rank(Protocol):
    """What a client rank is to those who ask it."""

    job: Job
    executor: Executor
    worker: Worker
    profiled: Phases
    store: Store
    topology: Topology
    local_rank: int
    views: State

    def host(self, topology: Topology) -> None: ...
    def release(self) -> None: ...


class Question:
    """Something that is asked of all ranks of a lane that are free.

    Attributes
    ----------
    with_state : bool
        Whether the shared state goes along.
    beside : bool
        Whether it may be asked of ranks that are at a visit: the reply comes on the channel for commands.
    alone : bool
        Whether the next command comes after the reply only.
    dismisses : bool
        Whether it ends the work of ranks: then late ones are waited for first.
    lasts : bool
        Whether a rank may need all the time that a reply may take: until then its silence is none.
    phase : str
        Where the time that a rank takes for it goes.
    """

    with_state: ClassVar[bool] = False
    beside: ClassVar[bool] = False
    alone: ClassVar[bool] = False
    dismisses: ClassVar[bool] = False
    lasts: ClassVar[bool] = False
    phase: ClassVar[str] = "other"

    def reply(self, job: Job, topology: Topology, led: bool = False) -> Any:
        """Return room for the reply."""
        return Done(topology, led)

    def room(self, rank: Rank, command: Command) -> list[Bytes]:
        """Return the room into which a rank receives what comes with the command, beside shared state, in parts."""
        return []

    def begin(self, rank: Rank, command: Command, reply: Any) -> Callable[[], bool]:
        """Begin what a rank does; the result says whether that is over, and its own part is in the reply."""
        return lambda: True

    def seconds(self, job: Job, topology: Topology) -> float:
        """Return how long a reply may take to begin to come at most; inf: as long as it takes others."""
        return SAVE_SECONDS


class Score(Question):
    """Test the clients' models on their own test parts."""

    with_state, phase = True, "evaluation"

    def reply(self, job: Job, topology: Topology, led: bool = False) -> Table:
        return Table(topology, job.scores, by_client=True)

    def begin(self, rank: Rank, command: Command, reply: Table) -> Callable[[], bool]:
        scores = partial(rank.executor.scores, command.round, rank.executor.placed(rank.views))
        return _computed(rank.worker, scores, partial(reply.put, rank.local_rank))

    def seconds(self, job: Job, topology: Topology) -> float:
        return inf


class Profile(Question):
    """Tell where a rank's time went, the rounds being over."""

    def reply(self, job: Job, topology: Topology, led: bool = False) -> Table:
        return Table(topology, len(Phases().figures()))

    def begin(self, rank: Rank, command: Command, reply: Table) -> Callable[[], bool]:
        rank.profiled.end()
        reply.put(rank.local_rank, rank.profiled.figures())
        return lambda: True


class Save(Question):
    """Hand over the acknowledged personal state."""

    beside = alone = True
    phase = "store"

    def reply(self, job: Job, topology: Topology, led: bool = False) -> States:
        return States(topology, job.like, led)

    def begin(self, rank: Rank, command: Command, reply: States) -> Callable[[], bool]:
        reply.put(rank.local_rank, rank.executor.personal())
        return lambda: True


class Write(Question):
    """Write the acknowledged personal state, which does not change meanwhile, to the checkpoint of a round."""

    beside = alone = lasts = True
    phase = "store"

    def begin(self, rank: Rank, command: Command, reply: Done) -> Callable[[], bool]:
        assert rank.store is not None
        under_way = begun(partial(rank.store, command.round, rank.executor.personal()))
        return lambda: under_way.done() and under_way.result() is None

    def seconds(self, job: Job, topology: Topology) -> float:
        most = max((len(clients) for clients in topology.hosted), default=0)
        return SAVE_SECONDS + most * job.personal_bytes / DISK


class Adopt(Question):
    """Take over the clients of a lost rank, whose personal state comes from the server."""

    alone = True

    def room(self, rank: Rank, command: Command) -> list[Bytes]:
        invited = set(command.cohort.tolist())
        self.chunks = [chunk for chunk in rank.job.chunks if not invited.isdisjoint(chunk.clients.tolist())]
        self.handover = Handover(self.chunks, rank.job.like)
        return self.handover.received()

    def begin(self, rank: Rank, command: Command, reply: Done) -> Callable[[], bool]:
        rank.host(rank.topology.with_more(self.chunks))
        return _computed(rank.worker, partial(rank.executor.adopt, self.chunks, self.handover.states()))


class Release(Question):
    """Forget everything: all that is still to come is the server's last word."""

    dismisses = True

    def begin(self, rank: Rank, command: Command, reply: Done) -> Callable[[], bool]:
        rank.release()
        return lambda: True


class Leave(Question):
    """Leave the run, which is over."""

    alone = dismisses = True

    def seconds(self, job: Job, topology: Topology) -> float:
        return LEAVE_SECONDS


QUESTIONS: dict[Op, type[Question]] = {
    **{Op.SCORE: Score, Op.SAVE: Save, Op.WRITE: Write, Op.PROFILE: Profile, Op.ADOPT: Adopt},
    **{Op.RELEASE: Release, Op.LEAVE: Leave},
}


def _computed(
    worker: Worker, work: Callable[[], Any], take: Callable[[Any], object] = lambda result: None
) -> Callable[[], bool]:
    """Let the second thread do some work; return what takes its result, and says whether it is over."""
    worker.start(lambda put: put(work()))
    return lambda: worker.over(take)
