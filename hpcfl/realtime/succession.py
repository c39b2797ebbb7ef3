"""Who leads whom over two levels, and who leads next where a leader is suspended, or dead.

The server decides it: leaders tell of those that they lead. It sends word to all client ranks
(`hpcfl.realtime.two_levels`), over channels of its own, since it does not reach them by way of somebody who hangs; all
of the branch in which one leads anew make new lanes, and leave the old ones as they are. A leader that wakes up finds
the word first, and is led from then on as any other rank.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from math import inf
from typing import Any

import numpy as np

from hpcfl.base.lazy import MPI
from hpcfl.base.terminal import say
from hpcfl.engine.job import Job
from hpcfl.mpi.channel import direct, notices, words
from hpcfl.mpi.placement import Tree, Under, topology
from hpcfl.realtime.lane import Lane
from hpcfl.realtime.lanes import Lanes
from hpcfl.realtime.node import NodeLane

MOST_SLACK = 64.0
MISSED = 2  # rounds at whose end a leader has not replied, before another rank leads


def lane_to(job: Job, comm: MPI.Intracomm, to: Under, facts: tuple[Any, ...]) -> Lane:
    """Return a lane of two levels; `facts` are what `Lane` is given about the run."""
    under, channels = topology(to.ranks, job.chunks), direct(comm, to.peer, True, to.epoch)
    if not to.leads:
        return Lane(under, channels, *facts)
    return NodeLane(under, (*channels, notices(comm, to.peer, True, to.epoch)), to.peer, to.heirs, *facts)


class Succession:
    """The server's part in it."""

    def __init__(self, job: Job, comm: MPI.Intracomm, tree: Tree, facts: tuple[Any, ...]) -> None:
        self.job, self.comm, self.tree, self.facts = job, comm, tree, facts
        self._missed: dict[int, int] = {}  # rounds, by leader
        self._passed: dict[int, set[int]] = {}  # by node, who has led in vain since one of its leaders replied
        self._slack: dict[int, float] = {}  # by node, how many times as long as usually the next one may take to come
        self._kept: list[Any] = []

    def lanes(self) -> list[Lane]:
        """Return the server's lanes."""
        return [lane_to(self.job, self.comm, one, self.facts) for one in self.tree.below(0)]

    def round_over(self, lanes: Lanes) -> None:
        """Let others lead the nodes whose leader has not replied at the end of so many rounds."""
        for _, leader, state in self._leaders(lanes):
            self._missed[leader] = self._missed.get(leader, 0) + 1 if state == "silent" else 0
            if state == "idle":
                self._passed.pop(self.tree.node(leader), None)
                self._slack.pop(self.tree.node(leader), None)
        self.look(lanes)

    def look(self, lanes: Lanes) -> None:
        """Let others lead the nodes whose leader is dead, or known to hang."""
        for old, leader, state in self._leaders(lanes):
            if old in lanes.all and (state == "dead" or self._missed.get(leader, 0) >= MISSED):
                why = "is lost" if state == "dead" else f"has not replied for {MISSED} rounds"
                self._replace(lanes, old, leader, why)

    def replace_late(self, lanes: Lanes) -> None:
        """Let others lead the nodes whose leader is not there when a job starts."""
        for old, leader, state in self._leaders(lanes):
            if old in lanes.all and state in ("late", "silent", "dead"):
                self._replace(lanes, old, leader, "is lost" if state == "dead" else "is not there")

    def _leaders(self, lanes: Lanes) -> list[tuple[NodeLane, int, str]]:
        """Return the lane by which each leader is reached, and its state, of `RANK_STATES`.

        Not of those that are below one who cannot tell.
        """
        found, below = [], {*self.tree.leaders[self.tree.fan_out :]}
        for one in lanes.all:
            if not isinstance(one, NodeLane):
                continue
            state = "silent" if one.hangs else one.state
            found.append((one, one.leader, state))
            if below and state not in ("silent", "dead"):
                told = zip(one.topology.ranks, one.noticed.told())
                found += [(one, *each) for each in told if each[0] in below]
        return found

    def _replace(self, lanes: Lanes, old: NodeLane, leader: int, why: str) -> None:
        node = self.tree.node(leader)
        states = dict(zip(old.topology.ranks, old.noticed.states()))
        row = [rank for rank in self.tree.nodes[node] if rank not in lanes.lost and rank != leader]
        after = [rank for rank in row if rank > leader] + [rank for rank in row if rank < leader]
        after = after or [rank for rank in self.tree.under(node).heirs if rank not in lanes.lost]  # of a node below
        if not after:
            return
        passed = self._passed.setdefault(node, set())
        passed.add(leader)
        if passed.issuperset(after):  # it may be all of them that are cut off
            self._passed[node], self._slack[node] = {leader}, min(MOST_SLACK, 4 * self._slack.get(node, 1.0))
        # stable: the next one of those that are free
        new = min(after, key=lambda rank: (rank in self._passed[node], states[rank] == "late"))
        self._missed[leader] = 0
        self._change(node, new, lanes.lost)
        self._renew(lanes, old, self.tree.branch(node))
        say(f"rank {new} leads the node of rank {leader}, which {why}")
        for client in old.topology.by_rank[leader]:
            lanes.events.append(("succeeded", client, f"rank {new} leads in place of rank {leader}, which {why}"))

    def leave_out_late(self, lanes: Lanes, why: str) -> None:
        """Give up for good, when a job starts, the ranks below leaders that are not there: they are lost."""
        for old in [one for one in lanes.all if isinstance(one, NodeLane) and one.state == "idle"]:
            late = [rank for rank, state in zip(old.topology.ranks, old.noticed.states()) if state == "late"]
            branch, lost = self.tree.branch(self.tree.node(old.leader)), {*lanes.lost}
            for rank in late:
                node = self.tree.node(rank)
                self._change(node, self.tree.leaders[node], lost, rank)
                lanes.all.append(Lane(topology([rank], self.job.chunks), direct(self.comm, rank, True), *self.facts))
                lanes.lose(lanes.all[-1], why)
            if late:
                self._renew(lanes, old, branch)

    def _change(self, node: int, leader: int, lost: Collection[int], out: int = 0) -> None:
        """Let a node have this leader, and leave a rank out, on all ranks that are not `lost`."""
        self.tree = self.tree.led_by(node, leader, self.tree.epochs[node] + 1, out)
        word = np.array([node, leader, self.tree.epochs[node], out], dtype=np.int64)
        for rank in range(1, self.comm.Get_size()):
            if rank not in lost:
                with suppress(MPI.Exception):  # it has died since, and will be missed later
                    self._kept.append((words(self.comm, rank, leads=True).down(word), word))

    def _renew(self, lanes: Lanes, old: NodeLane, branch: int) -> None:
        """Put the lane by which a branch is reached from now on in the place of the old one."""
        old.die("its ranks have new lanes")
        successor = lane_to(self.job, self.comm, self.tree.under(branch), self.facts)
        counted = dict(zip(old.hosted.tolist(), old.counted.tolist()))
        if isinstance(successor, NodeLane):
            successor.slack = self._slack.get(branch, 1.0)
        successor.expect(np.array([counted[client] for client in successor.hosted.tolist()], dtype=np.int64))
        if old.heard < inf:
            successor.heard = time.monotonic()  # they have been here: they may not take their time again
        lanes.all[lanes.all.index(old)] = successor
