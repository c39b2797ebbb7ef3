"""Doubling participant sets: how many visits a round waits for, stage by stage (SRPFL, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf, log, log2, sqrt

from hpcfl.plan import Floats


@dataclass(frozen=True)
class Stage:
    """Where a run stands; a round that is over leads to the next one.

    Attributes
    ----------
    number : int
        The stage, from 0; it waits for ``n0 · 2^number`` visits.
    rounds : int
        Rounds that are over in this stage.
    best : float
        The smallest training loss seen in it (``plateau``).
    since : int
        Rounds since then.
    """

    number: int = 0
    rounds: int = 0
    best: float = inf
    since: int = 0

    def numbers(self) -> dict[str, float]:
        """Return what a checkpoint holds."""
        return {"stage": self.number, "stage_rounds": self.rounds, "stage_best": self.best, "stage_since": self.since}

    @classmethod
    def of(cls, numbers: Mapping[str, float]) -> Stage:
        """Return what `numbers` wrote; the first stage where it wrote nothing."""
        if "stage" not in numbers:
            return cls()
        number, rounds, since = (int(numbers[name]) for name in ("stage", "stage_rounds", "stage_since"))
        return cls(number, rounds, numbers["stage_best"], since)


def stages(first: int, clients: int) -> int:
    """Return how many stages lead from `first` to all `clients`: ``⌈log2(N / n0)⌉ + 1``."""
    return ceil(log2(clients / first)) + 1


def wanted(first: int, clients: int, stage: int) -> int:
    """Return the visits that a round of this stage waits for: ``min(N, n0 2^r)``."""
    return int(min(clients, first * 2**stage))


@dataclass(frozen=True)
class Theory:
    """The rounds that each stage takes by the contraction ``dist⁺ ≤ dist √(1−a) + a / √(2^r (1−a))`` (eq. 199).

    Attributes
    ----------
    times : float64 [N]
        Expected seconds until so many of N visits have arrived, ``E[T_(n)]``.
    first : int
        Visits of the first stage, n0.
    a : float
        Contraction, in (0, 1/4].
    communication : float
        Seconds of a round beside its visits, C.
    distance : float
        Distance at the start, dist(B0, B*): stage 0 has no formula of its own.
    """

    times: Floats
    first: int
    a: float
    communication: float = 0.0
    distance: float = 1.0

    def floor(self, stage: int) -> float:
        """Return the distance at which a stage does not contract any more."""
        return self.a / (sqrt(2**stage * (1 - self.a)) * (1 - sqrt(1 - self.a)))

    def leaves_at(self, stage: int) -> float:
        """Return the distance ``X_{r+1}`` from which on twice as many visits are worth their time (eq. 206)."""
        now, then = self._time(stage), self._time(stage + 1)
        if then == now:
            return inf
        return self.floor(stage) * (1 + (now + self.communication) * (1 - 1 / sqrt(2)) / (then - now))

    def rounds(self) -> list[int]:
        """Return the rounds of all stages but the last, as printed: eq. 203, whatever the distance is by then."""
        count = stages(self.first, len(self.times))
        return [self._needed(self.distance, 0)] * (count > 1) + [self._printed(stage) for stage in range(1, count - 1)]

    def rounds_with_skips(self) -> list[int]:
        """Return the same with the distance followed: a stage that is to end above it takes no round."""
        found, distance = [], self.distance
        for stage in range(stages(self.first, len(self.times)) - 1):
            found.append(self._needed(distance, stage))
            shrunk = sqrt(1 - self.a) ** found[-1]
            distance = distance * shrunk + self.floor(stage) * (1 - shrunk)
        return found

    def _needed(self, distance: float, stage: int) -> int:
        """Return the rounds after which the bound has come down to where the stage ends."""
        if self.leaves_at(stage) >= distance:
            return 0
        floor = self.floor(stage)
        return ceil(2 * log((distance - floor) / (self.leaves_at(stage) - floor)) / log(1 / (1 - self.a)))

    def _printed(self, stage: int) -> int:
        before, now, then = (self._time(number) for number in (stage - 1, stage, stage + 1))
        if then == now or now == before:
            return 0
        return max(0, ceil(2 * log(sqrt(2) * (then - now) / (now - before)) / log(1 / (1 - self.a))))

    def _time(self, stage: int) -> float:
        return float(self.times[wanted(self.first, len(self.times), stage) - 1])
