"""One run, put together: the same on every rank, and deciding nothing that is not in the config."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from math import ceil, hypot, inf, isfinite, isnan, prod
from pathlib import Path
from threading import Event

import numpy as np
import torch

from hpcfl.algorithms import Algorithm, IteratedReduction
from hpcfl.algorithms.base import Extras
from hpcfl.base.errors import RunError, UsageError
from hpcfl.base.memory import LEAN_BYTES, give_back, keep_freed
from hpcfl.base.types import Floats, Ints, Shape, State
from hpcfl.comm.guard import GROWTH, REASONS, Norms, Rejection, Sieve, norms
from hpcfl.comm.message import Block, Layout, Sums
from hpcfl.comm.placement import Chunk, check_width, chunk_size, cut
from hpcfl.comm.transport import Personal
from hpcfl.config import Config
from hpcfl.learning.batches import Visits
from hpcfl.learning.evaluate import client_objectives, client_scores
from hpcfl.learning.task import Task
from hpcfl.schedule.deadlines import Deadlines
from hpcfl.schedule.doubling import Stage, Theory, entered, stages
from hpcfl.schedule.plan import Invitation, Plan

MOST_ATTEMPTS = 1000
"""After so many void attempts at one round it is given up."""


@dataclass
class Progress:
    """How far a run has come: what a checkpoint holds, on each rank its own part of it.

    Attributes
    ----------
    saved : Path, optional
        The checkpoint that was last written by this start, or from which it goes on; at the server.
    extras : Extras
        What never leaves the server; elsewhere empty.
    """

    round: int
    shared: State
    personal: Personal
    clock: dict[str, float] = field(default_factory=lambda: {"sim_seconds": 0.0, "wall_seconds": 0.0})
    stage: Stage = field(default_factory=Stage)
    norms: Norms = field(default_factory=Norms)
    saved: Path | None = None
    extras: Extras = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One run, put together; the same on every rank.

    Attributes
    ----------
    shares : float64 [L]
        The part of a visit's work that is done when layer l is ready, 1 for l = 1.
    lean : bool
        Whether to save memory rather than time: large models in real time.
    """

    config: Config
    task: Task
    algorithm: Algorithm
    chunks: list[Chunk]
    layout: Layout
    shares: Floats
    lean: bool = False

    @classmethod
    def of(cls, config: Config, data_dir: Path | None, ranks: int, device: str = "cpu", threads: int = 1) -> Job:
        """Read the data, build the model and deal the clients.

        Raises
        ------
        UsageError
            If the data cannot be read, or if there are more ranks than chunks, or wider lanes than ranks.
        """
        if config.clock == "wall":
            check_width(config.lane_width, ranks)
        torch.set_num_threads(threads)
        federation = config.data.federate(config.clients, config.seed, data_dir)
        task = Task(config.model, federation, config.seed, device, config.precision)
        algorithm = config.algorithm
        lean = config.clock == "wall" and task.nbytes >= LEAN_BYTES
        give_back() if lean else keep_freed()
        if config.doubling.when == "gradient" and algorithm.init_server(task).keys().isdisjoint(task.initial()):
            raise UsageError(
                f"doubling.when = 'gradient': algorithm.name = '{algorithm.name}' shares nothing that could move; "
                "did you mean doubling.when = 'plateau'?"
            )
        size = chunk_size(config.batch_clients, config.clients, task.nbytes, config.one_by_one)
        chunks = cut(size, config.speed.paces(config.seed, config.clients), ranks, federation.shapes)
        shares = _shares(config, algorithm, task)
        config.speed.covers(config.rounds, config.clients, len(shares))
        return cls(config, task, algorithm, chunks, algorithm.layout(task), shares, lean)

    def plans(self, first: int, stage: Callable[[], int] = lambda: 0) -> Iterator[Plan]:
        """Yield the plan of each round from `first` on, without end; `stage` is asked where a run stands by then.

        Raises
        ------
        RunError
            Where too few visits ever count.
        """
        deadlines = Deadlines(self.config.participation)
        for round_ in count(0 if deadlines.adaptive else first):  # what came before tells an adaptive deadline
            plan = self._planned(round_, deadlines, stage())
            if round_ >= first:
                yield plan

    def _planned(self, round: int, deadlines: Deadlines, stage: int) -> Plan:
        """Return the plan of a round: of its first attempt in which enough visits count."""
        if not self.algorithm.invites(round):
            return Plan.nobody(round, len(self.shares))
        if self.config.speed.replays:
            return self.plan(self.asked(round))
        closes, needed = 0.0, self.config.participation.min_clients
        for attempt in range(MOST_ATTEMPTS):
            plan = self.plan(self.asked(round, None, deadlines.seconds(round), attempt, stage))
            deadlines.saw(plan.seconds, plan.deadline)
            closes += plan.closes
            if plan.counted.sum() >= needed:
                return replace(plan, closes=closes)
        raise too_few(plan, needed)

    def asked(
        self,
        round: int,
        cohort: Ints | None = None,
        deadline: float | None = None,
        attempt: int = 0,
        stage: int = 0,
    ) -> Invitation:
        """Return what is asked in a round.

        Parameters
        ----------
        cohort : int64 [n]
            Who is invited, ascending client ids; None: whom the participation picks.
        deadline : float
            Seconds; None: as the rule says that knows of no visits.
        attempt : int
            How many attempts at this round were void.
        stage : int
            The stage of doubling participant sets.
        """
        config, rules = self.config, self.config.participation
        if cohort is None and self.algorithm.invites_all(round):
            cohort = np.arange(config.clients)
        if cohort is None:
            cohort = rules.cohort(config.seed, round, config.clients, attempt)
        if deadline is None:
            deadline = Deadlines(rules).seconds(round)
        if self.algorithm.invites_all(round):
            deadline = inf
        facts = config.seed, round, config.clients, cohort, self.shares, deadline, attempt, config.clock
        return Invitation(*facts, stage, *self._enough(round, cohort, stage))

    def _enough(self, round: int, cohort: Ints, stage: int) -> tuple[int | None, Ints | None]:
        """Return what closes a round that closes with the first visits, and what each visit is worth."""
        config, rules = self.config, self.config.participation
        visits = config.doubling.enough(rules, config.clients, stage)
        if visits is None or self.algorithm.invites_all(round):
            return None, None
        if config.doubling.by == "clients":
            return visits, None
        if visits == rules.invited(config.clients):
            return None, None  # the last stage waits for all, however many samples the invited have
        sizes = self.task.federation.train_sizes
        return ceil(visits * sizes.mean()), sizes[cohort]

    def plan(self, asked: Invitation) -> Plan:
        """Return one attempt at a round, decided; `closes` is that of this attempt alone."""
        return self.config.speed.plan(self.config.participation, asked, self.algorithm.layerwise)

    @cached_property
    def stage_limits(self) -> list[float]:
        """The most rounds of each stage but the last, of doubling participant sets."""
        doubling, rules = self.config.doubling, self.config.participation
        if doubling.when == "never" or rules.first is None:
            return []
        invited = rules.invited(self.config.clients)
        if doubling.when != "theory":
            most = float(doubling.rounds) if doubling.when == "rounds" else inf
            return [most] * (stages(rules.first, invited) - 1)
        times = self.config.speed.order(self.config.seed, self.config.clients, invited)
        theory = Theory(times, rules.first, doubling.contraction, self.config.speed.communication, doubling.distance)
        return [*map(float, theory.rounds_with_skips() if doubling.skip else theory.rounds())]

    def signal(self, before: State, after: State, sums: Sums, round: int = 0) -> float:
        """Return what a stage of doubling participant sets may end by, at least 0; −1: the round says nothing of it."""
        when = self.config.doubling.when
        if when == "plateau" and "loss" in sums and sums.weight("loss"):
            return float(sums.mean("loss"))
        sent = [name for name in before if name in sums and sums.weight(name)]
        if when == "gradient" and sent:
            moved = sum(float((after[name] - before[name]).double().square().sum()) for name in sent)
            return moved / self.algorithm.learning_rate(round) ** 2
        return -1.0

    def after(self, round: int, stage: Stage, signal: float) -> Stage:
        """Return the stage of the round after `round`; one that was for everyone counts in no stage."""
        if not self.stage_limits or self.algorithm.invites_all(round):
            return stage
        return self.config.doubling.after(stage, self.stage_limits, signal)

    def hosted(self, rank: int) -> list[Chunk]:
        """Return the chunks that a rank hosts."""
        return [chunk for chunk in self.chunks if chunk.rank == rank]

    def enter(self, chunk: Chunk) -> State:
        """Return the personal state of a chunk's clients before their first visit, ``{name: [c, …]}``."""
        return stacked([self.algorithm.init_client(self.task, int(client)) for client in chunk.clients])

    def like(self, client: int) -> State:
        """Return a client's personal state before its first visit, for its names, shapes and types."""
        return self._likes[self.task.federation.shapes[client]]

    @cached_property
    def _likes(self) -> dict[Shape, State]:
        shapes = self.task.federation.shapes
        return {shape: self.algorithm.init_client(self.task, shapes.index(shape)) for shape in dict.fromkeys(shapes)}

    @property
    def personal_bytes(self) -> int:
        """The most bytes that one client's personal state has; 0 where clients have none."""
        return max(sum(value.nbytes for value in like.values()) for like in self._likes.values())

    def begin(self, rank: int) -> Progress:
        """Return the state before round 0, on one rank."""
        personal = {chunk.number: self.enter(chunk) for chunk in self.hosted(rank)}
        shared, extras = (
            self.algorithm.init_server(self.task),
            self.algorithm.init_extras(self.task) if rank == 0 else {},
        )
        return Progress(0, shared, personal, stage=entered(0, self.stage_limits), extras=extras)

    def visits(self, plan: Plan, rows: Ints) -> Visits:
        """Return what the clients at `rows` of the cohort need to know."""
        clients = plan.cohort[rows]
        sizes = self.task.federation.train_sizes[clients]
        return Visits(plan.round, clients, plan.depth[rows], sizes, plan.reach[rows])

    def scored(self, round: int, shared: State, personal: State, clients: Ints) -> Floats:
        """Return the `scores` of a chunk's clients, ``[scores, c]``."""
        params = self.algorithm.model(self.task, shared, personal, Visits.for_test(round, clients))
        tested = client_scores(self.task, params, clients)
        return np.array(
            [*tested, client_objectives(self.task, params, clients)] if self.scores > len(tested) else tested
        )

    @property
    def scores(self) -> int:
        """How many sums an evaluation finds per client.

        Losses and correct answers on its own test part; if the objective is wanted, that on its training samples.
        """
        return 2 + self.config.evaluate.objective

    @property
    def whole(self) -> bool:
        """Whether a visit counts as a whole or not at all."""
        return self.config.participation.whole(self.algorithm.layerwise)

    def limits(self, seen: Norms) -> Floats | None:
        """Return the largest norms that are accepted: of each group, or of a visit; None: any will do."""
        factor = self.config.guard.max_norm
        return None if factor is None else seen.limits(factor, 1 if self.whole else len(self.layout))

    def fault(self, plan: Plan, rejected: Mapping[int, Rejection], broken: str) -> str:
        """Return why the run has diverged in this round, "" where it has not; the same on every rank that knows all."""
        arrived = int((plan.counted | np.isin(plan.cohort, list(rejected))).sum())
        if broken:
            return f"round {plan.round}: {broken}"
        if len(rejected) <= self.config.guard.most * arrived:
            return ""
        first = rejected[min(rejected)]
        return f"round {plan.round}: {len(rejected)} of {arrived} visits that arrived were rejected: {self.told(first)}"

    def rejections(self, clients: Ints, sieve: Sieve) -> dict[int, Rejection]:
        """Return whose visits a sieve has rejected, its rows being those of `clients`."""
        found = {}
        for client, group, reason in zip(clients.tolist(), sieve.first.tolist(), sieve.reason.tolist()):
            if reason:
                found[client] = Rejection(self.reached(0 if self.whole else group), group, reason)
        return found

    @cached_property
    def levels(self) -> dict[str, int]:
        """The layer (1 … L) of each tensor that is in one."""
        layers = self.algorithm.layers(self.task)
        return {name: number for number, names in enumerate(layers, start=1) for name in names}

    def told(self, rejection: Rejection) -> str:
        """Return in words why a visit was rejected."""
        return f"layer '{self.layer_names[self.group_layers[rejection.group] - 1]}' {REASONS[rejection.reason]}"

    def broken(self, before: State, after: State) -> str:
        """Return in words how a round's step has led the shared state out of all bounds, "" where it has not."""
        old = hypot(*(norms(value)[0] for value in before.values()))
        new = {name: norms(value)[0] for name, value in after.items()}
        most = GROWTH * old if old >= 1.0 else sys.float_info.max  # from nothing, any norm may be right
        if hypot(*new.values()) <= most:
            return ""
        worst = max(new, key=lambda name: inf if isnan(new[name]) else new[name])
        layer = self.layer_names[self.levels[worst] - 1] if worst in self.levels else worst
        if not isfinite(new[worst]):
            return f"layer '{layer}' of the shared state is not finite"
        return f"the shared state's norm rose from {old:.3g} to {hypot(*new.values()):.3g}, most in layer '{layer}'"

    @cached_property
    def layer_names(self) -> list[str]:
        """The names of layers 1 … L."""
        return [layer_name(names) for names in self.algorithm.layers(self.task)]

    @cached_property
    def iterated(self) -> IteratedReduction | None:
        """The further sums over each round's messages."""
        return self.algorithm.iterated_reduction(self.task)

    @cached_property
    def keeps(self) -> dict[str, Block]:
        """The blocks that are held for further sums, once sent.

        Raises
        ------
        ValueError
            If the algorithm names a block that is not in its layout.
        """
        names = frozenset() if self.iterated is None else self.iterated.kept
        kept = {name: block for group in self.layout for name, block in group.items() if name in names}
        if names - kept.keys():
            raise ValueError(f"kept: {sorted(names - kept.keys())} are no blocks of the layout")
        return kept

    def visits_of(self, round: int, client: int, reach: Floats, over: Event) -> Visits:
        """Return what one client needs to know in wall clock, where nobody knows yet how far it will come."""
        sizes = self.task.federation.train_sizes[[client]]
        return Visits(round, np.array([client]), np.ones(1, dtype=np.int64), sizes, reach[None], over)

    @cached_property
    def group_layers(self) -> Ints:
        """Return for each group of the layout the lowest layer (1 … L) in it; L for what is no layer's, int64 [G]."""
        level, count = self.levels, len(self.shares)
        return np.array([min((level.get(name, count) for name in group), default=count) for group in self.layout])

    def reached(self, groups: int) -> int:
        """Return the first layer (1 … L; L + 1: none) from which on all is there when so many groups have arrived."""
        return self._reached[groups]

    @cached_property
    def _reached(self) -> list[int]:
        layers, found = self.algorithm.layers(self.task), []
        sent, there = {name for group in self.layout for name in group}, set[str]()
        for group in ({}, *self.layout):
            there |= set(group)
            lacking = [any(name in sent - there for name in names) for names in layers]
            found.append(max((number for number, lacks in enumerate(lacking, start=1) if lacks), default=0) + 1)
        return found

    def layer_bytes(self) -> Ints:
        """Return the bytes of one visit's layers 1 … L as the method sends them, int64 [L]."""
        return self._by_layer({name: block.bytes for group in self.layout for name, block in group.items()})

    def layer_numbers(self) -> Ints:
        """Return how many numbers one visit's layers 1 … L have as the method sends them, int64 [L]."""
        return self._by_layer({name: prod(block.shape) for group in self.layout for name, block in group.items()})

    def _by_layer(self, blocks: dict[str, int]) -> Ints:
        return np.array([sum(blocks[name] for name in names) for names in self.algorithm.layers(self.task)])


def layer_name(tensors: Sequence[str]) -> str:
    """Return the name of a layer of these tensors."""
    return tensors[0].rpartition(".")[0] if len(tensors) > 1 else tensors[0]


def too_few(plan: Plan, needed: int) -> RunError:
    """Return the error that ends a run whose round was void too often; `plan` is the last attempt."""
    counted = int(plan.counted.sum())
    return RunError(
        f"round {plan.round}: given up after {MOST_ATTEMPTS} void attempts: {counted} of the visits to the last one "
        f"counted, expected at least participation.min_clients = {needed}"
    )


def stacked(states: list[State]) -> State:
    """Return the clients' states with a leading client axis."""
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def _shares(config: Config, algorithm: Algorithm, task: Task) -> Floats:
    """Return the part of a visit's work that is done when layer l is ready, float64 [L], 1 for l = 1."""
    layers = algorithm.layers(task)
    if config.speed.counts() == "equal":
        costs = np.ones(len(layers))
    else:
        blocks = {name: block for group in algorithm.layout(task) for name, block in group.items()}
        costs = np.array([sum(prod(blocks[name].shape) for name in names) for names in layers], dtype=np.float64)
    shares: Floats = np.cumsum(costs[::-1])[::-1] / costs.sum()
    return shares
