"""What a client rank is over two levels: it leads others, or is led, until it hears that this has changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hpcfl.base.errors import LeftOut, RunError
from hpcfl.base.lazy import MPI
from hpcfl.base.types import Ints, State
from hpcfl.engine.executor import Executor, Worker
from hpcfl.engine.job import Job
from hpcfl.engine.profile import Phases
from hpcfl.mpi.channel import direct, notices, within, words
from hpcfl.mpi.placement import Tree, topology
from hpcfl.mpi.transfers import Transfers
from hpcfl.mpi.waiting import idle
from hpcfl.realtime.client import ClientRank
from hpcfl.realtime.lane import Lane
from hpcfl.realtime.leader import Leader
from hpcfl.realtime.orders import Command
from hpcfl.realtime.succession import lane_to

PAUSE_SECONDS = 0.01


class Succeeded(Exception):  # noqa: N818
    """This rank's lanes have changed."""


class Roles:
    """What a client rank does over two levels, for as long as the run lasts: it leads others or it does not."""

    def __init__(
        self,
        job: Job,
        comm: MPI.Intracomm,
        tree: Tree,
        executor: Executor,
        rest: Callable[[], None],
        phases: Phases | None,
        store: Callable[[int, Mapping[int, State]], None] | None,
    ) -> None:
        self.job, self.comm, self.tree, self.executor = job, comm, tree, executor
        self.given, self.phases, self.store = rest, phases or Phases(), store
        self.rank = comm.Get_rank()
        self.worker = Worker()
        self.worker.start(lambda put: executor.warm())
        self.words = words(comm, 0, leads=False)
        self._kept: list[Any] = []  # earlier roles: MPI may still use what they hold
        self._listen()

    def serve(self) -> Command:
        """Return the server's last word."""
        while True:
            role = self._role()
            self._kept.append(role)
            try:
                return self._served(role)
            except Succeeded:
                continue

    def _served(self, role: ClientRank | Leader) -> Command:
        try:
            return role.serve()
        except RunError:
            if self.tree.above(self.rank)[0] == 0:
                raise
        while True:  # whoever led this rank is dead: the server says who does now
            self.rest()
            time.sleep(PAUSE_SECONDS)

    def rest(self) -> None:
        """Do what there is to do while this rank waits; raise Succeeded where its lanes have changed."""
        before = self.tree
        while all(request.Test() for request in self._heard):
            self.tree = self.tree.led_by(*self._word.tolist())
            self._listen()
        if self.tree is not before:
            if not any(self.rank in row for row in self.tree.nodes):
                raise LeftOut("it came too late, and the job has started without it")
            if self._lanes(before) != self._lanes(self.tree):
                raise Succeeded
        self.given()

    def _listen(self) -> None:
        self._word: Ints = np.zeros(4, dtype=np.int64)
        self._heard = self.words.down(self._word)

    def _lanes(self, tree: Tree) -> tuple[Any, ...]:
        return tree.above(self.rank), tree.below(self.rank)

    def _role(self) -> ClientRank | Leader:
        (parent, epoch), below = self.tree.above(self.rank), self.tree.below(self.rank)
        alone, channels = topology([self.rank], self.job.chunks), direct(self.comm, parent, False, epoch)
        if not below:
            given = channels, self.rest, None, self.phases, self.store, self.worker
            return ClientRank(self.job, self.executor, alone, 0, *given)
        transfers, (near, other) = Transfers(), within()
        beside = other, idle, None, None, self.store, self.worker, self.phases
        own = ClientRank(self.job, self.executor, alone, 0, *beside)
        facts = self.job.layout, self.job.config.clients, transfers, self.job.together, self.job.parts
        lane = Lane(alone, near, *facts)
        lanes = [lane if one.peer == self.rank else lane_to(self.job, self.comm, one, facts) for one in below]
        above = *channels, notices(self.comm, parent, False, epoch)
        under = topology([rank for each in lanes for rank in each.topology.ranks], self.job.chunks)
        depth, renewed = self.tree.depth(self.tree.node(self.rank)), any(self.tree.epochs)
        more = transfers, self.rest, self.phases, depth, renewed
        return Leader(self.job, under, above, parent, own, lanes, *more)
