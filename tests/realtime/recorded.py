"""Real jobs in real time as rank 0 saw them, and rank 0's own code played once more against that.

    mpiexec -n 5 python -m mpi4py tests/realtime/recorded.py FOLDER [NAME...]   # records JOBS of 5 ranks
    python tests/realtime/recorded.py --play FILE...                            # prints differences

Given the same events, the server takes the same actions. What lies in `recordings/` is of the code of commit 2e8313e8,
recorded by a copy of this file in a checkout of that one: jobs of 5 and of 7 ranks, under both MPIs. Those over two
levels are of commit 1222b059, since heads of leaders' sums have been laid out otherwise since the first.

What is recorded of a job: each operation that rank 0 began on a channel (which lane, its kind, its bytes, a digest of
what it sends), what came where it receives, and when it was begun and complete. Times are those of the server's looks
at what is under way: while it is recorded, as when it is played, the clock of `hpcfl.realtime` stands still between two
looks, so that the server knows no other times than those on record. A pause lasts until the next look on record. Most
looks at which nothing happened are left out.

Played, each operation must be the next one on record of its channel, begun at the same look or within `SLACK` seconds;
between channels the order is free. In the end all that is on record must have been begun.

Three differences to the first code that was recorded are allowed, no others, and none to the second:

- Commands have had one number more since (`Command.state`): their other fields are compared, not their bytes.
- What of a client's last visit counted was said once, and is said again and again now, with which visit it is about:
  that is compared where it is said first. That nothing of one counted is said no longer.
- A shared state that a lane has, as that number says, is not sent again. What is not sent must be on record as sent
  again, the same bytes as before on this lane; on that lane, what is received of the round may be begun earlier, since
  it was begun once the state had left. The server takes note of what comes no earlier than is on record.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np

from hpcfl.base import lazy
from hpcfl.config import from_table
from hpcfl.engine.executor import DEPTH_BITS
from hpcfl.engine.job import Job
from hpcfl.engine.loop import close, step
from hpcfl.engine.record import Record
from hpcfl.engine.watchdog import LeftBehind
from hpcfl.mpi import channel, waiting
from hpcfl.mpi.channel import Channel, Connected
from hpcfl.mpi.placement import TWO_LEVEL, lane_ranks
from hpcfl.mpi.transfers import Transfers
from hpcfl.realtime import orders, start
from hpcfl.realtime.orders import Op
from hpcfl.testing import network

FOLDER = Path(__file__).parent / "recordings"
KINDS = "down", "up", "summed", "absent", "agree", "meet"
BESIDE = "control", "data", "notices", "words"
MODULES = "arrivals", "lane", "lanes", "membership", "node", "server", "start", "succession", "two_levels"
BEGINNING = 1000.0  # seconds of the clock when a job begins
SPARSE = 500  # microseconds between looks that are kept though nothing happened
SLACK = 0.002  # seconds by which an operation may begin earlier or later
STUCK = 20  # looks without a pause, until time goes on
NEVER = -1

SALF: dict[str, Any] = {"name": "salf", "batch": 16}
FEDAVG: dict[str, Any] = {"name": "fedavg", "batch": 64}
KEPT: dict[str, Any] = {"momentum": 0.5, "persist_optimizer": True}
DEADLINE: dict[str, Any] = {"close": "deadline", "deadline": 0.12, "min_clients": 1}
QUORUM: dict[str, Any] = {"close": "quorum", "quorum": 3, "grace": 0.02}
FIRST: dict[str, Any] = {"close": "first", "first": 3}
ALL: dict[str, Any] = {"close": "all"}
TWO_HOSTS = "h0", "h0", "h0", "h1", "h1"
THREE_HOSTS = "h0", "h0", "h0", "h1", "h1", "h2", "h2"


@dataclass(frozen=True)
class Spec:
    """A job to be recorded; a client rank is `held` up once, so many seconds after its start, for so many.

    Where ranks write `apart`, each is told to write its clients' state, else the server is sent it. Where one is
    `lost`, it leaves once it is held up no longer.
    """

    algorithm: dict[str, Any]
    participation: dict[str, Any]
    width: Any = 1
    hosts: tuple[str, ...] = TWO_HOSTS
    rate: float = 20.0
    rounds: int = 5
    held: tuple[int, float, float] | None = None
    apart: bool = False
    lost: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        return {
            **{"clock": "wall", "clients": 7, "seed": 3, "rounds": 10**6, "threads": 1, "lane_width": self.width},
            **{"data": {"name": "digits"}, "model": {"name": "mlp", "hidden": [2]}, "algorithm": self.algorithm},
            **{"participation": self.participation, "speed": {"model": "exponential", "rate": self.rate}},
            **self.more,
        }


JOBS: dict[str, Spec] = {
    "salf-deadline-1": Spec(SALF, DEADLINE),
    "salf-kept-deadline-1-held": Spec(SALF | KEPT, DEADLINE, held=(2, 0.3, 0.5), apart=True),
    "salf-kept-deadline-2": Spec(SALF | KEPT, DEADLINE, 2),
    "salf-deadline-2-held": Spec(SALF, DEADLINE, 2, held=(3, 0.25, 0.4)),
    "salf-all-all": Spec(SALF, ALL, "all"),
    "salf-quorum-node": Spec(SALF, QUORUM, "node"),
    "salf-deadline-two-level": Spec(SALF, DEADLINE, "two-level"),
    "salf-kept-deadline-two-level-succession": Spec(
        SALF | KEPT, DEADLINE, "two-level", rounds=7, held=(3, 0.2, 0.7), apart=True
    ),
    "fedavg-deadline-1-void": Spec(FEDAVG, DEADLINE | {"min_clients": 6}, rate=60.0, rounds=4),
    "fedavg-quorum-1": Spec(FEDAVG, QUORUM),
    "fedavg-kept-quorum-2": Spec(FEDAVG | KEPT, QUORUM, 2, apart=True),
    "fedavg-first-1": Spec(FEDAVG, FIRST, rounds=6),
    "fedavg-kept-first-2": Spec(FEDAVG | KEPT, FIRST, 2),
    "fedavg-kept-first-node-held": Spec(FEDAVG | KEPT, FIRST, "node", held=(4, 0.2, 0.3)),
    "fedavg-kept-all-1": Spec(FEDAVG | KEPT, ALL, rounds=4),
    "fedavg-all-1-chunks": Spec(FEDAVG, ALL, more={"batch_clients": 2}, rounds=4),
    "fedavg-all-all": Spec(FEDAVG, ALL, "all"),
    "fedavg-kept-deadline-all": Spec(FEDAVG | KEPT, DEADLINE, "all"),
    "fedavg-kept-quorum-two-level": Spec(FEDAVG | KEPT, QUORUM, "two-level", apart=True),
    "fedavg-first-two-level": Spec(FEDAVG, FIRST, "two-level"),
    "fedavg-all-two-level": Spec(FEDAVG, ALL, "two-level"),
    "fedavg-kept-deadline-two-level-7": Spec(FEDAVG | KEPT, DEADLINE, "two-level", THREE_HOSTS),
    "salf-kept-quorum-2-7": Spec(SALF | KEPT, QUORUM, 2, THREE_HOSTS),
    "salf-kept-deadline-1-lost": Spec(SALF | KEPT, DEADLINE, held=(2, 0.3, 3.0), lost=True, more={"lost_after": 0.5}),
}


# what both have in common


class Clock:
    """What `time` is to the server: it stands still between two looks."""

    def __init__(self) -> None:
        self.micros = 0

    def monotonic(self) -> float:
        return BEGINNING + self.micros * 1e-6

    perf_counter = monotonic
    thread_time, sleep = staticmethod(time.thread_time), staticmethod(time.sleep)


class Wrapped(Channel):
    """A channel whose operations are told to a `tape`, with a way to begin them, if there is one `inside`."""

    def __init__(self, tape: Any, name: str, inside: Channel | None = None) -> None:
        self.tape, self.name, self.inside = tape, name, inside

    def down(self, data: Any) -> Any:
        return self._begun("down", data, sent=data)

    def up(self, data: Any, sizes: Sequence[int] = ()) -> Any:
        return self._begun("up", data, sizes, sent=np.array(sizes, dtype=np.int64), room=data)

    def summed(self, data: Any) -> Any:
        return self._begun("summed", data, room=data)

    def absent(self, data: Any) -> Any:
        return self._begun("absent", data, room=data)

    def agree(self, own: Any, found: Any) -> Any:
        return self._begun("agree", own, found, sent=own, room=found)

    def meet(self) -> Any:
        return self._begun("meet")

    def revoke(self) -> None:
        self._begun("revoke")

    def _begun(self, kind: str, *given: Any, sent: Any = None, room: Any = None) -> Any:
        begin = getattr(self.inside, kind, None)
        return self.tape.begun(self.name, kind, sent, room, None if begin is None else lambda: begin(*given))


@contextmanager
def served_by(tape: Any, clock: Clock, patience: type, comms: Any) -> Iterator[None]:
    """Let the server's channels be told to a tape, and its time be the clock's, within the block.

    Channels are what `comms` makes of them: a name to the function that makes it.
    """
    own = {"time": clock, "Patience": patience, **comms}
    with ExitStack() as stack:
        for name in MODULES:
            module = import_module(f"hpcfl.realtime.{name}")
            for key in own.keys() & vars(module).keys():
                stack.enter_context(patch.object(module, key, own[key]))
        stack.enter_context(patch.object(waiting, "time", clock))
        look = Transfers.look

        def looked(self: Transfers) -> Any:
            tape.looked(self)
            return look(self)

        stack.enter_context(patch.object(Transfers, "look", looked))
        yield


def named(rank: int, number: int, beside: int) -> str:
    return f"{rank}#{number}/{BESIDE[beside]}"


def of(ranks: Sequence[int], beside: int) -> str:
    return named(ranks[0], 0, beside) if len(ranks) == 1 else f"{'+'.join(map(str, ranks))}/{BESIDE[beside]}"


def as_bytes(data: Any) -> bytes:
    return b"" if data is None else np.ascontiguousarray(data).tobytes()


def digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


@cache
def _job(config: str, ranks: int) -> Job:
    return Job.of(from_table(json.loads(config)), None, ranks)


def rounds_of(facts: dict[str, Any], comm: Any) -> None:
    """Be rank 0 of a job: some rounds, scores and personal state after every third and in the end, and the farewell."""
    hosts = facts["hosts"]
    job = _job(json.dumps(facts["config"]), len(hosts))
    now, stop = job.begin(0), SimpleNamespace(requested=lambda: "")
    given: Any = job, comm, hosts, Path("/nowhere"), stop, now
    server: Any = start.lead(*given, apart=facts["apart"])
    while now.round < facts["rounds"]:
        record = Record.open(server.phases)
        plan, record.sums = server.exchange(now, record)
        step(job, now, record, plan)
        now.round += 1
        close(job, server, now, record, plan, "")
        if now.round % 3 == 0:
            server.scores(now)
            list(server.personal(now))
    server.lanes.wait_for_all(30.0)
    list(server.personal(now))
    server.profiles()
    server.leave(now.round, 0, False)
    if not server.lanes.lost:
        start._free(comm, server.connected)


# what is on record


@dataclass
class Operation:
    """One operation: begun at and complete at these looks, with what is sent, or its digest, and what came."""

    channel: str
    kind: str
    nbytes: int
    digest: int
    begun: int
    complete: int = NEVER
    sent: bytes = b""  # of commands alone
    came: bytes = b""
    room: Any = None
    left: int = 0

    def __str__(self) -> str:
        return f"{self.kind} of {self.nbytes} bytes"


@dataclass
class Recording:
    """A job on record: its looks, in microseconds, whether each came without a pause, and its operations."""

    name: str
    facts: dict[str, Any]
    looks: list[int]
    unpaused: list[bool]
    operations: list[Operation]

    def save(self, path: Path) -> None:
        """Store it, without the looks at which nothing happened."""
        one = self.thinned()
        channels = sorted({each.channel for each in one.operations})
        facts = json.dumps({**one.facts, "name": one.name, "channels": channels})
        rows = [
            [
                *(channels.index(each.channel), KINDS.index(each.kind), each.nbytes, each.begun, each.complete),
                *(len(each.sent), len(each.came)),
            ]
            for each in one.operations
        ]
        np.savez_compressed(
            path,
            facts=np.frombuffer(facts.encode(), dtype=np.uint8),
            looks=np.diff(np.array(one.looks, dtype=np.int32), prepend=0).astype(np.int32),
            unpaused=np.packbits(one.unpaused),
            operations=np.array(rows, dtype=np.int32).T,
            digests=np.array([each.digest for each in one.operations], dtype=np.uint64),
            sent=np.frombuffer(b"".join(each.sent for each in one.operations), dtype=np.uint8),
            came=np.frombuffer(b"".join(each.came for each in one.operations), dtype=np.uint8),
        )

    @classmethod
    def load(cls, path: Path) -> Recording:
        with np.load(path, allow_pickle=False) as data:
            facts = json.loads(data["facts"].tobytes())
            looks = np.cumsum(data["looks"]).tolist()
            unpaused = np.unpackbits(data["unpaused"], count=len(looks)).astype(bool).tolist()
            digests, rows = data["digests"].tolist(), data["operations"].T.tolist()
            sent, came = data["sent"].tobytes(), data["came"].tobytes()
        operations, at, here = [], 0, 0
        for (number, kind, nbytes, begun, complete, sends, comes), each in zip(rows, digests):
            parts = sent[at : at + sends], came[here : here + comes]
            at, here = at + sends, here + comes
            operations.append(Operation(facts["channels"][number], KINDS[kind], nbytes, each, begun, complete, *parts))
        return cls(facts["name"], facts, looks, unpaused, operations)

    def thinned(self) -> Recording:
        """Return it without most looks at which nothing happened, nor just before or after."""
        needed = {0, len(self.looks) - 1}
        for each in self.operations:
            needed |= {*range(each.complete, each.complete + 3), *range(each.begun - 2, each.begun + 2)}
        sparse = 0 if self.facts["config"].get("lost_after") else SPARSE  # silence is listened to now and then
        kept: list[int] = []
        for number, when in enumerate(self.looks):
            if number in needed or when - self.looks[kept[-1]] >= sparse:
                kept.append(number)
        at = {number: place for place, number in enumerate(kept)} | {NEVER: NEVER}
        operations = [replace(each, begun=at[each.begun], complete=at[each.complete]) for each in self.operations]
        looks, unpaused = [self.looks[number] for number in kept], [self.unpaused[number] for number in kept]
        return replace(self, looks=looks, unpaused=unpaused, operations=operations)


# recording


class Tape:
    """What rank 0 of a real job begins, and what comes."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.since = clock, time.monotonic()
        self.looks, self.unpaused, self.paused = [0], [True], False
        self.operations: list[Operation] = []
        self._waiting: dict[int, tuple[Any, Operation]] = {}

    def tick(self, paused: bool) -> None:
        self.clock.micros = int((time.monotonic() - self.since) * 1e6)
        self.looks.append(self.clock.micros)
        self.unpaused.append(not paused)
        self.paused = paused

    def begun(self, name: str, kind: str, sent: Any, room: Any, begin: Callable[[], Any]) -> Any:
        data, now = as_bytes(sent), len(self.looks) - 1
        nbytes = len(data) if kind == "down" else len(as_bytes(room))
        one = Operation(name, kind, nbytes, digest(data), now, room=room)
        if name.endswith("/control") and kind == "down":
            one.sent = data
        requests = begin()
        one.left = len(requests)
        self.operations.append(one)
        self._waiting |= {id(request): (request, one) for request in requests}
        return requests

    def looked(self, transfers: Transfers) -> None:
        if not self.paused:
            self.tick(False)
        self.paused = False

    def found(self, requests: Sequence[Any]) -> None:
        """Take note of requests that are complete."""
        for request in requests:
            _, one = self._waiting.pop(id(request))
            one.left -= 1
            if not one.left:
                one.complete, one.came = len(self.looks) - 1, as_bytes(one.room)


@contextmanager
def recorded() -> Iterator[Tape]:
    """Let what rank 0 does within the block be recorded."""
    clock = Clock()
    tape = Tape(clock)

    class Pauses(waiting.Patience):
        def pause(self, most: float = 1.0, coming: int = 0) -> None:
            super().pause(most, coming)
            tape.tick(True)

    made, found = dict(vars(channel)), Transfers._found

    def wrapped(names: Sequence[str], inside: Sequence[Channel]) -> Any:
        return tuple(Wrapped(tape, *each) for each in zip(names, inside))

    def connect(comm: Any, width: Any, hosts: Sequence[str], *rest: Any) -> Connected:
        there: Connected = made["connect"](comm, width, hosts, *rest)
        rows = [] if width == TWO_LEVEL else lane_ranks(width, hosts)
        there.lanes = {n: wrapped([of(rows[n], beside) for beside in (0, 1)], pair) for n, pair in there.lanes.items()}
        return there

    def direct(comm: Any, peer: int, leads: bool, number: int = 0) -> Any:
        return wrapped([named(peer, number, beside) for beside in (0, 1)], made["direct"](comm, peer, leads, number))

    def notices(comm: Any, peer: int, leads: bool, number: int = 0) -> Channel:
        return Wrapped(tape, named(peer, number, 2), made["notices"](comm, peer, leads, number))

    def words(comm: Any, peer: int, leads: bool) -> Channel:
        return Wrapped(tape, named(peer, 0, 3), made["words"](comm, peer, leads))

    def finding(self: Transfers) -> list[tuple[int, int]]:
        pairs = found(self)
        tape.found([self._requests[index] for index, error in pairs])
        return pairs

    makers = {"connect": connect, "direct": direct, "notices": notices, "words": words}
    with served_by(tape, clock, Pauses, makers), patch.object(Transfers, "_found", finding):
        yield tape


def client(spec: Spec, comm: Any) -> None:
    """Be a client rank of a job."""
    rank, since = comm.Get_rank(), time.monotonic()
    job = _job(json.dumps(spec.config), len(spec.hosts))
    held = [spec.held] if spec.held is not None and spec.held[0] == rank else []

    def rest() -> None:
        if held and time.monotonic() > since + held[0][1]:
            time.sleep(held.pop()[2])
            if spec.lost:
                raise LeftBehind("done")

    with suppress(network.Gone), patch.object(start, "_drop", _leave):
        start.serve(job, comm, spec.hosts, job.begin(rank), rest, store=lambda done, states: None)


def _leave(stopped: Any) -> NoReturn:
    raise network.Gone


def record(folder: Path, names: Sequence[str]) -> None:
    """Record, on all ranks at once, the jobs of so many ranks."""
    import torch
    from mpi4py import MPI

    torch.set_num_threads(1)
    comm, vendor = MPI.COMM_WORLD, "openmpi" if "Open MPI" in MPI.Get_library_version() else "mpich"
    for name in names or JOBS:
        spec = JOBS[name]
        if len(spec.hosts) != comm.Get_size():
            continue
        _job(json.dumps(spec.config), len(spec.hosts)).begin(comm.Get_rank())
        facts = {"config": spec.config, "hosts": spec.hosts, "rounds": spec.rounds, "apart": spec.apart}
        facts["head"] = orders.HEAD
        comm.Barrier()
        if comm.Get_rank():
            client(spec, comm)
        else:
            with recorded() as tape:
                rounds_of(facts, comm)
            path = folder / f"{name}-{vendor}.npz"
            Recording(path.stem, facts, tape.looks, tape.unpaused, tape.operations).save(path)
            print(
                path.name, path.stat().st_size, len(tape.looks), len(tape.operations), f"{tape.looks[-1] / 1e6:.2f} s"
            )
            sys.stdout.flush()
        comm.Barrier()


# playing


class Difference(Exception):  # noqa: N818
    """The server does something else than what is on record."""


class Script:
    """The other side of all channels, as it was recorded."""

    def __init__(self, recording: Recording, clock: Clock) -> None:
        self.recording, self.clock = recording, clock
        self.now, self.paused, self.first, self.after = 0, False, 0, 0
        self.rows: dict[str, list[Operation]] = defaultdict(list)
        for one in recording.operations:
            self.rows[one.channel].append(one)
        self.next: dict[str, int] = defaultdict(int)
        self.there: set[int] = set()  # operations that were begun, or need not be
        self.told: dict[str, list[int]] = {}  # what was said last of what counted, by channel
        self.withheld: set[str] = set()  # lanes on which the round's state was not sent again
        self.holds: dict[str, tuple[int, list[int]]] = defaultdict(lambda: (0, []))
        self._due: list[tuple[int, Any, Operation]] = []
        self._looked, self.spared, self.early, self.late = 0, 0, 0.0, 0.0

    # time

    def pause(self) -> None:
        """Let time pass until the next look."""
        self._miss()
        if self.now + 1 < len(self.recording.looks):
            self._go_on()
        else:
            self.after += 1
            self.clock.micros += SPARSE
            if self.after > 10000:
                raise self._differs("*", 0, "the end", "a server that waits")
        self.paused, self._looked = True, 0

    def looked(self, transfers: Transfers) -> None:
        self._looked += 1
        following = self.recording.unpaused[self.now + 1 : self.now + 2]
        if not self.paused and following and (following[0] or self._looked > STUCK):
            self._go_on()
        self.paused = False
        due = [each for each in self._due if each[0] <= self.now]
        self._due = [each for each in self._due if each[0] > self.now]
        for _, request, one in due:
            if one.room is not None:
                into = np.asarray(one.room).reshape(-1).view(np.uint8)
                into[:] = np.frombuffer(one.came, dtype=np.uint8)
            request.done, one.room = True, None

    def _go_on(self) -> None:
        self.now += 1
        self.clock.micros = self.recording.looks[self.now]

    def _miss(self) -> None:
        """Raise where something should have been begun by now."""
        operations = self.recording.operations
        while self.first < len(operations) and id(operations[self.first]) in self.there:
            self.first += 1
        if self.first < len(operations):
            one = operations[self.first]
            late = self.clock.micros - self.recording.looks[one.begun]
            if one.begun < self.now and late > SLACK * 1e6:
                raise self._differs(one.channel, self.next[one.channel], f"{one} by now", "nothing")

    # operations

    def begun(self, name: str, kind: str, sent: Any, room: Any, begin: Callable[[], Any] | None) -> Any:
        data, number = as_bytes(sent), self.next[name]
        nbytes = len(data) if kind == "down" else len(as_bytes(room))
        if number >= len(self.rows[name]):
            raise self._differs(name, number, "nothing more", f"{kind} of {nbytes} bytes")
        one = self.rows[name][number]
        if kind != one.kind:
            raise self._differs(name, number, str(one), f"{kind} of {nbytes} bytes")
        if name.endswith("/control") and kind == "down":
            self._compare(name, number, one, data)
        else:
            if nbytes != one.nbytes:
                raise self._differs(name, number, str(one), f"{kind} of {nbytes} bytes")
            if digest(data) != one.digest:
                raise self._differs(name, number, f"{one} {one.digest:016x}", f"other ones {digest(data):016x}")
        if name.endswith("/data") and kind == "down":
            self.holds[name][1].append(one.digest)
        self._in_time(name, number, one)
        self.next[name] += 1
        self.there.add(id(one))
        request = network.Request(0)
        one.room = room
        if one.complete != NEVER:
            self._due.append((one.complete, request, one))
        return [request]

    def _in_time(self, name: str, number: int, one: Operation) -> None:
        ahead = (self.recording.looks[one.begun] - self.clock.micros) * 1e-6
        if one.begun <= self.now or ahead < 0:
            self.late = max(self.late, -ahead)
            return
        if one.kind != "down" and name.rpartition("/")[0] in self.withheld:
            return
        self.early = max(self.early, ahead)
        if ahead > SLACK:
            raise self._differs(name, number, f"{one} {ahead * 1e3:.1f} ms later", "it now")

    def _compare(self, name: str, number: int, one: Operation, data: bytes) -> None:
        """Compare commands by what both have."""
        expected, found = (
            _decoded(each, head) for each, head in ((one.sent, self.recording.facts["head"]), (data, orders.HEAD))
        )
        if self.recording.facts["head"] != orders.HEAD:
            self._translate(name, expected, found)
        for key in expected.keys() & found.keys():
            if found[key] != expected[key]:
                raise self._differs(name, number, f"{expected['op']} with {key} {expected[key]}", f"{found[key]}")

    def _translate(self, name: str, expected: dict[str, Any], found: dict[str, Any]) -> None:
        """Put into the first code's words what a command says."""
        cohort = -(-self.recording.facts["config"]["clients"] // 64)
        said = found["who"][:-cohort]
        before, self.told[name] = self.told.get(name, [0] * len(said)), said
        news = [0 if each in (0, last) else each % (1 << DEPTH_BITS) for each, last in zip(said, before)]
        found["who"] = news + found["who"][-cohort:]
        nothing = (
            len(_job(json.dumps(self.recording.facts["config"]), len(self.recording.facts["hosts"])).layers.tensors) + 1
        )
        expected["who"] = [0 if each == nothing else each for each in expected["who"][:-cohort]] + expected["who"][
            -cohort:
        ]
        lane, state = name.rpartition("/")[0], found.get("state", 0)
        if found["op"] == Op.VISIT.name:
            self.withheld.discard(lane)
        if state:
            self._state(lane, state)

    def _state(self, lane: str, serial: int) -> None:
        """Take note of a shared state that comes with a command, or does not since the lane has it."""
        name = f"{lane}/data"
        held, digests = self.holds[name]
        if serial != held:
            self.holds[name] = serial, []
            return
        at = self.next[name]
        again = self.rows[name][at : at + len(digests)]
        if [each.digest for each in again if each.kind == "down"] != digests:
            raise self._differs(name, at, "another state", f"none, as if it were the one before ({serial})")
        self.there |= {id(each) for each in again}
        self.spared += len(again)
        self.next[name] += len(digests)
        self.withheld.add(lane)

    def end(self) -> None:
        """Raise where something was not begun."""
        for one in self.recording.operations:
            if id(one) not in self.there:
                raise self._differs(one.channel, self.next[one.channel], str(one), "the end")

    def _differs(self, name: str, number: int, expected: str, found: str) -> Difference:
        when = self.clock.micros * 1e-6
        return Difference(
            f"{self.recording.name}, {name}, operation {number} at {when:.4f} s: expected {expected}, found {found}"
        )


def _decoded(data: bytes, head: int) -> dict[str, Any]:
    """Return a command's fields, without one that was not there yet."""
    numbers = np.frombuffer(data, dtype=np.int64)
    keys = "op", "round", "attempt", "closes_after", "stage", "stopped", "hard", "state"
    fields: dict[str, Any] = dict(zip(keys, numbers[:head].tolist()))
    fields["op"], fields["closes_after"] = Op(fields["op"]).name, float(numbers[3:4].view(np.float64)[0])
    return {**fields, "who": numbers[head:].tolist()}


def play(recording: Recording) -> str:
    """Play a job once more; return in what it first differs from what is on record, "" where in nothing."""
    try:
        played(recording)
    except Difference as difference:
        return str(difference)
    return ""


def played(recording: Recording) -> Script:
    """Play a job once more to its end; raise Difference where it differs from what is on record."""
    clock = Clock()
    script = Script(recording, clock)

    class Pauses:
        start = 0.0

        def pause(self, most: float = 1.0, coming: int = 0) -> None:
            script.pause()

        def moved(self) -> None:
            pass

        def has_moved(self, look: float) -> bool:
            return False

    def pair(names: Sequence[str]) -> Any:
        return tuple(Wrapped(script, name) for name in names)

    def connect(comm: Any, width: Any, hosts: Sequence[str], *rest: Any) -> Connected:
        if width == TWO_LEVEL:
            return Connected({}, [comm])
        rows = lane_ranks(width, hosts)
        return Connected({n: pair([of(row, beside) for beside in (0, 1)]) for n, row in enumerate(rows)}, [])

    makers: dict[str, Any] = {
        "connect": connect,
        "direct": lambda comm, peer, leads, number=0: pair([named(peer, number, beside) for beside in (0, 1)]),
        "notices": lambda comm, peer, leads, number=0: Wrapped(script, named(peer, number, 2)),
        "words": lambda comm, peer, leads: Wrapped(script, named(peer, 0, 3)),
        "has_ulfm": lambda comm: False,
        "freeze": lambda: None,
        "_free": lambda comm, connected: None,
    }
    facts, mpi = recording.facts, vars(lazy.MPI)
    comm, kept = SimpleNamespace(Get_size=lambda: len(facts["hosts"]), Get_rank=lambda: 0), dict(mpi)
    mpi.update(vars(network.MPI))
    try:
        with served_by(script, clock, Pauses, makers), redirect_stderr(StringIO()):
            rounds_of(facts, comm)
        script.end()
    finally:
        for key in vars(network.MPI):
            mpi.pop(key, None)
        mpi.update(kept)
    return script


def main() -> None:
    """Record, or play."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--play", action="store_true")
    parser.add_argument("paths", nargs="+")
    options = parser.parse_args()
    if not options.play:
        record(Path(options.paths[0]), options.paths[1:])
        return
    for path in options.paths:
        began = time.perf_counter()
        found = play(Recording.load(Path(path)))
        print(found or f"ok {Path(path).stem}", f"{time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
    main()
