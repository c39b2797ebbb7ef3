"""Rounds in real time over a network that is none, on a clock that is none: a schedule is a seed, and can be repeated.

The server's and the client ranks' own code runs, each rank in a coroutine of `greenlet`, which is no thread: one runs
at a time, and the clock moves on only where it waits. Messages take what latency and bandwidth say, and a little more
that is drawn. The network is as unkind as MPI: what goes by one channel keeps its order, nothing else does; a large
message ends for its sender when it has been received; collectives have to be begun in one order by all. Ranks are
suspended or die, links are cut and come back. A sender that changes what is still being sent, or memory that is given
to MPI twice, ends the run by `Violation`.

An event is a message that is sent or received, a part in a collective that is given or comes back, a sleep that ends,
a fault, or a look of a rank that something has come for. A look in vain is none.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from math import inf
from threading import Lock
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
from greenlet import getcurrent, greenlet

from hpcfl.base import lazy
from hpcfl.base.rng import keyed
from hpcfl.engine.executor import Worker
from hpcfl.mpi import relay, waiting
from hpcfl.realtime import lane

PROC_FAILED, IN_STATUS = 75, 18
TICK = 1e-6  # seconds: nobody waits for less
LOOKS = 20  # without a pause, until time goes on
LOOK_SECONDS = 0.002  # after so long a rank looks again, whatever has come
MOST_NAP = 0.01  # from look to look of a rank that computes: what comes wakes it up


class Violation(Exception):  # noqa: N818
    """Something has happened that must not."""


class Killed(BaseException):
    """This rank is dead."""


class Error(Exception):
    """An error of MPI's."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    def Get_error_class(self) -> int:  # noqa: N802
        return self.code

    def Get_error_string(self) -> str:  # noqa: N802
        return _named(self.code)


def _named(code: int) -> str:
    return {PROC_FAILED: "MPI_ERR_PROC_FAILED: Process Failure"}.get(code, f"error {code}")


@dataclass(eq=False)
class Request:
    """An operation that is under way, of `rank`; `memory` is what MPI reads or writes meanwhile."""

    rank: int
    memory: Any = None
    writes: bool = False
    done: bool = False
    error: int = 0
    null: bool = False
    sent: bytes | None = None
    """What is being sent, as it was in the beginning."""
    looked: ClassVar[Callable[[], None]] = lambda: None

    def __eq__(self, other: object) -> bool:
        return self is other or (self.null and other is NULL)

    __hash__ = object.__hash__

    def Test(self) -> bool:  # noqa: N802
        if self.error:
            self.null, code, self.error = True, self.error, 0
            raise Error(code)
        self.null |= self.done
        return self.null

    @staticmethod
    def Testall(requests: Sequence[Any]) -> bool:  # noqa: N802
        Request.looked()
        done = [request.Test() for request in requests]  # MPI looks at each, whatever it finds
        return all(done)

    @staticmethod
    def Testsome(requests: Sequence[Request], statuses: list[Any] | None = None) -> list[int] | None:  # noqa: N802
        Request.looked()
        if not requests:
            return None
        found = [index for index, each in enumerate(requests) if (each.done or each.error) and not each.null]
        errors = [requests[index].error for index in found]
        for index in found:
            requests[index].null, requests[index].error = True, 0
        if any(errors):
            assert statuses is not None
            statuses[:] = [SimpleNamespace(Get_error=lambda code=code: code) for code in errors]
            raise Error(IN_STATUS)
        return found


NULL = Request(-1, null=True)


@dataclass
class Message:
    """What is on its way from one rank to another, `after` which second it may be there."""

    data: bytes
    request: Request
    after: float
    eager: bool
    number: int

    def Irecv(self, room: Any) -> Request:  # noqa: N802
        """Receive what `Comm.Improbe` has taken."""
        np.asarray(room)[:] = np.frombuffer(self.data, dtype=np.uint8)
        return Request(-1, done=True)


class Status:
    """Of whom a message is that was taken, its tag, and its bytes."""

    def Get_source(self) -> int:  # noqa: N802
        return self.source

    def Get_tag(self) -> int:  # noqa: N802
        return self.tag

    def Get_count(self, _: Any) -> int:  # noqa: N802
        return self.nbytes

    source = tag = nbytes = 0


@dataclass
class Collective:
    """One operation of all members, as far as they have come to it."""

    kind: str
    given: dict[int, tuple[Request, Any, Any]] = field(default_factory=dict)
    ready: float = 0.0  # when the last one's part is there
    over: bool = False


@dataclass(eq=False)
class Process:
    """What runs on one rank by itself: its main thread, or what computes there."""

    rank: int
    routine: greenlet
    due: float = inf
    looks: tuple[float, int] = (0.0, 0)  # when it has looked last, and how often at that time
    turn: int = 0  # so often it has waited: who wakes it up for an earlier time comes too late


class Network:
    """Ranks and what is between them.

    Parameters
    ----------
    latency, bandwidth : float
        Seconds, and bytes per second, of each link.
    jitter : float
        Up to so many times the latency is added to each message.
    skew : float
        Seconds by which the clock of rank r is r times ahead.
    failures : bool
        Whether MPI tells of dead ranks, as with ULFM.
    eager : int
        A message of more bytes ends for its sender when it has been received.
    """

    def __init__(
        self,
        ranks: int,
        seed: int,
        latency: float = 5e-5,
        bandwidth: float = 1e9,
        jitter: float = 4.0,
        skew: float = 1000.0,
        failures: bool = False,
        eager: int = 4096,
    ) -> None:
        self.ranks, self.latency, self.bandwidth, self.jitter = ranks, latency, bandwidth, jitter
        self.skew, self.failures, self.eager, self.rng = skew, failures, eager, keyed(seed, "network")
        self.now, self.events, self.sent = 0.0, 0, Counter[tuple[int, int]]()
        self.trace = hashlib.sha256()
        self.dead: set[int] = set()
        self._frozen: dict[int, float] = {}
        self._slow: dict[int, float] = {}  # how many times slower a rank's links are
        self._cut: dict[tuple[int, int], float] = {}
        self._heap: list[tuple[float, int, Callable[[], None] | Process, int]] = []
        self._order = count()
        self._until: Callable[[], bool] = lambda: True
        self._most = inf
        self._failure: BaseException | None = None
        self._outside = self._current = Process(0, getcurrent())
        self._processes: dict[int, list[Process]] = {rank: [] for rank in range(ranks)}  # those that are not over
        self._sent: dict[tuple[Any, ...], deque[Message]] = defaultdict(deque)
        self._expected: dict[tuple[Any, ...], deque[tuple[Request, Any]]] = defaultdict(deque)
        self._free: dict[tuple[int, int], float] = defaultdict(float)  # when a link is
        self._collectives: dict[tuple[Any, int], Collective] = {}
        self._pending: dict[int, list[Request]] = defaultdict(list)
        self._probed: set[Any] = set()  # communicators from which whatever comes is taken
        self.told: set[int] = set()  # the dead of whom MPI tells

    # the clock

    @property
    def current(self) -> int:
        """The rank whose turn it is."""
        return self._current.rank

    @property
    def process(self) -> Process:
        """What runs on it."""
        return self._current

    def at(self, when: float, act: Callable[[], None] | Process, turn: int = 0) -> None:
        """Do something at a second of the clock, or let a process go on that has not had its turn since then."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), act, turn))

    def note(self, *facts: Any) -> None:
        """Count an event, and add it to what tells schedules apart."""
        self.events += 1
        self.trace.update(repr((round(self.now, 6), *facts)).encode())

    def spawn(self, rank: int, run: Callable[[], None], when: float = 0.0) -> None:
        """Let something begin on a rank."""

        def body() -> None:
            torch.set_grad_enabled(True)  # torch keeps that by thread, and here all share one
            try:
                if rank not in self.dead:
                    run()
            except Killed:
                pass
            except BaseException as error:
                self._failure = self._failure or error
            self._processes[rank].remove(process)

        process = Process(rank, greenlet(body, self._outside.routine))
        self._processes[rank].append(process)
        self.at(when, process)

    def run(self, until: Callable[[], bool], most: float = inf) -> None:
        """Let time pass until something holds, or raise what a process has raised; Violation after `most` seconds."""
        self._until, self._most, self._failure = until, most, None
        with torch.enable_grad():
            while (process := self._chosen()) is not None:
                self._take_turn(process)
                process.routine.switch()
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        """Let all processes end that are left."""
        self.dead = set(range(self.ranks))
        for process in [each for those in self._processes.values() for each in those]:
            self._take_turn(process)
            process.routine.switch()

    def wait(self, seconds: float, wake: bool = True) -> bool:
        """Let others have their turn for so many seconds, or until something comes for this rank: then return True."""
        process = self._current
        if process.rank in self.dead:
            raise Killed
        process.turn += 1
        end = self.now + max(seconds, TICK)
        process.due = end if wake else inf
        self.at(end, process, process.turn)
        gradients = torch.is_grad_enabled()
        self._outside.routine.switch()
        if torch.is_grad_enabled() != gradients:
            torch.set_grad_enabled(gradients)
        if process.rank in self.dead:
            raise Killed
        return self.now < end

    def looked(self) -> None:
        """Take note of a look at what is under way: who does nothing else takes time with that."""
        when, looks = self._current.looks
        self._current.looks = self.now, looks + 1 if when == self.now else 0
        if looks >= LOOKS:
            self.wait(LOOK_SECONDS / 100)

    def _chosen(self) -> Process | None:
        """Return whose turn is the next; None where no more time is to pass."""
        try:
            while self._failure is None and not self._until():
                if not self._heap:
                    raise Violation(f"nothing happens any more at {self.now:.3f} s")
                self.now, _, act, turn = heapq.heappop(self._heap)
                if self.now > self._most:
                    raise Violation(f"no end after {self._most:g} s")
                if not isinstance(act, Process):
                    act()
                elif act.turn == turn and not act.routine.dead:
                    if self.now >= (thaw := self._frozen.get(act.rank, 0.0)):
                        return act
                    self.at(thaw, act, turn)
        except BaseException as error:
            self._failure = error
        return None

    def _take_turn(self, process: Process) -> None:
        process.turn += 1
        self._current = process

    def stir(self, rank: int) -> None:
        """Let a rank look, if it waits."""
        for process in self._processes[rank]:
            if process.due < inf:
                self.at(self.now, process, process.turn)

    # faults

    def freeze(self, rank: int, seconds: float) -> None:
        """Suspend a rank: what it computes too."""
        self.note("freeze", rank)
        self._frozen[rank] = self.now + seconds

    def kill(self, rank: int) -> None:
        """Let a rank die; where MPI tells of that, what others have under way with it fails a little later."""
        self.note("kill", rank)
        self.dead.add(rank)
        if self.failures:
            self.at(self.now + 0.05, self._fail)

    def slow(self, rank: int, times: float) -> None:
        """Let a rank's links be so many times slower than those of others from now on."""
        self.note("slow", rank)
        self._slow[rank] = times

    def cut(self, rank: int, seconds: float) -> None:
        """Let nothing pass between a rank and all others for so long; what is under way comes later."""
        self.note("cut", rank)
        for other in range(self.ranks):
            self._cut[rank, other] = self._cut[other, rank] = self.now + seconds

    def revoked(self, comm: tuple[Any, ...]) -> None:
        """Let what is under way on a communicator fail."""
        for (name, _), collective in self._collectives.items():
            if name == comm:
                self._failed([request for request, *_ in collective.given.values()])
        for key, expected in self._expected.items():
            if key[0] == comm:
                self._failed([request for request, _ in expected])
                expected.clear()

    def _fail(self) -> None:
        self.told |= self.dead
        for key, expected in self._expected.items():
            if key[1] in self.dead:
                self._failed([request for request, _ in expected])
                expected.clear()
        for key, messages in self._sent.items():
            if key[2] in self.dead:
                self._failed([message.request for message in messages])
                messages.clear()
        for (comm, _), collective in self._collectives.items():
            if not self.dead.isdisjoint(comm[1]):
                self._failed([request for request, *_ in collective.given.values()])

    def _failed(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if not request.done and request.rank not in self.dead:
                request.error = PROC_FAILED
                self._release(request)
                self.stir(request.rank)

    # messages

    def send(self, key: tuple[Any, ...], data: Any) -> Request:
        """Begin to send; the key is communicator, sender, receiver and tag, by ranks of the job."""
        _, source, to, _ = key
        array = np.ascontiguousarray(data)
        sent = array.tobytes()
        request = Request(source, array, sent=sent)
        if self.failures and to in self.dead:
            request.error = PROC_FAILED
            return request
        eager = array.nbytes <= self.eager
        message = Message(sent, request, self._arrival(source, to, array.nbytes, key), eager, next(self._order))
        self.note("send", *key[1:], array.nbytes)
        self.sent[source, to] += array.nbytes
        self._sent[key].append(message)
        if eager:
            request.done = True
        else:
            self._take(request)
        self.at(message.after, lambda: self._match(key))
        return request

    def _arrival(self, source: int, to: int, nbytes: int, key: tuple[Any, ...]) -> float:
        begin = max(self.now, self._free[source, to])
        slower = max(self._slow.get(source, 1.0), self._slow.get(to, 1.0))
        self._free[source, to] = begin + slower * nbytes / self.bandwidth
        delay = self.latency * (1 + self.jitter * float(self.rng.random()))
        earlier = self._sent[key][-1].after if self._sent[key] else 0.0
        return max(self._free[source, to] + delay, earlier)

    def receive(self, key: tuple[Any, ...], room: Any) -> Request:
        """Begin to receive into an array."""
        _, source, to, _ = key
        request = Request(to, room, writes=True)
        if self.failures and source in self.dead and not self._sent[key]:
            request.error = PROC_FAILED
            return request
        self._take(request)
        self._expected[key].append((request, room))
        self.at(self.now, lambda: self._match(key))
        return request

    def _match(self, key: tuple[Any, ...]) -> None:
        to, messages, expected = key[2], self._sent[key], self._expected[key]
        if messages and key[0] in self._probed and self._ready(key) < inf:
            self.at(self._ready(key), lambda: self.stir(to))
        while messages and expected and to not in self.dead:
            ready = self._ready(key)
            if ready > self.now:
                if ready < inf:
                    self.at(ready, lambda: self._match(key))
                return
            request, room = expected.popleft()
            into = np.asarray(room).reshape(-1).view(np.uint8)
            if len(messages[0].data) > into.nbytes:
                raise Violation(f"{key}: a message of {len(messages[0].data)} bytes for room of {into.nbytes}")
            message = self._taken(key)
            into[: len(message.data)] = np.frombuffer(message.data, dtype=np.uint8)
            self._finish(request)

    def _ready(self, key: tuple[Any, ...]) -> float:
        """Return from when on the first message that is under way can be received; inf: never."""
        _, source, to, _ = key
        message = self._sent[key][0]
        if source in self.dead and not message.eager and message.after > self.now:
            return inf  # it died before all of it had left
        return max(self.now, message.after, self._cut.get((source, to), 0.0))

    def _taken(self, key: tuple[Any, ...]) -> Message:
        message = self._sent[key].popleft()
        if not message.eager:
            self._finish(message.request)
        self.note("received", *key[1:], len(message.data))
        return message

    def probed(self, comm: Any, to: int) -> tuple[tuple[Any, ...], Message] | None:
        """Take a message that has come for a rank on a communicator, whosever it is; return its key too."""
        self._probed.add(comm)
        self.looked()
        first: dict[int, tuple[int, tuple[Any, ...]]] = {}  # of each sender's messages, whatever their tags
        for key, messages in self._sent.items():
            if key[0] == comm and key[2] == to and messages:
                oldest = messages[0].number, key
                first[key[1]] = min(first.get(key[1], oldest), oldest)
        for _, key in first.values():
            if self._ready(key) <= self.now:
                return key, self._taken(key)
        return None

    def _take(self, request: Request) -> None:
        """Note that MPI has memory; nobody else may write to it, nor MPI twice."""
        for other in self._pending[request.rank]:
            if (request.writes or other.writes) and _overlap(request.memory, other.memory):
                raise Violation(f"rank {request.rank}: memory is given to MPI twice")
        self._pending[request.rank].append(request)

    def _release(self, request: Request) -> None:
        if request in self._pending[request.rank]:
            self._pending[request.rank].remove(request)

    def _finish(self, request: Request) -> None:
        if request.sent is not None and request.rank not in self.dead and _bytes(request.memory) != request.sent:
            raise Violation(f"rank {request.rank}: what it is still sending has changed")
        request.done = True
        self._release(request)
        self.stir(request.rank)

    # collectives

    def together(self, comm: tuple[Any, ...], number: int, me: int, kind: str, own: Any, room: Any) -> Request:
        """Begin the operation of a communicator, by number, of one member; its members are ranks of the job."""
        members = comm[1]
        rank = members[me]
        sends = own is not None and (kind != "bcast" or me == 0)
        request = Request(rank, own, sent=_bytes(own)) if sends else Request(rank)
        if self.failures and not self.dead.isdisjoint(members):
            request.error = PROC_FAILED
            return request
        collective = self._collectives.setdefault((comm, number), Collective(kind))
        if collective.kind != kind:
            raise Violation(f"rank {rank}: {kind} where others are at {collective.kind}, operation {number} of {comm}")
        collective.given[me] = request, own, room
        self.note(kind, number, rank)
        delay = self.latency * (1 + self.jitter * float(self.rng.random()))
        cut = max((self._cut.get((rank, other), 0.0) for other in members), default=0.0)
        collective.ready = max(collective.ready, self.now + delay, cut)
        self.at(collective.ready, lambda: self._advance(comm, number))
        return request

    def _advance(self, comm: tuple[Any, ...], number: int) -> None:
        collective, members = self._collectives[comm, number], comm[1]
        given, kind = collective.given, collective.kind
        if kind == "bcast":
            if 0 not in given:
                return
            for me, (request, _, room) in list(given.items()):
                if me and not request.done:
                    np.asarray(room).reshape(-1)[:] = np.asarray(given[0][1]).reshape(-1)
                    self.events += 1
                    self._finish(request)
            if len(given) == len(members) and not given[0][0].done:
                self._finish(given[0][0])
            return
        if len(given) < len(members) or self.now < collective.ready or collective.over:
            return
        collective.over = True
        if kind in ("reduce", "allreduce"):
            parts = [np.asarray(given[me][1]) for me in sorted(given) if given[me][1] is not None]
            total = np.max(parts, axis=0) if kind == "allreduce" else np.sum(parts, axis=0)
            for _, _, room in given.values():
                if room is not None:
                    base = np.asarray(room).reshape(-1)
                    base[:] = total.reshape(-1) if kind == "allreduce" else base + total.reshape(-1)
        self.events += len(given)
        for request, *_ in given.values():
            if not request.done:
                self._finish(request)


def _bytes(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _overlap(one: Any, other: Any) -> bool:
    return bool(np.asarray(one).size and np.asarray(other).size and np.may_share_memory(one, other))


class Group:
    """What `MPI.Comm.Get_group` gives."""

    def __init__(self, members: Sequence[int]) -> None:
        self.members = tuple(members)

    def Incl(self, ranks: Sequence[int]) -> Group:  # noqa: N802
        return Group([self.members[rank] for rank in ranks])

    def Get_size(self) -> int:  # noqa: N802
        return len(self.members)

    def Translate_ranks(self, ranks: Iterable[int], group: Group) -> list[int]:  # noqa: N802
        return [group.members.index(self.members[rank]) for rank in ranks]

    def Free(self) -> None:  # noqa: N802
        """Do nothing."""


class Comm:
    """A communicator as one of its members has it: what this package asks of MPI's."""

    def __init__(self, network: Network, name: Any, members: Sequence[int], me: int) -> None:
        self.network, self.id, self.members, self.me = network, (name, tuple(members)), tuple(members), me
        self._numbers, self._made = count(), count()
        self._known: set[int] = set()  # the dead that it knows of

    def Get_rank(self) -> int:  # noqa: N802
        """Return which member this is."""
        return self.me

    def Get_size(self) -> int:  # noqa: N802
        return len(self.members)

    def Get_group(self) -> Group:  # noqa: N802
        return Group(self.members)

    def Free(self) -> None:  # noqa: N802
        """Do nothing."""

    def Idup(self) -> tuple[Comm, Request]:  # noqa: N802
        name = self.id, "dup", next(self._made)
        return Comm(self.network, name, self.members, self.me), Request(self.members[self.me], done=True)

    def Create_group(self, group: Group, tag: int) -> Comm:  # noqa: N802
        return Comm(self.network, (self.id, tag), group.members, group.members.index(self.members[self.me]))

    def Isend(self, data: Any, to: int, tag: int = 0) -> Request:  # noqa: N802
        return self.network.send((self.id, self.members[self.me], self.members[to], tag), data)

    def Irecv(self, room: Any, source: int, tag: int = 0) -> Request:  # noqa: N802
        return self.network.receive((self.id, self.members[source], self.members[self.me], tag), room)

    def Improbe(self, source: int, tag: int, status: Status) -> Message | None:  # noqa: N802
        """Take a message from anybody, if one has come; it could be that of a dead rank that nobody knows of yet."""
        if self.network.failures and not self._known >= self.network.told.intersection(self.members):
            raise Error(PROC_FAILED)
        taken = self.network.probed(self.id, self.members[self.me])
        if taken is None:
            return None
        (_, sender, _, status.tag), message = taken
        status.source, status.nbytes = self.members.index(sender), len(message.data)
        return message

    def Ack_failed(self) -> None:  # noqa: N802
        """Know of all who are dead by now."""
        self._known |= self.network.told.intersection(self.members)

    def Get_failed(self) -> Group:  # noqa: N802
        return Group(sorted(self._known))

    def Ibcast(self, data: Any, root: int = 0) -> Request:  # noqa: N802
        return self._together("bcast", data, data)

    def Ireduce(self, own: Any, total: Any, operation: Any, root: int = 0) -> Request:  # noqa: N802
        return self._together("reduce", None if own is IN_PLACE else own, total)

    def Iallreduce(self, own: Any, found: Any, operation: Any) -> Request:  # noqa: N802
        return self._together("allreduce", own, found)

    def Ibarrier(self) -> Request:  # noqa: N802
        return self._together("barrier", None, None)

    def Revoke(self) -> None:  # noqa: N802
        """Let what is under way fail at every member."""
        self.network.at(self.network.now + self.network.latency, lambda: self.network.revoked(self.id))

    def _together(self, kind: str, own: Any, room: Any) -> Request:
        return self.network.together(self.id, next(self._numbers), self.me, kind, own, room)


IN_PLACE = object()

MPI = SimpleNamespace(
    **{"Request": Request, "Exception": Error, "REQUEST_NULL": NULL, "IN_PLACE": IN_PLACE, "SUM": "sum", "MAX": "max"},
    **{"Status": Status, "Intracomm": Comm, "ERR_IN_STATUS": IN_STATUS, "Get_error_string": _named},
    **{"ANY_SOURCE": -1, "ANY_TAG": -1, "BYTE": "byte"},
)


# what the package has of a process of its own


class Clock:
    """What `time` is to the ranks; the monotonic clocks of their hosts differ."""

    def __init__(self, network: Network) -> None:
        self.network = network

    def monotonic(self) -> float:
        return self.network.now + self.network.skew * self.network.current

    perf_counter = time = monotonic

    def thread_time(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        self.network.wait(seconds, wake=False)
        self.network.events += 1


class Flag:
    """What `threading.Event` is to them."""

    def __init__(self, network: Network) -> None:
        self.network, self._set = network, False
        self._waits: Process | None = None

    def set(self) -> None:
        self._set = True
        if self._waits is not None:
            self.network.at(self.network.now, self._waits, self._waits.turn)

    def is_set(self) -> bool:
        return self._set

    def wait(self, seconds: float) -> bool:
        if not self._set and seconds > 0:
            self._waits = self.network.process
            self.network.wait(seconds, wake=False)
            self._waits = None
            self.network.events += 1
        return self._set


class Computing(Worker):
    """A worker that is no thread: a process of the network's, beside the rank's own."""

    def __init__(self, network: Network) -> None:
        self.network, self.rank, self.busy, self._next = network, network.current, False, None
        self._come: deque[tuple[str, Any]] = deque()
        self._nap = 0.0  # ever longer, as long as nothing comes

    def start(self, work: Callable[[Callable[[Any], None]], None]) -> None:
        self.busy = True

        def run() -> None:
            error = None
            try:
                work(lambda item: self._put("put", item))
            except Exception as raised:
                error = raised
            self._put("end", error)

        self.network.spawn(self.rank, run, self.network.now)

    def _put(self, kind: str, item: Any) -> None:
        self._come.append((kind, item))
        self.network.stir(self.rank)

    def wait(self, seconds: float) -> None:
        if self._next is None and not self._come and seconds > 0:
            self._nap = max(seconds, min(2 * self._nap, MOST_NAP))
            if self.network.wait(self._nap):
                self._nap = 0.0
                self.network.events += 1
        if self._next is None and self._come:
            self._next = self._come.popleft()


class Gone(Exception):  # noqa: N818
    """This rank has ended its process."""


ROOMS = (
    *(
        f"realtime.{name}"
        for name in ("arrivals", "client", "lane", "lanes", "leader", "membership", "node", "questions")
    ),
    *(f"realtime.{name}" for name in ("server", "start", "succession", "two_levels")),
    *(f"engine.{name}" for name in ("executor", "pace", "profile", "watchdog")),
    *(f"sums.{name}" for name in ("frames", "packing")),
)


@contextmanager
def in_place(network: Network, **more: Any) -> Iterator[None]:
    """Let the package talk over this network within the block, and live by its clock; `more` is put in place too."""

    def pause(self: waiting.Patience, most: float = 1.0, coming: int = 0) -> None:
        since = Clock(network).monotonic() - self.start
        longest = max(LOOK_SECONDS / 4, min(25 * LOOK_SECONDS, since / 4))
        found = network.wait(max(LOOK_SECONDS / 20, min(most, longest)))
        network.events += found

    def drop(*_: Any, **more: Any) -> None:
        raise Gone

    clock, mpi = Clock(network), vars(lazy.MPI)
    kept = dict(mpi)
    own = {
        **{"time": clock, "Event": lambda: Flag(network), "Worker": lambda: Computing(network), "freeze": lambda: None},
        **{"threading": SimpleNamespace(Event=lambda: Flag(network), Lock=Lock), "_drop": drop},
        **{"has_ulfm": lambda _: network.failures, "has_cuda": lambda _: False, "end_ranks": lambda _: None},
        **{"end_job": drop, "end_launcher": lambda: None, **more},
    }
    with ExitStack() as stack:
        for name in ROOMS:
            module = import_module(f"hpcfl.{name}")
            for key in own.keys() & vars(module).keys():
                if not (name == "engine.executor" and key in ("Worker", "threading")):
                    stack.enter_context(patch.object(module, key, own[key]))
        stack.enter_context(patch.object(lane.Lane, "checked", True))
        for module in (waiting, relay):
            stack.enter_context(patch.object(module, "time", clock))
        stack.enter_context(patch.object(waiting.Patience, "pause", pause))
        mpi.update(vars(MPI))
        stack.enter_context(patch.object(Request, "looked", network.looked))
        try:
            yield
        finally:
            network.end()
            for key in vars(MPI):
                mpi.pop(key, None)
            mpi.update(kept)
