"""How visits leave a client rank: no faster than the speed model says, layer by layer or as a whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from threading import Event

import numpy as np

from hpcfl.base.device_copy import on_host
from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.types import Ints
from hpcfl.engine.job import Job
from hpcfl.schedule.plan import Timeline
from hpcfl.sums.exact import BinnedSum
from hpcfl.sums.frames import REJECTED, SENT, FrameFormat, StagedFrame, Staging, zero_frames
from hpcfl.sums.guard import NO_GROUP, lengths
from hpcfl.sums.message import Message
from hpcfl.sums.on_device import weighted_sum

Put = Callable[[StagedFrame], None]


class Pace:
    """Slows visits, begun at `start`, down to the slowest of what is drawn for them; 0: as fast as it goes."""

    def __init__(self, job: Job, drawn: Timeline, over: Event, start: float) -> None:
        self.busy = job.config.speed.enforce == "busy"
        self.begins, self.computes, self.sends = (
            float(each.max(initial=0.0)) for each in (drawn.begins, drawn.computes, drawn.sends)
        )
        self._arrives = drawn.arrives.max(0, initial=0.0)[job.layers.of_groups - 1]
        self.over, self.start = over, start
        self._ready: float | None = None  # when what is as fast as it goes had something to send

    def seconds(self) -> float:
        return time.monotonic() - self.start

    def done_at(self, share: float) -> float:
        """Return when a share of the visit may be done at the earliest, in seconds of the monotonic clock."""
        return self.start + self.begins + share * self.computes

    def stop(self) -> None:
        """Let a visit that computes no more send what it has."""
        self._arrives[:], self._ready = self.sends, time.monotonic()

    def wait(self, number: int) -> None:
        """Return when group `number` may arrive, or when the round is over."""
        if self._ready is None:  # computing takes what is drawn, or, where that is nothing, what it has taken by now
            self._ready = self.start if self.computes else time.monotonic()
        self.until(self._ready + float(self._arrives[number]))

    def until(self, then: float) -> None:
        """Return at a second of the monotonic clock, or when the round is over."""
        if not self.busy:
            self.over.wait(max(0.0, then - time.monotonic()))
            return
        work = torch.ones(32, 32)
        while time.monotonic() < then and not self.over.is_set():
            work = torch.mm(work, work).clamp_(max=1.0)


@dataclass(eq=False)
class StepClock:
    """Stops a visit after as many local steps as it can take and still deliver.

    A step is begun if it can be done when the visit has to leave, taking no longer than the longest one so far.

    Parameters
    ----------
    steps : int64 [1]
        The local steps of the whole visit; once it stops, those that it has taken.
    least : int
        So many are tried in any case: fewer do not count.
    leaves : float
        When what it sends has to leave, in seconds of the monotonic clock.
    every : int
        Steps from one snapshot to the next, which `keep` is told to keep, given the steps taken; 0: there are none.
    """

    pace: Pace
    steps: Ints
    least: int
    leaves: float
    every: int = 0
    keep: Callable[[int], None] = lambda taken: None

    def __post_init__(self) -> None:
        self.whole, self.taken, self.longest = int(self.steps[0]), 0, 0.0
        self.begun, self.stopped = time.monotonic(), False

    def more(self) -> bool:
        """Return whether there is time for another step, no sooner than the speed model lets it begin."""
        if self.stopped:
            return False
        if self.taken:
            self.longest = max(self.longest, time.monotonic() - self.begun)
            if self.every and self.taken % self.every == 0 and self.taken >= self.least:
                self.keep(self.taken)
            self.pace.until(self.pace.done_at(self.taken / self.whole))
        self.begun = time.monotonic()
        done = max(self.begun + self.longest, self.pace.done_at((self.taken + 1) / self.whole))
        if self.taken >= self.least and done > self.leaves:
            self.steps[:], self.stopped = self.taken, True
            self.pace.stop()
            return False
        self.taken += 1
        return True


@dataclass(eq=False)
class Sender:
    """What the visits of a rank's turn send: frames of these formats, signed for its place on the lane, go to `put`."""

    formats: Sequence[FrameFormat]
    local_rank: int
    staging: Staging
    pace: Pace
    put: Put


@dataclass(eq=False)
class LayerSender(Sender):
    """Gathers the blocks of a visit into frames and puts each frame when it is ready.

    `gradients` returns how many the visit has computed so far.
    """

    gradients: Callable[[], int] = lambda: 0

    def __post_init__(self) -> None:
        self.group = {name: number for number, group in enumerate(self.formats) for name in group.blocks}
        self.number, self.bad = 0, NO_GROUP
        self.versions: dict[str, tuple[Tensor, int]] = {}
        self._begin()

    def take(self, message: Message) -> None:
        """Put the blocks of a message into their frames; a frame leaves when all of it is there."""
        for name, (value, weight) in message.items():
            self.versions[name] = value, value._version
            if self.group[name] < self.number:
                raise ValueError(f"block '{name}' comes after its group has left: yield blocks in the layout's order")
            while self.number < self.group[name]:
                self._leave()
            self.staging.write(self.staged, self.local_rank, name, value[0], float(weight[0]))
            self.missing.discard(name)
            if self.staging.far:
                self.staging.measure(self.staged, name, value)
            elif not np.isfinite(lengths([(value[:1], 1)])[0][0]):
                self._reject(name)
            if not self.missing:
                self._leave()

    def finish(self) -> None:
        """Let the rest leave: blocks that the visit has not sent have weight 0."""
        for name, (value, version) in self.versions.items():
            if value._version != version:  # it may have been sent from where it was
                raise ValueError(f"block '{name}' was changed after it was yielded: yield a tensor that stays as it is")
        while self.number < len(self.formats):
            self._leave()

    def _begin(self) -> None:
        if self.number < len(self.formats):
            self.staged = self.staging.open(self.formats[self.number])
            self.missing = set(self.staged.format.blocks)

    def _leave(self) -> None:
        self.pace.wait(self.number)
        if self.bad == NO_GROUP:
            self._sign(self.staged)
            self.staged.judge = partial(self._judge, self.number)
            ready = self.staging.close(self.staged)
        else:
            ready = self._rejected(self.number)
        self.number += 1
        self._begin()
        if not self.pace.over.is_set():
            self.put(ready)

    def _judge(self, number: int, staged: StagedFrame) -> None:
        """Take out of a frame from a device what does not count, now that its norms are known: in the main thread."""
        for name, norm in staged.norms.items():
            if not isfinite(norm):
                self._reject(name)
        if self.bad != NO_GROUP:
            staged.parts = self._rejected(number).parts

    def _reject(self, name: str) -> None:
        """Let the visit count no more, from this block's group on."""
        if self.bad == NO_GROUP:
            self.bad = self.group[name]

    def _rejected(self, number: int) -> StagedFrame:
        """Return a frame of which nothing counts; that by which the visit was rejected says so."""
        staged = self.staging.open(self.formats[number])
        if number == self.bad:
            self._sign(staged, REJECTED)
        return self.staging.close(staged)

    def _sign(self, staged: StagedFrame, flag: float = SENT) -> None:
        staged.format.sign(staged.parts, self.local_rank, self.pace.seconds(), self.gradients(), flag)


@dataclass(eq=False)
class WholeSender(Sender):
    """Gathers what a turn's visits send that count as a whole, and puts all frames together when they have ended.

    By then the clients' new state is there for the acknowledgement, which may come as soon as the last frame has left.
    Here a turn is a single visit.
    """

    def __post_init__(self) -> None:
        self.frames = [self.staging.open(group) for group in self.formats]
        self.frame = {name: staged for staged in self.frames for name in staged.format.blocks}
        self.visits: list[tuple[int, int, int]] = []

    def take(self, message: Message) -> None:
        """Put the blocks of a message, without what was rejected, into their frames."""
        for name, (value, weight) in message.items():
            self.staging.write(self.frame[name], self.local_rank, name, value[0], float(weight[0]))

    def end(self, rejected: Ints, gradients: Sequence[int], steps: Ints | None = None) -> None:
        """Note that a chunk's visits have ended.

        Parameters
        ----------
        rejected : int64 [c]
            The group by which each visit was rejected, `NO_GROUP` where it was not.
        gradients : sequence of int
            How many each visit has computed.
        steps : int64 [c], optional
            The local steps that each has taken, where that may differ.
        """
        self.visits += zip(rejected.tolist(), gradients, [0] * len(rejected) if steps is None else steps.tolist())

    def finish(self) -> None:
        """Let all leave, unless the round is over."""
        for number in range(len(self.frames)):
            self.pace.wait(number)
        if self.pace.over.is_set():
            return
        seconds = self.pace.seconds()
        for number, staged in enumerate(self.frames):
            for place, (group, gradients, steps) in enumerate(self.visits):
                if group in (NO_GROUP, number):
                    flag = SENT if group == NO_GROUP else REJECTED
                    staged.format.sign(staged.parts, self.local_rank, seconds, gradients, flag, place, steps)
            self.put(self.staging.close(staged))


class SumSender(WholeSender):
    """The same for a turn of several visits: chunk by chunk they are added up exactly, as in simulated time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for staged, parts in zip(self.frames, zero_frames(self.formats)):
            staged.parts = parts
        self.totals: dict[str, Tensor] = {}
        self.weights: dict[str, dict[int, float]] = {name: {} for name in self.frame}  # by part

    def take(self, message: Message) -> None:
        for name, (value, weight) in message.items():
            block, weights = self.frame[name].format.blocks[name], self.weights[name]
            rows = block.whole(value.detach())
            if rows.device.type == "cpu":
                self._bins(name).add_rows(rows, weight.tolist())
            else:
                self.totals[name] = weighted_sum(rows, weight.tolist())
            weights[block.part(value)] = weights.get(block.part(value), 0.0) + float(weight.sum())

    def end(self, rejected: Ints, gradients: Sequence[int], steps: Ints | None = None) -> None:
        super().end(rejected, gradients, steps)
        for name, total in zip(self.totals, on_host(list(self.totals.values()))):
            self._bins(name).add_rows(total[None], [1.0])
        for name, weights in self.weights.items():
            for part, weight in weights.items():
                self.frame[name].format.weigh(self.frame[name].parts, self.local_rank, name, weight, part)
        self.totals = {}

    def _bins(self, name: str) -> BinnedSum:
        return BinnedSum(self.frame[name].format.bins(self.frame[name].parts, name))
