"""Small problems without files: random federations, hand-made plans, and rounds that run in memory."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from hpcfl.algorithms import Algorithm, ServerState
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.salf import Salf
from hpcfl.data import ClientData, Federation
from hpcfl.engine import loop
from hpcfl.engine.iterated import iterate
from hpcfl.engine.job import Job, Progress, kinds
from hpcfl.engine.record import Record
from hpcfl.engine.simulated import Simulated, visit
from hpcfl.learning.batches import Visits
from hpcfl.learning.config import TaskConfig
from hpcfl.learning.task import Task
from hpcfl.models.cnn import Cnn
from hpcfl.models.glm import Glm
from hpcfl.models.mlp import Mlp
from hpcfl.mpi.placement import cut
from hpcfl.mpi.transport import Transport
from hpcfl.schedule.availability import Availability
from hpcfl.schedule.doubling import Doubling
from hpcfl.schedule.participation import Participation, Staleness
from hpcfl.schedule.plan import Plan
from hpcfl.schedule.planner import Planner
from hpcfl.schedule.scheduler import Scheduler
from hpcfl.schedule.speeds.base import Equal, Speed
from hpcfl.sums.guard import Guard
from hpcfl.sums.message import ExactSums

W = "linear.weight"
PLAIN = SimpleNamespace(  # all of a config that a job looks at
    seed=0,
    clock="simulated",
    batch_clients="auto",
    participation=Participation(),
    doubling=Doubling(),
    speed=Equal(),
    adds_times=False,
    availability=Availability(),
    guard=Guard(),
    staleness=Staleness(),
    scheduler=Scheduler(),
)


@dataclass(frozen=True, eq=False)
class Toy(Federation):
    held: list[ClientData]

    def client(self, i):
        return self.held[i]

    def server_test(self):
        return None


def federation(sizes, shape=(5,), classes=3, seed=0):
    """Clients of `sizes` samples; each has its own mean and its own favourite label, so gradients differ."""
    rng = np.random.default_rng(seed)
    held = []
    for client, size in enumerate(sizes):
        x = (rng.normal(size=(size, *shape)) + 0.5 * rng.normal(size=shape)).astype(np.float32)
        y = np.where(rng.random(size) < 0.5, client % classes, rng.integers(classes, size=size)).astype(np.int64)
        held.append(ClientData(x, y, x[:0], y[:0]))
    count = len(sizes)
    return Toy(classes, np.array(sizes), np.zeros(count, dtype=np.int64), [tuple(shape)] * count, held)


def mlp_task(sizes, hidden=(4, 3), dropout=0.0, seed=0, **keys):
    return Task(Mlp(hidden=hidden, dropout=dropout), federation(sizes, seed=seed), seed, **keys)


def quadratics(centres, sizes=None, start=0.0):
    """A task of one number w: client i holds ``½(w − b_i)²``, so many times that its passes have unequal steps."""
    sizes = [1] * len(centres) if sizes is None else sizes
    one = np.ones((max(sizes), 1), dtype=np.float32)
    held = [ClientData(one[:n], b * one[:n, 0], one[:0], one[:0, 0]) for b, n in zip(centres, sizes)]
    nobody = np.zeros(len(held), dtype=np.int64)
    toy = Toy(1, np.array(sizes), nobody, [(1,)] * len(held), held)
    kind = TaskConfig(loss="helpers.losses:half_square", metrics=())
    task = Task(Glm(link="identity", bias=False), toy, 0, precision="double", kind=kind)
    task.start.drawn[(1,)][W].fill_(start)
    return task


def cnn_task(sizes, dropout=0.0, seed=0):
    model = Cnn(channels=(2, 3), kernel=3, hidden=(6,), dropout=dropout)
    return Task(model, federation(sizes, shape=(1, 12, 12), seed=seed), seed)


def visits_of(task, clients, depth=None, round_=0, arrival=None):
    clients = np.asarray(clients)
    layers = len(task.layer_names())
    depth = np.ones(len(clients), dtype=np.int64) if depth is None else np.asarray(depth)
    arrival = np.ones((len(clients), layers)) if arrival is None else arrival
    return Visits(round_, clients, depth, task.federation.train_sizes[clients], arrival)


def planned(depth, layers, round_=0, miss=None):
    """A round with everybody invited whose depths are written down by hand."""
    depth = np.asarray(depth)
    miss = np.zeros(layers) if miss is None else np.asarray(miss)
    return Plan(round_, np.arange(len(depth)), np.ones(len(depth)), depth, 1.0, np.ones((len(depth), layers)), miss)


def planner(participation=None, speed=None, clients=4, work=(1.0,), seed=0, clock="simulated", layerwise=True):
    """The planner of clients of one sample each, under a method whose layers leave one by one or not."""
    method = Salf() if layerwise else FedAvg()
    sizes = np.ones(clients, dtype=np.int64)
    rules = participation or Participation(), speed or Equal(), method
    return Planner(*rules, sizes, np.asarray(work), seed, clock)


class Rounds:
    """Simulated rounds in one process and in memory, through the engine's own `visit`."""

    def __init__(self, algorithm: Algorithm, task: Task, per_chunk: int | None = None):
        clients = task.federation.clients
        chunks = cut(per_chunk or clients, np.ones(clients), 1, kinds(algorithm, task))
        config = SimpleNamespace(**vars(PLAIN), clients=clients)
        self.job = Job(config, task, algorithm, chunks)  # type: ignore[arg-type]
        self.now: Progress = self.job.begin(0)

    @property
    def state(self):
        return self.now.shared

    @property
    def server(self):
        return ServerState(self.now.shared, self.now.extras)

    @property
    def layers(self):
        return self.job.algorithm.layers(self.job.task)

    def plan(self, speed, participation, seed, round_):
        planner = replace(self.job.planner, participation=participation, speed=speed, seed=seed)
        return planner.plan(planner.attempt(round_))

    def collect(self, plan):
        """The sums of one round; the shared state is not touched."""
        sums = ExactSums(self.job.layout, plan.cohort, plan.miss_probability)
        kept = []
        visit(self.job, plan, self.job.chunks, self.now, sums, kept)
        if self.job.iterated is not None:
            sums.iterated = iterate(self.job.iterated, self.now.shared, kept, lambda own: own)
        return sums

    def step(self, plan):
        sums = self.collect(plan)
        sums.round = plan.round
        after = self.job.algorithm.step(self.job.task, self.server, sums)
        self.now.shared, self.now.extras = after.shared, after.extras
        self.now.round += 1
        return sums


class Paced(Speed):
    """Seconds that are written down: each client's, or each client's round by round, the last for all others."""

    model: str = "paced"
    of: tuple[float | tuple[float, ...], ...] = ()

    def seconds(self, attempt):
        rows = (np.atleast_1d(self.of[client]) for client in attempt.cohort)
        return np.array([row[min(attempt.round, len(row) - 1)] for row in rows])


class Arriving(Rounds):
    """The same where arrivals end rounds: whole rounds of the engine, whose clients take the seconds written down."""

    def __init__(self, algorithm: Algorithm, task: Task, seconds, staleness=None, **rules):
        clients = task.federation.clients
        chunks = cut(clients, np.ones(clients), 1, kinds(algorithm, task))
        config = vars(PLAIN) | {
            **{"clients": clients, "speed": Paced(of=tuple(seconds)), "staleness": staleness or Staleness()},
            "participation": Participation(close="arrivals", **rules),
        }
        self.job = Job(SimpleNamespace(**config), task, algorithm, chunks)  # type: ignore[arg-type]
        algorithm.check(self.job.config.participation)
        self.now: Progress = self.job.begin(0)
        self.rounds = Simulated(self.job, Transport(), 0)

    def step(self):
        """Do the next round; return its plan."""
        record = Record.open()
        plan, sums = self.rounds.exchange(self.now, record)
        record.sums = sums
        loop.step(self.job, self.now, record, plan)
        self.now.clock["sim_seconds"] += plan.duration
        self.now.round += 1
        return plan

    def path(self, rounds):
        """When each of the next rounds ends, and the one number w then."""
        found = []
        for _ in range(rounds):
            self.step()
            found.append((self.now.clock["sim_seconds"], float(self.state[W])))
        return found


def plain(task, state=None):
    """The same model as one ordinary nn.Sequential with parameters of its own."""
    net = nn.Sequential(*[copy.deepcopy(module) for layer in task.layers for module in layer.modules])
    if state is not None:
        load(net, state)
    return net


@torch.no_grad()
def load(net, state):
    for parameter, value in zip(net.parameters(), state.values(), strict=True):
        parameter.copy_(value)


def read(net, task):
    return dict(zip(task.initial(), [p.detach().clone() for p in net.parameters()], strict=True))


def plain_gradients(task, state, x, y):
    """Gradients of the mean cross-entropy by ordinary autograd, ``{name: […]}``."""
    net = plain(task, state)
    loss = nn.functional.cross_entropy(net(x), y)
    return dict(zip(task.initial(), torch.autograd.grad(loss, list(net.parameters())), strict=True))


def full_batch(task, client):
    own = task.federation.client(client)
    return torch.from_numpy(own.train_features), torch.from_numpy(own.train_labels)


def same_bits(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
