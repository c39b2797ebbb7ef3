"""The configuration: typed sections from TOML, with errors that name the key and the nearest valid one.

Nothing here imports torch: a config is judged before anything heavy starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, SerializeAsAny

from hpcfl.algorithms import Algorithm, algorithm_class, algorithms
from hpcfl.algorithms.buffered import with_buffers
from hpcfl.algorithms.compression import Compression, with_compression
from hpcfl.algorithms.fragments import Fragments, with_fragments
from hpcfl.algorithms.last_step import with_last_step
from hpcfl.algorithms.server_optimizer import ServerOptimizer, with_server_optimizer
from hpcfl.algorithms.weighting import Weighting, with_correction, with_even_clients
from hpcfl.base import plugins
from hpcfl.base.blame import blaming
from hpcfl.base.config import ConfigBase, check_plain, checked, sections, unknown
from hpcfl.base.config import recorded as recorded_table
from hpcfl.base.digests import changed, is_file, kept, origin
from hpcfl.base.errors import UsageError, no_meaning, refusal, toml
from hpcfl.base.loaded import renew
from hpcfl.base.rng import key_as_seed
from hpcfl.base.terminal import say
from hpcfl.config import presets
from hpcfl.config.presets import PICKED, Settings, Table
from hpcfl.data import Federation, Header, Source
from hpcfl.data.absent import AbsentSource
from hpcfl.data.base import check_clients, check_samples
from hpcfl.data.formats.files import found
from hpcfl.learning.config import METRICS, TaskConfig
from hpcfl.learning.initial_values import STATE_DICT, InitialFile
from hpcfl.learning.task import Task
from hpcfl.models import Model
from hpcfl.models.base import EVERYTHING
from hpcfl.models.modules import tracing
from hpcfl.mpi.devices import Device
from hpcfl.mpi.placement import FAN_OUT, TWO_LEVEL, Topology, check_single
from hpcfl.schedule import planner
from hpcfl.schedule.availability import Availability
from hpcfl.schedule.batch_queue import BatchQueue
from hpcfl.schedule.cadence import Checkpoints, Evaluate, Target
from hpcfl.schedule.doubling import Doubling
from hpcfl.schedule.link import UNLIMITED, Link
from hpcfl.schedule.oracle import Oracle
from hpcfl.schedule.participation import NOT_KNOWN, Participation, Staleness
from hpcfl.schedule.scheduler import Scheduler
from hpcfl.schedule.speeds import Speed
from hpcfl.sums.guard import Guard

Count = Annotated[int, Field(ge=1)]


def _no_zero(value: Any) -> Any:
    """Refuse 0, which Python takes for False."""
    if isinstance(value, int) and not isinstance(value, bool) and value < 1:
        raise ValueError("expected a number of at least 1, or a word")
    return value


NoZero = BeforeValidator(_no_zero)


class Config(ConfigBase):
    """Everything that a run depends on. The same config gives the same result, to the bit."""

    rounds: int = Field(ge=1, le=2**31 - 1)
    """Rounds of the whole run."""
    clients: int = Field(ge=1, le=2**24)
    """Clients of the federation. In a file or table it may be left out where the data say it."""
    seed: int = Field(0, ge=0, lt=2**63)
    """All random numbers are drawn by it, alike on any number of ranks."""
    clock: Literal["simulated", "wall"] = "simulated"
    """``simulated``: seconds are drawn, and nothing sleeps. ``wall``: they are real."""
    precision: Literal["single", "double"] = "single"
    """Type of parameters, samples and messages: float32, or float64 where the last digits of a minimum count."""
    batch_clients: Annotated[Literal["auto", False] | Count, NoZero] = "auto"
    """Clients per chunk, whose computations are batched together; it decides about last bits. ``auto``: by the sizes of
    model and federation; in a replay as recorded. In wall time visits of a chunk end together, and a chunk that is not
    complete when the round closes is lost. There ``auto`` is one by one, as with ``false``, unless rounds wait for all
    visits, as fast as they go, and each counts as a whole. A number is refused where layers leave one by one, or where
    the server looks at single messages."""
    threads: Annotated[Literal["auto"] | Count, NoZero] = "auto"
    """Threads per rank within one operation, which decide about last bits. ``auto``: 1 in simulated time; in wall time
    OMP_NUM_THREADS, or this rank's share of the cores it may use."""
    device: Device = "auto"
    """What computes: ``cuda`` is a GPU by the rank's number on its host, ``auto`` one where there is any."""
    server_device: Device = "cpu"
    """What the server computes on, where it is a rank of its own."""
    ranks_per_device: Count = 1
    """Ranks that may share a GPU; more of them are refused."""
    deterministic: Literal["auto"] | bool = "auto"
    """On a GPU: only algorithms that give the same bits each time, and no TF32, for one result on one kind of GPU.
    ``auto``: in simulated time."""
    lane_width: Annotated[Literal["auto", "node", "all", "two-level"] | Count, NoZero] = "auto"
    """Wall clock: client ranks that share a lane, which they alone can hold up; 1 is safest, and wider lanes save
    bytes. ``node``: the ranks of one host. ``all``: all ranks. ``auto``: 1 up to 64 ranks, then ``node``.
    ``two-level``: one rank of each host leads it, passes the state on and sends the server sums of what has come in
    time, or single messages where arrivals end rounds."""
    leaders: Annotated[Literal["node"] | Count, NoZero] = "node"
    """``two-level``: ranks that lead others. ``node``: one on each host. A number: so many in all, each with as many
    neighbours."""
    fan_out: int = Field(FAN_OUT, ge=2)
    """``two-level``: leaders that the server, and each leader, may lead: more of them are a tree."""
    lost_after: float | None = Field(None, gt=0)
    """Wall clock: seconds of silence after which a rank that owes an answer counts as dead, for MPIs that do not tell.
    By default never."""
    patience: float = Field(30.0, gt=0)
    """Seconds, at least ten median rounds, for which nothing may move before a rank says on stderr where it stands, or
    the server for whom it waits. Said again every 5 minutes."""
    fault_tolerance: Literal["auto", "ulfm"] = "auto"
    """Wall clock: go on without dead ranks where the MPI tells of them (``auto``), or refuse to run elsewhere."""
    lost_clients: Literal["drop", "rehost"] = "drop"
    """Wall clock, where the run goes on without dead ranks: ``drop`` leaves out their clients. ``rehost``: they go on
    at the ranks with the fewest clients from the next round on, with the personal state of the last checkpoint, or else
    their initial one."""
    start_within: float | None = Field(None, gt=0)
    """Wall clock: seconds for which the server waits for other ranks, at each step of the start; who comes later is
    lost. By default it waits for ever."""
    min_ranks: int | None = Field(None, ge=2)
    """With ``start_within``: ranks, the server among them, that are enough to start. By default all."""
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoints = Checkpoints()
    stop: Target = Target()
    algorithm: SerializeAsAny[Algorithm]
    """What clients compute and send, and what the server makes of it."""
    server: ServerOptimizer = ServerOptimizer()
    participation: Participation = Participation()
    weighting: Weighting = Weighting()
    message: Compression = Compression()
    fragments: Fragments = Fragments()
    staleness: Staleness = Staleness()
    scheduler: Scheduler = Scheduler()
    doubling: Doubling = Doubling()
    guard: Guard = Guard()
    oracle: Oracle = Oracle()
    task: TaskConfig = TaskConfig()
    speed: SerializeAsAny[Speed]
    """How long each client's visit takes. A section left out is ``model = "none"``."""
    queue: BatchQueue = BatchQueue()
    link: Link = Link()
    availability: Availability = Availability()
    data: SerializeAsAny[Source]
    """Where samples come from, and how clients share them."""
    model: SerializeAsAny[Model]
    """The model that is trained: a chain of layers, or ``package.module:factory``, any ``torch.nn.Module``."""

    @property
    def rules(self) -> Participation:
        """The rules that rounds really follow: of a replay those of the run that it replays."""
        return self.speed.rules(self.participation)

    @property
    def picked(self) -> dict[str, str]:
        """The names that pick the classes of sections, by section."""
        return {section: getattr(getattr(self, section), pick.by) for section, pick in PICKED.items()}

    @property
    def one_by_one(self) -> bool:
        """Whether clients are computed one at a time unless the config says otherwise: each visit may end by itself."""
        return self.clock == "wall" and not self.ends_together

    @property
    def ends_together(self) -> bool:
        """Whether nothing depends on when which visit of a round ends."""
        return self.participation.close == "all" and not (self.speed.slows or self.adds_times) and not self._unbatched

    @property
    def _unbatched(self) -> str:
        """Why visits cannot be computed together in real time; "" where they can."""
        if self.singles:
            return f"{self.singles} single messages"
        if self.participation.by_steps and self.participation.close != "all":
            return "participation.partial = 'steps' stops each visit by its own clock"
        layerwise = not self.participation.whole(self.algorithm.layerwise or self._splits_last)
        return f"algorithm.name = '{self.algorithm.name}' sends layers one by one" if layerwise else ""

    @property
    def _splits_last(self) -> bool:
        """Whether visits send the layers of their last step one by one, of a method that does so where asked to."""
        return self.rules.close != "all" and self.participation.partial == "layers" and self.algorithm.splits_last

    @property
    def reproducible(self) -> bool:
        """Whether a GPU is to give the same bits each time."""
        return self.clock == "simulated" if self.deterministic == "auto" else self.deterministic

    @property
    def singles(self) -> str:
        """Which key looks at single messages in real time, and how; "" where none does."""
        if self.participation.by_arrivals:
            return "participation.close = 'arrivals' waits for"
        if self.guard.max_norm:
            return f"guard.max_norm = {self.guard.max_norm:g} measures"
        return f"algorithm.name = '{self.algorithm.name}' asks for further sums over" if self.algorithm.iterates else ""

    @property
    def passes_singles(self) -> bool:
        """Whether leaders send on single messages: all of them, or those that are looked at beside their sums."""
        return bool(self.singles) and not self.guard.max_norm

    def check_lanes(self, lanes: Sequence[Topology] = ()) -> None:
        """Raise UsageError where ranks would share a lane although single messages are looked at."""
        if self.clock == "wall" and self.participation.scheduled:
            most = max((len(clients) for lane in lanes for clients in lane.hosted), default=1)
            if most > 1:
                rule = f"participation.dispatch = '{self.participation.dispatch}' with clock = 'wall'"
                ranks = sum(len(lane.ranks) for lane in lanes) + 1
                wanted = f"expected {self.clients + 1} ranks, got {ranks}"
                raise UsageError(f"{rule} keeps clients waiting, each of which needs a rank of its own: {wanted}")
        led = self.lane_width == TWO_LEVEL and self.passes_singles
        if self.clock == "wall" and self.singles and not led:
            check_single(self.singles, self.lane_width, lanes)

    def check(self, data_dir: Path | None) -> Header:
        """Raise UsageError where values do not go together or with the data's headers; return the headers."""
        self.check_values()
        with blaming(of=("data.name",)):
            header = self.data.check(self.clients, data_dir)
            if not isinstance(header, Header):
                raise TypeError(f"check returned {header!r:.80}, expected a Header")
        self.check_shapes(header)
        return header

    def check_values(self) -> None:
        """Raise UsageError where values do not go together; no data are read."""
        if self.clock == "wall" and self.batch_clients not in ("auto", False, 1) and self._unbatched:
            why = f"batch_clients: with clock = 'wall' {self._unbatched}"
            raise refusal(why, "'auto', false or 1", self.batch_clients, 1)
        if self.clock == "wall" and self.participation.by_arrivals and self.guard.max_norm:
            why = "with participation.close = 'arrivals' norms are measured in simulated time only"
            raise UsageError(f"guard.max_norm: {why}: remove it, or set clock = 'simulated'")
        if self.clock == "wall" and self.algorithm.between_rounds:
            key = self.algorithm.between_rounds
            raise UsageError(f"clock: {key} lets all clients learn after each round: expected 'simulated', got 'wall'")
        self._check_lost_ranks()
        if self.start_within is not None and self.clock != "wall":
            why = "start_within: in simulated time all ranks are needed"
            raise UsageError(f"{why}: expected clock = 'wall', got 'simulated'; remove it")
        if self.min_ranks is not None and self.start_within is None:
            only = "is only for a start with a time limit: set start_within, in seconds"
            raise UsageError(f"min_ranks = {self.min_ranks} {only}")
        self.check_lanes()
        for key, idle in (("buffers", "mean"), ("embedding", None)) if self.model.chain else ():
            if (value := getattr(self.task, key)) != idle:
                beside, other = (f"model.name = '{name}'" for name in (self.model.name, "package.module:factory"))
                raise no_meaning(f"task.{key}", value, beside, other)
        self.task.check()
        self.checkpoint.check(self.evaluate, self.task.columns)
        self.stop.check(self.task.columns)
        self.oracle.check()
        self.server.check(self.algorithm, self.doubling, self.model)
        parts = self.participation, self.doubling, self.speed, self.algorithm
        planner.check(*parts, self.rounds, self.clients, self.clock, self.availability)
        self._check_visit_times()
        self._check_planned()
        how = self.rules, self.times_known
        kept_by = f"algorithm.name = '{self.algorithm.name}'" if self.algorithm.keeps_sent else ""
        if self.weighting.correct == "remembered":
            kept_by = "weighting.correct = 'remembered'"
        without = "" if self.algorithm.shares_model else f"algorithm.name = '{self.algorithm.name}'"
        self.staleness.check(how[0], self.clients, kept_by, without)
        self._check_scheduler()
        if self.algorithm.needs_all and self.model.train != EVERYTHING:
            key = f"model.train: algorithm.name = '{self.algorithm.name}' {self.algorithm.needs_all}"
            raise refusal(key, "all to be trained", self.model.train, EVERYTHING)
        if self.availability.leave and how[0].bound is None and not how[0].by_arrivals:  # who may leave may be late
            self.algorithm.check(how[0].model_copy(update={"close": "deadline", "deadline": 1.0}), how[1])
        self.algorithm.check(*how)
        self.weighting.check(self.algorithm, *how, self.clock)
        self.message.check(self.algorithm, self.weighting.correct)
        self.fragments.check(self.algorithm, self._all_alike)
        self._check_effect()

    @property
    def _all_alike(self) -> str:
        """What takes all rounds to move the same of the model, "" where nothing does."""
        if self.weighting.correct == "estimated":
            return "weighting.correct = 'estimated' counts the rounds from one arrival to the next"
        if self.doubling.when == "gradient":
            return "doubling.when = 'gradient' takes a round's change for a mean gradient"
        if self.guard.max_norm is not None:
            return f"guard.max_norm = {self.guard.max_norm:g} compares with the norms of earlier rounds"
        if self.staleness.divisor != "visits":
            return f"staleness.divisor = '{self.staleness.divisor}' divides by the weights of all visits"
        planned = self.participation.deadline == "planned" and self.link != Link()
        return "participation.deadline = 'planned' has links send the same in each round" if planned else ""

    def _check_scheduler(self) -> None:
        """Raise UsageError where clients cannot be sent out by a rule, or changes not be divided so."""
        varies = f"availability.model = '{self.availability.model}'" if self.availability.model != "always" else ""
        self.scheduler.check(self.rules, self.algorithm, varies)
        if self.staleness.divisor != "visits":
            what = f"staleness.divisor = '{self.staleness.divisor}'"
            if self.clock != "simulated" and not self.participation.scheduled:
                raise UsageError(f"{what} is of simulated time: expected clock = 'simulated', got '{self.clock}'")
            if not self.participation.whole(self.algorithm.layerwise or self._splits_last):
                raise UsageError(f"{what} divides by the weights of whole visits: expected partial = 'discard'")
            why = f"algorithm.name = '{self.algorithm.name}', which does more than to take means of changes"
            with suppress(UsageError):
                if self.algorithm.means_alone and self.algorithm.mean_weights():
                    return
            raise no_meaning("staleness.divisor", self.staleness.divisor, why)

    def _check_visit_times(self) -> None:
        """Raise UsageError where what visits take beside computing does not go with the other sections."""
        self.queue.check(self.participation, self.rounds, self.clients, self.clock)
        self.link.check(self.clients)
        self.availability.check(self.clients)
        model, rules = f"speed.model = '{self.speed.model}'", self.participation
        for what in self._added_times:
            if self.speed.replays:
                raise UsageError(f"{what}: {model} replays seconds that a run has recorded: remove it")
            if self.speed.needs_end:
                raise UsageError(f"{what}: the times of {model} follow from the deadline; did you mean 'lognormal'?")
        if self.link.server != UNLIMITED and (rules.by_arrivals or rules.by_steps):
            key, other = ("close", "arrivals") if rules.by_arrivals else ("partial", "steps")
            why = "shares are known where the uploads of a round begin and end in it, whole or layer by layer"
            raise UsageError(f"link.server: {why}: expected another participation.{key} than '{other}'")

    def _check_planned(self) -> None:
        """Raise UsageError where deadlines cannot be planned."""
        rules, key = self.participation, "participation.deadline = 'planned'"
        if rules.planned_seconds is None:
            return
        if self.speed.replays:
            raise UsageError(f"{key}: a replay has the deadlines of its run; did you mean speed.closing = 'rule'?")
        if not self.times_known:
            raise UsageError(f"{key} needs the chance that a layer arrives {NOT_KNOWN}")
        if not self.speed.redrawn:
            expected = "a [speed] that draws seconds anew in each round, such as 'exponential' with kind = 'dynamic'"
            raise refusal(f"{key}: speed.model", expected, self.speed.model)
        if rules.planned_seconds <= (least := self.rounds * rules.planned_least):
            more = f"more than rounds · planned_least = {least:g}"
            raise refusal("participation.planned_seconds", more, rules.planned_seconds)

    @property
    def adds_times(self) -> bool:
        """Whether visits take other seconds than ``[speed]`` alone says."""
        return bool(self._added_times)

    @property
    def _added_times(self) -> list[str]:
        """What lets them do so."""
        there = {
            "[link]": self.link != Link(),
            f"queue.model = '{self.queue.model}'": self.queue.model != "none",
            f"availability.model = '{self.availability.model}'": self.availability.model != "always",
            "speed.per = 'step'": self.speed.per == "step",
            f"speed.scale = {self.speed.scale:g}": self.speed.scale != 1,
        }
        return [what for what, is_it in there.items() if is_it]

    @property
    def times_known(self) -> bool:
        """Whether the chances to arrive in time are known before a round."""
        known = self.link.server == UNLIMITED and not self.availability.leave
        return known and self.speed.known(self.clock)

    def _check_effect(self) -> None:
        """Raise UsageError where a key would have no effect by what the method does."""
        method, why = self.algorithm, ""
        if method.sends_loss_only:
            why = ", which sends nothing but the training loss"
        elif method.clients_done(2):
            why = ", whose clients send once"  # there are no norms of rounds before
        if self.guard.max_norm is not None and why:
            raise no_meaning("guard.max_norm", self.guard.max_norm, f"algorithm.name = '{method.name}'{why}")
        if self.doubling.when == "gradient" and not method.shares_any(self.model):
            raise self.doubling.nothing_moves(method.name)
        if self.weighting.correct == "estimated" and self.doubling.when != "never":
            why = f"with doubling.when = '{self.doubling.when}' chances to arrive change from stage to stage"
            raise UsageError(f"weighting.correct = 'estimated': {why}; did you mean weighting.correct = 'remembered'?")
        if method.steps_alone and self.weighting.correct == "none":
            weights, idle = getattr(method, "weights", None), type(method).model_fields["weights"].default
            if weights != idle:
                beside = f"algorithm.name = '{method.name}', whose server takes a step with each visit"
                raise no_meaning("algorithm.weights", weights, beside)

    def _check_lost_ranks(self) -> None:
        """Raise UsageError where leaders, or ranks that take over clients of dead ones, have no meaning."""
        if self.lane_width != TWO_LEVEL:
            self.check_only_for("", "lane_width", dict.fromkeys(("leaders", "fan_out"), TWO_LEVEL))
        elif self.clock == "wall" and self.lost_clients == "rehost":
            beside = f"does not go with lane_width = '{TWO_LEVEL}'"
            raise UsageError(f"lost_clients = 'rehost' {beside}: remove it, or set lane_width = 1")
        why = ""
        if self.clock != "wall":
            why = "in simulated time a dead rank ends the job: expected clock = 'wall'"
        elif self.weighting.correct == "remembered":
            why = "with weighting.correct = 'remembered' the server's mean knows of later visits than a checkpoint"
        elif self.algorithm.sums_kept:
            why = f"algorithm.name = '{self.algorithm.name}': the server's sum knows of later visits than a checkpoint"
        if why and self.lost_clients == "rehost":
            raise UsageError(f"lost_clients = 'rehost': {why}; did you mean lost_clients = 'drop'?")

    def check_shapes(self, header: Header) -> None:
        """Raise UsageError where the data have another number of clients, or the model does not suit them."""
        check_clients(self.clients, header.clients, f"data.name = '{self.picked['data']}'")
        self.algorithm.check_model(self.model, header)
        self.task.check_labels(header)
        if (header.tokens or header.pieces) and self.model.chain:
            takes = f"model.name = '{self.model.name}' takes arrays of real numbers"
            instead = "expected a model from outside, 'package.module:factory'"
            raise UsageError(f"data: samples are {'tuples' if header.pieces else 'tokens'}, {takes}: {instead}")
        if self.model.initial is not None and not self.model.initial.endswith(STATE_DICT):  # which takes torch
            InitialFile(Path(self.model.initial), self.clients, self.precision)
        shapes = header.shapes
        for shape in dict.fromkeys(shapes):
            self.model.check(shape, header.classes)
        other = next((number for number, shape in enumerate(shapes) if shape != shapes[0]), None)
        whose = "clients have features of different shapes"
        if other is not None and self.model.train != EVERYTHING:
            raise refusal(f"model.train: {whose}", "all to be trained", self.model.train, EVERYTHING)
        if other is None or self.algorithm.any_shape:
            return
        if len(shapes) == self.clients:
            whose = f"client number {other} has features of shape {shapes[other]}, the first one {shapes[0]}"
        classes = {name: algorithm_class(name) for name in algorithms()}
        able = ", ".join(name for name, cls in classes.items() if cls.any_shape and (header.fresh or not cls.fresh))
        why = f"algorithm '{self.algorithm.name}' shares one model, which needs equal shapes"
        raise UsageError(f"data: {whose}: {why}; expected one of {able}")

    def federation(self, data_dir: Path | None) -> Federation:
        """Return the clients' data; UsageError where they cannot be read, or are those of another number of clients."""
        name = self.picked["data"]
        # data of the user's draw the same from global generators wherever they are made
        seeded = tracing.seeded(key_as_seed(self.seed, "data")) if ":" in name else nullcontext()
        with blaming(of=("data.name",)), seeded:
            made = self.data.federate(self.clients, self.seed, data_dir)
            if ":" in name:
                check_samples(f"data.name = '{name}'", made, ":" in self.model.name, ":" in self.task.loss)
        for there in (made.clients, len(made.train_sizes), len(made.test_sizes)):
            check_clients(self.clients, there, f"data.name = '{name}'")
        return made

    def method(self, task: Task, algorithm: Algorithm | None = None) -> Algorithm:
        """Return the config's algorithm, or another, with all that stands around it for a task."""
        method = algorithm or self.algorithm
        if self._splits_last and method.splits_last:
            method = with_last_step(method)
        method = with_fragments(method, task, self.fragments, self.seed)
        members, by_steps = self.rules.taking_part(self.clients), self.participation.by_steps
        method = with_correction(method, self.weighting, members, by_steps)
        method = with_even_clients(method) if self.rules.every_client else method
        method = with_compression(method, task, self.message)
        return with_server_optimizer(with_buffers(method, task), task, self.server)

    def text(self) -> str:
        """Return the whole config as JSON, defaults included."""
        return self.model_dump_json(indent=1)

    @property
    def code(self) -> dict[str, dict[str, Any]]:
        """What was loaded from outside the package, by ``package.module:Class``, as `plugins.origins` has it."""
        return plugins.origins(name for _, name in self.named)

    @property
    def named(self) -> list[tuple[str, str]]:
        """What the config names from outside the package, as ``package.module:Class``, each with its key."""
        names = [(f"{section}.{PICKED[section].by}", name) for section, name in self.picked.items()]
        return [(key, name) for key, name in (*names, *self.task.own) if ":" in name]

    def placed(self, data_dir: Path | None) -> Config:
        """Return the same with absolute paths of the files that its sections name; UsageError where one is missing."""
        there = dict[str, dict[str, str]]()
        for (section, key), file in self._files.items():
            if (path := str(found(f"{section}.{key}", file, data_dir))) != file:
                there.setdefault(section, {})[key] = path
        changes = {section: getattr(self, section).model_copy(update=paths) for section, paths in there.items()}
        return self.model_copy(update=changes)

    @property
    def files(self) -> dict[str, dict[str, str]]:
        """The files that its sections name, ``{"section.key": {"file": …, "sha256": …}}``."""
        return {".".join(key): origin(Path(file)) for key, file in self._files.items()}

    @property
    def _files(self) -> dict[tuple[str, str], str]:
        """The files that its sections name, by section and key."""
        keys = [(section, key) for section in sections(type(self)) for key in getattr(self, section).paths]
        named = {(section, key): getattr(getattr(self, section), key) for section, key in keys}
        return {key: file for key, file in named.items() if file is not None}


Overlay = str | Path | Mapping[str, Any]
ConfigLike = Overlay | Config


def load(
    what: ConfigLike,
    settings: Settings = (),
    overlays: Overlay | Iterable[Overlay] = (),
    tell: bool = False,
    data_dir: Path | None = None,
) -> Config:
    """Return the typed config of a TOML file, a preset's name, a nested table or a config, with keys set on top.

    Keys of `what` that have no meaning beside names that `overlays` or `settings` change are dropped.

    Parameters
    ----------
    what : str, Path, mapping or Config
    settings : iterable of str, or mapping
        ``key=value`` with dotted keys and values in TOML, or values by dotted key.
    overlays : str, Path or mapping, or several
        TOML files, names of overlays or nested tables whose keys are merged onto `what`, before the settings.
    tell : bool
        Say on stderr, in one line, which keys of `what` were dropped.
    data_dir : Path, optional
        Where files that the config names are looked for first, then in the working directory.

    Raises
    ------
    UsageError
        One line naming the key or the file, what was expected, and the nearest valid choice.
    """
    plugins.look_first([])
    renew()
    several = [overlays] if isinstance(overlays, str | Path | Mapping) else list(overlays)
    settings = settings if isinstance(settings, Mapping) else list(settings)
    for given in (what, settings, *several):
        if isinstance(given, Mapping):
            check_plain(given, "config")
    if isinstance(what, Config) and not settings and not several:
        return what.placed(data_dir)
    tables = [
        dict(each) if isinstance(each, Mapping) else _read(str(presets.overlay_file(str(each)))) for each in several
    ]
    if isinstance(what, Config):  # what it was given, not what is the default
        below = what.model_dump(mode="json", exclude_unset=True)
        for section, name in what.picked.items():
            below[section][PICKED[section].by] = name
    else:
        below = dict(what) if isinstance(what, Mapping) else _read(str(what))
    names = ["" if isinstance(each, Mapping) else f"{each}: " for each in several]
    sources = {key: name for name, table in zip(names, tables) for key, _ in presets.flat(table)}
    sources |= {key: "" for key, _, _ in presets.assignments(settings)}
    try:
        table, dropped = presets.on_top(below, tables, settings)
        loaded = from_table(table, data_dir=data_dir).placed(data_dir)
    except UsageError as error:
        wrong = str(error).partition(": ")[0].partition(" ")[0]
        source = next((source for key, source in sources.items() if f"{key}.".startswith(f"{wrong}.")), "")
        raise UsageError(f"{source}{error}") from error
    if dropped and tell:
        name = f"{what}: " if isinstance(what, str | Path) else ""
        say(f"{name}dropped {'; '.join(dropped)}")
    return loaded


def _read(name: str) -> Table:
    """Return what a file says with its bases; classes from outside are looked for beside each of these."""
    for file, _ in presets.chain(name):
        plugins.look_in(file.parent)
    return presets.read(name)


def from_text(text: str) -> Config:
    """Return the config that `Config.text` wrote."""
    return from_table(recorded_table(text))


def of_run(attributes: Mapping[str, str], run: Path, force: bool = False, trust: bool = False) -> Config:
    """Return the config of a recorded run; `force` takes its files, and those of classes from outside, as they are.

    Code is imported that has run here, and with `trust` what the folder names. UsageError where a file has changed, is
    not there, or is not to be imported.
    """
    lost, (table, files) = _look_for(attributes, run, force, trust), _kept(attributes, run)
    for reason in (*lost.values(), *_changed_files(files, force).values()):
        raise UsageError(reason)
    return from_table(table)


def _kept(attributes: Mapping[str, str], run: Path) -> tuple[Table, dict[str, dict[str, str]]]:
    """Return a run's config as a table, and the files that it names, those of the `run` folder where that is now."""
    table, files = recorded_table(attributes["config"]), json.loads(attributes.get("files", "{}"))
    for key, known in files.items():
        here, (section, _, name) = kept(run.resolve(), key, known), key.partition(".")
        elsewhere = is_file(here) and here != Path(known["file"])
        if (
            elsewhere
            and changed(key, known, "")
            and not changed(key, known, "", here)
            and isinstance(table.get(section), dict)
        ):
            table[section][name] = known["file"] = str(here)
    return table, files


def has_moved(attributes: Mapping[str, str], run: Path) -> bool:
    """Return whether files that the `run` folder keeps lie elsewhere than its config says."""
    return _kept(attributes, run)[0] != recorded_table(attributes["config"])


def _changed_files(files: Mapping[str, Mapping[str, str]], force: bool) -> dict[str, str]:
    """Return what has become of the files that a run's config names and that have changed, by their keys."""
    files = {} if force else files
    reasons = {key: changed(key, known, "expected it there") for key, known in files.items()}
    return {key: reason for key, reason in reasons.items() if reason}


def _look_for(attributes: Mapping[str, str], run: Path, force: bool, trust: bool) -> dict[str, str]:
    """Look for a run's code from now on; return why not, by the names in its config."""
    code, table = json.loads(attributes.get("code", "{}")), recorded_table(attributes["config"])
    lost = plugins.look_for(code, run, force, trust)
    picked = [(section, pick.by) for section, pick in PICKED.items()]
    for section, key in (*picked, ("task", "loss"), ("task", "metrics")):
        named = table.get(section)
        names = named.get(key) if isinstance(named, dict) else None
        for name in names if isinstance(names, list) else [names]:
            if isinstance(name, str) and ":" in name and name not in code:
                lost[name] = f"{section}.{key} = '{name}': expected its file in the attribute code of run.h5, got none"
    return lost


def to_read(
    attributes: Mapping[str, str], run: Path, force: bool = False, trust: bool = False
) -> tuple[Config, dict[str, str]]:
    """Return the config of a recorded run whose models are to be read, and why what of it is not here.

    In the place of a section that is not here, by the names ``algorithm``, ``task``, ``speed`` and ``data``, stands one
    that has its name alone; ``model.initial`` is left out. Nothing of these may be computed with.

    Raises
    ------
    UsageError
        If the model's own class is not here, or is not to be imported, or what of it is frozen has no file any more.
    """
    lost, absent = _look_for(attributes, run, force, trust), dict[str, str]()
    table, files = _kept(attributes, run)
    for section in PICKED:
        if not isinstance(table.get(section, {}), dict):
            raise UsageError(f"{section}: expected a table, got {toml(table[section])}")
    for key, reason in _changed_files(files, force).items():
        absent[key if key.startswith("model.") else key.partition(".")[0]] = reason
    if "model.initial" in absent:
        if table["model"].get("train", [*EVERYTHING]) != [*EVERYTHING]:  # what is frozen is nowhere else
            raise UsageError(absent["model.initial"])
        table["model"] = {**table["model"], "initial": None}
    task = TaskConfig.from_table(table.get("task", {}), "task")
    names = {section: [table.get(section, {}).get(pick.by, pick.default)] for section, pick in PICKED.items()}
    names["task"] = [name for _, name in task.own]
    for section, own in names.items():
        find = task.check if section == "task" else partial(_picked, table, section)
        try:
            for reason in (lost[name] for name in own if name in lost):
                raise UsageError(reason)
            find()
        except UsageError as error:
            absent.setdefault(section, str(error))
    if "model" in absent:
        raise UsageError(absent["model"])
    stands = {
        "algorithm": Algorithm(name=names["algorithm"][0]),
        "speed": Speed(model=names["speed"][0]),
        "data": AbsentSource(name=names["data"][0]),
        "task": task.model_copy(update={"loss": "auto", "metrics": METRICS}),
    }
    instead = {section: stand for section, stand in stands.items() if section in absent}
    config = from_table(table, instead=instead)
    if "speed" not in absent:
        try:
            config.speed.paces(config.seed, config.clients)  # of a replay they are in another run's folder
        except UsageError as error:
            absent["speed"] = str(error)
    return config, absent


def from_table(
    table: Table, data_dir: Path | None = None, instead: Mapping[str, ConfigBase] = MappingProxyType({})
) -> Config:
    """Return the typed config of a nested table.

    Where it says nothing of `clients` they are as many as the data have, if these say so. Sections that are given
    `instead` are taken as they are.
    """
    for key in table:
        if key not in Config.model_fields:
            raise UsageError(_unknown(table, key))
    picked = dict(instead) | {key: _picked(table, key) for key in PICKED if key not in instead}
    for key, cls in sections(Config).items():
        if key in table and key not in picked:
            picked[key] = cls.from_table(table[key], key)
    rest = {key: value for key, value in table.items() if key not in picked}
    source = cast("Source", picked["data"])
    if "clients" not in rest and (there := source.number_of_clients(data_dir)) is not None:
        rest["clients"] = there
    return checked(lambda: Config.model_validate({**rest, **picked}), Config, "")


def _unknown(table: Table, key: str) -> str:
    """Return the line that refuses a key that stands in no section: it may belong into one of this config."""
    classes = dict[str, type[ConfigBase]]()
    for name, pick in PICKED.items():
        section = table.get(name)
        with suppress(UsageError):  # of a section that is refused later
            choice = section.get(pick.by, pick.default) if isinstance(section, dict) else pick.default
            classes |= {name: pick.find(choice)} if isinstance(choice, str) else {}
    classes = {**classes, **{name: cls for name, cls in sections(Config).items() if name not in PICKED}}
    homes = [f"{name}.{key}" for name, cls in classes.items() if key in cls.model_fields]
    return f"{key}: unknown key; did you mean {' or '.join(homes)}?" if homes else unknown(Config, key)


def _picked(table: Table, key: str) -> ConfigBase:
    """Return the section at `key`, of the class that one of its own keys names."""
    by, default, _, find_class = PICKED[key]
    section = table.get(key, {})
    if not isinstance(section, dict):
        raise UsageError(f"{key}: expected a table, got {section!r}")
    name = section.get(by, default)
    if not isinstance(name, str):
        raise UsageError(f"{key}.{by}: expected a name, got {'nothing' if name is None else repr(name)}")
    return find_class(name).from_table({**section, by: name}, key)
