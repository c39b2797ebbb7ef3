"""Talking over MPI without spinning: how to wait, and how ranks agree before a run begins. Knows no torch."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from statistics import median
from typing import Any, ClassVar

import numpy as np

from hpcfl.base.errors import ErrorOnOtherRank, LeftOut, UserError
from hpcfl.base.lazy import MPI
from hpcfl.base.terminal import say
from hpcfl.base.types import Floats

STEPS = 3
REPEAT_SECONDS = 300.0  # from one line about a wait to the next
YIELD_SECONDS = 0.0005  # of looking: some 200 looks at a single request
LONG_SECONDS = 0.002
NAPS = 50  # a nap takes this part of the waiting so far, times ranks per core: what is awaited is noticed as much later
MOVED_SECONDS = 2e-5  # of computing: what copying some bytes takes
COMING = 1e10  # bytes per second that come or leave on one host: where so many are on their way, nobody sleeps
DOZE_SECONDS = 0.1  # longest nap of a rank that has nothing more to do
DOZE_GROWTH = 1.05  # from nap to nap
UNKNOWN = 1e8  # bytes per second that are counted on before anything is known: those of gigabit Ethernet
SLACK = 3.0  # how many times as long as expected bytes may take before nobody waits for them any longer
TELLING = 2**20  # bytes of a transfer that says something: less takes no longer than the pause between two looks


class Patience:
    """How long to pause between two looks at what is under way: give way while bytes move, then sleep ever longer.

    A blocking wait spins: 33 waiting MPICH ranks on 2 cores made a computing one 16 times slower. A plain back-off
    without the first regime costs 14 times at 1 MB. One look moves MPI on by one step, and what has come while this
    rank slept needs up to three: so many looks follow every sleep. A look that takes much longer than others has
    moved bytes, but in looks that do much else this is hard to see: a caller that knows how many bytes are on their way
    says so, and does not sleep for as long as copying them may take. The first look after a sleep is compared with
    other first ones: by then others have used the caches, and with many lanes it takes much longer whatever has moved.
    Where looks take long, as they do at many lanes or among many ranks of MPICH, they are rarer.
    """

    tells: ClassVar[float] = inf  # see `telling`
    crowd: ClassVar[float] = 1.0  # ranks per core: all that wait together are to take a quarter of the cores at most

    def __init__(self) -> None:
        self.least, self.least_cold, self.looked = inf, inf, 0.0
        self.moved()
        self.used, self.told = time.thread_time(), False

    def moved(self) -> None:
        """Begin anew: something has just happened, so that the look that was just taken is like no other."""
        self.looks, self.start, self.cold, self.told = 0, time.monotonic(), False, True

    def has_moved(self, look: float) -> bool:
        """Whether a look that took so many seconds has moved bytes."""
        return look > 5 * (self.least_cold if self.cold else self.least) + MOVED_SECONDS

    def pause(self, most: float = 1.0, coming: int = 0) -> None:
        """Give way or sleep, at most `most` seconds; `coming` bytes are known to be on their way."""
        look = time.thread_time() - self.used
        if not self.told and self.has_moved(look):
            self.moved()
        if self.cold:
            self.least_cold = min(self.least_cold, look)
        elif not self.told:
            self.least = min(self.least, max(look, 1e-6))
        self.looks, self.cold, self.told = self.looks + 1, False, False
        self.looked += self.least if self.least < inf else 0.0
        awake = self.looks * self.least < YIELD_SECONDS or self.looked * COMING < coming
        if awake or self.looks % STEPS:
            os.sched_yield()
        else:
            nap = min(LONG_SECONDS, self.crowd * (time.monotonic() - self.start) / NAPS)
            looks = (STEPS - 1) * self.least + (self.least_cold if self.least_cold < inf else self.least)
            time.sleep(max(0.0, min(most, max(nap, 4 * looks * self.crowd))))
            self.cold = True
        self.used = time.thread_time()


class Bandwidth:
    """How fast bytes move between the server and its lanes, and so how long those that are under way may take.

    What comes decides: a sum over ranks may be many times slower than a broadcast. The median of its last transfers
    counts, since one may have met a suspended rank; until there is one, the fastest broadcast.
    """

    def __init__(self) -> None:
        self.incoming: deque[float] = deque(maxlen=9)
        self.outgoing = 0.0

    def came(self, nbytes: int, start: float) -> None:
        """Note a transfer to the server in which nobody computed, now over; `start` is of the monotonic clock."""
        if nbytes >= TELLING:
            self.incoming.append(nbytes / (time.monotonic() - start + 1e-6))

    def went(self, nbytes: int, start: float) -> None:
        if nbytes >= TELLING:
            self.outgoing = max(self.outgoing, nbytes / (time.monotonic() - start + 1e-6))

    @property
    def rate(self) -> float:
        """Bytes per second on which to count."""
        return median(self.incoming) if self.incoming else min(UNKNOWN, self.outgoing or UNKNOWN)

    def allows(self, nbytes: int) -> float:
        """Return the seconds that bytes under way may take."""
        return SLACK * nbytes / self.rate


@contextmanager
def telling(comm: MPI.Intracomm | None, seconds: float) -> Iterator[None]:
    """Let a line on rank 0 say so where `wait` takes longer than so many seconds within the block: a job starts."""
    Patience.tells = seconds if comm is not None and comm.Get_rank() == 0 else inf
    try:
        yield
    finally:
        Patience.tells = inf


def idle() -> None:
    """Do nothing while waiting."""


def wait(requests: list[MPI.Request], rest: Callable[[], None] = idle) -> None:
    """Complete the requests without spinning; call `rest` in between."""
    patience, start, due = Patience(), time.monotonic(), Patience.tells
    while not MPI.Request.Testall(requests):
        rest()
        patience.pause()
        if time.monotonic() - start > due:
            say(f"still waiting ({due:.1f} s) for all ranks to start: some may be dead, or their hosts out of reach")
            due += REPEAT_SECONDS


class Doze:
    """How long to pause where it may take hours and is in no hurry: ever longer, after as many looks as MPI needs."""

    def __init__(self) -> None:
        self.looks, self.nap = 0, LONG_SECONDS

    def pause(self, coming: int = 0) -> None:
        self.looks += 1
        if self.looks % STEPS == 0:
            time.sleep(self.nap)
            self.nap = min(DOZE_GROWTH * self.nap, DOZE_SECONDS)


def doze(requests: list[MPI.Request], rest: Callable[[], None]) -> None:
    """Complete requests that may take hours and are in no hurry: sleep ever longer, call `rest` in between."""
    pauses = Doze()
    while not MPI.Request.Testall(requests):
        rest()
        pauses.pause()


def tell(comm: MPI.Intracomm | Roll, text: str, root: int = 0) -> str:
    """Return the text of rank `root` on every rank."""
    if isinstance(comm, Roll):
        return comm.exchange(text)[root]
    data = np.frombuffer(text.encode(errors="surrogateescape"), dtype=np.uint8).copy()
    size = np.array([data.size], dtype=np.int64)
    wait([comm.Ibcast(size, root=root)])
    data = data if comm.Get_rank() == root else np.empty(int(size[0]), dtype=np.uint8)
    wait([comm.Ibcast(data, root=root)])
    return data.tobytes().decode(errors="surrogateescape")


def texts(comm: MPI.Intracomm | Roll | None, text: str) -> list[str]:
    """Return every rank's text, whole, in the order of the ranks; of a process alone its own."""
    if comm is None:
        return [text]
    if isinstance(comm, Roll):
        return comm.exchange(text)
    most = int(rows(comm, np.array([float(len(text.encode()))])).max())
    own = np.frombuffer(text.encode().ljust(most, b"\0"), dtype=np.uint8).copy()
    table = np.empty((comm.Get_size(), most), dtype=np.uint8)
    wait([comm.Iallgather(own, table)])
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in table]


def rows(comm: MPI.Intracomm, own: Floats) -> Floats:
    """Return every rank's row of as many numbers, in the order of the ranks."""
    table = np.empty((comm.Get_size(), len(own)))
    wait([comm.Iallgather(own, table)])
    return table


def settle(comm: MPI.Intracomm | Roll, error: Exception | None) -> None:
    """Raise on every rank if any has an error: its own on the first such rank, `ErrorOnOtherRank` on the others.

    Where that is not rank 0, the error says which rank it is, and on which host.
    """
    codes = np.zeros(comm.Get_size(), dtype=np.int64)
    if error is not None:
        codes[comm.Get_rank()] = error.code if isinstance(error, UserError) else 1
    if isinstance(comm, Roll):
        codes[:] = [int(text or 0) for text in comm.exchange(str(codes[comm.Get_rank()]))]
    else:
        wait([comm.Iallreduce(MPI.IN_PLACE, codes, MPI.SUM)])
    if not codes.any():
        return
    first = int(np.flatnonzero(codes)[0])
    if isinstance(error, UserError) and comm.Get_rank() == first:
        error.settled = True
        error.args = (f"{error} (rank {first}, host {os.uname().nodename})" if first else str(error),)
    line = tell(comm, str(error or ""), first)
    if comm.Get_rank() == first and error is not None:
        raise error
    raise ErrorOnOtherRank(int(codes[first]), line)


HEAD, BODY = 1, 2  # tags
LEFT_OUT = -1


class Roll:
    """The ranks of a job that starts, of which some may be dead or hang.

    To the functions above it is a communicator. Rank 0 hears the others one by one, and goes on without those that have
    not spoken within so many `seconds` after it began to listen.

    Attributes
    ----------
    absent : dict of int to str
        Ranks that the job starts without, and why; the latter at rank 0 only.
    connected : hpcfl.mpi.channel.Connected
        The lanes, which were made while all ranks were there.
    """

    def __init__(self, comm: MPI.Intracomm, seconds: float, connected: Any) -> None:
        self.comm, self.seconds, self.connected = comm, seconds, connected
        self.absent: dict[int, str] = {}
        self._kept: list[Any] = []  # what is being sent: who hangs may never take it

    def Get_rank(self) -> int:  # noqa: N802
        return int(self.comm.Get_rank())

    def Get_size(self) -> int:  # noqa: N802
        return int(self.comm.Get_size())

    def exchange(self, text: str) -> list[str]:
        """Return every rank's text, "" of those that are absent; raise LeftOut on a rank that is one of them."""
        if self.Get_rank():
            self._send(0, text.encode(errors="surrogateescape"))
            texts = json.loads(self._reply())
            self.absent = {rank: "" for rank, each in enumerate(texts) if each is None}
        else:
            texts = self._heard(text)
            told = json.dumps(texts).encode()
            for rank in self._others():
                self._send(rank, told)
        return [each or "" for each in texts]

    def _others(self) -> list[int]:
        return [rank for rank in range(1, self.Get_size()) if rank not in self.absent]

    def _heard(self, own: str) -> list[str | None]:
        """Hear every other rank, and leave out who is dead or has not spoken in time."""
        texts: list[str | None] = [own, *(None for _ in range(1, self.Get_size()))]
        owing = {rank: self._receive(rank, HEAD, np.zeros(1, dtype=np.int64)) for rank in self._others()}
        patience, deadline = Patience(), time.monotonic() + self.seconds
        while owing:
            for rank, (request, room) in list(owing.items()):
                try:
                    if not request.Test():
                        continue
                    if room.dtype == np.int64:
                        owing[rank] = self._receive(rank, BODY, np.empty(int(room[0]), dtype=np.uint8))
                        continue
                    texts[rank] = room.tobytes().decode(errors="surrogateescape")
                except MPI.Exception as error:
                    self._leave_out(rank, " ".join(error.Get_error_string().split()))
                del owing[rank]
            if time.monotonic() > deadline:
                for rank in owing:
                    self._leave_out(rank, f"not there within {self.seconds:g} s")
                self._kept += owing.values()
                return texts
            patience.pause()
        return texts

    def _receive(self, rank: int, tag: int, room: Any) -> tuple[MPI.Request, Any]:
        return self.comm.Irecv(room, rank, tag), room

    def _leave_out(self, rank: int, why: str) -> None:
        self.absent[rank] = why
        with suppress(MPI.Exception):  # it is dead
            head = np.array([LEFT_OUT], dtype=np.int64)
            self._kept.append((self.comm.Isend(head, rank, HEAD), head))

    def _send(self, rank: int, data: bytes) -> None:
        head, body = np.array([len(data)], dtype=np.int64), np.frombuffer(data, dtype=np.uint8).copy()
        with suppress(MPI.Exception):  # it has died since, and will be missed later
            self._kept += [(self.comm.Isend(head, rank, HEAD), head), (self.comm.Isend(body, rank, BODY), body)]

    def _reply(self) -> bytes:
        head = np.zeros(1, dtype=np.int64)
        wait([self.comm.Irecv(head, 0, HEAD)])
        if head[0] == LEFT_OUT:
            raise LeftOut(f"rank {self.Get_rank()} came too late, and the job has started without it")
        body = np.empty(int(head[0]), dtype=np.uint8)
        wait([self.comm.Irecv(body, 0, BODY)])
        return body.tobytes()
