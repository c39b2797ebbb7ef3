"""Visit times by a law: a mean, a spread between clients, a spread of each client's visits, and how long these last.

A visit takes ``mean · B · W`` seconds. B is the client's, drawn once per run; W is the visit's, drawn in each round.
Both have the mean 1. ``W = S⁻¹(Φ(−z))`` with the law's survival function S, and z is an AR(1) process over the rounds
with a standard normal marginal (a Gaussian copula): chances are those of the law, whatever the persistence. For the
log-normal law, log W is itself that process. Chances are over all rounds, not given those before.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cache
from math import exp, sqrt
from typing import Literal

import numpy as np
from pydantic import Field

from hpcfl.base.errors import refusal
from hpcfl.base.lazy import Lazy
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.plan import Attempt
from hpcfl.schedule.speeds.base import NO_ATTEMPT, Speed

special, optimize = Lazy("scipy.special"), Lazy("scipy.optimize")
_last: dict[tuple[int, int, float], tuple[int, Floats]] = {}  # round and z of a run: the next ones follow from it


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
    _last.clear()
    _last[key] = round - 1, z
    return _next(z, own, persistence)


def _next(z: Floats, fresh: Floats, persistence: float) -> Floats:
    return persistence * z + sqrt(1 - persistence**2) * fresh


class Law(Speed):
    """Base of the laws."""

    mean: float = Field(1.0, gt=0)
    """Seconds of a visit in the mean over clients and rounds."""
    between: float = Field(0.0, ge=0)
    """Spread between clients: of their mean seconds, drawn once per run. 0: all are alike."""
    within: float = Field(0.0, ge=0)
    """Spread of one client's visits about its mean. 0: all take the same."""
    persistence: float = Field(0.0, gt=-1, lt=1)
    """How much of a visit's deviation is there in the next round: the lag-1 autocorrelation of z, see above."""
    sorted: bool = False
    """Number clients from fast to slow. With ``data.label_groups``, speeds then go with labels."""

    @abstractmethod
    def factor(self, survival: Floats, spread: float) -> Floats:
        """Return what is exceeded with these chances, of mean 1; `spread` is above 0."""

    @abstractmethod
    def chance(self, factor: Floats, spread: float) -> Floats:
        """Return the chances not to exceed a factor; `spread` is above 0."""

    def check(self, participation: Participation, clock: str = "simulated") -> None:
        if self.persistence and not self.within:
            raise refusal("speed.persistence", "0 with speed.within = 0: all visits take the same", self.persistence, 0)

    def paces(self, seed: int, clients: int) -> Floats:
        paces = self.mean * self._factors(keyed(seed, "pace").standard_normal(clients), self.between)
        return np.sort(paces) if self.sorted else paces

    def seconds(self, attempt: Attempt) -> Floats:
        z = normals(attempt.seed, attempt.clients, self.persistence, attempt.round, attempt.number)
        return (self.paces(attempt.seed, attempt.clients) * self._factors(z, self.within))[attempt.cohort]

    def arrival(self, attempt: Attempt) -> Floats:
        """Return the chance of the law that each layer is there in time, given the client's mean, float64 [n, L]."""
        if not self.within:
            return super().arrival(attempt)
        paces = self.paces(attempt.seed, attempt.clients)[attempt.cohort]
        return self.chance(attempt.closes_after / np.outer(paces, attempt.work_fractions), self.within)

    @property
    def redrawn(self) -> bool:
        return bool(self.within)

    def in_time(self, attempt: Attempt, limits: Floats) -> Floats:
        if not self.within:
            return super().in_time(attempt, limits)
        paces = self.paces(attempt.seed, attempt.clients)[attempt.cohort]
        return self.chance(np.maximum(0.0, limits) / paces[:, None], self.within)

    def quantile(self, attempt: Attempt, chance: float) -> Floats:
        """Return the seconds that each invited client's visit does not exceed with this chance, float64 [n]."""
        paces = self.paces(attempt.seed, attempt.clients)[attempt.cohort]
        return paces * (self.factor(np.array(1 - chance), self.within) if self.within else 1.0)

    def _factors(self, z: Floats, spread: float) -> Floats:
        return self.factor(special.ndtr(-z), spread) if spread else np.ones(len(z))


class Lognormal(Law):
    """Log-normal visit times, as phones have them; spreads are standard deviations of the seconds' logarithm."""

    model: Literal["lognormal"] = "lognormal"

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
    """Spread between clients: of their mean seconds, drawn once per run. 0: all are alike."""
    within: float = Field(0.0, ge=0, le=1)
    """Spread of one client's visits about its mean, of which 1 less that is the least. 0: all take the same."""

    def factor(self, survival: Floats, spread: float) -> Floats:
        return 1 - spread - spread * np.log(survival)

    def chance(self, factor: Floats, spread: float) -> Floats:
        return -np.expm1(-np.maximum(0.0, factor - 1 + spread) / spread)


@cache
def weibull_of(spread: float) -> tuple[float, float]:
    """Return shape and scale of the Weibull law of mean 1 with this standard deviation."""

    def excess(log_shape: float) -> float:
        inverse = exp(-log_shape)
        return float(special.gammaln(1 + 2 * inverse) - 2 * special.gammaln(1 + inverse) - np.log1p(spread**2))

    shape = exp(optimize.brentq(excess, -3.0, 12.0, xtol=1e-14))
    return shape, 1 / float(special.gamma(1 + 1 / shape))
