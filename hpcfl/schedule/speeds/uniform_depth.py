"""Uniform visit times, and stragglers that are somewhere in the model when the deadline comes."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from hpcfl.base.errors import UsageError, no_meaning, refusal
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats, Ints
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.plan import Attempt
from hpcfl.schedule.speeds.base import CLOSE, Speed


class Uniform(Speed):
    """Uniform visit times, clients alike, drawn anew in each round: at a deadline of x·`longest`, 1 − x straggle."""

    model: Literal["uniform"] = "uniform"
    longest: float = Field(1.0, gt=0)
    """Seconds that no visit exceeds; means are half of it."""

    def paces(self, seed: int, clients: int) -> Floats:
        return np.full(clients, self.longest / 2)

    def seconds(self, attempt: Attempt) -> Floats:
        rng = keyed(attempt.seed, "time", attempt.round, step=attempt.number)
        drawn: Floats = rng.uniform(0.0, self.longest, attempt.clients)[attempt.cohort]
        return drawn

    def arrival(self, attempt: Attempt) -> Floats:
        """Return ``min(1, closes_after / (longest · work_fraction))``, float64 [n, L]."""
        chance = np.minimum(1.0, attempt.closes_after / (self.longest * attempt.work_fractions))
        return np.tile(chance, (len(attempt.cohort), 1))


class UniformDepth(Speed):
    """A given share of the clients straggles, each to a depth drawn uniformly (SALF, section IV and eq. 10)."""

    model: Literal["uniform-depth"] = "uniform-depth"
    stragglers: float = Field(0.5, ge=0, le=1)
    """Share of the clients that straggle."""
    redraw: bool = True
    """Draw anew in each round who straggles (the paper), or once per run (the released code)."""
    nothing: bool = True
    """A straggler may deliver nothing: depth L + 1 is one of the outcomes."""
    complete: bool = True
    """A straggler may finish: depth 1 is one of the outcomes."""

    late: Literal["pace", "rounds"] = "pace"
    """How long a straggler's whole visit takes. ``pace``: by the share of its work that it has done at the deadline.
    ``rounds``: one that stopped at layer l reports every 2l-th deadline, as SALF's AsyncFL does (only with
    ``close = "arrivals"``)."""
    needs_end: ClassVar[bool] = True

    def check(self, participation: Participation, clock: str = "simulated") -> None:
        if self.late == "rounds" and not participation.by_arrivals:
            beside, other = (f"participation.close = '{word}'" for word in (participation.close, "arrivals"))
            raise no_meaning("speed.late", "rounds", beside, other)
        check_end(participation, "speed.model = 'uniform-depth' says how far stragglers are")

    def paces(self, seed: int, clients: int) -> Floats:
        """Return 1 for all, or 2 for those who straggle in every round, float64 [clients]."""
        return 1.0 + (np.zeros(clients) if self.redraw else self._drawn(seed, clients))

    def depth(self, attempt: Attempt) -> Ints:
        low, high = self._range(attempt.layers)
        rng = keyed(attempt.seed, "depth", attempt.round, step=attempt.number)
        drawn = rng.integers(low, high + 1, attempt.clients)
        return np.where(self._late(attempt), drawn[attempt.cohort], 1).astype(np.int64)

    def seconds(self, attempt: Attempt) -> Floats:
        depth = self.depth(attempt)
        if self.late == "rounds":
            return attempt.closes_after * np.where(depth > 1, 2.0 * depth, 1.0)
        return seconds_at(attempt, depth)

    def enforced(self, attempt: Attempt) -> Floats:
        """Return paces that do not race with the deadline, float64 [n].

        The deadline falls midway, in work, between the first layer that counts being ready and the next one being
        ready; a visit that is in time takes half the deadline.
        """
        if self.late == "rounds":
            return self.seconds(attempt) - attempt.closes_after / 2
        done = np.concatenate([[3.0], attempt.work_fractions, [0.0]])  # no layer is before 1: 3 halves the deadline
        depth = self.depth(attempt)
        paces: Floats = 2 * attempt.closes_after / (done[depth] + done[depth - 1])
        return paces

    def arrival(self, attempt: Attempt) -> Floats:
        invited = len(attempt.cohort)
        late = np.full(invited, self._count(attempt) / invited) if self.redraw else self._late(attempt)
        return 1.0 - late[:, None] * (1.0 - self._cumulative(attempt.layers))

    def reach(self, attempt: Attempt, share: Floats) -> Floats:
        return self.arrival(attempt)[reaching(attempt, share)]

    def miss_probability(self, attempt: Attempt) -> Floats:
        """Return ``P[nobody reaches l]``, float64 [L]: 0 as soon as somebody never straggles."""
        if not self.redraw:
            return super().miss_probability(attempt)
        everyone = self._count(attempt) == len(attempt.cohort)
        return everyone * (1.0 - self._cumulative(attempt.layers)) ** len(attempt.cohort)

    def _range(self, layers: int) -> tuple[int, int]:
        low, high = (1 if self.complete else 2), (layers + 1 if self.nothing else layers)
        if low > high:
            raise UsageError("speed: with one layer, stragglers need complete = true or nothing = true")
        return low, high

    def _cumulative(self, layers: int) -> Floats:
        low, high = self._range(layers)
        return np.clip(np.arange(1, layers + 1) - low + 1, 0, None) / (high - low + 1)

    def _count(self, attempt: Attempt) -> int:
        return round(self.stragglers * len(attempt.cohort))

    def _late(self, attempt: Attempt) -> Floats:
        """Return 1 for who straggles, else 0, float64 [n]."""
        if not self.redraw:
            return self._drawn(attempt.seed, attempt.clients)[attempt.cohort]
        rng = keyed(attempt.seed, "stragglers", attempt.round, step=attempt.number)
        return (rng.permutation(len(attempt.cohort)) < self._count(attempt)).astype(np.float64)

    def _drawn(self, seed: int, clients: int) -> Floats:
        order = keyed(seed, "stragglers", 0).permutation(clients)
        return (order < round(self.stragglers * clients)).astype(np.float64)


def check_end(participation: Participation, what: str) -> None:
    """Refuse rounds that do not close after given seconds where a speed model says how far visits are by then."""
    if not participation.by_time and not (participation.by_arrivals and participation.deadline is not None):
        raise refusal(f"{what} at the deadline", "participation.close = 'deadline'", participation.close)
    if participation.adaptive:
        why = f"follows from times, and {what} at the deadline"
        raise UsageError(f"participation.deadline = 'adaptive' {why}; expected seconds")


def seconds_at(attempt: Attempt, depth: Ints) -> Floats:
    """Return the seconds a whole visit would take at the pace seen at the deadline, float64 [n]."""
    done = np.append(attempt.work_fractions, 0.0)[depth - 1]
    with np.errstate(divide="ignore"):
        return attempt.closes_after / done


def reaching(attempt: Attempt, share: Floats) -> tuple[Ints, Ints]:
    """Return where in a table [n, L] the deepest layers are at which a `share` (float64 [n]) of each visit is done."""
    done = attempt.work_fractions * (1 + CLOSE) >= share[:, None]
    return np.arange(len(share)), done.sum(1) - 1
