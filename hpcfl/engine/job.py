"""One run, put together: the same on every rank, and deciding nothing that is not in the config."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from math import inf, log
from pathlib import Path
from threading import Event

import numpy as np

from hpcfl.algorithms import algorithm_class
from hpcfl.algorithms.base import Algorithm, Block, Extras, IteratedReduction, Layout, Task, Visits
from hpcfl.base.blame import blaming
from hpcfl.base.device_copy import on_host
from hpcfl.base.errors import refusal
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.memory import LEAN_BYTES, give_back, keep_freed
from hpcfl.base.types import Computing, Floats, Ints, Shape, State
from hpcfl.config import Config
from hpcfl.data import Federation
from hpcfl.engine.border import Border
from hpcfl.engine.chunk_batches import MOST, Bundles
from hpcfl.engine.hangs import Moves
from hpcfl.engine.uneven import evenly
from hpcfl.learning import batchnorm
from hpcfl.learning.evaluate import client_finite, client_objectives, client_sums
from hpcfl.learning.optim import stacked as stacked
from hpcfl.learning.slots import Slots
from hpcfl.mpi.placement import Chunk, check_width, chunk_size, cut
from hpcfl.mpi.transport import Personal
from hpcfl.schedule.counterfactual import Counterfactual
from hpcfl.schedule.doubling import Stage
from hpcfl.schedule.plan import Plan
from hpcfl.schedule.planner import Flights, Planner
from hpcfl.schedule.visit_times import VisitTimes
from hpcfl.sums.guard import METRIC, Norms, RunGuard, Watch
from hpcfl.sums.message import Arrived, Layers

FILLING_BYTES = 2**28  # of models, and of a step's samples: from there on a large GPU's memory is busy


@dataclass
class Progress:
    """How far a run has come: what a checkpoint holds, on each rank its own part of it.

    Attributes
    ----------
    saved : Path, optional
        The checkpoint that was last written by this start, or from which it goes on; at the server.
    extras : Extras
        What never leaves the server; elsewhere empty.
    flights : Flights
        Where arrivals end rounds: who is at work, with which state.
    served : dict of int to State
        Those states by their rounds, on each rank those that its own clients have in their hands, at the server all.
    """

    round: int
    shared: State
    personal: Personal
    clock: dict[str, float] = field(default_factory=lambda: {"sim_seconds": 0.0, "wall_seconds": 0.0})
    stage: Stage = field(default_factory=Stage)
    norms: Norms = field(default_factory=Norms)
    watch: Watch = field(default_factory=Watch)
    saved: Path | None = None
    extras: Extras = field(default_factory=dict)
    flights: Flights = field(default_factory=lambda: Flights.none(0))
    served: dict[int, State] = field(default_factory=dict)

    def arrived(self, plan: Plan) -> Arrived | None:
        """Return what the visits of a round that arrivals end began with; None for other rounds."""
        if (known := plan.arrivals) is None:
            return None
        served = {v: self.served[v] for v in {*known.versions.tolist()}}
        return Arrived(plan.cohort, known.versions, known.factors, served)


@dataclass(frozen=True)
class Job:
    """One run, put together; the same on every rank."""

    config: Config
    task: Task
    algorithm: Algorithm
    chunks: list[Chunk]
    moves: Moves = field(default_factory=Moves)

    @classmethod
    def of(
        cls,
        config: Config,
        data_dir: Path | None,
        ranks: int,
        device: str = "cpu",
        threads: int = 1,
        computing: Computing | None = None,
        chunk: int | None = None,
        federation: Federation | None = None,
    ) -> Job:
        """Read the data, build the model and deal the clients.

        `computing` is how the run has computed chunks before, `chunk` the size that they began with. A `federation`
        that is given has been read already.

        Raises
        ------
        UsageError
            If the data cannot be read or do not suit the algorithm, or if there are more ranks than chunks, or wider
            lanes than ranks.
        """
        if config.clock == "wall":
            check_width(config.lane_width, ranks, config.leaders)
        torch.set_num_threads(threads)
        federation = federation or config.federation(data_dir)
        if computing is None and config.model.chain:
            computing = config.speed.computing
        how = config.precision, None, config.task, computing
        with blaming(of=("model.name", "task.loss", "data.name")):
            task = Task(config.model, federation, config.seed, device, *how)
        task.paces = config.speed.paces(config.seed, config.clients)
        give_back() if config.clock == "wall" and task.nbytes >= LEAN_BYTES else keep_freed()
        with blaming(of=("algorithm.name",)):
            algorithm, own = config.method(task), config.algorithm
            if config.doubling.when == "gradient" and own.init_server(task).keys().isdisjoint(task.initial()):
                raise config.doubling.nothing_moves(own.name)
            auto = config.batch_clients == "auto"
            size, single = chunk or (config.speed.chunk if auto else None), config.one_by_one or task.looped
            size = size or chunk_size(config.batch_clients, config.clients, task.nbytes, single, task.heavy)
            if auto and config.clock == "wall":
                size = min(size, max(1, config.clients // (ranks - 1)))
            job = cls(config, task, algorithm, cut(size, task.paces, ranks, kinds(algorithm, task)))
            task.slots = job.slots()
            config.speed.covers(config.rounds, config.clients, len(job.layers.tensors))
            if config.model.initial is not None:
                task.start.check_method(algorithm.name, algorithm.init_server(task), algorithm.personal(task))
        return job

    def slots(self) -> Slots | None:
        """Return the fillings of a rank on a device that is not the CPU; None: visits are computed chunk by chunk."""
        config, task = self.config, self.task
        if task.device.type == "cpu" or config.clock == "wall":
            return None
        members = self.planner.members
        sizes, kind = task.federation.train_sizes, kinds(self.algorithm, task)
        uneven = len({(kind[client], sizes[client]) for client in members.tolist()}) > 1
        if uneven or not self.planner.whole:
            return None
        if config.batch_clients != "auto" or task.looped:
            return Slots(1 if task.looped else self.chunk)
        samples = getattr(self.algorithm, "batch", 0) or int(sizes.max())
        step = samples * int(np.prod(task.federation.shapes[0])) * task.dtype.itemsize
        cohort = min(len(members), config.participation.invited(config.clients))
        most = max(1, min(MOST, FILLING_BYTES // max(task.nbytes, step)))
        return Slots(-(-cohort // -(-cohort // most)))

    @property
    def chunk(self) -> int:
        """The size of the largest chunk."""
        return max(len(chunk.clients) for chunk in self.chunks)

    @property
    def together(self) -> bool:
        """Whether in real time a rank sends one sum over all its chunks."""
        return self.chunk > 1 and self.config.ends_together

    @cached_property
    def layout(self) -> Layout:
        """The blocks that visits send.

        Raises
        ------
        ValueError
            If the algorithm keeps a block for further sums that is not among them.
        """
        layout = self.algorithm.layout(self.task)
        names = frozenset() if self.iterated is None else self.iterated.kept
        if unknown := names - {name for group in layout for name in group}:
            raise ValueError(f"kept: {sorted(unknown)} are no blocks of the layout")
        return tuple(
            {name: replace(block, kept=True) if name in names else block for name, block in group.items()}
            for group in layout
        )

    @cached_property
    def layers(self) -> Layers:
        return Layers(self.algorithm.layers(self.task), self.layout)

    @cached_property
    def parts(self) -> Ints:
        """Which of the blocks' parts each client holds, int64 [clients]."""
        return self.algorithm.holds(self.task)

    def sent(self, plan: Plan) -> set[str]:
        """Return the names of the blocks that anybody sends in a round."""
        first, names = plan.depth.min(initial=plan.layers + 1), self.algorithm.sends(plan.round)
        blocks = {name for group in self.layout for name in group if self.layers.of.get(name, plan.layers) >= first}
        begun = [plan.round] if plan.arrivals is None else {*plan.arrivals.versions.tolist()}
        withheld = [self.algorithm.withholds(each) for each in begun]
        blocks -= frozenset.intersection(*withheld) if withheld else set()
        return blocks if names is None else blocks & names

    @cached_property
    def planner(self) -> Planner:
        """Who is invited, when rounds close, how far visits come."""
        config, sizes = self.config, self.task.federation.train_sizes
        tensors, given = self.layers.tensors, config.speed.counts()
        if isinstance(given, tuple):
            if len(given) != len(tensors):
                raise refusal("speed.costs", f"{len(tensors)} numbers, one for each layer of the model", list(given))
            costs: Floats = np.array(given)
        else:
            costs = np.ones(len(tensors)) if given == "equal" else self.layers.numbers.astype(np.float64)
        before = self.algorithm.steps_before
        done: Floats = np.cumsum(costs[::-1])[::-1] / costs.sum()  # of a visit's work, when layer l is ready
        done = (before + done) / (before + 1) if before else done
        rules = config.participation, config.speed, self.algorithm
        facts = *rules, sizes, done, config.seed, config.clock, config.doubling, config.staleness
        weights = "uniform" if config.staleness.divisor == "visits" else config.algorithm.mean_weights()
        planner = Planner(*facts, availability=config.availability, scheduler=config.scheduler, weights=weights)
        planner.visit_times = self._visit_times(planner)
        if config.participation.deadline == "planned":
            planner.plan_deadlines(config.rounds)
        return planner

    def _visit_times(self, planner: Planner) -> VisitTimes | None:
        """Return what says how long visits take where it is not the speed model alone."""
        config, blocks = self.config, {name: block for group in self.layout for name, block in group.items()}
        if not config.adds_times:
            return None
        kinds, parts = np.unique(self.parts, return_inverse=True)
        whole = config.participation.whole(self.algorithm.layerwise)

        @cache
        def up(withheld: frozenset[str]) -> Ints:
            each = np.zeros((len(kinds), len(self.layers.tensors)), dtype=np.int64)
            for lowest, group in zip(self.layers.of_groups, self.layout):
                for name, block in group.items():
                    if name != METRIC and not block.mask and name not in withheld:  # as `message_bytes` counts
                        each[:, 0 if whole else lowest - 1] += [block.written(kind) for kind in kinds.tolist()]
            return each[parts]

        state = self.task.start.given(self.border.begun(self.algorithm.init_server(self.task), "init_server"))

        @cache
        def down(withheld: frozenset[str]) -> Ints:
            each = [(blocks.get(name), value) for name, value in state.items() if name not in withheld]
            return np.array([sum(_bytes(*one, kind) for one in each) for kind in kinds.tolist()])[parts]

        steps = np.ones(planner.clients)
        if config.speed.per == "step":
            steps = _steps(planner)
            if isinstance(config.speed, Counterfactual) and not config.speed.simulated:
                table = config.speed.tape.algorithm
                method = algorithm_class(table["name"]).from_table(table, "algorithm")
                then = config.speed.tape.config
                steps /= _steps(replace(planner, algorithm=method, speed=then.speed, participation=then.participation))
        given = config.speed, config.queue.times, config.link, config.seed
        turn, nothing = self.algorithm.withholds, frozenset[str]()
        up_in, down_in = lambda round_: up(turn(round_)), lambda round_: down(turn(round_ - 1) if round_ else nothing)
        in_turn = bool(self.algorithm.in_turn)
        known = down_in if in_turn and self.algorithm.goes_on else None, up_in if in_turn else None
        return VisitTimes(*given, steps, down(nothing), up(nothing), *known)

    @cached_property
    def warnings(self) -> dict[str, str]:
        """What the user should know of who arrives before the run, by name."""
        if self.config.rules.by_arrivals:
            return self.planner.warnings  # no chances to arrive
        first = self.planner.plan(self.planner.attempt(0))
        return self.planner.warnings | self.config.weighting.warnings(first)

    @cached_property
    def guard(self) -> RunGuard:
        """What messages are accepted, and when the run has diverged."""
        return RunGuard(self.config.guard, self.layers, self.layout, self.planner.whole)

    @cached_property
    def chance(self) -> float:
        """The loss of a model that takes all classes to be equally likely; inf where it is not known."""
        loss, classes = self.task.loss.name, self.task.federation.classes
        return log(classes) if classes > 1 and loss in ("auto", "cross-entropy") else inf

    @cached_property
    def iterated(self) -> IteratedReduction | None:
        """The further sums over each round's messages."""
        return self.algorithm.iterated_reduction(self.task)

    @cached_property
    def keeps(self) -> dict[str, Block]:
        """The blocks that are held for further sums, once sent."""
        return {name: block for group in self.layout for name, block in group.items() if block.kept}

    @cached_property
    def border(self) -> Border:
        """The method as it is asked."""
        return Border(self.algorithm, self.task, self.layout)

    @cached_property
    def bundles(self) -> Bundles:
        """What computes this rank's visits."""
        wanted, apart = self.config.batch_clients == "auto" and self.planner.whole, self.config.clock == "wall"
        of = kinds(self.algorithm, self.task)
        return Bundles(self.border, of, wanted, apart, self.moves)

    def begin(self, rank: int) -> Progress:
        """Return the state before round 0, on one rank."""
        personal = {chunk.number: self.enter(chunk) for chunk in self.hosted(rank)}
        begun, stage = self.border.begun(self.algorithm.init_server(self.task), "init_server"), self.planner.first_stage
        shared, extras = self.task.start.given(begun), self.algorithm.init_extras(self.task) if rank == 0 else {}
        flights = Flights.none(self.task.federation.clients)
        return Progress(0, shared, personal, stage=stage, extras=extras, flights=flights)

    def hosted(self, rank: int) -> list[Chunk]:
        """Return the chunks that a rank hosts."""
        return [chunk for chunk in self.chunks if chunk.rank == rank]

    def enter(self, chunk: Chunk) -> State:
        """Return the personal state of a chunk's clients before their first visit, ``{name: [c, …]}``."""
        states = (self.algorithm.init_client(self.task, int(client)) for client in chunk.clients)
        return stacked([self.border.begun(state, "init_client") for state in states])

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

    @cached_property
    def changes(self) -> list[str]:
        """The blocks that count by their visits' factors, where arrivals end rounds."""
        summed = self.algorithm.summed(self.task)
        return [name for name in self.layers.of if name not in summed]

    def visits(self, plan: Plan, rows: Ints, closed: Event | None = None) -> Visits:
        """Return what the clients at `rows` of the cohort need to know.

        In real time `closed` ends their visits: nobody knows yet how far they come, nor after how many steps they stop.
        """
        clients = plan.cohort[rows]
        depth = plan.depth[rows] if closed is None else np.ones(len(rows), dtype=np.int64)
        sizes = self.task.federation.train_sizes[clients]
        steps = None if plan.steps is None else plan.steps[rows]
        cut = closed is not None and steps is not None and not self.planner.rules.scheduled
        if cut or (steps is None and self.planner.rules.work == "speed"):
            steps = self.planner.visit_steps[0][clients]
        chances = None if plan.step_chances is None else plan.step_chances[rows]
        known = plan.arrival[rows], closed, steps
        visits = Visits(plan.round, clients, depth, sizes, *known, number=plan.number, step_chances=chances)
        return visits if plan.rate == 1 else replace(visits, rate=plan.rate)

    def members(self, clients: Ints) -> Ints:
        """Return the places of those `clients` that take part in the run, int64 [n]."""
        return np.flatnonzero(np.isin(clients, self.planner.members))

    @property
    def scores(self) -> int:
        """How many sums an evaluation finds per client.

        Losses and metrics on its own test part, and how many samples of it have an output that is finite; if the
        objective is wanted, that on its training samples.
        """
        return 2 + len(self.task.metrics) + self.config.evaluate.objective

    def statistics(self, shared: State, clients: Ints) -> Floats:
        """Return what some clients gather for tests by the shared model, ``[numbers, clients]``; 0 for all others."""
        own = clients[self.members(clients)]
        found = batchnorm.client_statistics(self.task, shared, own)
        sums = np.zeros((len(found), self.config.clients))
        sums[:, own] = found
        return sums

    def scored(self, round: int, shared: State, hosted: Iterable[tuple[Ints, State]]) -> list[Floats]:
        """Return the `scores` of chunks' clients, ``[scores, c]`` each; who is held out is not tested, and gets 0.

        `hosted` has the clients of each chunk and their personal state. All are tested before the device is waited for.
        """
        task, model = self.task, partial(self.algorithm.model, self.task, shared)
        wanted = self.config.evaluate.objective

        def params(clients: Ints, rows: Ints, personal: State) -> State:
            own = personal
            if len(rows) < len(clients):
                own = {name: value[torch.from_numpy(rows)] for name, value in personal.items()}
            task.hold(clients[rows])
            return evenly(model, task, own, Visits.for_test(round, clients[rows]))

        chunks = [(clients, self.members(clients), personal) for clients, personal in hosted]
        tested, objectives = [], []
        for clients, rows, personal in chunks:
            if len(rows):
                state = params(clients, rows, personal)
                tested.append(client_sums(task, state, clients[rows]))
                objectives.append([client_objectives(task, state, clients[rows])] if wanted else [])
        found, sums = [], iter(zip(on_host(tested), objectives))
        for clients, rows, personal in chunks:
            scores = np.zeros((self.scores, len(clients)))
            if len(rows):
                own, objective = next(sums)
                finite: Ints | Floats = task.federation.test_sizes[clients[rows]]
                if not own[0].isfinite().all():  # a finite loss has finite outputs
                    finite = client_finite(task, params(clients, rows, personal), clients[rows])
                scores[:, rows] = np.array([*own.numpy(), finite, *objective])
            found.append(scores)
        return found


def kinds(algorithm: Algorithm, task: Task) -> list[tuple[Shape, int]]:
    """Return for each client what those that are computed together have in common: shapes of features and parts."""
    return list(zip(task.federation.shapes, algorithm.holds(task).tolist()))


def _bytes(block: Block | None, value: Tensor, part: int) -> int:
    """Return the bytes of a part of a tensor of the shared state, as a block that visits send has it."""
    return (value.numel() if block is None else block.sent(part)) * value.element_size()


def _steps(planner: Planner) -> Floats:
    """Return the local steps of each client's whole visit, 1 at least, float64 [clients]."""
    return np.maximum(1, planner.visit_steps[0]).astype(np.float64)
