"""The round loop, and what it needs to be put together. Nothing here knows an algorithm by name."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from hpcfl.algorithms import Algorithm
from hpcfl.config import Config
from hpcfl.memory import keep_freed
from hpcfl.message import Layout, Message, State, Sums
from hpcfl.plan import Floats, Ints, Plan
from hpcfl.ranks import Chunk, chunk_size, cut
from hpcfl.record import Record, Recorder
from hpcfl.task import Task
from hpcfl.transport import Personal, Transport
from hpcfl.visits import Visits

R = TypeVar("R")


@dataclass
class Progress:
    """How far a run has come: what a checkpoint holds, on each rank its own part of it."""

    round: int
    shared: State
    personal: Personal
    clock: dict[str, float] = field(default_factory=lambda: {"sim_seconds": 0.0, "wall_seconds": 0.0})


@dataclass(frozen=True)
class Job:
    """One run, put together; the same on every rank."""

    config: Config
    task: Task
    algorithm: Algorithm
    chunks: list[Chunk]
    layout: Layout
    shares: Floats

    @classmethod
    def of(cls, config: Config, data_dir: Path | None, ranks: int, device: str = "cpu") -> Job:
        """Read the data, build the model and deal the clients.

        Raises
        ------
        UsageError
            If the data cannot be read, or if there are more ranks than chunks.
        """
        torch.set_num_threads(config.threads)
        keep_freed()
        federation = config.data.federate(config.clients, config.seed, data_dir)
        task = Task(config.model, federation, config.seed, device)
        algorithm = config.algorithm
        size = chunk_size(config.batch_clients, config.clients, sum(v.nbytes for v in task.initial().values()))
        chunks = cut(size, config.speed.paces(config.seed, config.clients), ranks)
        return cls(config, task, algorithm, chunks, algorithm.layout(task), _shares(config, algorithm, task))

    def plans(self, first: int) -> Iterator[Plan]:
        """Yield the plan of each round from `first` on, without end."""
        config, round_ = self.config, first
        while True:
            if self.algorithm.invites(round_):
                yield config.participation.plan(
                    config.speed, config.seed, round_, config.clients, self.shares, self.algorithm.layerwise
                )
            else:
                yield Plan.nobody(round_, len(self.shares))
            round_ += 1

    def hosted(self, transport: Transport) -> list[Chunk]:
        """Return the chunks that this rank hosts."""
        return [chunk for chunk in self.chunks if chunk.rank == transport.rank]

    def enter(self, chunk: Chunk) -> State:
        """Return the personal state of a chunk's clients before their first visit, ``{name: [c, …]}``."""
        return stacked([self.algorithm.enter(self.task, int(client)) for client in chunk.clients])

    def begin(self, transport: Transport) -> Progress:
        """Return the state before round 0."""
        personal = {chunk.number: self.enter(chunk) for chunk in self.hosted(transport)}
        return Progress(0, self.algorithm.start(self.task), personal)

    def visits(self, plan: Plan, rows: Ints) -> Visits:
        """Return what the clients at `rows` of the cohort need to know."""
        clients = plan.cohort[rows]
        sizes = self.task.federation.train_sizes[clients]
        return Visits(plan.round, clients, plan.depth[rows], sizes, plan.reach[rows])

    def layer_bytes(self) -> Ints:
        """Return the bytes of one visit's layers 1 … L as the method sends them, int64 [L]."""
        blocks = {name: block.bytes for group in self.layout for name, block in group.items()}
        return np.array([sum(blocks[name] for name in names) for names in self.algorithm.layers(self.task)])


def stacked(states: list[State]) -> State:
    """Return the clients' states with a leading client axis."""
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def run(job: Job, transport: Transport, recorder: Recorder | None, now: Progress) -> Progress:
    """Run the rounds that are left. `recorder` is the server's; None elsewhere."""
    config, algorithm, mine = job.config, job.algorithm, job.hosted(transport)
    for plan in islice(job.plans(now.round), config.rounds - now.round):
        record = Record.open(plan, transport)
        now.shared = transport.invite(now.shared)
        sums = Sums(job.layout, len(plan.cohort), plan.missing)
        with record.timed("compute_seconds"):
            for chunk in mine:
                record.visits += visit(job, plan, chunk, now, sums)
        with record.timed("wait_seconds"):
            sums = transport.close(sums)
        record.carried(transport)
        if transport.serves:
            with record.timed("server_seconds"):
                now.shared = algorithm.server(job.task, now.shared, sums)
        now.round += 1
        if config.evaluate.due(now.round, config.rounds):
            record.scores = evaluate(job, transport, now)
        now.clock["sim_seconds"] += plan.closes
        now.clock["wall_seconds"] += record.elapsed()
        record.ranks(transport)
        if recorder is not None:
            recorder.row(record, sums, now.clock)
        if config.checkpoint.due(now.round, config.rounds):
            save(job, transport, recorder, now)
    return now


def visit(job: Job, plan: Plan, chunk: Chunk, now: Progress, sums: Sums) -> int:
    """Do a chunk's visits that count, add their messages to `sums`, keep the personal state; return how many."""
    rows = plan.rows(chunk.clients)
    if not len(rows):
        return 0
    places = torch.from_numpy(chunk.places(plan.cohort[rows]))
    personal = now.personal[chunk.number]
    own = {name: value[places] for name, value in personal.items()}
    client = job.algorithm.client(job.task, now.shared, own, job.visits(plan, rows))
    for name, value in drained(client, sums.add).items():
        personal[name][places] = value
    return len(rows)


def drained(client: Generator[Message, None, R], take: Callable[[Message], None]) -> R:
    """Hand every message to `take` and return what the generator returns."""
    while True:
        try:
            take(next(client))
        except StopIteration as end:
            result: R = end.value
            return result


def evaluate(job: Job, transport: Transport, now: Progress) -> dict[str, Floats | float]:
    """Score the new state: at the server on the global test set, at each client on its own test part."""
    now.shared = transport.invite(now.shared)
    count = job.config.clients
    found = np.zeros((2, count))
    for chunk in job.hosted(transport):
        seen = Visits(now.round, chunk.clients, np.ones(0, int), np.ones(0, int), np.ones((0, 0)))
        params = job.algorithm.model(job.task, now.shared, now.personal[chunk.number], seen)
        found[:, chunk.clients] = job.task.tested(params, chunk.clients)
    found = transport.reduce(found)
    if not transport.serves:
        return {}
    sizes = np.where(job.task.federation.test_sizes > 0, job.task.federation.test_sizes, np.nan)
    scores: dict[str, Floats | float] = {"client_test_loss": found[0] / sizes, "client_accuracy": found[1] / sizes}
    together = job.task.server_tested(now.shared)
    if together is not None:
        loss, correct, size = together
        scores |= {"test_loss": loss / size, "accuracy": correct / size}
    return scores


def save(job: Job, transport: Transport, recorder: Recorder | None, now: Progress) -> None:
    """Write a checkpoint: the server writes, every rank hands over the personal state that it hosts."""
    like = job.algorithm.enter(job.task, 0)
    parts = transport.collect(job.chunks, now.personal, like)
    if recorder is not None:
        shared = {name: value.cpu().numpy() for name, value in now.shared.items()}
        recorder.checkpoint(now.round, shared, parts, now.clock)
    for _ in parts:
        pass


def _shares(config: Config, algorithm: Algorithm, task: Task) -> Floats:
    """Return the part of a visit's work that is done when layer l is ready, float64 [L], 1 for l = 1."""
    layers = algorithm.layers(task)
    if config.speed.costs == "equal":
        costs = np.ones(len(layers))
    else:
        shapes = task.initial()
        costs = np.array([sum(shapes[name].numel() for name in names) for names in layers], dtype=np.float64)
    shares: Floats = np.cumsum(costs[::-1])[::-1] / costs.sum()
    return shares
