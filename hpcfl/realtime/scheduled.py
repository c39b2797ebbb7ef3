"""Arrivals in real time where a rule says how many steps each client takes, and whose visits are merged when.

What has come is kept until its merge, also over the server's steps; its client waits. Each client has a rank of its
own, since a rank is at work for one client at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hpcfl.base.types import Ints
from hpcfl.engine.executor import acknowledgment
from hpcfl.engine.job import Job, Progress
from hpcfl.engine.received import Received
from hpcfl.engine.record import Record
from hpcfl.mpi.waiting import idle
from hpcfl.realtime.arrivals import ArrivalsServer, Step, arrival
from hpcfl.realtime.lane import Lane
from hpcfl.realtime.lanes import Lanes
from hpcfl.schedule.plan import Plan
from hpcfl.schedule.planner import Came
from hpcfl.sums.guard import NO_GROUP, NOT_FINITE, Rejection
from hpcfl.sums.message import Sums


class ScheduledServer(ArrivalsServer):
    """The server of such arrivals.

    Attributes
    ----------
    unmerged : dict of int
        By client what has come of visits that wait for their merge, and which group of it was rejected.
    """

    def __init__(self, job: Job, lanes: Lanes, rest: Callable[[], None] = idle) -> None:
        super().__init__(job, lanes, rest)
        self.unmerged: dict[int, tuple[Came, Received, int]] = {}

    def exchange(self, now: Progress, record: Record) -> tuple[Plan, Sums]:
        plan, sums = super().exchange(now, record)
        assert plan.arrivals is not None
        rates = now.flights.known["rate"][plan.cohort]  # nobody has left again with another one
        return replace(plan, arrivals=replace(plan.arrivals, rates=rates)), sums

    def _fill(self, step: Step, now: Progress, record: Record) -> None:
        known = now.flights.known
        self.rule = self.job.planner.rule(known)
        if self.owed:  # what had come of their visits is not on file
            known["came"][self.owed] = np.nan
        step.ends = self.origin + self.rule.ends
        super()._fill(step, now, record)

    def _take(self, step: Step, now: Progress, record: Record) -> None:
        super()._take(step, now, record)
        if self.lanes.lost:  # clients of some of these may have gone on elsewhere
            self.rule.lost[:] = False
            self.rule.lost[[client for client, lane in self.lane.items() if lane.state == "dead"]] = True

    def _arrive(self, lane: Lane, step: Step, now: Progress, record: Record) -> None:
        flight, one, planner = self.at_work.pop(lane), lane.visits.pending, self.job.planner
        assert one is not None
        lane.visits.keep_pending()
        client, when = flight.client, arrival(lane)[0]
        lane.worked[:, 0] += 1, one.seconds(0)
        groups, steps = len(one.times), int(self.rule.known["steps"][client])
        bad, depth = int(one.rejected(groups)[0, 0]), self.job.layers.reached[int(one.sent(groups)[0, 0])]
        if bad == NO_GROUP:
            record.gradients = max(record.gradients, one.gradients(0, 0, groups))
        drawn = planner.attempt(flight.version, flight.number, cohort=planner.members)
        waited = float(planner.times.waits(drawn)[np.searchsorted(planner.members, client)])
        seconds = when - flight.sent
        came = client, flight.version, flight.number, when - self.origin, seconds, depth, steps
        self.unmerged[client] = came, one, bad
        merged = self.rule.arrive(client, when - self.origin, min(waited, seconds), max(seconds - waited, 0.0))
        if merged is None:  # it counts in the next merge, whoever's it is
            self._count(np.array([client]), step, now)
            if len(step.came) == len(planner.members):
                step.full, step.over = True, when - self.origin
        elif len(merged):
            self._merge(merged, step, now, when)
        step.ends = self.origin + self.rule.ends

    def _merge(self, clients: Ints, step: Step, now: Progress, when: float) -> None:
        self._count(clients, step, now)
        step.full, step.over = True, when - self.origin

    def _count(self, clients: Ints, step: Step, now: Progress) -> None:
        for client in clients.tolist():
            came, one, bad = self.unmerged.pop(client)
            _, version, number, _, _, depth, _ = came
            now.flights.due[client] = self.rule.known["came"][client] = np.nan  # it may be a while until it leaves
            lane = self.lane[client]
            lane.counted[lane.hosted == client] = acknowledgment(version, number, depth)  # only now it is sure to count
            if bad != NO_GROUP:
                step.rejected[len(step.came)] = Rejection(depth, bad, NOT_FINITE)
            step.came.append(came)
            step.held.append(one)

    def _closes(self, step: Step, now: Progress) -> bool:
        when = max(time.monotonic() - self.origin, self.rule.ends)
        if len(merged := self.rule.close(when)):
            self._merge(merged, step, now, self.origin + when)
        step.ends = self.origin + self.rule.ends
        return step.full

    def _leave(self, clients: Ints, step: Step, now: Progress) -> None:
        if len(clients):
            self.rule.depart(clients, time.monotonic() - self.origin)
            step.ends = self.origin + self.rule.ends

    def _work(self, client: int, now: Progress) -> tuple[int, int]:
        steps, rate = (float(self.rule.known[name][client]) for name in ("steps", "rate"))
        return int(steps), round(steps * rate)
