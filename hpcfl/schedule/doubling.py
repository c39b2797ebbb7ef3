"""Doubling participant sets: how many visits a round waits for, stage by stage (SRPFL, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, log, log2, sqrt
from typing import Literal

from pydantic import Field

from hpcfl.base.config import ConfigBase
from hpcfl.base.errors import UsageError, refusal
from hpcfl.base.types import Floats, State
from hpcfl.schedule.participation import Participation
from hpcfl.sums.message import Sums


@dataclass(frozen=True)
class Stage:
    """Where a run stands: stage ``number``, its rounds that are over, its smallest signal, and the rounds since."""

    number: int = 0
    rounds: int = 0
    best: float = inf
    since: int = 0

    def numbers(self) -> dict[str, float]:
        return {"stage": self.number, "stage_rounds": self.rounds, "stage_best": self.best, "stage_since": self.since}

    @classmethod
    def of(cls, numbers: Mapping[str, float]) -> Stage:
        """Return what `numbers` wrote to a checkpoint; the first stage where it wrote nothing."""
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


class Doubling(ConfigBase):
    """Rounds that end with the first visits (``close = "first"``) wait for ever more of them, stage by stage.

    A stage waits for ``min(N, n0 2^r)`` visits, N being how many are invited and n0 ``participation.first``. The last
    one, which waits for all, does not end.
    """

    when: Literal["never", "rounds", "theory", "plateau", "gradient"] = "never"
    """What ends a stage. ``rounds``: a number of rounds. ``theory``: the rounds of SRPFL's theory (eq. 203).
    ``plateau``: that the training loss has stopped falling. ``gradient``: FLANP's criterion, a small averaged gradient.
    ``never``: there is one stage."""
    by: Literal["clients", "samples"] = "clients"
    """What doubles. ``clients``: the visits. ``samples``: the samples that they hold together, at first n0 visits'
    worth (SRPFL, appendix C)."""
    rounds: int = Field(10, ge=1)
    """Rounds per stage (``rounds``)."""
    contraction: float = Field(0.1, gt=0, le=0.25)
    """Contraction a of SRPFL's Theorem 4.7 (``theory``)."""
    distance: float = Field(1.0, gt=0)
    """Distance at the start, dist(B0, B*) (``theory``)."""
    skip: bool = False
    """Follow the distance, so that stages that are to end above it take no round (``theory``)."""
    patience: int = Field(5, ge=1)
    """Rounds without a fall of the training loss that end a stage (``plateau``)."""
    tolerance: float = Field(1e-3, ge=0)
    """Relative fall that counts as one (``plateau``)."""
    threshold: float = Field(0.01, gt=0)
    """A stage ends when the square of the averaged gradient, the mean update of all that is shared over the learning
    rate, is at most ``threshold / 2^r`` (``gradient``)."""

    def check(self, participation: Participation) -> None:
        """Raise UsageError where rounds do not close with the first visits."""
        if self.when == "never":
            return
        when, first = f"doubling.when = '{self.when}'", "participation.close = 'first'"
        if participation.close != "first":
            got = f"got close = '{participation.close}'; did you mean {first}?"
            raise UsageError(f"{when}: expected {first} and participation.first = n0, {got}")
        if participation.adaptive:
            why = f"with {when} these ended with ever more visits: expected seconds, or none"
            raise UsageError(f"participation.deadline = 'adaptive' follows from past rounds alone, and {why}")
        if self.by == "samples" and participation.min_clients > 1:
            why = "counts visits, and doubling.by = 'samples' waits for samples, which fewer may hold"
            raise refusal(f"participation.min_clients {why}", "at most 1", participation.min_clients, 1)

    def nothing_moves(self, method: str) -> UsageError:
        """Return the error for a method that shares nothing of which there could be a gradient."""
        why = f"algorithm.name = '{method}' shares nothing that could move"
        return UsageError(f"doubling.when = 'gradient': {why}; did you mean doubling.when = 'plateau'?")

    def signal(self, before: State, after: State, sums: Sums, rate: float) -> float:
        """Return what a stage may end by, at least 0; −1: the round says nothing. `rate`: the learning rate."""
        if self.when == "plateau" and "loss" in sums and sums.weight("loss"):
            return float(sums.mean("loss"))
        sent = [name for name in before if name in sums and sums.weight(name)]
        if self.when == "gradient" and sent:
            return sum(float((after[name] - before[name]).double().square().sum()) for name in sent) / rate**2
        return -1.0

    def after(self, stage: Stage, limits: Sequence[float], signal: float) -> Stage:
        """Return where a run stands after one more round; `limits`: the most rounds of each stage but the last."""
        if signal < 0 and self.when in ("plateau", "gradient"):
            return replace(stage, rounds=stage.rounds + 1)
        fallen = signal < stage.best - self.tolerance * abs(stage.best) or stage.best == inf
        best, since = (signal, 0) if fallen else (stage.best, stage.since + 1)
        now = replace(stage, rounds=stage.rounds + 1, best=best, since=since)
        if now.number >= len(limits):
            return now
        quiet = self.when == "plateau" and now.since >= self.patience
        small = self.when == "gradient" and signal <= self.threshold / 2**now.number
        return entered(now.number + 1, limits) if quiet or small or now.rounds >= limits[now.number] else now


def entered(number: int, limits: Sequence[float]) -> Stage:
    """Return the beginning of this stage, or of the next one that takes any round."""
    while number < len(limits) and limits[number] == 0:
        number += 1
    return Stage(number)


@dataclass(frozen=True)
class Theory:
    """The rounds that each stage takes by the contraction ``dist⁺ ≤ dist √(1−a) + a / √(2^r (1−a))`` (eq. 199).

    Stage 0 has no formula of its own: it begins with `distance`, dist(B0, B*).
    """

    times: Floats  # [N]: expected seconds until so many of N visits have arrived, E[T_(n)]
    first: int  # n0, the visits of the first stage
    a: float  # contraction, in (0, 1/4]
    communication: float = 0.0  # C, seconds of a round beside its visits
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
        rounds = [self._needed(self.distance, 0)] * (count > 1)
        for before, now, then in zip(*(map(self._time, range(first, count - 2 + first)) for first in range(3))):
            flat = then == now or now == before
            ratio = 1.0 if flat else sqrt(2) * (then - now) / (now - before)
            rounds.append(max(0, ceil(2 * log(ratio) / log(1 / (1 - self.a)))))
        return rounds

    def rounds_with_skips(self) -> list[int]:
        """Return the same with the distance followed: a stage that is to end above it takes no round."""
        rounds, distance = [], self.distance
        for stage in range(stages(self.first, len(self.times)) - 1):
            rounds.append(self._needed(distance, stage))
            shrunk = sqrt(1 - self.a) ** rounds[-1]
            distance = distance * shrunk + self.floor(stage) * (1 - shrunk)
        return rounds

    def _needed(self, distance: float, stage: int) -> int:
        if self.leaves_at(stage) >= distance:
            return 0
        floor = self.floor(stage)
        return ceil(2 * log((distance - floor) / (self.leaves_at(stage) - floor)) / log(1 / (1 - self.a)))

    def _time(self, stage: int) -> float:
        return float(self.times[wanted(self.first, len(self.times), stage) - 1])
