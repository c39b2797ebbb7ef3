"""Bare rounds in real time, without a run folder: what the benchmarks measure.

An algorithm of some layers of equal size stands for all; a server and members are made as every run makes them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from mpi4py import MPI
from torch import Tensor

from hpcfl.algorithms import Algorithm
from hpcfl.base.memory import LEAN_BYTES, give_back
from hpcfl.base.types import State
from hpcfl.config import from_table
from hpcfl.engine.executor import Executor
from hpcfl.engine.job import Job
from hpcfl.engine.stopping import Stop
from hpcfl.mpi.channel import connect
from hpcfl.mpi.cores import cores
from hpcfl.mpi.placement import lane_topologies
from hpcfl.mpi.waiting import Patience
from hpcfl.realtime import start
from hpcfl.realtime.client import ClientRank
from hpcfl.realtime.outcome import RoundOutcome
from hpcfl.realtime.server import Server
from hpcfl.schedule.plan import Attempt
from hpcfl.sums.message import Block, Layout

if TYPE_CHECKING:
    from hpcfl.algorithms.base import Client
    from hpcfl.learning.batches import Visits
    from hpcfl.learning.task import Task


NOWHERE = Path("no run folder")


class Layers(Algorithm):
    """Layers that are there at once, each full of the number that the shared state holds.

    Attributes
    ----------
    count : int
    entries : int
        Float32 numbers per layer.
    """

    name: Literal["layers"] = "layers"
    count: int = 8
    entries: int = 250_000
    layerwise: ClassVar[bool] = True

    def layers(self, task: Task) -> tuple[tuple[str, ...], ...]:
        """Return the names of layers 1 … L."""
        return tuple((f"layer {number}",) for number in range(1, self.count + 1))

    def layout(self, task: Task) -> Layout:
        """Return one group per layer, last layer first."""
        return tuple({name: Block((self.entries,))} for (name,) in reversed(self.layers(task)))

    def init_server(self, task: Task) -> State:
        """Return zeros."""
        return {name: torch.zeros(self.entries) for (name,) in self.layers(task)}

    def client(self, task: Task, shared: State, personal: State, visits: Visits) -> Client:
        """Send the layers, last layer first."""
        for (name,) in reversed(self.layers(task)):
            yield {name: (ones(self.entries), visits.ones(1))}
        return {}


@cache
def ones(entries: int) -> Tensor:
    """Return a layer of ones ``[1, entries]``, made once."""
    return torch.ones(1, entries)


def job_of(algorithm: Algorithm, ranks: int, width: int | str, rules: Mapping[str, Any], **more: Any) -> Job:
    """Return a wall-clock job with one client per client rank.

    Parameters
    ----------
    rules : mapping
        The ``[participation]`` section.
    **more
        Further keys of the config.
    """
    table = {
        "rounds": 1,
        "clients": ranks - 1,
        "clock": "wall",
        "lane_width": width,
        "participation": dict(rules),
        "algorithm": {"name": "salf", "missing": "none"},
        "data": {"name": "digits"},
        "model": {"name": "mlp", "hidden": [8]},
        **more,
    }
    Patience.crowd = ranks / len(cores())
    job = Job.of(from_table(table), None, ranks)
    if sum(value.nbytes for value in algorithm.init_server(job.task).values()) >= LEAN_BYTES:
        give_back()  # as every job does with a model of this size
    return replace(job, algorithm=algorithm)


class Timed(Server):
    """A server that notes when a round began and how long it took to close.

    Attributes
    ----------
    began : float
        When the last round's invitation was sent (seconds of the monotonic clock).
    took : float
        Seconds from there until it was decided what counts.
    attempt : Attempt
        Who was invited.
    """

    began = took = 0.0
    attempt: Attempt

    def __init__(self, job: Job, *given: Any) -> None:
        super().__init__(job, *given)
        self.absences.hosts = ["here"] * self.size

    def _attempt(self, *given: Any) -> RoundOutcome:
        outcome = super()._attempt(*given)
        self.took = time.monotonic() - outcome.start
        self.began, self.attempt = outcome.start, outcome.attempt
        return outcome


def server(job: Job, comm: MPI.Intracomm) -> Timed:
    """Return the server's side; every client rank calls `serve` or `client_rank` meanwhile."""
    made = start.lead(job, comm, _here(comm), NOWHERE, Stop(NOWHERE, True), job.begin(0))
    return Timed(job, made.lanes, made.rest)


def serve(job: Job, comm: MPI.Intracomm) -> None:
    """Be a client rank until the server says that the run is over."""
    start.serve(job, comm, _here(comm), job.begin(comm.Get_rank()), lambda: None)


def client_rank(job: Job, comm: MPI.Intracomm) -> ClientRank:
    """Return a client rank's side, whose `serve` may be called again after the server's `leave`."""
    rank = comm.Get_rank()
    rows = lane_topologies(job.config.lane_width, _here(comm), job.chunks)
    number, topology = next((number, topology) for number, topology in enumerate(rows) if rank in topology.ranks)
    executor = Executor(job, job.hosted(rank), job.begin(rank).personal)
    connected = connect(comm, job.config.lane_width, _here(comm), False).lanes[number]
    return ClientRank(job, executor, topology, topology.ranks.index(rank), connected, lambda: None)


def _here(comm: MPI.Intracomm) -> list[str]:
    return ["here"] * comm.Get_size()
