"""What of one round in real time counts: whose visits arrived, how far, and when."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hpcfl.message import Deposits, Message
from hpcfl.plan import Floats, Ints, Invitation, Plan
from hpcfl.wall.held import Held, fold, message
from hpcfl.wall.lane import Lane
from hpcfl.wall.slot import Slot

if TYPE_CHECKING:
    from hpcfl.job import Job


class Tally:
    """One attempt at a round.

    Parameters
    ----------
    asked : Invitation
        Who was invited.
    lanes : list of Lane
        The lanes that take part.
    start : float
        When they were invited (seconds of the monotonic clock).
    """

    def __init__(self, job: Job, asked: Invitation, lanes: list[Lane], start: float) -> None:
        self.job, self.asked, self.lanes, self.start = job, asked, lanes, start
        self.whole = job.whole
        self.worth = None if asked.worth is None else dict(zip(asked.cohort.tolist(), asked.worth.tolist()))
        self.groups = len(job.layout)
        self.reached = [job.reached(count) for count in range(self.groups + 1)]
        self.depth: Ints = np.full(len(asked.cohort), asked.layers + 1, dtype=np.int64)
        self.seconds: Floats = np.full(len(asked.cohort), np.inf)
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
        self._note(lane, slot, self.groups)
        fold(slot, self.folded)
        if self.job.keeps:
            self.copied.append(message(slot, self.groups, self.job.keeps, self.job.task.device))
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
                self._note(lane, slot, groups)
                if self.reached[groups] <= self.asked.layers:  # a loss without any layer does not count
                    self.kept.append((slot, groups))
        self._acknowledge()

    def void(self) -> None:
        """Let nothing of this attempt count."""
        self.depth[:] = self.asked.layers + 1
        self._acknowledge()

    @property
    def count(self) -> int:
        """How many visits counted at all."""
        return int((self.depth <= self.asked.layers).sum())

    def plan(self, seconds: float, repeats: int) -> Plan:
        """Return the round as it was."""
        expected = self.job.plan(self.asked)
        return replace(expected, depth=self.depth, seconds=self.seconds, closes=seconds, repeats=repeats)

    def sums(self, plan: Plan) -> Held:
        """Return the sums over what counted."""
        held = Held(self.job.layout, len(self.asked.cohort), plan.missing, self.kept, self.folded, self.copied)
        held.gradients = self.gradients
        return held

    def _looked_at(self) -> list[tuple[Lane, Slot]]:
        """Return the current slots; where n visits are enough, those of the first ones only."""
        slots = [(lane, lane.slot) for lane in self.lanes if lane.slot is not None]
        if self.asked.enough is None:
            return slots
        done = sorted((s for s in slots if s[1].complete), key=lambda pair: (pair[1].times[-1], pair[0].bench.ranks))
        count, taken = self.early, []
        for lane, slot in done:
            if count < self.asked.enough:
                taken.append((lane, slot))
            count += self._value(lane)
        return taken

    def _value(self, lane: Lane) -> int:
        """Return the visits of a lane's current slot if it is complete, or their samples where these are counted."""
        if self.worth is None or not lane.arrived or lane.slot is None:
            return lane.arrived
        return sum(self.worth[client] for client in lane.slot.clients if client >= 0)

    def _note(self, lane: Lane, slot: Slot, groups: int) -> None:
        """Note whose visits are in a slot, and how far each had come within its first `groups` groups."""
        for seat, (client, count) in enumerate(zip(slot.clients, slot.sent(groups).tolist())):
            if client < 0:
                continue
            lane.worked[:, seat] += 1, slot.seconds(seat)
            row = np.searchsorted(self.asked.cohort, client)
            self.depth[row] = self.reached[count]
            if self.reached[count] <= self.asked.layers:
                self.gradients = max(self.gradients, slot.gradients(seat, groups))
            if count == self.groups:
                self.seconds[row] = slot.times[-1] - self.start

    def _acknowledge(self) -> None:
        """Leave word on the lanes how much of each visit counted."""
        depth = dict(zip(self.asked.cohort.tolist(), self.depth.tolist()))
        for lane in self.lanes:
            lane.counted = np.array([depth.get(client, 0) for client in lane.hosted.tolist()], dtype=np.int64)
