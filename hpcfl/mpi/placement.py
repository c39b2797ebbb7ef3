"""Who is where: chunks of clients on ranks, ranks on lanes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, zip_longest
from math import inf

import numpy as np

from hpcfl.base.errors import RunError, UsageError, listed, refusal
from hpcfl.base.types import Floats, Ints

CACHE_BYTES = 6_400_000  # a chunk's parameters should stay in caches that two ranks share: 10 models of 640 kB
MOST_PER_CHUNK = 256
CHUNKS_WANTED = 8  # "auto" leaves at least so many chunks, so that some ranks can share them
TWO_LEVEL = "two-level"  # of `lane_width`
PER_LANE = 2
"""Communicators of a lane of several ranks: for commands and for data. Lanes of one rank share one for all of them."""
COMMUNICATORS: Mapping[str, int] = {"MPICH": 2046}
"""How many communicators a process can make, by the family of the MPI; others have no limit that matters here."""
FAN_OUT = 32  # leaders whom one rank leads
SINGLE_RANKS = 64  # up to so many ranks every client rank has a lane of its own


@dataclass(frozen=True)
class Chunk:
    """Clients that are computed together: number, ids int64 [c] (fast ones first), and the rank that hosts them."""

    number: int
    clients: Ints
    rank: int

    def places(self, clients: Ints) -> Ints:
        """The rows of this chunk at which `clients` stand."""
        order = np.argsort(self.clients, kind="stable")
        return order[np.searchsorted(self.clients, clients, sorter=order)]


def chunk_size(
    batch_clients: str | int | bool, clients: int, model_bytes: int, one_by_one: bool = False, heavy: bool = False
) -> int:
    """Clients per chunk: as the config says; for "auto" by cache size and number of clients.

    With `one_by_one` "auto" is 1: visits that are computed together end together. `heavy` clients gain next to nothing
    from being together: few of them are rather spread evenly over ranks.
    """
    if batch_clients is False or (one_by_one and batch_clients == "auto"):
        return 1
    if isinstance(batch_clients, int):
        return min(batch_clients, clients)
    fitting = max(1, CACHE_BYTES // max(1, model_bytes))
    shared = clients // CHUNKS_WANTED if heavy else -(-clients // CHUNKS_WANTED)
    return max(1, min(MOST_PER_CHUNK, fitting, shared))


def cut(size: int, paces: Floats, ranks: int, kinds: Sequence[Hashable] | None = None) -> list[Chunk]:
    """Cut the clients, fastest expected pace first, into chunks of `size` and deal these to the client ranks.

    Dealt like cards, so that any fastest n are spread evenly. Rank 0 serves, and hosts clients only when alone. The
    clients of a chunk are of one of `kinds` [clients]: their tensors are stacked. UsageError where there are more
    client ranks than chunks.
    """
    order = np.argsort(paces, kind="stable")
    parts = cut_by_kind(size, order, kinds or [None] * len(order))
    if ranks - 1 > len(parts):
        fitting = max(1, len(order) // (ranks - 1))
        raise UsageError(
            f"{ranks} ranks are one server and {ranks - 1} client ranks, but there are only {len(parts)} chunks of "
            f"{size} clients; start at most {len(parts) + 1} ranks, or set batch_clients = {fitting} or less"
        )
    return [Chunk(number, part, 0 if ranks == 1 else 1 + number % (ranks - 1)) for number, part in enumerate(parts)]


def cut_by_kind(size: int, order: Ints, kinds: Sequence[Hashable]) -> list[Ints]:
    """Parts of at most `size` clients of one kind each, in the order of the first of each part."""
    full: list[list[int]] = []
    open_: dict[Hashable, list[int]] = {}
    for client in order.tolist():
        part = open_.get(kinds[client])
        if part is None or len(part) == size:
            part = open_[kinds[client]] = []
            full.append(part)
        part.append(client)
    return [np.array(part, dtype=np.int64) for part in full]


Turn = list[list[int]]
"""Clients that are visited, ``[chunk][client]``, ascending ids: what a rank sends of them travels together."""


@dataclass(frozen=True)
class Topology:
    """The client ranks of one lane; a local rank is a place among them.

    `chunks` are those that each of them hosts, ``[local rank][chunk][client]``.
    """

    ranks: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], ...], ...]

    @cached_property
    def hosted(self) -> tuple[tuple[int, ...], ...]:
        """The clients that each rank hosts."""
        return tuple(tuple(chain(*chunks)) for chunks in self.chunks)

    @cached_property
    def by_rank(self) -> dict[int, tuple[int, ...]]:
        """The same by rank."""
        return dict(zip(self.ranks, self.hosted))

    @cached_property
    def clients(self) -> Ints:
        """All clients of the lane, by local rank, int64 [h]."""
        return np.array([client for clients in self.hosted for client in clients], dtype=np.int64)

    def places(self, local_rank: int) -> slice:
        """Where the clients of a local rank stand among `clients`."""
        start = sum(len(clients) for clients in self.hosted[:local_rank])
        return slice(start, start + len(self.hosted[local_rank]))

    def most(self, together: bool) -> int:
        """The most clients of a rank in one of its `turns`."""
        parts: Iterable[tuple[int, ...]] = self.hosted if together else chain(*self.chunks)
        return max(map(len, parts))

    def turns(self, cohort: Ints, together: bool) -> list[list[Turn]]:
        """What is visited in which turn, ``[turn][local rank]``, of a cohort in ascending ids.

        Each rank serves its chunks in the order in which it hosts them, if anybody of them is invited: one after the
        other, or all of them in one turn. The ranks with fewer of them send nothing in the last turns, but take part in
        the sums.
        """
        first, last = (np.searchsorted(cohort, self.clients, side) for side in ("left", "right"))
        invited = set(self.clients[first < last].tolist())  # by bisection: a lane is small beside the cohort
        rows = [[sorted(invited.intersection(chunk)) for chunk in chunks] for chunks in self.chunks]
        chunks = [[chunk for chunk in row if chunk] for row in rows]
        if together:
            return [chunks] if any(chunks) else []
        return [list(turn) for turn in zip_longest(*([[chunk] for chunk in row] for row in chunks), fillvalue=[])]

    def single(self, local_rank: int) -> Topology:
        """The lane of one of the ranks by itself."""
        return Topology((self.ranks[local_rank],), (self.chunks[local_rank],))

    def with_more(self, chunks: Sequence[Chunk]) -> Topology:
        """The lane of a rank by itself when it hosts these chunks too, after its own."""
        (own,) = self.chunks
        return Topology(self.ranks, ((*own, *(tuple(chunk.clients.tolist()) for chunk in chunks)),))


def lane_topologies(width: int | str, hosts: Sequence[str], chunks: Sequence[Chunk]) -> list[Topology]:
    """Return who is on which lane, with the clients that each rank hosts; as `lane_ranks`."""
    hosted = defaultdict[int, list[Chunk]](list)  # a rank's, found at once: there may be 100,000
    for chunk in chunks:
        hosted[chunk.rank].append(chunk)
    return [topology(row, [chunk for rank in row for chunk in hosted[rank]]) for row in lane_ranks(width, hosts)]


def topology(ranks: Sequence[int], chunks: Sequence[Chunk]) -> Topology:
    """Return a lane of these ranks, with the clients that each of them hosts."""
    hosted = (tuple(tuple(chunk.clients.tolist()) for chunk in chunks if chunk.rank == rank) for rank in ranks)
    return Topology(tuple(ranks), tuple(hosted))


@dataclass(frozen=True)
class Under:
    """Those whom one rank reaches over one lane: `ranks`, by way of the one that is its `peer` there.

    `epoch` tells lanes between the same two ranks apart that are made one after the other; `leads`: whether the peer
    leads the others, its `heirs`, which may lead in its place: first those of its node.
    """

    peer: int
    epoch: int
    leads: bool
    ranks: tuple[int, ...]
    heirs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Tree:
    """Two levels: who leads whom, the server being rank 0.

    Leaders and server are a tree: the first `fan_out` nodes' leaders are led by the server, the next ones by these, as
    many by each.

    Attributes
    ----------
    nodes : tuple of tuple of int
        The client ranks of each node; there are none where all of a node are left out, and nobody reaches those below,
        or have joined another one.
    leaders, epochs : tuple of int
        The rank that leads each of them, and how often the lanes of its branch have been made anew; a branch is one of
        the nodes that the server leads, with all that are below it.
    """

    nodes: tuple[tuple[int, ...], ...]
    fan_out: int
    leaders: tuple[int, ...]
    epochs: tuple[int, ...]

    def below(self, rank: int) -> list[Under]:
        """Return whom a rank leads, lane by lane, a leader itself among them; nobody where it does not lead."""
        if rank == 0:
            return [*map(self.under, range(min(self.fan_out, len(self.nodes))))]
        if rank not in self.leaders:
            return []
        number = self.leaders.index(rank)
        return [
            *(Under(other, self.epochs[number], False, (other,)) for other in self.nodes[number]),
            *(self.under(child) for child in self._children(number) if self.nodes[child]),
        ]

    def above(self, rank: int) -> tuple[int, int]:
        """Return who leads a client rank, and the epoch of the lane between the two."""
        number = self.node(rank)
        epoch = self.epochs[number]
        if self.leaders[number] != rank:
            return self.leaders[number], epoch
        return (0 if number < self.fan_out else self.leaders[self._parent(number)]), epoch

    def node(self, rank: int) -> int:
        """Return the number of a client rank's node."""
        return next(number for number, row in enumerate(self.nodes) if rank in row)

    def branch(self, number: int) -> int:
        """Return which of the nodes that the server leads a node is, or is below."""
        return number if number < self.fan_out else self.branch(self._parent(number))

    def depth(self, number: int) -> int:
        """Return how many leaders are above that of a node."""
        return 0 if number < self.fan_out else 1 + self.depth(self._parent(number))

    def led_by(self, node: int, leader: int, epoch: int, out: int = 0) -> Tree:
        """Return the same with another leader of a node, without the rank `out`, and with new lanes in its branch.

        For a leader that has a new lane above makes its lanes below anew too, and so has to be met there. One of a node
        below joins this one with all of its own; the first node that theirs led takes their place, and so on.
        """
        rows, leaders, branch = list(self.nodes), list(self.leaders), self.branch(node)
        gap = next((number for number, row in enumerate(rows) if leader in row), node)  # it may have been left out
        if gap != node:
            rows[node] += rows[gap]
            while below := [child for child in self._children(gap) if rows[child]]:
                rows[gap], leaders[gap] = rows[below[0]], leaders[below[0]]
                gap = below[0]
            rows[gap], leaders[gap] = (), 0
        leaders[node] = leader
        nodes = tuple(tuple(rank for rank in row if rank != out) for row in rows)
        epochs = tuple(epoch if self.branch(each) == branch else own for each, own in enumerate(self.epochs))
        return replace(self, nodes=nodes, leaders=tuple(leaders), epochs=epochs)

    def ranks_under(self, number: int) -> tuple[int, ...]:
        """Return all ranks of a node and below its leader, in an order that does not depend on who leads."""
        if not self.nodes[number]:
            return ()
        return (*self.nodes[number], *chain(*map(self.ranks_under, self._children(number))))

    def under(self, number: int) -> Under:
        """Return those who are reached by way of the leader of a node."""
        leader = self.leaders[number]
        ranks = self.ranks_under(number)
        return Under(leader, self.epochs[number], True, ranks, tuple(rank for rank in ranks if rank != leader))

    def _parent(self, number: int) -> int:
        return number // self.fan_out - 1

    def _children(self, number: int) -> range:
        first = self.fan_out * (number + 1)
        return range(min(first, len(self.nodes)), min(first + self.fan_out, len(self.nodes)))


def tree(leaders: int | str, fan_out: int, hosts: Sequence[str], absent: Collection[int] = ()) -> Tree:
    """Return the two levels of a job: ``node`` is one leader per host, a number so many in all.

    Each of those leads as many ranks as the others, neighbours by their numbers; the `absent` are then left out.
    """
    parts = np.array_split(np.arange(1, len(hosts)), int(leaders)) if leaders != "node" else []
    rows = [tuple(part.tolist()) for part in parts] or lane_ranks("node", hosts)
    rows = [row for row in (tuple(rank for rank in each if rank not in absent) for each in rows) if row]
    return Tree(tuple(rows), fan_out, tuple(row[0] for row in rows), (0,) * len(rows))


def lane_ranks(width: int | str, hosts: Sequence[str]) -> list[tuple[int, ...]]:
    """Cut the client ranks into lanes of `width` ranks; ``node``: those of one host, ``auto``: 1 up to 64 ranks.

    `hosts` [ranks] is the host of each rank.
    """
    ranks = range(1, len(hosts))
    if width == "auto":
        width = 1 if len(hosts) <= SINGLE_RANKS else "node"
    if width in ("node", TWO_LEVEL):
        rows = [[rank for rank in ranks if hosts[rank] == host] for host in dict.fromkeys(hosts)]
    else:
        step = len(ranks) if width == "all" else int(width)
        rows = [list(ranks[start : start + step]) for start in range(0, len(ranks), step)]
    return [tuple(row) for row in rows if row]


def check_width(width: int | str, ranks: int, leaders: int | str = "node") -> None:
    """Raise UsageError where there is nobody to be on a lane, or to lead, or a lane would be wider than the world."""
    if ranks < 2:
        raise UsageError(
            "clock = 'wall' needs a server and client ranks: expected at least 2 ranks, got 1; "
            "did you mean mpirun -n 2 …?"
        )
    if isinstance(width, int) and width > ranks - 1:
        room = f"1 … {ranks - 1} (the client ranks of this job), 'node', 'all' or '{TWO_LEVEL}'"
        raise refusal("lane_width", room, width, ranks - 1)
    if isinstance(leaders, int) and leaders > ranks - 1:
        raise refusal("leaders", f"1 … {ranks - 1} (the client ranks of this job) or 'node'", leaders, ranks - 1)


def check_there(least: int | None, ranks: int, absent: Collection[int], seconds: float) -> None:
    """Raise RunError where of a job's `ranks` fewer than `least` (None: all) were there after so many `seconds`."""
    wanted = ranks if least is None else least
    if ranks - len(absent) < wanted:
        names = f"rank{'s' * (len(absent) > 1)} {listed(sorted(absent))}"
        raise RunError(
            f"min_ranks: expected at least {wanted} of {ranks} ranks within start_within = {seconds:g} s, but {names} "
            f"{'were' if len(absent) > 1 else 'was'} not there"
        )


def check_single(who: str, width: int | str, lanes: Sequence[Topology] = ()) -> None:
    """Raise UsageError where ranks would share a lane although single messages are looked at: `who` says by what."""
    wide = width in ("all", TWO_LEVEL) or (isinstance(width, int) and width > 1)
    if wide or any(len(lane.ranks) > 1 for lane in lanes):
        raise UsageError(
            f"lane_width: {who} single messages, which ranks that share a lane add up on the way: "
            f"expected 1, got {width!r}; did you mean 1?"
        )


def limit(mpi: str) -> float:
    """How many communicators a process has with the MPI of this name, such as ``MPICH 5.0.2``."""
    return next((most for family, most in COMMUNICATORS.items() if mpi.startswith(family)), inf)


def check_communicators(mpi: str, width: int | str, hosts: Sequence[str]) -> None:
    """Raise UsageError where lanes take more communicators than a process of this MPI has; `hosts` [ranks] as ever."""
    shared = sum(len(row) > 1 for row in lane_ranks(width, hosts)) if width != TWO_LEVEL else 0
    if PER_LANE * shared <= limit(mpi):
        return
    most = int(limit(mpi)) // PER_LANE
    narrowest = -(-(len(hosts) - 1) // most)
    raise UsageError(
        f"lane_width = {width!r}: {shared} lanes of several ranks take {PER_LANE * shared} communicators, and {mpi} "
        f"has {limit(mpi):g} for a process, for {most} such lanes: expected 1, 'two-level' or at least {narrowest}; "
        f"did you mean {narrowest}?"
    )
