"""What messages between the server and its client ranks cost here: measured over MPI, told as a table and a document.

All ranks know the hosts, and so which part of the measurement follows which; the server says how often it is repeated.
All of them wait as a run does (`hpcfl.mpi.waiting.wait`), so that naps and yields are part of what is measured. Each
time the server tells ranks to begin, and it is over when all of these have acknowledged it; what the two take by
themselves is subtracted. How the numbers are used: `hpcfl.contrib.network.model`.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter
from rich.table import Table

from hpcfl.base.errors import UsageError, count_of, cut
from hpcfl.base.lazy import MPI, torch
from hpcfl.contrib.network.model import Costs, Known, Link, Rates, levels, look_seconds
from hpcfl.data.formats.files import reading
from hpcfl.engine.received import ReceivedSums
from hpcfl.launch.failure import raise_together
from hpcfl.mpi import launcher, waiting
from hpcfl.mpi.channel import Group, direct
from hpcfl.mpi.cores import cores
from hpcfl.mpi.placement import Topology, lane_ranks
from hpcfl.mpi.transfers import Transfers
from hpcfl.mpi.waiting import tell, texts, wait
from hpcfl.realtime.lane import Lane
from hpcfl.realtime.lanes import Lanes
from hpcfl.realtime.orders import Command, Op
from hpcfl.sums.frames import frame_formats
from hpcfl.sums.message import Block

KIND, VERSION = "hpcfl network", 1
WRITTEN = "what hpcfl doctor --network --json FILE has written"
MOST = 1 << 20
"""Bytes of a document; of a thousand hosts it has some tens of thousands."""
SECONDS = 20.0
"""For all of it; a part that takes long is repeated less often, and once at least."""
PARTS = 150
"""At most so many figures are the best of repetitions: three for each rate."""
REPEATS, PINGS = 9, 500
FIRST, LARGEST, TOGETHER = 2**18, 2**23, 2**26
"""Bytes to one rank: at first, and at most; to all ranks at most."""
LONG, IDLE = 0.02, 0.15
"""Seconds: a transfer that takes so long tells enough; a rank that waits for so long sleeps as long as it ever does."""
SAMPLE = 4  # ranks that are measured one by one, and hosts, of each place
SMALL, MANY, REQUESTS = 8, 1024, 256
"""Bytes of a small message; about how many of them are sent at once; requests in one look."""
LANES, FRAMES, NUMBERS = 64, 4, 2**21
"""Lanes that lead to the server itself; frames that are summed, and float32 numbers in each."""
PLACES = {"within": "a lane of the server's host", "between": "a lane of another host", "all": "one lane of all"}
ORDER, ACK, DATA = 11, 12, 13  # tags


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
    network = measure(comm, texts(comm, socket.gethostname()), SECONDS)
    return None if network is None else (table(network), document(network))


def measure(comm: Any, hosts: Sequence[str], seconds: float) -> Network | None:
    """Measure between rank 0 and all others, which call it too, in about so many seconds; return it on rank 0.

    `hosts` [ranks] are the names of the hosts: all ranks know them.
    """
    waiting.Patience.crowd = hosts.count(hosts[comm.Get_rank()]) / len(cores())
    return _Measurement(comm, hosts, seconds / PARTS).network()


class _Measurement:
    """All ranks go through the same parts in the same order, and rank 0 times them: figures on the others are nothing.

    What is repeated may take about `share` seconds.
    """

    def __init__(self, comm: Any, hosts: Sequence[str], share: float) -> None:
        self.comm, self.rank, self.hosts, self.share = comm, comm.Get_rank(), hosts, share
        self.clients = range(1, len(hosts))
        # for messages; touched before it is used
        self.room = np.ones(LARGEST if self.rank else min(TOGETHER, LARGEST * len(hosts)), dtype=np.uint8)

    def network(self) -> Network | None:
        """Measure part after part."""
        began, load = time.monotonic(), os.getloadavg()[0] / len(cores())
        rows = lane_ranks("node", self.hosts)  # the client ranks of each host
        trees, links = {"all": [self._tree(self.clients)] if len(rows) > 1 else []}, dict[str, Link]()
        for place in ("within", "between"):
            by_host = [row for row in rows if (self.hosts[row[0]] == self.hosts[0]) == (place == "within")]
            trees[place] = [self._tree(row) for row in _spread([row for row in by_host if len(row) > 1], SAMPLE)]
            if by_host:
                links[place] = self._link(by_host, trees[place] or (trees["all"] if place == "between" else []))
        sent, received = self._small(up=False), self._small(up=True)
        if self.rank:  # asleep while rank 0 does the rest by itself
            self._wake()
            return None
        (look, request), (lane, _), (_, summing) = _look(), _rounds(LANES, 8), _rounds(FRAMES, NUMBERS)
        lane = max(0.0, lane - 2 * sent - received)  # a command, a state, and a frame
        sums, wake = FRAMES * NUMBERS * 4 / summing, self._wake()
        return Network(
            launcher.library(MPI.Get_library_version()),
            launcher.launcher(os.environ),
            datetime.now(timezone.utc).isoformat(timespec="seconds"),
            time.monotonic() - began,
            load,
            {host: self.hosts.count(host) for host in dict.fromkeys(self.hosts)},
            Costs(links.get("within"), links.get("between"), sent, received, look, request, sums, lane, wake),
            {place: _middle([rates for _, rates in trees[place]]) for place in PLACES if trees[place]},
        )

    # parts

    def _link(self, by_host: Sequence[Sequence[int]], trees: Sequence[tuple[int, Rates]]) -> Link:
        """Return a place's link, by lanes there: where none of the other hosts has one, that of all ranks."""
        ranks = sorted(chain(*by_host))
        some = [[rank] for rank in _spread(ranks, SAMPLE)]
        latency = median(self._best(rank, repeats=PINGS) for rank in some) / 2
        alone, server = self._stars(some), self._stars([ranks])
        host = self._stars(_spread(by_host, SAMPLE)) if len(by_host) > 1 else server
        own = [Rates(levels(n) * rates.down, levels(n) * rates.up) for n, rates in trees]
        return Link(latency, alone, host, server, _middle(own or [alone]))

    def _stars(self, groups: Sequence[Sequence[int]]) -> Rates:
        """Bytes per second to and from a group's ranks at once, in the middle one of some groups."""
        ways = [[self._rate(ranks, partial(self._moved, ranks, up, 1)) for up in (False, True)] for ranks in groups]
        return _middle([Rates(*rates) for rates in ways])

    def _tree(self, ranks: Sequence[int]) -> tuple[int, Rates]:
        """How many ranks a lane has, and the bytes per second of a broadcast to each rank, and of a sum from each."""
        lane, count = self.comm.Split(0 if self.rank in (0, *ranks) else MPI.UNDEFINED), len(ranks)
        down = self._rate(ranks, lambda size: Group(lane).down(self.room[:size])) / count
        up = self._rate(ranks, lambda size: Group(lane).summed(self.room[:size].view(np.float32))) / count
        if lane:  # this rank is on it
            lane.Free()
        return count, Rates(down, up)

    def _rate(self, ranks: Sequence[int], move: Callable[[int], list[Any]]) -> float:
        """Bytes per second to or from all of these ranks together, by what begins to move so many at each end.

        Messages are as large as take long enough, by what small ones took, so that nothing that is slow holds it up.
        """
        most = min(LARGEST, TOGETHER // len(ranks))
        empty, least = self._best(ranks), max(SMALL, min(FIRST, most) // SMALL * SMALL)
        first = self._best(ranks, partial(move, least))
        size = self._agreed(max(least, min(most, least * LONG / first) // SMALL * SMALL))
        best = self._best(ranks, partial(move, size))
        return len(ranks) * size / max(best - empty, best / 2)

    def _small(self, up: bool) -> float:
        """Seconds of this thread for each small message that it sends, or receives, all of them being there."""
        move = partial(self._moved, self.clients, up, max(1, min(64, MANY // len(self.clients))), SMALL)

        def once() -> float:
            requests = move() if self.rank else []  # they come, or there is room for them, before the server begins
            wait([self.comm.Ibarrier()])
            start = time.thread_time()
            requests = requests or move()
            while not MPI.Request.Testall(requests):  # without naps
                os.sched_yield()
            return (time.thread_time() - start) / len(requests)

        return min(self._times(once))

    def _wake(self) -> float:
        """Seconds beside its way until the last of all ranks, which sleep, has noticed a message: the typical ones."""

        def asleep() -> float:
            time.sleep(0 if self.rank else IDLE)
            return self._ask(self.clients)

        return max(0.0, median(self._times(asleep)) - self._best(self.clients))

    # how

    def _agreed(self, number: float) -> int:
        """Return, on all ranks, rank 0's whole number."""
        return int(tell(self.comm, str(int(number))))

    def _times(self, once: Callable[[], float], repeats: int = REPEATS) -> list[float]:
        """Return the seconds of some repetitions: two, and others while there is time."""
        seconds = [once(), once()]
        return seconds + [once() for _ in range(self._agreed(min(repeats - 2, self.share / (min(seconds) + 1e-9))))]

    def _best(self, ranks: Sequence[int], act: Callable[[], list[Any]] = list, repeats: int = REPEATS) -> float:
        """Return the fewest seconds in which ranks do something, since whatever else a machine does only adds to them.

        `act` begins it at each end: nothing, beside what `_ask` does by itself.
        """
        return min(self._times(partial(self._ask, ranks, act), repeats))

    def _ask(self, ranks: Sequence[int], act: Callable[[], list[Any]] = list) -> float:
        """Have ranks act as rank 0 does; return there the seconds until all have acknowledged it."""
        order, acks = np.zeros(SMALL, dtype=np.uint8), np.zeros((len(ranks), SMALL), dtype=np.uint8)
        if self.rank in ranks:
            wait([self.comm.Irecv(order, 0, ORDER)])
            wait(act())
            wait([self.comm.Isend(order, 0, ACK)])
        if self.rank:
            return 1.0
        start = time.perf_counter()
        coming = [self.comm.Irecv(ack, rank, ACK) for ack, rank in zip(acks, ranks)]
        wait(coming + [self.comm.Isend(order, rank, ORDER) for rank in ranks] + act())
        return time.perf_counter() - start

    def _moved(self, ranks: Sequence[int], up: bool, count: int, size: int) -> list[Any]:
        """Begin, at this end, to move so many messages of so many bytes between rank 0 and each of these ranks."""
        ends = [0] if self.rank else [*ranks]
        if up == (self.rank == 0):  # they come
            rows = self.room[: count * len(ends) * size].reshape(-1, size)
            return [self.comm.Irecv(row, end, DATA) for row, end in zip(rows, count * ends)]
        rows = self.room[: count * size].reshape(-1, size)
        return [self.comm.Isend(row, end, DATA) for row in rows for end in ends]


def _look() -> tuple[float, float]:
    """Seconds of this thread for a look at no request, and for each one that nothing has come for."""
    rows = np.zeros((REQUESTS, SMALL), dtype=np.uint8)
    requests = [MPI.COMM_SELF.Irecv(row, 0, DATA) for row in rows]

    def once(some: list[Any]) -> float:
        start = time.thread_time()
        MPI.Request.Testsome(some)
        return time.thread_time() - start

    one, many = (min(once(some) for _ in range(PINGS)) for some in (requests[:1], requests))
    wait(requests + [MPI.COMM_SELF.Isend(row, 0, DATA) for row in rows.copy()])
    request = max(0.0, many - one) / (REQUESTS - 1)
    return max(0.0, one - request), request


def _rounds(count: int, numbers: int) -> list[float]:
    """Play rounds with so many lanes of one rank, all of which lead to this process, and frames of so many numbers.

    Return the seconds of this thread for each lane, its messages included, and those in which frames are added up.
    """
    layout, transfers = ({"block": Block((numbers,))},), Transfers()
    (group,) = frame_formats(layout, 1)
    frame, state = group.zeros(), np.zeros(64, dtype=np.uint8)
    group.value(frame, "block").copy_(torch.linspace(-1.0, 1.0, numbers))
    group.weigh(frame, 0, "block", 0.5)
    led, ranks = ([direct(MPI.COMM_SELF, 0, leads, n) for n in range(count)] for leads in (True, False))
    made = [Lane(Topology((1,), (((n,),),)), pair, layout, count, transfers) for n, pair in enumerate(led)]
    lanes = Lanes(made, transfers=transfers)

    def once() -> tuple[float, float]:
        start = time.thread_time()
        for lane in made:
            lane.invite(Command(Op.VISIT, cohort=np.arange(count)), [state])
        used, theirs = time.thread_time() - start, list[Any]()
        for control, data in ranks:
            theirs += [*control.down(Command.empty(1, count)), *data.down(np.empty_like(state))]
            theirs += [request for part in frame for request in data.summed(part.numpy())]
        start = time.thread_time()
        while lanes.those("visiting"):
            lanes.poll()
        used += time.thread_time() - start
        wait(theirs)
        start = time.perf_counter()
        ReceivedSums(layout, count, np.zeros(1), [(lane.visits.pending, 1) for lane in made]).total("block")
        return used / count, time.perf_counter() - start

    return [min(seconds) for seconds in zip(*(once() for _ in range(REPEATS)))]


def _spread(values: Sequence[Any], most: int) -> list[Any]:
    """Return at most so many of them, from first to last."""
    count = min(most, len(values))
    return [values[place * (len(values) - 1) // max(1, count - 1)] for place in range(count)]


def _middle(rates: Sequence[Rates]) -> Rates:
    return Rates(median(each.down for each in rates), median(each.up for each in rates))


# documents and tables


def table(network: Network) -> Any:
    """Return it as a table of `rich`."""
    costs, clients = network.costs, network.ranks - 1
    title = f"{network.mpi} · {network.ranks} ranks on {count_of(len(network.hosts), 'host')} · {network.date}"
    places = {"within the server's host": costs.within, "between hosts": costs.between}
    links = {place: link for place, link in places.items() if link is not None}
    found = Table("", *links, title=title, title_justify="left")
    found.add_row("latency, µs", *(_shown(1e6, link.latency) for link in links.values()))
    found.add_row("one rank alone, GB/s down · up", *(_speeds(link.alone) for link in links.values()))
    found.add_row("the ranks of one host at once, GB/s down · up", *(_speeds(link.host) for link in links.values()))
    found.add_row("all these ranks at once, GB/s down · up", *(_speeds(link.server) for link in links.values()))
    found.add_row("a lane, per level of its tree, GB/s down · up", *(_speeds(link.tree) for link in links.values()))
    for place, rates in network.trees.items():
        found.add_row(f"{PLACES[place]}, GB/s broadcast · sum, each rank", _speeds(rates))
    looks = [look_seconds(costs, count) for count in (clients, 1000)]
    found.add_row("the server, per message sent · received, µs", _shown(1e6, costs.sent, costs.received))
    found.add_row("the server, per lane beside messages, µs", _shown(1e6, costs.lane))
    found.add_row("until the last rank that sleeps looks, µs", _shown(1e6, costs.wake))
    found.add_row(f"a look at {clients} requests · at 1000, µs", _shown(1e6, *looks))
    found.add_row("sums of frames, GB/s", _shown(1e-9, costs.sums))
    found.add_row("measured in · load per core", f"{network.seconds:.1f} s · {network.load:.1f}")
    return found


def _shown(unit: float, *figures: float) -> str:
    return " · ".join(f"{figure * unit:.3g}" for figure in figures)


def _speeds(rates: Rates) -> str:
    return _shown(1e-9, rates.down, rates.up)


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
