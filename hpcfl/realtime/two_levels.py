"""What a client rank is over two levels: it leads others, or is led, until it hears that this has changed.

Where arrivals end rounds every visit counts by itself, so leaders have nothing to add up: each rank has a lane of its
own, and those of a node reach the server by way of its leader, which passes messages on (`hpcfl.mpi.relay`). Where MPI
tells that it is dead, or a lane has been silent for too long, the ranks go on without it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from hpcfl.base.errors import LeftOut, RunError
from hpcfl.base.lazy import MPI
from hpcfl.base.types import Ints
from hpcfl.engine.executor import Executor, Worker
from hpcfl.engine.job import Job
from hpcfl.engine.profile import Phases
from hpcfl.engine.watchdog import LEAVE_SECONDS
from hpcfl.mpi.channel import NOTHING, Pair, direct, farewell, notices, relayed, single, within, word, words
from hpcfl.mpi.placement import Tree, topology
from hpcfl.mpi.relay import Relay
from hpcfl.mpi.transfers import Transfers
from hpcfl.mpi.waiting import Patience, idle
from hpcfl.realtime.client import ClientRank, Rest
from hpcfl.realtime.lane import Lane
from hpcfl.realtime.leader import Leader
from hpcfl.realtime.orders import Command
from hpcfl.realtime.questions import Store
from hpcfl.realtime.succession import lane_to

PAUSE_SECONDS = 0.01
LAST_SECONDS = 2.0  # for neighbours to leave where some are lost, and may hang for ever
Comms: TypeAlias = "list[MPI.Intracomm]"
"""For what has come to where it goes, and for what is to be passed on."""


class Succeeded(Exception):  # noqa: N818
    """This rank's lanes have changed."""


class Roles:
    """What a client rank does over two levels, for as long as the run lasts: it leads others or it does not."""

    def __init__(
        self, job: Job, comms: Comms, tree: Tree, executor: Executor, rest: Rest, phases: Phases | None, store: Store
    ) -> None:
        self.job, self.comm, self.tree, self.executor = job, comms[0], tree, executor
        self.given, self.phases, self.store = rest, phases or Phases(), store
        self.rank = self.comm.Get_rank()
        self.worker = Worker()
        self.worker.start(lambda put: executor.warm())
        self.words = words(self.comm, 0, leads=False)
        self._kept: list[Any] = []  # earlier roles: MPI may still use what they hold
        self._listen()

    def serve(self) -> Command:
        """Return the server's last word."""
        while True:
            role = self._role()
            self._kept.append(role)
            with suppress(Succeeded):
                return self._served(role)

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


class RelayedRank:
    """A client rank that has a lane of its own, and passes on what goes to its neighbours if it leads its node."""

    def __init__(
        self, job: Job, comms: Comms, tree: Tree, executor: Executor, rest: Rest, phases: Phases | None, store: Store
    ) -> None:
        self.comms, self.rank = comms, comms[0].Get_rank()
        row = tree.nodes[tree.node(self.rank)]
        self.leader = tree.leaders[tree.node(self.rank)]
        self.relay = Relay(comms, [rank for rank in row if rank != self.rank]) if self.leader == self.rank else None

        def beside() -> None:
            if self.relay is not None:
                self.relay.look()
            rest()

        own, spare = _channels(comms, tree, self.rank, leads=False)
        alone = topology([self.rank], job.chunks)
        self.client = ClientRank(job, executor, alone, 0, own, beside, spare, phases, store)
        if spare is not None:
            self.client.word = word(comms[0], self.rank, leads=False).down(NOTHING)

    def serve(self) -> Command:
        """Return the server's last word, once there is nothing more to pass on."""
        last = self.client.serve()
        if self.relay is not None:
            patience, end = Patience(), time.monotonic() + (LAST_SECONDS if last.hard else 2 * LEAVE_SECONDS)
            while not self.relay.over and time.monotonic() < end:
                self.relay.look()
                patience.pause()
        elif self.client.spare is not None:
            said = farewell(self.comms, self.leader, self.rank), word(self.comms[0], self.rank, leads=False)
            self._said = [channel.up(NOTHING) for channel in said]
        return last


def relayed_lanes(job: Job, comms: Comms, nodes: Tree, facts: tuple[Any, ...]) -> tuple[list[Lane], dict[int, Lane]]:
    """Return the server's lanes, and the spare ones of ranks that it reaches by way of others."""
    made, spare = [], {}
    for rank in sorted(chain(*nodes.nodes)):
        own, others = _channels(comms, nodes, rank, leads=True)
        made.append(Lane(topology([rank], job.chunks), own, *facts))
        if others is not None:
            # where this rank dies, MPI tells of it on channels to it, not on those by way of others
            made[-1].begin(word(comms[0], rank, leads=True).up(NOTHING))
            spare[rank] = Lane(topology([rank], job.chunks), others, *facts)
    return made, spare


def _channels(comms: Comms, nodes: Tree, rank: int, leads: bool) -> tuple[Pair, Pair | None]:
    """Return one end of a rank's lane, and of the spare one, if it is reached by way of another."""
    leader, peer = nodes.leaders[nodes.node(rank)], rank if leads else 0
    if leader == rank:
        return direct(comms[0], peer, leads, rank), None
    return relayed(comms, leader, rank, leads), direct(comms[0], peer, leads, single(rank, comms[0].Get_size()))
