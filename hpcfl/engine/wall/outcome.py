"""What of one round in real time counts: whose visits arrived, how far, and when."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from hpcfl.base.types import Floats, Ints
from hpcfl.comm.guard import NOBODY, NOT_FINITE, Rejection
from hpcfl.comm.message import Deposits, Message
from hpcfl.engine.wall.lane import Lane
from hpcfl.engine.wall.slot import Slot
from hpcfl.engine.wall.sums import Held, fold, message
from hpcfl.schedule.plan import Attempt, Plan

if TYPE_CHECKING:
    from hpcfl.engine.job import Job


class Tally:
    """One attempt at a round.

    Parameters
    ----------
    attempt : Attempt
        Who was invited.
    lanes : list of Lane
        The lanes that take part.
    start : float
        When they were invited (seconds of the monotonic clock).
    limits : float64 [units], optional
        The largest norms that are accepted, see `RunGuard.limits`; lanes are of one rank each then.

    Attributes
    ----------
    rejected : dict of int to Rejection
        The clients whose visits, or layers of them, were rejected.
    norms : float64 [clients, units]
        Norms of the messages that were accepted; empty where there are no limits.
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
        self.groups = len(job.layout)
        self.reached = job.layers.reached
        self.depth: Ints = np.full(len(attempt.cohort), attempt.layers + 1, dtype=np.int64)
        self.seconds: Floats = np.full(len(attempt.cohort), np.inf)
        self.kept: list[tuple[Slot, int]] = []
        self.folded: Deposits | None = None
        self.copied: list[Message] = []
        self.early = self.gradients = 0

    def progress(self) -> tuple[int, int]:
        """Return how many visits are complete, or their samples, and how many more visits may still come."""
        arrived = sum(self._value(lane) for lane in self.lanes)
        return self.early + arrived, sum(lane.awaited for lane in self.lanes)

    def turn(self, lane: Lane) -> None:
        """Sum up a complete slot and let the lane go on to its next one."""
        slot = lane.slot
        assert slot is not None
        self.folded = self.folded or Deposits(self.job.layout)
        self.early += self._value(lane)
        accepted = self._accepted(slot, self.groups)
        self._note(lane, slot, accepted)
        fold(slot, self.folded, accepted)
        if self.job.keeps:
            self.copied.append(message(slot, accepted, self.job.keeps, self.job.task.device))
        lane.open_next()

    def finish(self, closed: float) -> None:
        """Decide what counts of a round that was closed at `closed` (seconds of the monotonic clock).

        A rank alone on its lane counts as far as its groups were there by then. What ranks that share a lane handed
        in just after it counts too: it cannot be told apart from the sum.
        """
        for lane, slot in self._looked_at():
            single = len(lane.bench.ranks) == 1
            groups = sum(when <= closed for when in slot.times) if single else len(slot.times)
            if groups == self.groups or not self.whole:
                groups = self._accepted(slot, groups)
                self._note(lane, slot, groups)
                if self.reached[groups] <= self.attempt.layers:  # a loss without any layer does not count
                    self.kept.append((slot, groups))
        self._acknowledge()

    def void(self) -> None:
        """Let nothing of this attempt count."""
        self.depth[:] = self.attempt.layers + 1
        self._acknowledge()

    @property
    def count(self) -> int:
        """How many visits counted, or would have, had they not been rejected."""
        arrived = (self.depth <= self.attempt.layers) | np.isin(self.attempt.cohort, list(self.rejected))
        return int(arrived.sum())

    def plan(self, seconds: float, repeats: int) -> Plan:
        """Return the round as it was."""
        expected = self.job.planner.plan(self.attempt)
        return replace(expected, depth=self.depth, seconds=self.seconds, duration=seconds, repeats=repeats)

    def sums(self, plan: Plan) -> Held:
        """Return the sums over what counted."""
        held = Held(
            self.job.layout, len(self.attempt.cohort), plan.miss_probability, self.kept, self.folded, self.copied
        )
        held.gradients, held.rejected, held.norms = self.gradients, self.rejected, self.norms
        return held

    def _looked_at(self) -> list[tuple[Lane, Slot]]:
        """Return the current slots; where n visits are enough, those of the first ones only."""
        slots = [(lane, lane.slot) for lane in self.lanes if lane.slot is not None]
        if self.attempt.quorum is None:
            return slots
        done = sorted((s for s in slots if s[1].complete), key=lambda pair: (pair[1].times[-1], pair[0].bench.ranks))
        count, taken = self.early, []
        for lane, slot in done:
            if count < self.attempt.quorum:
                taken.append((lane, slot))
            count += self._value(lane)
        return taken

    def _accepted(self, slot: Slot, groups: int) -> int:
        """Return how many of the first `groups` groups of a single rank's visit count, as far as their norms say."""
        client = slot.clients[0]
        if self.limits is None or client < 0 or not groups or slot.rejected(groups)[0] != NOBODY:
            return groups
        sieve = self.job.guard.sieve(1, self.limits)
        weight = torch.ones(1)
        parts = [
            [(name, group.value(data, name)[None], weight) for name in group.blocks]
            for group, data in zip(slot.wire[:groups], slot.data)
        ]
        for held in [list(chain(*parts))] if self.whole else parts:
            sieve.judge(held)
        self.norms[client] = sieve.norms[0]
        self.rejected |= self.job.guard.rejections(np.array([client]), sieve)
        return groups if sieve.first[0] == NOBODY else 0 if self.whole else int(sieve.first[0])

    def _value(self, lane: Lane) -> int:
        """Return the visits of a lane's current slot if it is complete, or their samples where these are counted."""
        if self.weights is None or not lane.arrived or lane.slot is None:
            return lane.arrived
        return sum(self.weights[client] for client in lane.slot.clients if client >= 0)

    def _note(self, lane: Lane, slot: Slot, groups: int) -> None:
        """Note whose visits are in a slot, and how far each had come within its first `groups` groups."""
        rejected = slot.rejected(groups).tolist()
        for seat, (client, count) in enumerate(zip(slot.clients, slot.sent(groups).tolist())):
            if client < 0:
                continue
            if rejected[seat] != NOBODY:
                self.rejected[client] = Rejection(self.reached[count], rejected[seat], NOT_FINITE)
            lane.worked[:, seat] += 1, slot.seconds(seat)
            row = np.searchsorted(self.attempt.cohort, client)
            self.depth[row] = self.reached[count]
            if self.reached[count] <= self.attempt.layers:
                self.gradients = max(self.gradients, slot.gradients(seat, groups))
            if count == self.groups or (client in self.rejected and slot.complete):
                self.seconds[row] = slot.times[-1] - self.start

    def _acknowledge(self) -> None:
        """Leave word on the lanes how much of each visit counted."""
        depth = dict(zip(self.attempt.cohort.tolist(), self.depth.tolist()))
        for lane in self.lanes:
            lane.counted = np.array([depth.get(client, 0) for client in lane.hosted.tolist()], dtype=np.int64)
