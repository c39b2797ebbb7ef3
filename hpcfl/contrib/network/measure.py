"""What messages between the server and its client ranks cost here: measured over MPI, told as a table and a document.

The server asks, one order at a time, and the ranks answer; all of them wait as a run does
(`hpcfl.mpi.waiting.wait`), so that naps and yields are part of what is measured. An order is over when every rank that
it went to has acknowledged it; what the order and the acknowledgements take by themselves is subtracted. How the
numbers are used: `hpcfl.contrib.network.model`.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from enum import IntEnum
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import Field, TypeAdapter
from rich.table import Table

from hpcfl.base.errors import UsageError, cut
from hpcfl.base.lazy import MPI, torch
from hpcfl.base.types import Floats
from hpcfl.contrib.network.model import Costs, Known, Link, Rates, levels, look_seconds
from hpcfl.data.formats.files import reading
from hpcfl.launch.failure import raise_together
from hpcfl.mpi import launcher, waiting
from hpcfl.mpi.channel import direct
from hpcfl.mpi.cores import cores
from hpcfl.mpi.placement import Topology, lane_ranks
from hpcfl.mpi.transfers import Transfers
from hpcfl.mpi.waiting import names, wait
from hpcfl.realtime import orders
from hpcfl.realtime.frames import frame_formats
from hpcfl.realtime.lane import Lane
from hpcfl.realtime.lanes import Lanes
from hpcfl.realtime.outcome import ReceivedSums
from hpcfl.sums.message import Block

T = TypeVar("T")
R = TypeVar("R")
KIND, VERSION = "hpcfl network", 1
WRITTEN = "what hpcfl doctor --network --json FILE has written"
MOST = 1 << 20
"""Bytes of a document; of a thousand hosts it has some tens of thousands."""
SECONDS = 20.0
"""For all of it; a part that takes long is repeated less often, and once at least."""
REPEATS, PINGS, FEW = 9, 50, 2
FIRST, LARGEST, TOGETHER = 2**16, 2**23, 2**26
"""Bytes to one rank: at first, and at most; to all ranks at most."""
LONG = 0.05  # seconds: a transfer that takes so long tells enough
SAMPLE = 4  # ranks that are measured one by one, and hosts, of each place
MANY = 1024  # ranks whose small messages are counted, and about as many messages
REQUESTS = 256  # least requests in one look
FRAMES, NUMBERS = 4, 2**21  # that are summed: how many, and float32 numbers in each
IDLE = 0.15  # seconds after which a rank that waits sleeps as long as it ever does
LANES = 64  # that lead to the server itself
PLACES = {"within": "a lane of the server's host", "between": "a lane of another host", "all": "one lane of all"}
ORDER, ACK, DATA, LATER = 11, 12, 13, 14  # tags


class Op(IntEnum):
    """What a rank is to do before it acknowledges."""

    PING = 0  # nothing
    TAKE = 1  # receive so many bytes
    GIVE = 2  # send so many bytes
    BROADCAST = 3  # so many bytes on a lane
    SUM = 4
    SINK = 5  # receive so many small messages
    BURST = 6  # send so many
    END = 7


@dataclass(frozen=True)
class Network:
    """What was measured, and where.

    Attributes
    ----------
    mpi : str
        Name and number of the library.
    hosts : dict of str to int
        Ranks of each host, the server's first.
    load : float
        Processes of the server's host that wanted a core when it began, for each core.
    trees : dict of str to Rates
        Bytes per second that lanes of several ranks carry to or from each rank of theirs, by what they are.
    """

    mpi: str
    launcher: str
    date: str
    seconds: Known
    load: Known
    hosts: dict[str, Annotated[int, Field(strict=True, ge=1)]]
    costs: Costs
    trees: dict[str, Rates]

    @property
    def ranks(self) -> int:
        return sum(self.hosts.values())

    @property
    def per_host(self) -> int:
        """The most ranks of a host."""
        return max(self.hosts.values())


class _Room:
    """Memory for messages, touched before it is used, which grows."""

    def __init__(self) -> None:
        self._data = np.ones(FIRST, dtype=np.uint8)

    def of(self, size: int) -> Any:
        if size > len(self._data):
            self._data = np.ones(size, dtype=np.uint8)
        return self._data[:size]


def facts(comm: Any, file: Path) -> tuple[Any, dict[str, Any]] | None:
    """Measure on the ranks of `comm`, each on its own host; rank 0, which may write to `file`, gets what is found.

    That is a table of `rich`, and a JSON object. UsageError where there are no two ranks, or no such folder.
    """
    if comm is None or comm.Get_size() < 2:
        expected = "expected at least 2 ranks, got 1; did you mean mpirun -n 2 hpcfl doctor --network?"
        raise UsageError(f"hpcfl doctor --network measures between the server and other ranks: {expected}")

    def check() -> None:
        if comm.Get_rank() == 0 and not file.parent.is_dir():
            raise UsageError(f"--json '{file}': no such folder: '{file.parent}'")

    raise_together(comm, check)
    network = measure(comm, names(comm, socket.gethostname()), SECONDS)
    return None if network is None else (table(network), document(network))


def measure(comm: Any, hosts: Sequence[str], seconds: float) -> Network | None:
    """Measure between rank 0 and all others, which call it too, in about so many seconds; return it on rank 0.

    `hosts` [ranks] are the names of the hosts: all ranks know them.
    """
    serves, found = comm.Get_rank() == 0, None
    if serves:
        torch.empty(0)  # loads it, which may take as long as all the rest
    began, load = time.monotonic(), os.getloadavg()[0] / len(cores())
    waiting.Patience.crowd = hosts.count(hosts[comm.Get_rank()]) / len(cores())
    lanes, own = _lanes(hosts), []
    for _, members in lanes:  # None on a rank that is not one of them
        group = comm.Get_group().Incl([0, *members])
        own.append(comm.Create_group(group) if comm.Get_rank() in (0, *members) else None)
        group.Free()
    if serves:
        found = _Server(comm, hosts, lanes, own, began + seconds).network(began, load)
    else:
        _answer(comm, own)
    for lane in own:
        if lane is not None:
            lane.Free()
    return found


def _lanes(hosts: Sequence[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Return lanes of several ranks to measure, by place: those of some hosts, then that of all ranks."""
    rows = [("within" if hosts[row[0]] == hosts[0] else "between", row) for row in lane_ranks("node", hosts)]
    wide = [each for each in rows if len(each[1]) > 1]
    everyone = "all", tuple(range(1, len(hosts)))
    return [*wide[: SAMPLE + 1], *([everyone] if len(rows) > 1 else [])]


def _answer(comm: Any, lanes: Sequence[Any]) -> None:
    """Do what the server says until it has all that it wants."""
    room, order, ack = _Room(), np.zeros(4, dtype=np.int64), np.zeros(8, dtype=np.uint8)
    while order[0] != Op.END:
        wait([comm.Irecv(order, 0, ORDER)])
        op, size, lane, tag = order.tolist()
        if op == Op.TAKE:
            wait([comm.Irecv(room.of(size), 0, DATA)])
        elif op == Op.GIVE:
            wait([comm.Isend(room.of(size), 0, DATA)])
        elif op == Op.BROADCAST:
            wait([lanes[lane].Ibcast(room.of(size), 0)])
        elif op == Op.SUM:
            wait([lanes[lane].Ireduce(room.of(size).view(np.float32), None, MPI.SUM, 0)])
        elif op == Op.SINK:
            few = np.zeros((size, 8), dtype=np.uint8)
            wait([comm.Irecv(row, 0, tag) for row in few])
        elif op == Op.BURST:
            wait([comm.Isend(ack, 0, tag) for _ in range(size)])
        wait([comm.Isend(ack, 0, ACK)])


@dataclass
class _Server:
    """Rank 0 of a measurement that is to be over at `end` (seconds of the monotonic clock)."""

    comm: Any
    hosts: Sequence[str]
    lanes: list[tuple[str, tuple[int, ...]]]
    made: list[Any]
    end: float
    room: _Room = field(default_factory=_Room)
    until: float = 0.0  # when the part that is being measured should be over
    left: int = 0  # parts that are still to be measured

    def network(self, began: float, load: float) -> Network:
        """Measure part after part, each with its share of the time that is left."""
        self.clients = list(range(1, len(self.hosts)))
        places = dict[str, dict[str, list[int]]]()  # ranks by place and host
        for rank in self.clients:
            place = places.setdefault("within" if self.hosts[rank] == self.hosts[0] else "between", {})
            place.setdefault(self.hosts[rank], []).append(rank)
        self.left = len(self.lanes) + 7 + sum(3 + (len(by_host) > 1) for by_host in places.values())
        trees = [(name, len(members), self._part(self._tree(n))) for n, (name, members) in enumerate(self.lanes)]
        links = {name: self._link(name, list(by_host.values()), trees) for name, by_host in places.items()}
        sent, received, (look, request) = self._part(self._sent), self._part(self._received), self._part(self._look)
        sums, lane, wake = self._part(self._sums), self._part(self._lane), self._part(self._wake)
        beside = max(0.0, lane - 2 * sent - received)  # a command, a state, and a frame
        self._ask(Op.END, self.clients)
        by_place = {name: [rates for each, _, rates in trees if each == name] for name in PLACES}
        return Network(
            launcher.library(MPI.Get_library_version()),
            launcher.launcher(os.environ),
            datetime.now(timezone.utc).isoformat(timespec="seconds"),
            time.monotonic() - began,
            load,
            {host: self.hosts.count(host) for host in dict.fromkeys(self.hosts)},
            Costs(links.get("within"), links.get("between"), sent, received, look, request, sums, beside, wake),
            {name: _middle(rates) for name, rates in by_place.items() if rates},
        )

    def _part(self, measured: Callable[[], T]) -> T:
        """Return what was measured in its share of the time."""
        now = time.monotonic()
        self.until = now + (self.end - now) / self.left
        self.left -= 1
        return measured()

    def _link(self, name: str, by_host: list[list[int]], trees: list[tuple[str, int, Rates]]) -> Link:
        """Return a place's link. Where none of the other hosts has a lane, that of all ranks stands in for theirs."""
        ranks = sorted(rank for here in by_host for rank in here)
        some, hosts = _spread(ranks, SAMPLE), _spread(by_host, SAMPLE)
        latency = self._part(lambda: self._latency(some))
        alone = self._part(lambda: self._stars([[rank] for rank in some]))
        server = self._part(lambda: self._stars([ranks]))
        host = self._part(lambda: self._stars(hosts)) if len(hosts) > 1 else server
        like = name if name == "within" or any(each == name for each, _, _ in trees) else "all"
        own = [Rates(levels(n) * rate.down, levels(n) * rate.up) for each, n, rate in trees if each == like]
        return Link(latency, alone, host, server, _middle(own or [alone]))

    # parts

    def _latency(self, ranks: Sequence[int]) -> float:
        """Half of the time to and fro, of the middle one of some ranks."""
        return median(self._each(ranks, lambda rank, n: self._best(lambda: self._ask(Op.PING, [rank]), PINGS, n))) / 2

    def _stars(self, groups: Sequence[Sequence[int]]) -> Rates:
        """Bytes per second to and from a group's ranks at once, in the middle one of some groups."""

        def star(group: Sequence[int], parts: int) -> Rates:
            return Rates(self._rate(Op.TAKE, group, 2 * parts), self._rate(Op.GIVE, group, 2 * parts - 1))

        return _middle(self._each(groups, star))

    def _tree(self, number: int) -> Callable[[], Rates]:
        """Bytes per second that a lane's broadcast carries to each rank, and a sum from each."""
        _, members = self.lanes[number]
        return lambda: Rates(
            self._rate(Op.BROADCAST, members, 2, number) / len(members),
            self._rate(Op.SUM, members, 1, number) / len(members),
        )

    def _wake(self) -> float:
        """Seconds beside its way until the last of all ranks, which sleep, has noticed a message: the typical ones."""
        awake, seconds = self._best(lambda: self._ask(Op.PING, self.clients), REPEATS, 2), list[float]()
        while not seconds or (len(seconds) < REPEATS and time.monotonic() < self.until):
            time.sleep(IDLE)
            seconds.append(self._ask(Op.PING, self.clients))
        return max(0.0, median(seconds) - awake)

    def _sent(self) -> float:
        """Seconds of this thread for each small message that is sent."""
        ranks, count = self._few()
        message = np.zeros(8, dtype=np.uint8)

        def once() -> float:
            acks = self._begin(Op.SINK, ranks, count, tag=LATER)
            start = time.thread_time()
            self._all([self.comm.Isend(message, rank, LATER) for _ in range(count) for rank in ranks])
            used = time.thread_time() - start
            wait(acks)
            return used / (count * len(ranks))

        return self._best(once, REPEATS)

    def _received(self) -> float:
        """Seconds of this thread for each small message that it receives, all of them being there."""
        ranks, count = self._few()
        messages = np.zeros((count * len(ranks), 8), dtype=np.uint8)

        def once() -> float:
            wait(self._begin(Op.BURST, ranks, count, tag=LATER))  # acknowledged: so they have come before
            start = time.thread_time()
            senders = [rank for _ in range(count) for rank in ranks]
            self._all([self.comm.Irecv(row, rank, LATER) for row, rank in zip(messages, senders)])
            return (time.thread_time() - start) / len(messages)

        return self._best(once, REPEATS)

    def _look(self) -> tuple[float, float]:
        """Seconds of this thread for a look at no request, and for each one that nothing has come for."""
        count = -(-REQUESTS // len(self.clients))
        rows = np.zeros((count * len(self.clients), 8), dtype=np.uint8)
        requests = [self.comm.Irecv(row, self.clients[n % len(self.clients)], LATER) for n, row in enumerate(rows)]

        def once(count: int) -> float:
            some = requests[:count]
            start = time.thread_time()
            MPI.Request.Testsome(some)
            return time.thread_time() - start

        one = self._best(lambda: once(1), PINGS, 2)
        many = self._best(lambda: once(len(requests)), PINGS)
        wait(self._begin(Op.BURST, self.clients, count, tag=LATER) + requests)
        request = max(0.0, many - one) / (len(requests) - 1)
        return max(0.0, one - request), request

    def _sums(self) -> float:
        """Bytes per second at which the server adds up the frames of a round."""
        layout = ({"block": Block((NUMBERS,))},)
        formats = frame_formats(layout, 1)
        received: list[Any] = []
        for number in range(FRAMES):
            frames = [group.zeros() for group in formats]
            frames[0][1].copy_(torch.linspace(-1.0, 1.0, NUMBERS))
            formats[0].weigh(frames[0], 0, "block", number + 1.0)
            received.append((SimpleNamespace(formats=formats, frames=frames), 1))
        chances: Floats = np.zeros(1)

        def once() -> float:
            start = time.perf_counter()
            ReceivedSums(layout, FRAMES, chances, received).total("block")
            return time.perf_counter() - start

        once()  # memory is touched
        return FRAMES * NUMBERS * 4 / self._best(once, REPEATS)

    def _lane(self) -> float:
        """Seconds of this thread for a lane of one rank in a round, its messages included: it leads to this process."""
        layout, cohort = ({"block": Block((8,))},), np.arange(LANES)
        state, frame = np.zeros(64, dtype=np.uint8), frame_formats(layout, 1)[0].zeros()[0].numpy()
        led, ranks = ([direct(MPI.COMM_SELF, 0, leads, n) for n in range(LANES)] for leads in (True, False))
        topologies, transfers = [Topology((1,), (((n,),),)) for n in range(LANES)], Transfers()
        made = [Lane(each, pair, layout, LANES, transfers) for each, pair in zip(topologies, led)]
        lanes = Lanes(made, transfers=transfers)

        def once() -> float:
            start = time.thread_time()
            for lane in lanes.all:
                lane.invite(orders.Command(orders.Op.VISIT, cohort=cohort), [state])
            used = time.thread_time() - start
            rooms = [(orders.Command.empty(1, LANES), np.empty_like(state)) for _ in ranks]
            requests = [
                request
                for (control, data), room in zip(ranks, rooms)
                for request in (*control.down(room[0]), *data.down(room[1]), *data.summed(frame))
            ]
            start = time.thread_time()
            while lanes.those("visiting"):
                lanes.poll()
            used += time.thread_time() - start
            wait(requests)
            return used / LANES

        return self._best(once, REPEATS)

    # how

    def _few(self) -> tuple[list[int], int]:
        """Return ranks whose small messages are counted, and how many of each."""
        ranks = _spread(self.clients, MANY)
        return ranks, max(1, min(64, MANY // len(ranks)))

    def _each(self, some: Sequence[T], measured: Callable[[T, int], R]) -> list[R]:
        """Measure one after the other while there is time, and the first in any case.

        `measured` is told how many are left, itself included.
        """
        found = list[R]()
        for place, each in enumerate(some):
            if not found or time.monotonic() < self.until:
                found.append(measured(each, len(some) - place))
        return found

    def _rate(self, op: Op, ranks: Sequence[int], parts: int, lane: int = 0) -> float:
        """Bytes per second that an order carries to or from all of these ranks together; `parts` as of `_best`.

        Messages grow until one transfer takes long enough, so that neither a slow network nor many ranks hold it up.
        """

        def transfer(repeats: int) -> float:
            return self._best(lambda: self._ask(op, ranks, size, lane), repeats, parts)

        end = self._end(parts)
        empty = self._best(lambda: self._ask(Op.PING, ranks), REPEATS, 4 * parts)
        most = max(8, min(LARGEST, TOGETHER // len(ranks)) // 8 * 8)
        size = min(FIRST, most)
        best = transfer(FEW)
        while size < most and time.monotonic() < end:
            if best >= LONG:  # or something else held it up
                best = min(best, transfer(REPEATS))
            if best >= LONG:
                break
            size = min(4 * size, most)
            best = transfer(FEW)
        if time.monotonic() < end:
            best = min(best, transfer(REPEATS))
        return len(ranks) * size / max(best - empty, best / 2)

    def _best(self, once: Callable[[], float], repeats: int, parts: int = 1) -> float:
        """Return the fewest seconds of some repetitions, since whatever else a machine does only adds to them.

        One at least, others while they take less than one of `parts` of the time left.
        """
        end = self._end(parts)
        seconds = [once()]
        while len(seconds) < repeats and time.monotonic() < end:
            seconds.append(once())
        return min(seconds)

    def _end(self, parts: int) -> float:
        """When one of so many equal parts of what is left of this part's time is over."""
        now = time.monotonic()
        return now + max(0.0, self.until - now) / parts

    def _ask(self, op: Op, ranks: Sequence[int], size: int = 0, lane: int = 0) -> float:
        """Have an order carried out by ranks; return the seconds until all have acknowledged it."""
        whole = self.room.of(size * len(ranks) if op is Op.GIVE else size)
        start = time.perf_counter()
        requests = self._begin(op, ranks, size, lane)
        if op is Op.TAKE:
            requests += [self.comm.Isend(whole, rank, DATA) for rank in ranks]
        elif op is Op.GIVE:
            parts = whole.reshape(len(ranks), size)
            requests += [self.comm.Irecv(part, rank, DATA) for part, rank in zip(parts, ranks)]
        elif op is Op.BROADCAST:
            requests.append(self.made[lane].Ibcast(whole, 0))
        elif op is Op.SUM:
            requests.append(self.made[lane].Ireduce(MPI.IN_PLACE, whole.view(np.float32), MPI.SUM, 0))
        wait(requests)
        return time.perf_counter() - start

    def _begin(self, op: Op, ranks: Sequence[int], size: int = 0, lane: int = 0, tag: int = 0) -> list[Any]:
        """Send an order to ranks and expect their acknowledgements."""
        order, acks = np.array([op, size, lane, tag], dtype=np.int64), np.zeros((len(ranks), 8), dtype=np.uint8)
        self._kept = order, acks
        coming = [self.comm.Irecv(ack, rank, ACK) for ack, rank in zip(acks, ranks)]
        return coming + [self.comm.Isend(order, rank, ORDER) for rank in ranks]

    def _all(self, requests: list[Any]) -> None:
        """Complete requests that only this thread is waited for: without naps."""
        while not MPI.Request.Testall(requests):
            os.sched_yield()


def _spread(values: Sequence[Any], most: int) -> list[Any]:
    """Return at most so many of them, from first to last."""
    if len(values) <= most:
        return list(values)
    return [values[place * (len(values) - 1) // (most - 1)] for place in range(most)]


def _middle(rates: Sequence[Rates]) -> Rates:
    return Rates(median(each.down for each in rates), median(each.up for each in rates))


# documents and tables


def table(network: Network) -> Any:
    """Return it as a table of `rich`."""
    costs, hosts = network.costs, len(network.hosts)
    title = f"{network.mpi} · {network.ranks} ranks on {hosts} host{'s' * (hosts > 1)} · {network.date}"
    links = {"within the server's host": costs.within, "between hosts": costs.between}
    shown = {name: link for name, link in links.items() if link is not None}
    found = Table("", *shown, title=title, title_justify="left")
    found.add_row("latency, µs", *(f"{link.latency * 1e6:.3g}" for link in shown.values()))
    rows = {
        "one rank alone": "alone",
        "the ranks of one host at once": "host",
        "all these ranks at once": "server",
        "a lane, per level of its tree": "tree",
    }
    for name, what in rows.items():
        found.add_row(f"{name}, GB/s down · up", *(_shown(getattr(link, what)) for link in shown.values()))
    empty = [""] * (len(shown) - 1)
    for place, rates in network.trees.items():
        found.add_row(f"{PLACES[place]}, GB/s broadcast · sum, each rank", _shown(rates), *empty)
    clients = network.ranks - 1
    looks = " · ".join(f"{look_seconds(costs, count) * 1e6:.3g}" for count in (clients, 1000))
    server = {
        "the server, per message sent · received, µs": f"{costs.sent * 1e6:.3g} · {costs.received * 1e6:.3g}",
        "the server, per lane beside messages, µs": f"{costs.lane * 1e6:.3g}",
        "until the last rank that sleeps looks, µs": f"{costs.wake * 1e6:.3g}",
        f"a look at {clients} requests · at 1000, µs": looks,
        "sums of frames, GB/s": f"{costs.sums / 1e9:.3g}",
        "measured in · load per core": f"{network.seconds:.1f} s · {network.load:.1f}",
    }
    for name, text in server.items():
        found.add_row(name, text, *empty)
    return found


def _shown(rates: Rates) -> str:
    return f"{rates.down / 1e9:.3g} · {rates.up / 1e9:.3g}"


def document(network: Network) -> dict[str, Any]:
    """Return it as a JSON object."""
    return {"kind": KIND, "version": VERSION, "ranks": network.ranks, **asdict(network)}


def read(file: Path) -> Network:
    """Return what `document` has written; UsageError where a file is nothing of that kind."""
    try:
        with reading(file, WRITTEN), file.open("rb") as opened:
            content = opened.read(MOST + 1)
    except UsageError as error:
        raise UsageError(f"--like {error}") from None
    if len(content) > MOST:
        raise _other(file, f"more than {MOST} bytes")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise _other(file, "what is no JSON") from None
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise _other(file, "other JSON")
    if found.get("version") != VERSION:
        raise _other(file, f"version {found.get('version')}, this hpcfl reads version {VERSION}")
    try:
        network = TypeAdapter(Network).validate_python(found)
        costs = network.costs
        if network.ranks < 2 or costs.within is costs.between is None or asdict(costs).keys() - found["costs"].keys():
            raise ValueError
    except (ValueError, OverflowError):  # pydantic's is a ValueError
        raise _other(file, "one that is damaged") from None
    return network


def _other(file: Path, got: str) -> UsageError:
    return UsageError(f"--like '{cut(str(file), 200)}': expected {WRITTEN}, got {cut(got, 100)}")
