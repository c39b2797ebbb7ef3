"""What is recorded of each round, the columns of a run, the server's recorder that writes them, and what it says.

That is a bar on a terminal and in a notebook, and a line per evaluation in a log. Only the server speaks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hpcfl import store
from hpcfl.base import notebook
from hpcfl.base.errors import UsageError, listed
from hpcfl.base.terminal import install, plain, raw, say
from hpcfl.base.types import Floats, Ints
from hpcfl.data import Federation
from hpcfl.engine.job import Job
from hpcfl.engine.profile import Phases
from hpcfl.engine.stopping import decode, encode
from hpcfl.mpi.transport import Transport
from hpcfl.schedule.oracle import Spent
from hpcfl.schedule.plan import Fate, Plan
from hpcfl.store import Column, Fact
from hpcfl.store.columns import NAMES
from hpcfl.sums.guard import Rejection
from hpcfl.sums.message import Sums

MOST_LOGGED = 1000  # rejections that are events too: the log has room for ten times as many of all kinds
PER_RANK = ("visits", "compute_seconds", "wait_seconds", "wire_bytes_in", "wire_bytes_out")
SAVING = ("checkpoint_wait_seconds", "checkpoint_seconds", "checkpoint_bytes")
WALL = ("wall_seconds", "server_seconds", "compute_seconds", "wait_seconds", *SAVING)
"""Columns that differ from run to run."""
PHASE = {"compute_seconds": "compute", "wait_seconds": "waiting", "server_seconds": "server"}

FATES = tuple(fate.name.lower() for fate in Fate)
COLUMNS = (
    Column("loss", (), "float64", "mean training loss over the visits that counted"),
    Column("accuracy", (), "float64", "accuracy of the shared model on the global test set"),
    Column("test_loss", (), "float64", "loss of the shared model on the global test set"),
    Column("objective", (), "float64", "mean loss over all training samples, the server's included, penalty included"),
    Column("client_accuracy", ("client",), "float64", "accuracy of the client's model on its own test part"),
    Column("client_test_loss", ("client",), "float64", "loss of the client's model on its own test part"),
    Column("mean_client_accuracy", (), "float64", "mean of client_accuracy over the clients of which it is known"),
    Column("mean_client_test_loss", (), "float64", "mean of client_test_loss over the clients of which it is known"),
    Column("cohort", ("client",), "bool", "client was invited, or at work where arrivals end rounds"),
    Column("arrived", ("client",), "bool", "something of the client's visit counted"),
    Column("rejected", ("client",), "bool", "the visit, or layers of it, did not count: not finite or too large"),
    Column("fate", ("client",), "int8", "what became of the client's visit, -1 if it was at none", "", FATES),
    Column("version", ("client",), "int64", "round whose state the client was served, -1 if not invited"),
    Column("depth", ("client",), "int64", "first layer that counted, L + 1 for none, -1 if not invited"),
    Column("blocks", ("client",), "int64", "layers of the client that counted"),
    Column("visit_seconds", ("client",), "float64", "simulated seconds a whole visit takes, inf if it never ends", "s"),
    Column("layer_weight", ("layer",), "float64", "sum of weights over the clients that reached the layer"),
    Column("stage", (), "int64", "stage of doubling participant sets"),
    Column("void", (), "bool", "no visit counted"),
    Column("repeats", (), "int64", "void attempts before this round, participation.min_clients not being met"),
    Column("deadline", (), "float64", "seconds until the round closed at the latest", "s"),
    Column("round_seconds", (), "float64", "simulated seconds of this round", "s"),
    Column("sim_seconds", (), "float64", "simulated seconds since the start", "s"),
    Column("wall_seconds", (), "float64", "wall-clock seconds since the start", "s"),
    Column("server_seconds", (), "float64", "wall-clock seconds of the server's step", "s"),
    Column("checkpoint_wait_seconds", (), "float64", "seconds waited for checkpoints since the row before", "s"),
    Column("checkpoint_seconds", (), "float64", "seconds that a checkpoint took, visible since the row before", "s"),
    Column("checkpoint_bytes", (), "int64", "bytes of that checkpoint; 0 where there was none", "bytes"),
    Column("message_bytes", (), "int64", "bytes of the layers that counted, as the method sends them", "bytes"),
    Column("visits", ("rank",), "int64", "visits computed"),
    Column("compute_seconds", ("rank",), "float64", "wall-clock seconds of computing", "s"),
    Column("wait_seconds", ("rank",), "float64", "wall-clock seconds of sending and waiting", "s"),
    Column("wire_bytes_in", ("rank",), "int64", "bytes received by MPI calls, evaluation excluded", "bytes"),
    Column("wire_bytes_out", ("rank",), "int64", "bytes sent by MPI calls, evaluation excluded", "bytes"),
)
ARRIVALS = [
    Column("arrival_client", ("arrival",), "int64", "whose visit arrived, in this order; -1: none did"),
    Column("arrival_version", ("arrival",), "int64", "round whose state it began with"),
    Column("arrival_staleness", ("arrival",), "int64", "the server's steps since then"),
    Column("arrival_number", ("arrival",), "int64", "visits that the client had begun before with the same state"),
    Column("arrival_depth", ("arrival",), "int64", "first layer that counted"),
    Column("arrival_visit_seconds", ("arrival",), "float64", "seconds that the whole visit takes", "s"),
    Column("arrival_seconds", ("arrival",), "float64", "when it arrived, since the start of the run", "s"),
]
ARRIVAL_STEPS = Column("arrival_steps", ("arrival",), "int64", "local steps that counted")
ARRIVAL_RATE = Column("arrival_rate", ("arrival",), "float64", "by what the visit's step size was multiplied")
ORACLE = (
    Column("gradients", (), "int64", "gradients of single samples, the most that a visit that counted has computed"),
    Column("server_gradients", (), "int64", "gradients of single samples that the server's step has computed"),
    Column("vectors", (), "float64", "numbers that clients sent and that counted, over those of one client's model"),
    Column("epochs_a", (), "int64", "epochs in which clients computed gradients and sent"),
    Column("epochs_b", (), "int64", "epochs in which the server computed; rounds in a row without clients are one"),
    Column("epochs_c", (), "int64", "epochs in which clients only sent"),
    Column("oracle", (), "float64", "federated oracle complexity of the round: gradients plus phi times vectors"),
    Column("running_time", (), "float64", "expected running time of the round's epochs as eq. 25 has it, in gradients"),
)
"""Columns of federated oracle complexity, where `oracle.record` asks for them."""
STEPS = Column("steps", ("client",), "int64", "local steps of the client that counted, -1 if not invited")
"""The column of visits that may be cut short at a step."""
SOMETIMES = {
    "`oracle.record = true`": ORACLE,
    '`partial = "steps"`, `work = "speed"`, or a `dispatch` that sets steps': (STEPS,),
    '`close = "arrivals"`': ARRIVALS,
    '`close = "arrivals"`, and `partial = "steps"` or a `dispatch` that sets steps': (ARRIVAL_STEPS,),
    '`dispatch = "fedqueue"`': (ARRIVAL_RATE,),
}
"""The columns that only some configs have, by the keys that ask for them."""
FACTS = {
    "train_samples": "training samples of the client",
    "test_samples": "samples in the client's own test part",
    "features": "numbers in one sample's features",
    NAMES: "the client's name",
}
"""What is recorded once of each client."""


def columns(job: Job) -> list[Column]:
    """All columns of a run; UsageError where a metric has the name of another one."""
    found = [*COLUMNS, *(ORACLE if job.config.oracle.record else ())]
    rules = job.config.rules
    found += [STEPS] if rules.sets_steps or rules.work == "speed" else []
    if job.config.rules.by_arrivals:
        found += ARRIVALS + ([ARRIVAL_STEPS] if rules.sets_steps else [])
        found += [ARRIVAL_RATE] if rules.dispatch == "fedqueue" else []
    found += [Column(name, (), "float64", text) for name, text in job.algorithm.metric_columns.items()]
    taken = {column.name for column in found}
    for name in job.task.metrics:
        if name == "accuracy":
            continue
        if taken & {name, f"client_{name}", f"mean_client_{name}"}:
            raise UsageError(f"task.metrics: '{name}' is what another column is called; expected a name of its own")
        found.append(Column(name, (), "float64", f"{name} of the shared model on the global test set"))
        text = f"{name} of the client's model on its own test part"
        found.append(Column(f"client_{name}", ("client",), "float64", text))
        text = f"mean of client_{name} over the clients of which it is known"
        found.append(Column(f"mean_client_{name}", (), "float64", text))
    return found


def about_clients(federation: Federation) -> list[Fact]:
    """What a run knows of its clients from the start, int64 [clients] each; their names are text, if they have any."""
    values = {
        "train_samples": federation.train_sizes.astype(np.int64),
        "test_samples": federation.test_sizes.astype(np.int64),
        "features": np.array([prod(shape) for shape in federation.shapes], dtype=np.int64),
        **({NAMES: np.array(federation.names)} if federation.names else {}),
    }
    return [Fact(name, each, FACTS[name]) for name, each in values.items()]


@dataclass
class Record:
    """One round as it is measured on one rank; `gather` brings the ranks' measurements together on the server.

    Attributes
    ----------
    gradients, server_gradients : int
        The most gradients that a visit has computed, and those of the server's step.
    wire : tuple of int
        Bytes received and sent.
    scores, metrics, warnings : mapping
        What the evaluation gave, what the algorithm measures of the state, and what it warns of, by kind.
    by_rank : float64 [5, ranks]
        In the order of `PER_RANK`.
    signal : float
        What a stage of doubling may end by, see `Doubling.signal`.
    events : list of tuple
        Kind, client (-1: none) and text.
    rejected : dict of int to Rejection
        What of the round's visits was rejected, by their places in the cohort.
    limits : float64 [units]
        The largest norms that are accepted, see `RunGuard.limits`; None: they are not measured.
    norms : float64 [clients, units]
        Norms of the messages that were accepted, 0 elsewhere; empty where they are not measured.
    saving : dict
        What checkpoints have cost since the row before, by the names of `SAVING`.
    broken : str
        What of the server's state is not finite.
    loss : float, optional
        The mean training loss over the visits that counted, at the server; None: none is known.
    fruitless : str
        Why the run learns nothing, "" where that is not known; at the server.
    told : dict of str to str
        What the guard warns of, by kind, at the server.
    sums : Sums
        What came, larger than the model: it goes with the record, before other sums come.
    """

    start: float
    phases: Phases = field(default_factory=Phases)
    visits: int = 0
    gradients: int = 0
    server_gradients: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    wire: tuple[int, int] = (0, 0)
    scores: Mapping[str, Floats | float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    warnings: Mapping[str, str] = field(default_factory=dict)
    by_rank: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    signal: float = 0.0
    stage: int = 0
    events: list[tuple[str, int, str]] = field(default_factory=list)
    rejected: dict[int, Rejection] = field(default_factory=dict)
    limits: Floats | None = None
    norms: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    saving: Mapping[str, float] = field(default_factory=dict)
    broken: str = ""
    loss: float | None = None
    fruitless: str = ""
    told: dict[str, str] = field(default_factory=dict)
    sums: Sums = field(init=False, repr=False, compare=False)

    @classmethod
    def open(cls, phases: Phases | None = None) -> Record:
        """Begin a round, and tell `phases` of it."""
        phases = phases or Phases()
        phases.begin()
        return cls(time.perf_counter(), phases)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure a part of the round, without the parts of it that are measured by themselves."""
        start, known = time.perf_counter(), sum(self.seconds.values())
        with self.phases.phase(PHASE[name]):
            yield
        within = sum(self.seconds.values()) - known
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start - within

    def elapsed(self) -> float:
        """Wall-clock seconds since the round began."""
        return time.perf_counter() - self.start

    def gather(self, transport: Transport, reason: str = "", visits: int = 0) -> str:
        """Bring together what all ranks have measured, and rejected of so many `visits` of the round at most.

        Returns why the run is to stop after this round: this rank's own `reason`, or another's; "" if none has one.
        It is empty on all ranks or on none.
        """
        timed = self.seconds.get("compute_seconds", 0.0), self.seconds.get("wait_seconds", 0.0)
        own = self.gradients, self.signal, encode(reason), bool(self.broken or self.fruitless), len(self.rejected)
        table = np.zeros((len(PER_RANK) + len(own), transport.size))
        table[:, transport.rank] = self.visits, *timed, *self.wire, *own
        self.by_rank, rest = np.split(transport.agree(table), [len(PER_RANK)])
        gradients, signal, reasons, broken, rejected = rest
        self.gradients, self.signal = int(gradients.max()), float(signal.sum())
        if broken.any() and not (self.broken or self.fruitless):
            self.broken = "the server says so"
        if rejected.any():
            table = np.zeros((visits, 3))
            for place, rejection in self.rejected.items():
                table[place] = rejection.depth, rejection.group, rejection.reason
            table = transport.agree(table)
            places = np.flatnonzero(table[:, 2]).tolist()
            self.rejected = {place: Rejection(*map(int, table[place])) for place in places}
        if self.norms.size:
            self.norms = transport.agree(self.norms)
        return reason or decode(reasons)


def released(ranks: int) -> tuple[str, int, str]:
    """The event that clients are needed no more."""
    return "released", -1, f"clients are needed no more: {ranks} rank{'s' * (ranks > 1)} released"


class Reporter:
    """Tells of rounds that are safely on disk; `first` is the round that this start begins with.

    Seconds are called by the `clock` that they are of.
    """

    def __init__(self, rounds: int, first: int, clock: str, quiet: bool = False) -> None:
        self.rounds, self.clock, self.quiet = rounds, clock, quiet
        self.text = self.short = ""
        self.bar: Progress | None = None
        shown = None if quiet else notebook.display()
        self.cell = None if shown is None else notebook.Bar(shown, rounds, first)
        if sys.stderr.isatty() and not quiet:
            columns = BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
            self.bar = Progress(TextColumn("round"), *columns, console=Console(file=raw(sys.stderr)))
            self.task = self.bar.add_task("", total=rounds, completed=first)
            self.bar.start()
            install()  # what is printed meanwhile goes to the bar's console, until it stops

    def round(self, done: int, row: Mapping[str, Any]) -> None:
        """Tell of one round; in a log only where it was evaluated."""
        if "client_test_loss" in row:
            known, invited, unreachable = tested(row), int(np.sum(row["cohort"])), row.get("unreachable", 0)
            self.short = plain(known)
            known += f"objective {row['objective']:.6g}  " if "objective" in row else ""
            loss = f"loss {row['loss']:.4f}  " if "loss" in row else "void  " if invited else ""
            arrived = f"{int(np.sum(row['arrived']))}/{invited + unreachable} arrived" if invited else "nobody invited"
            arrived += f", {unreachable} unreachable" if invited and unreachable else ""
            self.text = f"{known}{loss}{arrived}  {self.clock} {row['sim_seconds']:.1f} s"
        if self.bar is not None:
            self.bar.update(self.task, completed=done, description=self.short)
        elif self.cell is not None:
            self.cell.update(done, self.short)
        elif not self.quiet and "client_test_loss" in row:
            print(f"round {done}/{self.rounds}  {self.text}", flush=True)

    def warn(self, kind: str, text: str, always: bool = False) -> None:
        """Warn of something, also where the run is quiet if `always`."""
        if self.bar is not None:
            self.bar.console.print(plain(f"hpcfl: warning: {kind}: {text}"), markup=False, soft_wrap=True)
        elif always or not self.quiet:
            say(f"warning: {kind}: {text}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def tested(row: Mapping[str, Any]) -> str:
    """The metrics on the global test set, or where there is none the means over the clients' own, by their columns."""
    said = []
    for own in (key for key in row if key.startswith("client_") and key != "client_test_loss"):
        name = own.removeprefix("client_") if own.removeprefix("client_") in row else f"mean_{own}"
        if not np.isnan(row[name]):
            said.append(f"{name} {row[name]:.4f}  ")
    return "".join(said)


class Recorder:
    """Writes metrics to an existing run folder, and tells of rounds that are on file.

    `first` is the round that this start begins with.
    """

    def __init__(self, run_dir: Path, job: Job, ranks: int, first: int, reporter: Reporter) -> None:
        self.run_dir, self.job, self.reporter = run_dir, job, reporter
        self.warned: set[str] = set()
        self.rejections = 0
        coords: dict[str, Sequence[int | str]] = {
            "client": range(job.config.clients),
            "layer": job.layers.names,
            "rank": range(ranks),
        }
        if slots := job.planner.slots:
            coords["arrival"] = range(slots)
        self.segment = store.begin(run_dir, columns(job), coords, first, job.config.rounds)

    def row(self, plan: Plan, record: Record, sums: Sums, clock: Mapping[str, float]) -> None:
        """Write one round, then tell of it."""
        store.check_owner(self.run_dir)
        with record.phases.phase("store"):
            depth, rejected = plan.depth.copy(), np.zeros(self.job.config.clients, dtype=bool)
            for place, rejection in record.rejected.items():
                depth[place], rejected[plan.cohort[place]] = rejection.depth, True
            plan = replace(plan, depth=depth)
            row = self.plan_columns(plan) | self.oracle_columns(plan, record, sums)
            row |= dict(record.scores) | dict(record.metrics) | dict(record.saving) | dict(clock)
            row["layer_weight"] = [sums.weight(tensors[0]) for tensors in self.job.layers.tensors]
            if record.loss is not None:
                row["loss"] = record.loss
            for name, values in zip(PER_RANK, record.by_rank):
                row[name] = values if name.endswith("seconds") else values.astype(np.int64)
            row["stage"], row["server_seconds"] = record.stage, record.seconds.get("server_seconds", 0.0)
            row["rejected"], row["fate"] = rejected, self._fates(plan, record)
            self._log(plan, record)
            self.segment.write(plan.round, row)
            if "client_test_loss" in row:  # else nothing is told of the round
                real = self.job.config.clock == "wall" and plan.arrivals is None
                drawn = self.job.planner.attempt(plan.round, plan.repeats).cohort if real else plan.cohort
                row["unreachable"] = len(drawn) - len(plan.cohort)  # their ranks are late, or lost
            self.reporter.round(plan.round + 1, row)

    def _fates(self, plan: Plan, record: Record) -> Ints:
        """Return what became of each client's last visit in the round, int64 [clients]; -1: it was at none."""
        fates: Ints = np.full(self.job.config.clients, -1)
        fates[plan.at_work] = Fate.CANCELLED if plan.round + 1 == self.job.config.rounds else Fate.UNDER_WAY
        short = plan.depth > 1
        if plan.steps is not None and self.job.config.participation.by_steps:
            short |= plan.steps < self.job.planner.visit_steps[0][plan.cohort]
        came = np.where(plan.counted, np.where(short, Fate.PARTIAL, Fate.COUNTED), Fate.LATE)
        fates[plan.cohort] = came  # of several visits of a client the last one
        for place in record.rejected:
            fates[plan.cohort[place]] = Fate.REJECTED
        lost = {client: Fate.LOST for kind, client, _ in record.events if kind == "lost" and fates[client] == Fate.LATE}
        for client, fate in {**plan.ended, **lost}.items():
            if fates[client] not in (Fate.COUNTED, Fate.PARTIAL, Fate.REJECTED):
                fates[client] = fate
        return fates

    def log(self, round: int, events: Sequence[tuple[str, int, str]]) -> None:
        """Log what has happened in a round, which may have come to no end."""
        for kind, client, text in events:
            self.segment.event(round, kind, client, text)

    def _log(self, plan: Plan, record: Record) -> None:
        """Log a round's events, and warn of each kind once; a client that is always rejected must not fill the log."""
        self.log(plan.round, record.events)
        for place, rejection in sorted(record.rejected.items()):
            client, why = int(plan.cohort[place]), self.job.guard.why(rejection)
            self.rejections += 1
            if self.rejections == 1:
                line = f"round {plan.round}: client {client}: {why}; more of it is only recorded"
                self.reporter.warn("rejected", line)
            if self.rejections <= MOST_LOGGED:
                self.segment.event(plan.round, "rejected", client, why)
        warnings = self.job.warnings | dict(record.warnings) | record.told
        for kind in sorted(warnings.keys() - self.warned):
            self.segment.event(plan.round, kind, -1, warnings[kind])
            self.reporter.warn(kind, warnings[kind], always=kind in record.told)
        self.warned |= warnings.keys()

    def plan_columns(self, plan: Plan) -> dict[str, Any]:
        """The columns that follow from the plan alone."""
        row = self._arrival_columns(plan)
        if self.job.config.rules.sets_steps:
            counted = np.zeros_like(plan.depth) if plan.steps is None else np.where(plan.counted, plan.steps, 0)
            row["steps"] = self._by_client(plan, counted, -1)
        elif self.job.config.participation.work == "speed":
            whole = self.job.planner.visit_steps[0][plan.cohort]
            row["steps"] = self._by_client(plan, np.where(plan.counted, whole, 0), -1)
        return row | {
            "cohort": np.isin(np.arange(self.job.config.clients), plan.at_work),
            "arrived": self._by_client(plan, np.isin(plan.cohort, plan.cohort[plan.counted]), 0),
            "version": self._by_client(plan, plan.round if plan.arrivals is None else plan.arrivals.versions, -1),
            "depth": self._by_client(plan, plan.depth, -1),
            "blocks": self._by_client(plan, plan.layers + 1 - plan.depth, 0),
            "visit_seconds": self._by_client(plan, plan.seconds, np.nan),
            "void": not plan.counted.any(),
            "repeats": plan.repeats,
            "deadline": plan.closes_after,
            "round_seconds": plan.duration,
            "message_bytes": int(self._sent(plan, bytes=True).sum()),
        }

    def _arrival_columns(self, plan: Plan) -> dict[str, Any]:
        """The columns of the visits of a round that arrivals end, in the order in which they came."""
        if (known := plan.arrivals) is None:
            return {}
        order = np.argsort(known.times, kind="stable")
        columns: dict[str, Ints | Floats] = {
            "client": plan.cohort,
            "version": known.versions,
            "staleness": plan.round - known.versions,
            "number": known.numbers,
            "depth": plan.depth,
            "visit_seconds": plan.seconds,
            "seconds": known.times,
        }
        if plan.steps is not None:
            columns["steps"] = plan.steps
        if known.rates is not None and self.job.config.rules.dispatch == "fedqueue":
            columns["rate"] = known.rates
        rest = self.job.planner.slots - len(order)
        return {
            f"arrival_{name}": np.pad(
                values[order], (0, rest), constant_values=np.nan if values.dtype.kind == "f" else -1
            )
            for name, values in columns.items()
        }

    def oracle_columns(self, plan: Plan, record: Record, sums: Sums) -> dict[str, Any]:
        """The columns of federated oracle complexity; none where they are not asked for."""
        oracle, invites = self.job.config.oracle, self.job.algorithm.invites
        if not oracle.record or oracle.phi is None:
            return {}
        layers, counted = self.job.layers, int(plan.counted.sum())
        # numbers came of layers in which anything did, and of what goes beside them but the loss and masks
        came = [any(sums.weight(name) for name in names) for names in layers.tensors]
        blocks = [(name, block.numbers) for group in self.job.layout for name, block in group.items() if not block.mask]
        beside = sum(size for name, size in blocks if name not in layers.of and name != "loss" and sums.weight(name))
        numbers, gradients = int(np.dot(self._sent(plan), came)) + beside * counted, record.gradients if counted else 0
        continued = plan.round > 0 and not invites(plan.round) and not invites(plan.round - 1)
        spent = Spent(gradients, record.server_gradients, counted, numbers, self.job.task.parameter_count, continued)
        return {
            "gradients": spent.gradients,
            "server_gradients": spent.server_gradients,
            "vectors": spent.vectors,
            **{f"epochs_{kind}": number for kind, number in zip("abc", spent.epochs)},
            "oracle": spent.complexity(oracle.phi),
            "running_time": spent.running_time(oracle.phi),
        }

    def _sent(self, plan: Plan, bytes: bool = False) -> Ints:
        """Return how many numbers, or bytes, of layers 1 … L counted, int64 [L]."""
        counted, parts = plan.depth[:, None] <= np.arange(1, plan.layers + 1), self.job.parts[plan.cohort]
        total = np.zeros(plan.layers, dtype=np.int64)
        begun = np.full(len(parts), plan.round) if plan.arrivals is None else plan.arrivals.versions
        for part, round_ in np.unique(np.stack([parts, begun], 1), axis=0).tolist():
            which = (parts == part) & (begun == round_)
            total += counted[which].sum(0) * self.job.layers.sent(part, bytes, self.job.algorithm.withholds(round_))
        return total

    def _by_client(self, plan: Plan, values: Any, fill: float) -> Floats | Ints:
        """Return the cohort's values over all clients."""
        whole = np.full(self.job.config.clients, fill, dtype=np.result_type(np.asarray(values), type(fill)))
        whole[plan.cohort] = values
        return whole

    def stale(self, done: int, rounds: Mapping[int, int]) -> None:
        """Say whose personal state in the checkpoint after `done` rounds is older, and of which rounds it is."""
        for client, round_ in rounds.items():
            text = f"the checkpoint after round {done} holds the client's personal state after round {round_}"
            self.segment.event(done - 1, "stale", client, text)
        if rounds:
            oldest, newest = min(rounds.values()), max(rounds.values())
            late = f"no personal state in time from client{'s' * (len(rounds) > 1)} {listed(sorted(rounds))}"
            of = f"round {oldest}" if oldest == newest else f"rounds {oldest} to {newest}"
            say(f"checkpoint after round {done}: {late}; kept is that of {of}")

    def close(self) -> None:
        self.segment.close()
        self.reporter.close()
