"""Arrivals over two levels: each rank is alone on its lane, and those of a node reach the server by way of its leader.

Every visit counts by itself there, so leaders have nothing to add up: they pass messages on (`hpcfl.mpi.relay`).
Where MPI tells that one is dead, or a lane has been silent for too long, the ranks go on without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, TypeAlias

from hpcfl.base.lazy import MPI
from hpcfl.base.types import State
from hpcfl.engine.executor import Executor
from hpcfl.engine.job import Job
from hpcfl.engine.profile import Phases
from hpcfl.engine.watchdog import LEAVE_SECONDS
from hpcfl.mpi.channel import NOTHING, Pair, direct, farewell, relayed, single, word
from hpcfl.mpi.placement import Tree, topology
from hpcfl.mpi.relay import Relay
from hpcfl.mpi.waiting import Patience
from hpcfl.realtime.client import ClientRank
from hpcfl.realtime.lane import Lane
from hpcfl.realtime.orders import Command

LAST_SECONDS = 2.0  # for neighbours to leave where some are lost, and may hang for ever
Comms: TypeAlias = "list[MPI.Intracomm]"
"""For what has come to where it goes, and for what is to be passed on."""


def lanes(job: Job, comms: Comms, nodes: Tree, facts: tuple[Any, ...]) -> tuple[list[Lane], dict[int, Lane]]:
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


class RelayedRank:
    """A client rank that has a lane of its own, and passes on what goes to its neighbours if it leads its node."""

    def __init__(
        self,
        job: Job,
        comms: Comms,
        nodes: Tree,
        executor: Executor,
        rest: Callable[[], None],
        phases: Phases | None,
        store: Callable[[int, Mapping[int, State]], None] | None,
    ) -> None:
        self.comms, self.rank = comms, comms[0].Get_rank()
        row = nodes.nodes[nodes.node(self.rank)]
        self.leader = nodes.leaders[nodes.node(self.rank)]
        self.relay = Relay(comms, [rank for rank in row if rank != self.rank]) if self.leader == self.rank else None

        def beside() -> None:
            if self.relay is not None:
                self.relay.look()
            rest()

        own, spare = _channels(comms, nodes, self.rank, leads=False)
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


def _channels(comms: Comms, nodes: Tree, rank: int, leads: bool) -> tuple[Pair, Pair | None]:
    """Return one end of a rank's lane, and of the spare one, if it is reached by way of another."""
    leader, peer = nodes.leaders[nodes.node(rank)], rank if leads else 0
    if leader == rank:
        return direct(comms[0], peer, leads, rank), None
    return relayed(comms, leader, rank, leads), direct(comms[0], peer, leads, single(rank, comms[0].Get_size()))
