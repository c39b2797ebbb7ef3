"""What of one round in real time counts: whose visits arrived, how far, and when; and the sums over them."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from hpcfl.base.lazy import torch
from hpcfl.base.types import Floats, Ints
from hpcfl.engine.executor import acknowledgment
from hpcfl.engine.job import Job
from hpcfl.engine.received import Received, ReceivedSums, add_all, messages
from hpcfl.schedule.plan import Attempt, Plan
from hpcfl.sums.guard import NO_GROUP, NOT_FINITE, Rejection
from hpcfl.sums.message import ExactSums, Message

if TYPE_CHECKING:
    from hpcfl.realtime.lane import Lane


def names_who_counts(attempt: Attempt, whole: bool) -> bool:
    """Whether n whole visits close a round at once, so that it matters which ones those are."""
    return attempt.quorum is not None and not attempt.grace and whole


class RoundOutcome:
    """One attempt at a round: the `lanes` that take part were invited at `start` (seconds of the monotonic clock).

    Attributes
    ----------
    limits : float64 [units], optional
        The largest norms that are accepted, see `RunGuard.limits`; lanes are of one rank each then.
    rejected : dict of int to Rejection
        Which visits, or layers of them, were rejected, by their places in the cohort.
    norms : float64 [clients, units]
        Norms of the messages that were accepted; empty where there are no limits.
    ends : float
        Seconds from its start to its end at the latest, as far as is known by now.
    """

    def __init__(
        self, job: Job, attempt: Attempt, lanes: list[Lane], start: float, limits: Floats | None = None
    ) -> None:
        self.job, self.attempt, self.lanes, self.start, self.limits = job, attempt, lanes, start, limits
        self.rejected: dict[int, Rejection] = {}
        self.norms: Floats = np.zeros((attempt.clients, 0 if limits is None else len(limits)))
        self.whole = job.planner.whole
        weights = attempt.weights
        self.weights = None if weights is None else dict(zip(attempt.cohort.tolist(), weights.tolist()))
        self.groups, self.reached = len(job.layout), job.layers.reached
        self.depth: Ints = np.full(len(attempt.cohort), attempt.layers + 1, dtype=np.int64)
        self.seconds: Floats = np.full(len(attempt.cohort), np.inf)
        self.steps: Ints = np.zeros(len(attempt.cohort), dtype=np.int64)
        self.received: list[tuple[Received, int]] = []
        self.early: ExactSums | None = None
        self.kept: list[Message] = []
        self.summed_up = self.gradients = 0
        self.first: set[int] | None = None  # whose visits count as the round closes, where n are enough
        self.ends = attempt.closes_after

    def over(self, seconds: float) -> bool:
        """Return whether it is over so many seconds after its start. The timer decides, never the next arrival."""
        arrived, awaited = self.progress()
        self.ends = min(self.ends, self.attempt.ends(arrived, seconds))
        return seconds >= self.ends or awaited == 0

    def counting(self) -> Ints:
        """Return whose visits may count as the round closes, client ids: where n are enough, the first n only."""
        if not names_who_counts(self.attempt, self.whole):
            return self.attempt.cohort
        count, self.first = self.summed_up, set[int]()
        for _, _, client in sorted(chain(*(lane.visits.completed for lane in self.lanes))):
            if count < (self.attempt.quorum or 0):
                self.first.add(client)
            count += 1 if self.weights is None else self.weights[client]
        return np.array(sorted(self.first), dtype=np.int64)

    def progress(self) -> tuple[int, int]:
        """Return how many visits are complete, or their samples, and how many more visits may still come."""
        arrived = sum(self._value(lane) for lane in self.lanes)
        return self.summed_up + arrived, sum(lane.visits.awaited for lane in self.lanes)

    def sum_up(self, lane: Lane) -> None:
        """Sum up a lane's complete visits and let it go on to its next ones."""
        one = lane.visits.pending
        assert one is not None
        self.early = self.early or ExactSums(self.job.layout)
        self.summed_up += self._value(lane)
        accepted = self._accepted(one, self.groups)
        self._note(lane, one, accepted)
        if self.reached[accepted] <= self.attempt.layers:  # a loss without any layer does not count
            add_all(one, self.early, accepted)
            self.kept += messages(one, accepted, self.job.keeps) if self.job.keeps else []
        lane.visits.receive_next()

    def finish(self, closed: float) -> None:
        """Decide what counts of a round that was closed at `closed` (seconds of the monotonic clock).

        A rank alone on its lane counts as far as its groups were there by then. What ranks that share a lane handed
        in just after it counts too: it cannot be told apart from the sum.
        """
        for lane in self.lanes:
            one = lane.visits.pending
            # where some are named, a leader was told whom of its own to add up
            if one is None or not (lane.leads or self.first is None or self.first & {*chain(*one.clients)}):
                continue
            single = len(lane.topology.ranks) == 1 and not lane.leads
            groups = sum(when <= closed for when in one.times) if single else len(one.times)
            if groups == self.groups or not self.whole:
                groups = self._accepted(one, groups)
                self._note(lane, one, groups)
                if self.reached[groups] <= self.attempt.layers:  # a loss without any layer does not count
                    self.received.append((one, groups))

    def void(self) -> None:
        """Let nothing of this attempt count."""
        self.depth[:] = self.attempt.layers + 1

    @property
    def count(self) -> int:
        """How many visits counted, or would have, had they not been rejected."""
        arrived = (self.depth <= self.attempt.layers) | np.isin(np.arange(len(self.depth)), list(self.rejected))
        return int(arrived.sum())

    @property
    def enough(self) -> bool:
        """Whether so many visits counted that the round is not void."""
        return self.count >= self.job.planner.participation.min_clients

    def plan(self, seconds: float, repeats: int) -> Plan:
        expected = self.job.planner.plan(self.attempt)
        steps = None if expected.steps is None else np.where(self.depth <= self.attempt.layers, self.steps, 0)
        return replace(expected, depth=self.depth, seconds=self.seconds, steps=steps, duration=seconds, repeats=repeats)

    def sums(self, plan: Plan) -> ReceivedSums:
        told = self.job.layout, self.attempt.cohort, plan.miss_probability
        sums = ReceivedSums(*told, self.received, self.early, self.kept)
        sums.gradients, sums.rejected, sums.norms = self.gradients, self.rejected, self.norms
        return sums

    def _accepted(self, one: Received, groups: int) -> int:
        """Return how many of the first `groups` groups of a single rank's visit count, as far as their norms say."""
        if self.limits is None or not one.visits or not groups or one.rejected(groups)[0, 0] != NO_GROUP:
            return groups
        ((client,),) = one.clients
        sieve = self.job.guard.sieve(1, self.limits)
        weight = torch.ones(1)
        parts = [
            [(name, group.value(frame, name)[None], weight) for name in group.blocks]
            for group, frame in zip(one.formats[:groups], one.frames)
        ]
        for unit in [list(chain(*parts))] if self.whole else parts:
            sieve.judge(unit)
        self.norms[client] = sieve.norms[0]
        self.rejected |= self.job.guard.rejections(np.searchsorted(self.attempt.cohort, [client]), sieve)
        return groups if sieve.first[0] == NO_GROUP else 0 if self.whole else int(sieve.first[0])

    def _value(self, lane: Lane) -> int:
        """Return a lane's complete visits that are not summed up, or their samples where these are counted."""
        if self.weights is not None:
            return sum(self.weights[client] for _, _, client in lane.visits.completed)
        return int(lane.visits.arrived)

    def _note(self, lane: Lane, one: Received, groups: int) -> None:
        """Note whose visits these are, and how far each had come within its first `groups` groups."""
        sent, rejected, planner = one.sent(groups), one.rejected(groups), self.job.planner
        for local_rank, clients in enumerate(one.clients):
            if clients:
                lane.worked[:, local_rank] += one.count(local_rank), one.seconds(local_rank)
            for place, client in enumerate(clients):
                count, bad = int(sent[local_rank, place]), int(rejected[local_rank, place])
                row = int(np.searchsorted(self.attempt.cohort, client))
                if bad != NO_GROUP:
                    self.rejected[row] = Rejection(self.reached[count], bad, NOT_FINITE)
                self.depth[row] = self.reached[count]
                if self.reached[count] <= self.attempt.layers:
                    self.gradients = max(self.gradients, one.gradients(local_rank, place, groups))
                self.steps[row] = one.steps(local_rank, place)
                cut = planner.participation.by_steps and self.steps[row] != planner.visit_steps[0][client]
                if not cut and (count == self.groups or (row in self.rejected and one.complete)):
                    self.seconds[row] = one.came(local_rank, place) - self.start

    def acknowledge(self) -> None:
        """Leave word on the lanes of what has counted; of visits of which nothing has, none is needed."""
        some, which = self.depth <= self.attempt.layers, (self.attempt.round, self.attempt.number)
        told = dict(zip(self.attempt.cohort[some].tolist(), acknowledgment(*which, self.depth[some]).tolist()))
        for lane in self.lanes:
            before = zip(lane.hosted.tolist(), lane.counted.tolist())
            lane.counted = np.array([told.get(client, earlier) for client, earlier in before], dtype=np.int64)
