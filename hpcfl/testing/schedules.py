"""Jobs in real time under faults, all drawn by a seed and played over `hpcfl.testing.network`.

    python -m hpcfl.testing.schedules --seeds 0:1000

plays so many, and prints one JSON line last: the seeds, how many schedules and events that were, seconds, faults by
kind, what was broken by which seed, and the commit; `--record` appends it to a file. What counts in a round is computed
once more in simulated time. Sums, and personal state in the end, have to be the same, to the bit where MPI forms no
sums on their way.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import redirect_stderr, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache
from io import StringIO
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch

from hpcfl.base.errors import Diverged, Interrupted, RunError, Stopped, ended
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats
from hpcfl.config import from_table
from hpcfl.engine.iterated import iterate
from hpcfl.engine.job import Job, Progress
from hpcfl.engine.loop import close, step
from hpcfl.engine.profile import Phases
from hpcfl.engine.record import Record
from hpcfl.engine.simulated import visit
from hpcfl.engine.watchdog import LeftBehind, Watchdog
from hpcfl.mpi.channel import connect
from hpcfl.mpi.placement import TWO_LEVEL
from hpcfl.mpi.transport import arrays
from hpcfl.realtime import start
from hpcfl.realtime.lanes import GRACE_SECONDS
from hpcfl.realtime.questions import SAVE_SECONDS
from hpcfl.schedule.plan import Arrivals, Plan
from hpcfl.sums.message import ExactSums, Message, Sums
from hpcfl.sums.packing import APART_BYTES
from hpcfl.testing.network import Comm, Gone, Network, Violation, in_place
from hpcfl.testing.quick import FURTHER, QUICK

ROUNDS = 6
QUICK_SHARE = 0.8  # of schedules in which clients learn nothing
MOST_SECONDS = 3000.0  # of the network's clock: all waits of a job that is over end before, and 1,000 void attempts
LATE = 0.15  # seconds after a deadline: ranks of the round before are given time to be free, and leaders to reply
PERSONAL = {"momentum": 0.5, "persist_optimizer": True}
METHODS: tuple[dict[str, Any], ...] = (
    {"name": "salf", "batch": 16},
    {"name": "salf", "batch": 16, "missing": "none", **PERSONAL},
    {"name": "fedavg", "batch": 64},
    {"name": "fedavg", "batch": 64, **PERSONAL},
)
CLOSES: tuple[dict[str, Any], ...] = (
    {"close": "deadline", "deadline": 0.1, "min_clients": 1},
    {"close": "quorum", "quorum": 3, "grace": 0.02},
    {"close": "first", "first": 3},
    {"close": "all"},
)
ARRIVALS: tuple[dict[str, Any], ...] = (
    {"buffer": 3},
    {"buffer": 2, "max_staleness": 1},
    {"buffer": 2, "max_staleness": 1, "stop_stale": True},
    {"buffer": 2, "concurrency": 2, "dispatch": "reporter"},
    {"deadline": 0.1, "once_per_version": True},
    {"buffer": 7, "every_client": True, "max_staleness": 0},
    {"buffer": 3, "max_seconds": 0.1},
)
SCHEDULERS: tuple[dict[str, Any], ...] = (
    {
        "participation": {"close": "arrivals", "dispatch": "fedcompass"},
        "scheduler": {"least_steps": 2, "patience": 1.2},
        "staleness": {"weight": "polynomial", "divisor": "clients"},
    },
    {
        "participation": {"close": "arrivals", "dispatch": "fedqueue"},
        "scheduler": {"least_steps": 2, "period": 0.2, "margin": 0.02, "allowance": 0.1},
        "staleness": {"weight": "harmonic", "divisor": "weights"},
        "queue": {"model": "lognormal", "mean": 0.05, "within": 0.9},
    },
)
WIDTHS: tuple[Any, ...] = (1, 1, 2, "node", "all", "two-level", "two-level")
SAVING = 10**7  # schedules of seeds from here on have checkpoints, and ranks that never come
WIDER = 8 * 10**7  # and from here on some invite a few clients, who come and go, and whole visits of many layers
LARGE = 9 * 10**7  # and from here on tensors of some travel by themselves, not in the heads of frames
LATEST = 95 * 10**6  # and from here on some have further sums, and ranks never come, or too late, without ULFM too


@dataclass(frozen=True)
class Fault:
    """At some second a rank is suspended ("freeze") or cut off ("cut") for so many seconds, or dies ("kill").

    Or its links are so many times slower from then on ("slow"), or the job starts without it ("absent").
    """

    when: float
    kind: str
    rank: int
    much: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """A job and what befalls it; `network` is what `Network` is given beside ranks and seed."""

    seed: int
    config: str
    hosts: tuple[str, ...]
    network: dict[str, Any] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    rounds: int = ROUNDS
    quick: bool = False
    """Whether clients learn nothing, see `hpcfl.testing.quick`."""
    stop: float = inf
    """From this second on it is wished that the run stops."""
    saves: int = 0
    """After every so many rounds there is a checkpoint; 0: there is none."""
    writes: float = inf
    """Seconds that a rank takes to write its part of one; inf: it sends it to the server."""
    apart: int = APART_BYTES
    """Tensors of so many bytes travel by themselves."""
    further: bool = False
    """Whether there are further sums over the messages that counted."""

    @property
    def absent(self) -> dict[int, str]:
        """Ranks that the job starts without, and why."""
        return {fault.rank: "not there within 1 s" for fault in self.faults if fault.kind == "absent"}

    @property
    def far(self) -> bool:
        """Whether a word there and back may take longer than lanes are given to become free after a closing."""
        most = self.network.get("latency", 0.0) * (1 + self.network.get("jitter", 0.0))
        return bool(2 * most > GRACE_SECONDS)

    @property
    def stalls(self) -> bool:
        """Whether a rank may take longer to write than is waited for."""
        return SAVE_SECONDS < self.writes < inf

    @property
    def smooth(self) -> bool:
        """Whether nothing befalls any rank, and all are in time."""
        return not (self.faults or self.far or self.stalls)

    @property
    def dying(self) -> dict[int, float]:
        """Ranks that die, and when at the latest."""
        return {fault.rank: fault.when for fault in self.faults if fault.kind in ("kill", "absent")}

    @property
    def told(self) -> dict[str, Any]:
        given = {"hosts": self.hosts, "faults": self.faults, "quick": self.quick, "stop": self.stop}
        given |= {"saves": self.saves, "writes": self.writes, "apart": self.apart}
        given["further"] = self.further
        return {**json.loads(self.config), **given, **self.network}


@dataclass
class Played:
    """What has become of a schedule: `broken` is "" where nothing was."""

    events: int = 0
    trace: str = ""
    seconds: float = 0.0
    broken: str = ""
    lost: list[str] = field(default_factory=list)
    said: str = ""
    ended: str = ""
    """Why the run was given up."""
    rejected: int = 0
    """Visits, or layers of them."""
    rehosted: set[int] = field(default_factory=set)
    visits: Counter[str] = field(default_factory=Counter)
    sent: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Bytes from one rank to another in messages."""
    wire: Counter[tuple[int, int]] = field(default_factory=Counter)
    """The same when the last round was over."""
    stopped: tuple[Progress, Reference] | None = None
    """With what it goes on after a wish to stop."""
    figures: Floats = field(default_factory=lambda: np.zeros((5, 1)))
    """What the server had recorded of the ranks by then, `Record.by_rank`, summed over rounds."""
    gradients: list[int] = field(default_factory=list)
    """The most of a client, by round."""
    profiles: dict[int, np.ndarray] = field(default_factory=dict)
    """Where ranks' time went."""
    codes: dict[int, int] = field(default_factory=dict)
    """By which exit codes ranks have ended."""
    plans: list[Plan] = field(default_factory=list)
    """Of its rounds, as they came to be."""
    shared: dict[str, torch.Tensor] = field(default_factory=dict)
    """What the server has in the end."""
    states: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    """What its clients have then."""


def drawn(seed: int, faults: bool = True) -> Schedule:
    """Return the schedule of a seed."""
    rng = keyed(seed, "schedule")

    def one(of: Sequence[Any]) -> Any:
        return of[int(rng.integers(len(of)))]

    ranks = int(rng.integers(3, 8))
    hosts = tuple(f"h{rank * int(rng.integers(1, 4)) // ranks}" for rank in range(ranks))
    method, closing, width = dict(one(METHODS)), dict(one(CLOSES)), one(WIDTHS)
    if method["name"] == "salf" and closing["close"] == "first":
        closing = dict(CLOSES[0])
    fails = bool(rng.random() < 0.5)
    config = {
        **{"clock": "wall", "clients": 7, "seed": 3, "rounds": 10**6, "threads": 1, "lane_width": width},
        **{"data": {"name": "digits"}, "model": {"name": "mlp", "hidden": [4]}, "algorithm": method},
        **{"participation": closing, "speed": {"model": "exponential", "rate": float(one([5.0, 20.0, 100.0]))}},
    }
    if not fails and rng.random() < 0.5:
        config["lost_after"] = 2.0
    network = {
        **{"latency": float(10 ** rng.uniform(-5, -2.5)), "bandwidth": float(10 ** rng.uniform(6, 10))},
        **{"jitter": float(one([0.0, 1.0, 10.0])), "failures": fails, "eager": int(one([0, 4096]))},
    }
    happens = []
    for _ in range(int(rng.integers(0, 4)) if faults else 0):
        when, rank = float(rng.uniform(0, 1)), int(rng.integers(1, ranks))
        kind = one(["freeze", "freeze", "cut", *(["kill"] if fails or "lost_after" in config else [])])
        if kind == "kill" and not fails:  # a rank that has never been heard of may take its time to start
            when = max(when, 0.2)
        happens.append(Fault(when, kind, rank, float(10 ** rng.uniform(-3, 0))))
    if rng.random() < 0.2:
        happens.append(Fault(float(rng.uniform(0, 1)), "slow", int(rng.integers(1, ranks)), 10 ** rng.uniform(0, 3)))
    if "lost_after" in config and rng.random() < 0.5:
        config["start_within"] = 1.0
    quick = bool(rng.random() < QUICK_SHARE)
    if width == "two-level" and rng.random() < 0.5:
        config["fan_out"] = 2  # then a third node's leader is below another one
    if width in (1, "two-level") and rng.random() < 0.2:
        config["participation"] = {"close": "arrivals", **one(ARRIVALS)}
    if fails and width != "two-level" and rng.random() < 0.5:
        config["lost_clients"] = "rehost"
        if config["participation"]["close"] == "arrivals":  # a client may go on between two visits of one round
            config["algorithm"] = {key: method[key] for key in method.keys() - PERSONAL.keys()}
    if fails and rng.random() < 0.2:
        config["lost_after"] = 2.0
    if width == 1 and config["participation"]["close"] != "arrivals" and rng.random() < 0.2:
        config["guard"] = {"max_norm": 1.5}
    stop = float(rng.uniform(0, 1)) if rng.random() < 0.1 else inf
    rounds = config["rounds"] = (1 + quick) * ROUNDS
    saves, writes = 0, inf
    if seed >= SAVING:
        longest = 0.6 if "lost_after" in config else 1.0  # else who writes longer than is waited for is lost
        saves, writes = int(one([1, 2, 5])), float(one([inf, 10 ** rng.uniform(-4, longest)]))
        if faults and fails and rng.random() < 0.2:
            happens = [Fault(0.0, "absent", int(rng.integers(1, ranks))), *happens]
            config |= {"start_within": 1.0, "min_ranks": 2}
        rules = config["participation"]
        if rules["close"] == "deadline" and method["name"] == "fedavg" and width == 1 and rng.random() < 0.5:
            config["algorithm"] = {**method, "steps": 8, "epochs": 0}
            config["participation"] = {**rules, "partial": "steps", "snapshot": 0 if quick else int(one([0, 1]))}
        if rules["close"] == "arrivals" and rng.random() < 0.4:  # a rank for each client
            own = PERSONAL if rng.random() < 0.5 else {}
            config |= {**one(SCHEDULERS), "clients": ranks - 1, "lost_clients": "drop"}
            config["algorithm"] = {"name": "fedavg", "batch": 16, "steps": 9, "epochs": 0, **own}
    rules = config["participation"]
    if seed >= WIDER and rules["close"] != "arrivals":
        if method["name"] == "salf" and rules["close"] != "all" and rng.random() < 0.5:
            rules["partial"] = "discard"
        if rng.random() < 0.3:
            rules |= {"invite": "uniform", "size": int(rng.integers(3, 7))}
        if rng.random() < 0.3:
            config["availability"] = {"model": "on-off", "on": 0.4, "off": 0.2, "leaves": "stays"}
    apart = 512 if seed >= LARGE and rng.random() < 0.5 else APART_BYTES
    further = seed >= LATEST and quick and width in (1, "two-level") and bool(rng.random() < 0.5)
    if seed >= LATEST and faults and not fails and rng.random() < 0.4:
        kind, rank, much = one(["absent", "freeze"]), int(rng.integers(1, ranks)), float(rng.uniform(0.5, 4))
        happens = [Fault(0.0 if kind == "absent" else float(rng.uniform(0, 0.02)), kind, rank, much), *happens]
        config |= {"start_within": 1.0, "min_ranks": 2}
    given = tuple(happens), rounds, quick, stop, saves, writes, apart, further
    return Schedule(seed, json.dumps(config), hosts, network, *given)


@cache
def _data(clients: int, seed: int, data: Any) -> Any:
    return data.federate(clients, seed, None)


@cache
def _job(config: str, ranks: int, quick: bool, further: bool) -> Job:
    read = from_table(json.loads(config))
    job = Job.of(read, None, ranks, federation=_data(read.clients, read.seed, read.data))
    if quick:
        kinds = FURTHER if further else QUICK
        job = replace(job, algorithm=kinds[job.algorithm.name](**json.loads(config)["algorithm"]))
    return job


def fresh(schedule: Schedule) -> Job:
    """Return a job of which nothing has happened yet; data and model are made once."""
    made = _job(schedule.config, len(schedule.hosts), schedule.quick, schedule.further)
    task = copy(made.task)
    task.oracle_calls = made.task.oracle_calls.copy()
    return replace(made, task=task)


class Disk:
    """What the run folder is to ranks: checkpoints' personal state in memory, which takes its time to be written."""

    network: Network

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._written: dict[int, dict[int, dict[str, np.ndarray]]] = defaultdict(dict)  # by ranks, after so many rounds
        self._saved: dict[Path | None, tuple[dict[int, dict[str, np.ndarray]], dict[int, int]]] = {}

    def begun(self, work: Callable[[], Any]) -> Future[Any]:
        """Begin to write; what is written is what is there in the end."""
        future, rank = Future[Any](), self.network.current

        def over() -> None:
            if rank not in self.network.dead:
                self.network.note("written", rank)
                future.set_result(work())

        self.network.at(self.network.now + self.seconds, over)
        return future

    def write(self, round: int, states: Any) -> None:
        self._written[round] |= {client: arrays(state) for client, state in states.items()}

    def save(self, rounds: Any, now: Progress) -> dict[int, dict[str, np.ndarray]]:
        """Make a checkpoint, and return what it has of all clients but those of whom it has what an earlier one had."""
        parts = [
            (int(ids[0]), {name: value[0].copy() for name, value in own.items()}) for ids, own in rounds.personal(now)
        ]
        written = self._written[now.round]
        states = {**dict(parts), **{client: written[client] for client in rounds.wrote}}
        known = {client: rounds.stale.get(client, now.round) for client in states}
        if len(parts) + len(rounds.wrote) != len(states) or states.keys() != set(range(rounds.job.config.clients)):
            raise Violation(f"a checkpoint has clients {sorted([*dict(parts), *rounds.wrote])}")
        if {client: rank for client, rank in enumerate(rounds.homes.tolist()) if rank} != rounds.wrote:
            raise Violation(f"ranks {rounds.homes} have clients, and {rounds.wrote} have written")
        now.saved = Path(f"/nowhere/round-{now.round}")
        self._saved[now.saved] = states, known
        return {client: states[client] for client in states.keys() - rounds.stale.keys()}

    def restore(self, path: Path | None, chunk: Any, state: dict[str, torch.Tensor], client: int | None = None) -> None:
        """Put the state of a chunk's clients, or of one of them, in the place of what is there."""
        states, _ = self._saved[path]
        for row, each in enumerate(chunk.clients.tolist()):
            for name, own in states[each].items() if client in (None, each) else ():
                state[name][row] = torch.as_tensor(own)

    def load_personal(
        self, path: Path, clients: Iterable[int], check: bool = False
    ) -> dict[int, dict[str, np.ndarray]]:
        states, _ = self._saved[path]
        return {client: states[client] for client in clients}

    def personal_rounds(self, path: Path, clients: Iterable[int]) -> dict[int, int]:
        _, known = self._saved[path]
        return {client: known[client] for client in clients}


class Reference:
    """What counts in each round, computed once more in simulated time."""

    stops: Callable[[], str]
    free = False
    """Whether all ranks have to be: nothing has befallen any, and the last round was over on all."""

    def __init__(self, schedule: Schedule) -> None:
        self.job, self.schedule, self.disk = fresh(schedule), schedule, Disk(schedule.writes)
        self.now = self.job.begin(0)
        self.now.personal = {chunk.number: self.job.enter(chunk) for chunk in self.job.chunks}
        self.visits: set[tuple[int, int, int]] = set()  # that have counted, where arrivals end rounds
        self.at_work: set[int] = set()  # when the last one of these was over
        self.exact = json.loads(schedule.config)["lane_width"] in (1, "two-level")

    def begin(self, stops: Callable[[], str], saved: Path | None) -> None:
        """Begin, or go on from a checkpoint, until `stops` says why not."""
        self.stops, self.free = stops, False
        if saved is not None:
            for chunk in self.job.chunks:
                self.disk.restore(saved, chunk, self.now.personal[chunk.number])

    def check(self, plan: Plan, sums: Sums, shared: dict[str, torch.Tensor], limits: Any) -> None:
        """Raise Violation where the sums of a round are not those of the visits that counted."""
        record, kept = Record.open(), list[Message]()
        if limits is not None:
            record.limits, record.norms = limits, np.zeros((self.job.config.clients, len(limits)))
        wanted, self.now.shared, self.now.served[plan.round] = ExactSums(self.job.layout), shared, shared
        for part in plan.parts():
            visit(self.job, part, self.job.chunks, self.now, wanted, kept, record)
        if plan.arrivals is not None:
            self._check_arrivals(plan, plan.arrivals)
        for name in wanted:
            weight, other = sums.weight(name), wanted.weight(name)
            if not np.isclose(weight, other, rtol=0 if self.exact else 1e-6):
                raise Violation(f"round {plan.round}: weight {weight:g} of {name}, expected {other:g}")
            if weight and not self._alike(sums.total(name), wanted.total(name)):
                raise Violation(f"round {plan.round}: another sum of {name}")
        if self.job.iterated is not None:
            found = iterate(self.job.iterated, shared, kept, lambda responses: responses)
            if found.keys() != sums.iterated.keys() or any(
                not found[name].equal(sums.iterated[name]) for name in found
            ):
                raise Violation(f"round {plan.round}: other further sums")

    def _check_arrivals(self, plan: Plan, known: Arrivals) -> None:
        """Raise Violation where a visit counts twice, is too old, or counts though enough had come."""
        rules, came = self.job.config.participation, zip(plan.cohort, known.versions, known.numbers)
        for client, version, number in ((int(c), int(v), int(n)) for c, v, n in came):
            if (client, version, number) in self.visits:
                raise Violation(f"round {plan.round}: visit {number} of client {client} of version {version} again")
            if plan.round - version > (inf if rules.max_staleness is None else rules.max_staleness):
                raise Violation(f"round {plan.round}: client {client} began with version {version}")
            self.visits.add((client, version, number))
        short = not self.stops() and len(plan.cohort) < (rules.buffer or 0)
        if rules.buffer and not rules.every_client and (short or len(plan.cohort) > rules.buffer):
            raise Violation(f"round {plan.round}: {len(plan.cohort)} visits count, expected {rules.buffer}")
        before, self.at_work = self.at_work, set(known.waiting.tolist())
        if left := before - self.at_work - {*plan.cohort.tolist()} - plan.ended.keys():
            raise Violation(f"round {plan.round}: nothing has become of the visits of clients {sorted(left)}")
        if len(self.at_work) < len(known.waiting):
            raise Violation(f"round {plan.round}: clients are at work twice: {known.waiting}")

    def restart(self, client: int, saved: Path | None) -> None:
        """Let a client go on, at another rank, with the state of a checkpoint, or that before its first visit."""
        chunk = next(each for each in self.job.chunks if client in each.clients)
        for name, value in self.job.algorithm.init_client(self.job.task, client).items():
            self.now.personal[chunk.number][name][int(chunk.places(np.array([client]))[0])] = value
        if saved is not None:
            self.disk.restore(saved, chunk, self.now.personal[chunk.number], client)

    def check_personal(self, states: dict[int, dict[str, np.ndarray]]) -> None:
        """Raise Violation where clients have other state than what counted has made of it."""
        for chunk in self.job.chunks:
            for row, client in enumerate(chunk.clients.tolist()):
                for name, value in self.now.personal[chunk.number].items():
                    if client in states and not np.array_equal(states[client][name], value[row].numpy()):
                        raise Violation(f"client {client} has another {name} than what counted has made of it")

    def _alike(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        return torch.equal(one, other) if self.exact else torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def play(schedule: Schedule) -> Played:
    """Play a schedule to its end; a run that was stopped goes on from its last checkpoint, and nothing befalls it."""
    found = play_once(schedule)
    if found.stopped is None or found.broken:
        return found
    last = play_once(replace(schedule, faults=(), stop=inf), found.stopped)
    last.trace = hashlib.sha256((found.trace + last.trace).encode()).hexdigest()
    last.events, last.seconds = last.events + found.events, last.seconds + found.seconds
    last.lost, last.said, last.visits = found.lost + last.lost, found.said + last.said, found.visits + last.visits
    return last


def play_once(schedule: Schedule, begins: tuple[Progress, Reference] | None = None) -> Played:
    """Play a schedule until its run is over or stopped; `begins`: what an earlier one has `stopped` with."""
    network, said = Network(len(schedule.hosts), schedule.seed, **schedule.network), StringIO()
    found, over, over_at = Played(sent=network.sent), set[int](), list[float]()
    absent, apart, reference = schedule.absent, schedule.writes < inf, begins[1] if begins else Reference(schedule)
    disk = reference.disk
    disk.network = network
    stop = SimpleNamespace(requested=lambda: "stop" * (network.now >= schedule.stop))

    def exits(stopped: Stopped | None) -> None:
        found.codes[network.current] = 0 if stopped is None else stopped.code

    def drop(stopped: Stopped | None, alone: bool = False) -> NoReturn:
        exits(stopped)
        raise Gone

    def end_job(comm: Any, code: int) -> NoReturn:
        found.codes[network.current] = code
        raise Gone

    def connected(comm: Any, job: Job) -> Any:
        """Make the lanes while all ranks are there, if some will be absent."""
        rules, width = job.config.participation, job.config.lane_width
        return connect(comm, width, schedule.hosts, network.failures, rules.by_arrivals) if absent else None

    def client(rank: int) -> None:
        job = fresh(schedule)
        comm: Any = Comm(network, "world", range(network.ranks), rank)
        lanes = connected(comm, job)
        if rank in absent:
            network.kill(rank)
            return

        def rest() -> None:
            if over_at and network.now > over_at[0] + leaving:
                raise LeftBehind("diverged" if found.ended else "stopped" if stop.requested() else "done")

        given = Phases(True), lanes, absent, disk.write if apart else None
        now = job.begin(rank)
        if begins:
            for chunk in job.hosted(rank):
                disk.restore(begins[0].saved, chunk, now.personal[chunk.number])
        exits(start.serve(job, comm, schedule.hosts, now, rest, *given))

    def server() -> None:
        job = fresh(schedule)
        comm: Any = Comm(network, "world", range(network.ranks), 0)
        leads, lanes = job.config.lane_width == TWO_LEVEL, connected(comm, job)
        now = begins[0] if begins else job.begin(0)
        reference.begin(stop.requested, now.saved)
        # what others feel: over a slow link a leader's sums may come too late for what it has told of
        befalls = schedule.far or schedule.stalls or any(fault.kind != "slow" or leads for fault in schedule.faults)
        most = inf if befalls else LATE + 100 * network.latency
        given: Any = Path("/nowhere"), stop, now, Phases(True), lanes, absent, apart
        rounds = start.lead(job, comm, schedule.hosts, *given)
        try:
            while now.round < schedule.rounds and not stop.requested():
                _round(job, rounds, now, reference, found, most)
                if schedule.saves and now.round % schedule.saves == 0 and job.personal_bytes:
                    reference.check_personal(disk.save(rounds, now))
        except Interrupted:
            pass
        except RunError as error:
            if not rounds.lanes.lost and "void attempts" not in str(error):
                raise Violation(f"nobody is lost, and yet: {error}") from None
            found.ended = str(error)
        _restart(rounds, reference, found, now)  # in a round that is none
        rounds.lanes.wait_for_all(30.0)
        states = found.states = disk.save(rounds, now)
        found.shared = now.shared
        if not (found.ended and job.config.participation.by_arrivals):  # else some of a round that is none has counted
            reference.check_personal(states)
        found.profiles = rounds.profiles() if schedule.saves else {}
        if schedule.saves and found.profiles.keys() != set(range(network.ranks)) and schedule.smooth:
            raise Violation("not all ranks tell where their time went")
        over_at.append(network.now)
        if schedule.saves and now.round < schedule.rounds and not found.ended:
            found.stopped = now, reference
        how = ended(now.round, Diverged.code if found.ended else Stopped.code if stop.requested() else 0)
        with suppress(Gone):
            start.dismiss(rounds, comm, now.round, how)
            exits(how)
        found.lost = [*map(str, rounds.lanes.lost.values())]
        told = {rank for rank, when in schedule.dying.items() if when + 1.0 < network.now}
        if network.failures and (unknown := told - rounds.lanes.lost.keys()):
            raise Violation(f"ranks {sorted(unknown)} are dead, and nobody says so")

    def run(rank: int) -> None:
        with suppress(Gone):
            client(rank) if rank else server()
        over.add(rank)

    leaving = Watchdog(Path("/nowhere"), json.loads(schedule.config).get("lost_after")).leaving
    needed = set(range(network.ranks)) - schedule.dying.keys()
    began = time.perf_counter()
    own: dict[str, Any] = {"begun": disk.begun, "store": disk, "_drop": drop, "end_job": end_job}
    with redirect_stderr(said), in_place(network, **own, APART_BYTES=schedule.apart):
        for fault in schedule.faults:
            network.at(fault.when, lambda fault=fault: _befall(network, fault))  # type: ignore[misc]
        for rank in range(network.ranks):
            network.spawn(rank, lambda rank=rank: run(rank))  # type: ignore[misc]
        try:
            network.run(lambda: over >= needed, MOST_SECONDS)
        except Violation as violation:
            found.broken = str(violation)
        except RunError as error:  # too few ranks were there in time, and the job ends
            short = bool(schedule.faults) and str(error).startswith("min_ranks: ")
            found.ended, found.broken = (str(error), "") if short else ("", f"RunError: {error}")
        except Exception as error:
            found.broken = f"{type(error).__name__}: {error}"
    found.events, found.trace, found.said = network.events, network.trace.hexdigest(), said.getvalue()
    words = ["void attempts"]
    if schedule.far or schedule.stalls:  # leaders may seem to be silent
        words.append(" leads the node of ")
    if schedule.stalls:
        words += [" has not been heard of since ", " is back, after "]
    odd = [line for line in found.said.splitlines() if not any(word in line for word in words)]
    if odd and not schedule.faults and not found.broken:
        found.broken = f"nothing has befallen it, and yet: {odd[0]}"
    alone = json.loads(schedule.config)["lane_width"] in (1, "two-level")  # else ranks are lost with their lane
    for rank in set(range(1, network.ranks)) - {fault.rank for fault in schedule.faults} if alone else ():
        if f"rank {rank}: the run " in found.said and not found.broken:
            found.broken = f"nothing has befallen rank {rank}, and yet it was taken for dead"
    found.seconds = time.perf_counter() - began
    return found


def _round(job: Job, rounds: Any, now: Progress, reference: Reference, found: Played, most: float) -> None:
    record = Record.open(rounds.phases)
    limits = job.guard.limits(now.norms)
    plan, record.sums = rounds.exchange(now, record)
    found.plans.append(plan)
    _check_homes(rounds, job)
    _restart(rounds, reference, found, now)
    if plan.arrivals is None:
        _check_times(job, plan, reference, most)
        _check_invited(job, plan, reference)
    found.rejected += len(record.rejected)
    found.gradients.append(int(record.gradients))
    found.visits["invited"] += len(plan.cohort)
    found.visits["counted"] += int((plan.depth <= plan.layers).sum())
    reference.check(plan, record.sums, now.shared, limits)
    step(job, now, record, plan)
    now.round += 1
    close(job, rounds, now, record, plan, "")
    found.figures, found.wire = found.figures + record.by_rank, found.sent.copy()
    if now.round % 3 == 0:
        rounds.scores(now)


def _restart(rounds: Any, reference: Reference, found: Played, now: Progress) -> None:
    """Let clients go on with earlier state whose ranks are lost."""
    again = {client for kind, client, _ in rounds.lanes.events if kind == "rehosted"}
    for client in again:
        reference.restart(client, now.saved)
    found.rehosted |= again
    rounds.lanes.events.clear()


def _check_homes(rounds: Any, job: Job) -> None:
    """Raise Violation where a client lives nowhere, or twice."""
    homes = Counter(client for lane in rounds.lanes.all for client in lane.hosted.tolist())
    homes.update(rounds.orphans.clients.tolist())
    if homes != Counter(range(job.config.clients)):
        raise Violation(f"clients live at so many places: {dict(sorted(homes.items()))}")


def _check_times(job: Job, plan: Plan, reference: Reference, most: float) -> None:
    """Raise Violation where a round has lasted too long or not long enough, or a visit."""
    attempt = job.planner.attempt(plan.round, plan.repeats, cohort=plan.cohort)
    closing, drawn = attempt.closing(plan.seconds), job.planner.times.timeline(attempt).arrives[:, 0]
    if plan.repeats == 0 and plan.duration > closing + most:
        raise Violation(f"round {plan.round} lasted {plan.duration:.3f} s, expected at most {closing + most:.3f}")
    rules, counted = job.config.participation, int((plan.depth <= plan.layers).sum())
    closes_early = rules.close == "first" and not job.algorithm.invites_all(plan.round)
    if closes_early and job.planner.whole and reference.exact and counted > (rules.first or 0):
        raise Violation(f"round {plan.round}: {counted} visits count, expected the first {rules.first}")
    # once all are there, no grace is waited for; a visit that stops by the clock is there in good time
    whole = plan.seconds[np.isfinite(plan.seconds)] if rules.by_steps else plan.seconds
    least = min(closing, float(whole.max(initial=0.0)))
    if most < inf and plan.duration < least:
        raise Violation(f"round {plan.round} was over after {plan.duration:.3f} s, expected at least {least:.3f}")
    odd = np.isfinite(plan.seconds) & ((plan.seconds < drawn) | (plan.seconds > plan.duration))
    if odd.any():
        took, least = (float(values[odd][0]) for values in (plan.seconds, drawn))
        raise Violation(f"round {plan.round}: a visit took {took:.3f} s, expected {least:.3f} to {plan.duration:.3f}")


def _check_invited(job: Job, plan: Plan, reference: Reference) -> None:
    """Raise Violation where somebody was not invited whose rank was free, unless clients come and go."""
    if job.planner.presence is not None:
        return
    drawn = job.planner.attempt(plan.round, plan.repeats).cohort[: None if job.algorithm.invites(plan.round) else 0]
    if reference.free and plan.repeats == 0 and (left := np.setdiff1d(drawn, plan.cohort)).size:
        raise Violation(f"round {plan.round}: all ranks were free, and clients {left} were not invited")
    reference.free = reference.schedule.smooth and bool((plan.depth == 1).all())


def _befall(network: Network, fault: Fault) -> None:
    if fault.rank in network.dead or fault.kind == "absent":
        return
    if fault.kind == "kill":
        network.kill(fault.rank)
    else:
        getattr(network, fault.kind)(fault.rank, fault.much)


def main() -> None:
    """Play the schedules of some seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:100", help="From the first up to before the last.")
    parser.add_argument("--seconds", type=float, default=1e9, help="Begin no more after so many.")
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--record", type=Path, help="A file of such lines.")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    first, last = map(int, options.seeds.split(":"))
    torch.set_num_threads(1)
    began, events, broken, played, faults = time.perf_counter(), 0, {}, 0, Counter[str]()
    commit = _commit()
    for seed in range(first, last):
        if time.perf_counter() - began > options.seconds:
            break
        schedule = drawn(seed, not options.no_faults)
        found = play(schedule)
        events, played = events + found.events, played + 1
        faults.update(fault.kind for fault in schedule.faults)
        if found.broken:
            broken[seed] = found.broken
        if options.verbose or found.broken:
            print(seed, found.broken or "ok", found.events, round(found.seconds, 2), schedule.told, file=sys.stderr)
            print(found.said, file=sys.stderr, end="")
    line = {
        **{"seeds": [first, first + played], "schedules": played, "events": events, "broken": broken},
        **{"faults": dict(sorted(faults.items())), "seconds": round(time.perf_counter() - began, 1)},
        **{"commit": commit},
    }
    print(json.dumps(line))
    if options.record:
        with options.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _commit() -> str:
    """Return the commit that is played, with a + where the working tree has changed since; "" outside of git."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


if __name__ == "__main__":
    main()
