"""Visit times by a law: a mean, a spread between clients, a spread of each client's visits, and how long these last.

A visit takes ``mean · B · W`` seconds. B is the client's, drawn once per run; W is the visit's, drawn in each round.
Both have the mean 1. ``W = S⁻¹(Φ(−z))`` with the law's survival function S, and z is an AR(1) process over the rounds
with a standard normal marginal (a Gaussian copula): chances are those of the law, whatever the persistence. For the
log-normal law, log W is itself that process. Chances are over all rounds, not given those before.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cache
from math import exp, pi, sqrt
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hpcfl.base.errors import UsageError, no_meaning, refusal
from hpcfl.base.lazy import Lazy
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.plan import Attempt
from hpcfl.schedule.speeds.base import NO_ATTEMPT, Speed, check_together

special, optimize = Lazy("scipy.special"), Lazy("scipy.optimize")
REMEMBERED = 4
K = TypeVar("K")
V = TypeVar("V")
_last: dict[tuple[int, int, float], tuple[int, Floats]] = {}  # round and z of a run: the next ones follow from it
_last_phase: dict[tuple[int, int, float, float], tuple[int, NDArray[np.bool_]]] = {}


def normals(seed: int, clients: int, persistence: float, round: int, number: int) -> Floats:
    """Return every client's z in a round, float64 [clients]: the same whatever was asked for before.

    A void attempt at a round (`number`) draws the round's own part anew.
    """
    own = keyed(seed, "time", round, step=number).standard_normal(clients)
    if not persistence or not round or number == NO_ATTEMPT:
        return own
    key = seed, clients, persistence
    at, z = _last.get(key, (-1, own))
    if at >= round:
        at = -1
    for each in range(at + 1, round):
        fresh = keyed(seed, "time", each).standard_normal(clients)
        z = _next(z, fresh, persistence) if each else fresh
    _remember(_last, key, (round - 1, z))
    return _next(z, own, persistence)


def in_slow_phase(seed: int, clients: int, share: float, rounds: float, round: int, number: int) -> NDArray[np.bool_]:
    """Return who is in a slow phase in a round, bool [clients]: a Markov chain, the same whatever was asked for before.

    Void attempts at a round are in it too; rounds that are none of the run are drawn one by one.
    """
    if number == NO_ATTEMPT:
        return keyed(seed, "slow", round, step=number).random(clients) < share
    key = seed, clients, share, rounds
    at, slow = _last_phase.get(key, (-1, None))
    if slow is None or at > round:
        at, slow = 0, keyed(seed, "slow").random(clients) < share
    for each in range(at + 1, round + 1):
        u = keyed(seed, "slow", each).random(clients)
        slow = np.where(slow, u >= 1 / rounds, u < share / (1 - share) / rounds)
    _remember(_last_phase, key, (round, slow))
    return slow


def _remember(known: dict[K, V], key: K, value: V) -> None:
    """Keep what a run's next round follows from, of few runs and sections at once."""
    known[key] = value
    if len(known) > REMEMBERED:
        del known[next(iter(known))]


def _next(z: Floats, fresh: Floats, persistence: float) -> Floats:
    return persistence * z + sqrt(1 - persistence**2) * fresh


class Law(Speed):
    """Base of the laws."""

    mean: float = Field(1.0, gt=0)
    """Seconds of a visit in the mean over clients and rounds."""
    between: float = Field(0.0, ge=0)
    """Spread between clients: of their mean seconds, drawn once per run."""
    within: float = Field(0.0, ge=0)
    """Spread of one client's visits about its mean."""
    persistence: float = Field(0.0, gt=-1, lt=1)
    """How much of a visit's deviation is there in the next round: its lag-1 autocorrelation."""
    slow: float = Field(1.0, ge=1)
    """By how much a client is slower in a slow phase (fail-slow). The `mean` is that of other visits."""
    slow_share: float = Field(0.1, gt=0, lt=1)
    """Share of the visits that are in slow phases."""
    slow_rounds: float = Field(10.0, ge=1)
    """Mean number of rounds that a slow phase lasts, which may end in each."""
    lag: float | None = Field(None, gt=0)
    """Seconds of the run after which clients are drawn anew, in simulated time; `persistence` and slow phases go from
    span to span."""
    sorted: bool = False
    """Number clients from fast to slow. With ``data.label_groups``, speeds then go with labels."""

    @abstractmethod
    def factor(self, survival: Floats, spread: float) -> Floats:
        """Return what is exceeded with these chances, of mean 1; `spread` is above 0."""

    @abstractmethod
    def chance(self, factor: Floats, spread: float) -> Floats:
        """Return the chances not to exceed a factor; `spread` is above 0."""

    def check(self, participation: Participation, clock: str = "simulated") -> None:
        idle = {"slow_share": 0.1, "slow_rounds": 10.0}
        for key, value in idle.items() if self.slow == 1 else ():
            if getattr(self, key) != value:
                raise no_meaning(f"speed.{key}", getattr(self, key), "speed.slow = 1")
        if (least := self.slow_share / (1 - self.slow_share)) > self.slow_rounds:
            why = f"speed.slow_share = {self.slow_share:g} needs phases of {least:.3g} rounds at least"
            raise UsageError(f"speed.slow_rounds = {self.slow_rounds:g}: {why}")
        if self.persistence and not self.within:
            raise refusal("speed.persistence", "0 with speed.within = 0: all visits take the same", self.persistence, 0)
        if self.lag is not None:
            if not self.redrawn:
                raise no_meaning("speed.lag", self.lag, "speed.within = 0: all visits take the same")
            check_together(f"speed.lag = {self.lag:g} is of rounds whose visits begin together", participation, clock)

    def paces(self, seed: int, clients: int) -> Floats:
        paces = self._means(seed, clients)
        return paces if self.slow == 1 else paces * (1 + self.slow_share * (self.slow - 1))

    def _means(self, seed: int, clients: int) -> Floats:
        """Return every client's mean seconds per visit outside of slow phases, float64 [clients]."""
        paces = self.mean * self._factors(keyed(seed, "pace").standard_normal(clients), self.between)
        return np.sort(paces) if self.sorted else paces

    def seconds(self, attempt: Attempt) -> Floats:
        seed, clients, place = attempt.seed, attempt.clients, (attempt.round, attempt.number)
        if self.lag is not None and attempt.number != NO_ATTEMPT:
            place = int(attempt.begins // self.lag), 0
        z = normals(seed, clients, self.persistence, *place)
        seconds = self._means(seed, clients) * self._factors(z, self.within)
        if self.slow > 1:
            slow = in_slow_phase(seed, clients, self.slow_share, self.slow_rounds, *place)
            seconds = np.where(slow, self.slow * seconds, seconds)
        return seconds[attempt.cohort]

    def arrival(self, attempt: Attempt) -> Floats:
        """Return the chance of the law that each layer is there in time, given the client's mean, float64 [n, L]."""
        if not self.redrawn:
            return super().arrival(attempt)
        paces = self._means(attempt.seed, attempt.clients)[attempt.cohort]
        return self._chance(attempt.closes_after / np.outer(paces, attempt.work_fractions))

    @property
    def redrawn(self) -> bool:
        return self.within > 0 or self.slow > 1

    @property
    def persists(self) -> bool:
        return self.persistence != 0 or self.slow > 1 or self.lag is not None

    def in_time(self, attempt: Attempt, limits: Floats) -> Floats:
        if not self.redrawn:
            return super().in_time(attempt, limits)
        paces = self._means(attempt.seed, attempt.clients)[attempt.cohort]
        return self._chance(np.maximum(0.0, limits) / paces[:, None])

    def _chance(self, factor: Floats) -> Floats:
        """Return the chances not to exceed a factor, in slow phases or not."""

        def chance(factor: Floats) -> Floats:
            return self.chance(factor, self.within) if self.within else (factor >= 1).astype(np.float64)

        if self.slow == 1:
            return chance(factor)
        return (1 - self.slow_share) * chance(factor) + self.slow_share * chance(factor / self.slow)

    def quantile(self, attempt: Attempt, chance: float) -> Floats:
        """Return the seconds that each invited client's visit does not exceed with this chance, float64 [n]."""
        paces = self.paces(attempt.seed, attempt.clients)[attempt.cohort]
        return paces * (self.factor(np.array(1 - chance), self.within) if self.within else 1.0)

    def _factors(self, z: Floats, spread: float) -> Floats:
        return self.factor(special.ndtr(-z), spread) if spread else np.ones(len(z))


class Lognormal(Law):
    """Log-normal visit times, as phones have them; spreads are standard deviations of the seconds' logarithm."""

    model: Literal["lognormal"] = "lognormal"
    between: float = Field(0.0, ge=0, le=5)
    """Spread between clients: of the logarithm of their mean seconds, drawn once per run; 0.5 is a factor of 1.65."""
    within: float = Field(0.0, ge=0, le=5)
    """Spread of the logarithm of one client's visits."""

    def factor(self, survival: Floats, spread: float) -> Floats:
        return np.asarray(np.exp(-spread * special.ndtri(survival) - spread**2 / 2))

    def chance(self, factor: Floats, spread: float) -> Floats:
        with np.errstate(divide="ignore"):
            return np.asarray(special.ndtr(np.log(factor) / spread + spread / 2))


class Gamma(Law):
    """Gamma visit times; spreads are standard deviations over means, 1 being exponential."""

    model: Literal["gamma"] = "gamma"

    def factor(self, survival: Floats, spread: float) -> Floats:
        return np.asarray(special.gammainccinv(spread**-2, survival) * spread**2)

    def chance(self, factor: Floats, spread: float) -> Floats:
        return np.asarray(special.gammainc(spread**-2, factor / spread**2))


class Weibull(Law):
    """Weibull visit times; spreads are standard deviations over means, 1 being exponential."""

    model: Literal["weibull"] = "weibull"

    def factor(self, survival: Floats, spread: float) -> Floats:
        shape, scale = weibull_of(spread)
        return scale * (-np.log(survival)) ** (1 / shape)

    def chance(self, factor: Floats, spread: float) -> Floats:
        shape, scale = weibull_of(spread)
        return -np.expm1(-((factor / scale) ** shape))


class Pareto(Law):
    """Pareto visit times (type I), with a heavy tail; spreads are standard deviations over means."""

    model: Literal["pareto"] = "pareto"

    def factor(self, survival: Floats, spread: float) -> Floats:
        index = 1 + sqrt(1 + spread**-2)
        return (index - 1) / index * survival ** (-1 / index)

    def chance(self, factor: Floats, spread: float) -> Floats:
        index = 1 + sqrt(1 + spread**-2)
        with np.errstate(divide="ignore"):
            return 1 - np.minimum(1.0, (index - 1) / index / factor) ** index


class ShiftedExponential(Law):
    """Exponential visit times after a least one, as of parallel computing; spreads are sd over mean, at most 1."""

    model: Literal["shifted-exponential"] = "shifted-exponential"
    between: float = Field(0.0, ge=0, le=1)
    """Spread between clients: of their mean seconds, drawn once per run."""
    within: float = Field(0.0, ge=0, le=1)
    """Spread of one client's visits about its mean, 1 less which is the least."""

    def factor(self, survival: Floats, spread: float) -> Floats:
        return 1 - spread - spread * np.log(survival)

    def chance(self, factor: Floats, spread: float) -> Floats:
        return -np.expm1(-np.maximum(0.0, factor - 1 + spread) / spread)


class UniformAbout(Law):
    """Uniform visit times about each client's mean; spreads are sd over mean, .577 being from 0 to twice the mean."""

    model: Literal["uniform-about"] = "uniform-about"
    between: float = Field(0.0, ge=0, le=0.577)
    """Spread between clients: of their mean seconds, drawn once per run."""
    within: float = Field(0.0, ge=0, le=0.577)
    """Spread of one client's visits about its mean."""

    def factor(self, survival: Floats, spread: float) -> Floats:
        return 1 + sqrt(3) * spread * (1 - 2 * survival)

    def chance(self, factor: Floats, spread: float) -> Floats:
        return np.asarray(np.clip((1 + (factor - 1) / (sqrt(3) * spread)) / 2, 0.0, 1.0))


@cache
def weibull_of(spread: float) -> tuple[float, float]:
    """Return shape and scale of the Weibull law of mean 1 with this standard deviation."""

    def excess(log_shape: float) -> float:
        inverse = exp(-log_shape)
        return float(special.gammaln(1 + 2 * inverse) - 2 * special.gammaln(1 + inverse) - np.log1p(spread**2))

    if spread < 1e-3:  # from the expansion for large shapes, where the difference above is lost to rounding
        return pi / (sqrt(6) * spread), 1.0
    shape = exp(optimize.brentq(excess, -3.0, 12.0, xtol=1e-14))
    return shape, 1 / float(special.gamma(1 + 1 / shape))
