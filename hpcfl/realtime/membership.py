"""Ranks that have not been heard of for some rounds; clients whose rank is lost, and the ranks at which they go on."""

from __future__ import annotations

import time
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcfl import store
from hpcfl.base.errors import listed
from hpcfl.base.terminal import say
from hpcfl.base.types import Ints
from hpcfl.engine.checkpointing import restored
from hpcfl.engine.job import Job
from hpcfl.mpi.placement import Chunk
from hpcfl.realtime.lane import BUSY, Lane
from hpcfl.realtime.lanes import Lanes
from hpcfl.realtime.orders import Command, Op
from hpcfl.realtime.questions import Adopt, Done, Handover

NOWHERE = -1
ABSENT_ROUNDS, ABSENT_SECONDS = 3, 1.0  # a rank that could not be invited for so long is spoken of


class Absences:
    """Who has not been heard of for some rounds, and who is back: each is told of once, with its host.

    Attributes
    ----------
    hosts : sequence of str
        Each rank's.
    """

    hosts: Sequence[str] = ()

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self._since: dict[int, tuple[int, float]] = {}  # round and second from which a rank has been late
        self._told: set[int] = set()

    def look(self, round: int) -> None:
        """Take note of who is late when the clients of a round are invited."""
        late, now = self._clients_in("late"), time.monotonic()
        if not late and not self._since:
            return
        dead = self._clients_in("dead")
        rows = [row for lane in self.lanes.all for row in lane.topology.by_rank.items()]
        clients, away = dict(rows), {rank for rank, own in rows if late.intersection(own)}
        gone = self._since.keys() - {rank for rank, own in rows if dead.isdisjoint(own)}
        # of those who are gone others tell
        self._tell("returned", "is back, after {1:.1f} s", self._told - away - gone, clients, now)
        self._since = {rank: self._since.get(rank, (round, now)) for rank in away}
        self._told &= away
        new = {rank for rank in away - self._told if round - self._since[rank][0] >= ABSENT_ROUNDS - 1}
        new = {rank for rank in new if now - self._since[rank][1] > ABSENT_SECONDS}
        self._tell("absent", "has not been heard of since round {0}, {1:.1f} s", new, clients, now)
        self._told |= new

    def _clients_in(self, state: str) -> set[int]:
        return {client for lane in self.lanes.all for client in lane.clients_in(state).tolist()}

    def _tell(
        self, kind: str, text: str, ranks: Collection[int], clients: Mapping[int, tuple[int, ...]], now: float
    ) -> None:
        """Say one line for each host that has any of these ranks."""
        for host in dict.fromkeys(self.hosts[rank] for rank in sorted(ranks)):
            these = [rank for rank in sorted(ranks) if self.hosts[rank] == host]
            own = sorted(client for rank in these for client in clients[rank])
            who = f"{host} (rank{'s' * (len(these) > 1)} {listed(these)}; client{'s' * (len(own) > 1)} {listed(own)})"
            since, start = min(self._since[rank] for rank in these)
            say(line := f"{who} {text.format(since, now - start)}")
            self.lanes.events += [(kind, client, line) for client in own]


@dataclass
class Orphan:
    """A chunk of clients whose rank is lost, and the rank that is to take them over."""

    chunk: Chunk
    lost: int
    host: int = NOWHERE


class Orphans:
    """The clients of lost ranks until other ranks have taken them over, chunk by chunk."""

    def __init__(self, job: Job, lanes: Lanes) -> None:
        self.job, self.lanes = job, lanes
        self.waiting: list[Orphan] = []
        self._chunk = {int(chunk.clients[0]): chunk for chunk in job.chunks}

    @property
    def clients(self) -> Ints:
        """Who waits for a rank, int64 [n]."""
        return np.array([client for each in self.waiting for client in each.chunk.clients], dtype=np.int64)

    @property
    def hopeful(self) -> Ints:
        """Who of them will be taken over, int64 [n]: nobody where all ranks are lost."""
        return self.clients if self.lanes.those("idle", *BUSY) else self.clients[:0]

    @property
    def hosted(self) -> Ints:
        """Who lives where they are to be taken over, int64 [n]: they wait for these ranks to be free."""
        hosts = {each.host for each in self.waiting}
        hosted = [lane.hosted for lane in self.lanes.all if hosts.intersection(lane.topology.ranks)]
        return np.concatenate([np.zeros(0, dtype=np.int64), *hosted])

    def place(self, at_work: Container[Lane], saved: Path | None) -> list[Lane]:
        """Hand clients of lost ranks over to others that are idle, not `at_work`; return lanes that this keeps busy.

        Each chunk goes to the rank with the fewest clients, of several to the first, whether that is free by now or
        not. A lane of several ranks falls apart when one of them is to take over clients. Personal state is that of the
        checkpoint `saved`, where there is one, else that before the first visit.
        """
        for lane in self.lanes.those("dead"):
            self.lanes.all.remove(lane)
            for rank, chunks in zip(lane.topology.ranks, lane.topology.chunks):
                self.waiting += [Orphan(self._chunk[chunk[0]], rank) for chunk in chunks]
        self.waiting.sort(key=lambda each: each.chunk.number)
        self._choose()
        busy = []
        for host in sorted({each.host for each in self.waiting} - {NOWHERE}):
            lane = next(lane for lane in self.lanes.all if host in lane.topology.ranks)
            if lane.state == "idle" and lane not in at_work:
                alone = len(lane.topology.ranks) == 1
                busy += self._hand_over(lane, host, saved) if alone else self.lanes.split(lane)
        return busy

    def _choose(self) -> None:
        load = {rank: len(own) for lane in self.lanes.all for rank, own in lane.topology.by_rank.items()}
        for each in self.waiting:
            if each.host in load:
                load[each.host] += len(each.chunk.clients)
            else:
                each.host = NOWHERE
        for each in self.waiting if load else ():
            if each.host == NOWHERE:
                each.host = min(load, key=lambda rank: (load[rank], rank))
                load[each.host] += len(each.chunk.clients)

    def _hand_over(self, lane: Lane, host: int, saved: Path | None) -> list[Lane]:
        """Give the rank of this lane the clients that it is to take over, and say so."""
        mine = [each for each in self.waiting if each.host == host]
        chunks = [each.chunk for each in mine]
        handover = Handover(chunks, self.job.like)
        known = store.load_personal(saved, handover.clients, check=True) if saved and self.job.personal_bytes else {}
        states = {client: self.job.algorithm.init_client(self.job.task, client) for client in handover.clients}
        states |= {client: restored(states[client], own) for client, own in known.items()}
        command = Command(Op.ADOPT, cohort=np.sort(handover.clients))
        lane.ask(command, Adopt(), Done(lane.topology), handover.sent(states))
        lane.host(lane.topology.with_more(chunks))
        self.waiting = [each for each in self.waiting if each.host != host]
        rounds = store.personal_rounds(saved, handover.clients) if saved else dict.fromkeys(handover.clients, 0)
        for lost in dict.fromkeys(each.lost for each in mine):
            clients = [client for each in mine if each.lost == lost for client in each.chunk.clients.tolist()]
            where = f"at rank {host} in place of rank {lost}"
            self.lanes.events += [("rehosted", client, where + self._since([rounds[client]])) for client in clients]
            many, since = "s" * (len(clients) > 1), self._since(rounds[client] for client in clients)
            say(f"client{many} {listed(clients)} of rank {lost} go{'' if many else 'es'} on at rank {host}{since}")
        return [lane]

    def _since(self, rounds: Iterable[int]) -> str:
        """Return of when the personal state is with which clients go on, "" where they have none."""
        if not self.job.personal_bytes:
            return ""
        found = sorted(set(rounds))
        if found == [0]:
            return ", with the state before the first visit"
        return f", with the state after round{'s' * (len(found) > 1)} {listed(found)}"
