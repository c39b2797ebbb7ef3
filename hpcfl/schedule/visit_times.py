"""What visits take in all: a wait before they start, what is sent down, computing, and what is sent up.

Layers leave as soon as they are ready, one after the other, the last layer first. A visit that counts as a whole sends
all of it at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hpcfl.base.rng import key_as_seed
from hpcfl.base.types import Floats, Ints
from hpcfl.schedule.link import UNLIMITED, Lines, Link, rate, shared
from hpcfl.schedule.plan import Attempt, Timeline
from hpcfl.schedule.speeds.base import CLOSE, Speed, drawn_order
from hpcfl.schedule.speeds.laws import Law

NODES, WEIGHTS = np.polynomial.legendre.leggauss(64)
"""Of the rule by which chances are averaged over waits: on [-1, 1], where the weights are 2 in all."""


@dataclass(frozen=True, eq=False)
class VisitTimes:
    """How long visits take and how far they come, of one run: to the planner what a speed model is.

    Parameters
    ----------
    wait : Speed or None
        What a visit waits before it starts.
    steps : float64 [clients]
        How often each client's visit takes the seconds that `speed` says.
    down : int64 [clients]
        The bytes that each client's visit begins with.
    up : int64 [clients, L]
        The bytes that it sends with each layer.
    down_in, up_in : callable, optional
        Return the same of visits that begin with the state of a round, where these differ.
    """

    speed: Speed
    wait: Speed | None
    link: Link
    seed: int
    steps: Floats
    down: Ints
    up: Ints
    down_in: Callable[[int], Ints] | None = None
    up_in: Callable[[int], Ints] | None = None

    @property
    def communication(self) -> float:
        return self.speed.scale * self.speed.communication

    @cached_property
    def _work(self) -> Floats:
        return self.steps * np.float64(self.speed.scale)

    @cached_property
    def _lines(self) -> Lines:
        lines, scale = self.link.lines(self.seed, len(self.steps)), self.speed.scale
        return Lines(lines.down / scale, lines.up / scale, lines.latency * scale)

    def _fixed(self, round: int) -> Floats:
        """Return each client's seconds until it has what it begins with, without its wait, float64 [clients]."""
        down = self.down if self.down_in is None else self.down_in(round)
        fixed: Floats = self._lines.latency + down / self._lines.down
        return fixed

    def known(self, clock: str) -> bool:
        """Return whether the chance to arrive in time is known."""
        return self.speed.known(clock) and self.link.server == UNLIMITED

    def seconds(self, attempt: Attempt) -> Floats:
        """Return the seconds that each invited client's visit takes this round, float64 [n]."""
        seconds: Floats = self._timeline(attempt, self._drawn(attempt)).arrives[:, 0]
        return seconds

    def timeline(self, attempt: Attempt) -> Timeline:
        """Return what each invited client's visit shall do when in real time."""
        return self._timeline(attempt, self.speed.enforced(self._unscaled(attempt)))

    def depth(self, attempt: Attempt) -> Ints:
        """Return the first layer that each invited client delivers in time, int64 [n], L + 1 for none."""
        until = np.reshape(attempt.until(attempt.closes_after), (-1, 1))
        ready = self._timeline(attempt, self._drawn(attempt)).arrives <= until
        return np.where(ready.any(1), ready.argmax(1), attempt.layers).astype(np.int64) + 1

    def share(self, attempt: Attempt, seconds: Floats, end: float | Floats) -> Floats:
        """Return the share of their steps that visits which take `seconds` do by the `end`, float64 [n]."""
        computes = self._work[attempt.cohort] * self._drawn(attempt)
        return np.where(seconds <= end, 1.0, np.clip((end - (seconds - computes)) / computes, 0.0, 1.0))

    def lasting(self, attempt: Attempt, share: Floats) -> Floats:
        """Return the seconds of visits that do a `share` of their steps and no more, float64 [n]."""
        return self.seconds(attempt) - (1 - share) * self._work[attempt.cohort] * self._drawn(attempt)

    def _drawn(self, attempt: Attempt) -> Floats:
        return self.speed.seconds(self._unscaled(attempt))

    def _unscaled(self, attempt: Attempt) -> Attempt:
        """Return the attempt at the second at which it would begin, did all take as long as the sections say."""
        return replace(attempt, begins=attempt.begins / self.speed.scale)

    def _timeline(self, attempt: Attempt, computes: Floats) -> Timeline:
        cohort, lines = attempt.cohort, self._lines
        computes = self._work[cohort] * computes
        begins = self._fixed(attempt.round)[cohort] + self.waits(attempt)
        ready, up = begins[:, None] + np.outer(computes, attempt.work_fractions), self._sent(attempt)
        if self.link.server == UNLIMITED:
            there, last = np.empty_like(ready), np.zeros(len(cohort))
            for layer in reversed(range(attempt.layers)):
                last = there[:, layer] = np.maximum(ready[:, layer], last) + up[:, layer] / lines.up[cohort]
        else:
            there = shared(ready, up, lines.up[cohort], rate(self.link.server) / self.speed.scale)
        arrives = there + lines.latency[cohort, None]
        return Timeline(begins, computes, arrives[:, 0] - ready[:, 0], arrives)

    def _sent(self, attempt: Attempt) -> Floats:
        """Return the bytes that each invited client sends with each layer, float64 [n, L]."""
        sent = self.up if self.up_in is None else self.up_in(attempt.round)
        up = sent[attempt.cohort].astype(np.float64)
        return up if attempt.layers == up.shape[1] else up.sum(1, keepdims=True)

    def waits(self, attempt: Attempt) -> Floats:
        """Return what of their seconds visits wait in a queue, float64 [n]."""
        if self.wait is None:
            return np.zeros(len(attempt.cohort))
        return self.speed.scale * self.wait.seconds(_of_wait(self._unscaled(attempt)))

    # chances

    def arrival(self, attempt: Attempt) -> Floats:
        """Return ``P[d_u <= l]`` before this round's times are drawn, float64 [n, L]."""
        if not self.speed.redrawn and (self.wait is None or not self.wait.redrawn):  # nothing is left to chance
            return (self.depth(attempt)[:, None] <= np.arange(1, attempt.layers + 1)).astype(np.float64)
        sends = np.cumsum(self._sent(attempt)[:, ::-1] / self._lines.up[attempt.cohort, None], 1)[:, ::-1]
        later = np.append(sends[:, 1:], np.zeros((len(sends), 1)), 1)
        # layer l is there in time where each layer k >= l was ready before it and those between them had to leave
        least = sends[:, :, None] - later[:, None, :]
        layers = np.arange(attempt.layers)
        least = np.where(layers[:, None] <= layers, least, -np.inf)
        return self._in_time(attempt, attempt.closes_after - least, attempt.work_fractions)

    def reach(self, attempt: Attempt, share: Floats) -> Floats:
        """Return the chance that each invited client does a `share` (float64 [n]) of its visit in time, float64 [n]."""
        sends = self._sent(attempt).sum(1) / self._lines.up[attempt.cohort]
        rest = attempt.closes_after * (1 + CLOSE) - sends
        return self._in_time(attempt, rest[:, None, None], share[:, None, None])[:, 0]

    def miss_probability(self, attempt: Attempt) -> Floats:
        """Return ``P[nobody reaches l]``, float64 [L]; the product form holds for independent clients."""
        chance: Floats = np.prod(1.0 - self.arrival(attempt), axis=0)
        return chance

    def _in_time(self, attempt: Attempt, rest: Floats, shares: Floats) -> Floats:
        """Return the chance that ``fixed + wait + share · compute`` is at most `rest` (float64 [n, M, K]) for all K.

        float64 [n, M]
        """
        cohort, latency = attempt.cohort, self._lines.latency
        rest = rest - (self._fixed(attempt.round) + latency)[cohort, None, None]
        work = self._work[cohort, None]
        if self.wait is None or not self.wait.redrawn:
            rest = rest - self.waits(attempt)[:, None, None]
            return self.speed.in_time(attempt, (rest / shares).min(2) / work)
        waits, scale = _of_wait(attempt), self.speed.scale
        if not self.speed.redrawn:
            computes = self._work[cohort] * self._drawn(attempt)
            return self.wait.in_time(waits, (rest - computes[:, None, None] * shares).min(2) / scale)
        assert isinstance(self.wait, Law)
        chance = np.zeros(rest.shape[:2])
        for node, weight in zip((NODES + 1) / 2, WEIGHTS / 2):
            waited = scale * self.wait.quantile(waits, node)[:, None, None]
            chance += weight * self.speed.in_time(attempt, ((rest - waited) / shares).min(2) / work)
        return chance

    def order(self, seed: int, clients: int, members: Ints, invited: int) -> Floats:
        """Return the expected seconds until 1 … n of the invited visits have arrived, see `Speed.order`."""
        fixed = self._fixed(0) + self.up.sum(1) / self._lines.up + self._lines.latency
        alike = self.wait is None and self.link.server == UNLIMITED and self.up_in is None
        if alike and not np.ptp(fixed) and not np.ptp(self._work):
            return np.asarray(fixed[0] + self._work[0] * self.speed.order(seed, clients, members, invited))
        return drawn_order(self.seconds, seed, clients, members, invited)


def _of_wait(attempt: Attempt) -> Attempt:
    """Return the attempt by which waits are drawn: not by the numbers of the visits' speeds."""
    return replace(attempt, seed=key_as_seed(attempt.seed, "wait"))
