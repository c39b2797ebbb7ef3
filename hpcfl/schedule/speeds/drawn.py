"""Visit times that are drawn: exponential, of clients alike or of groups, or uniform; and stragglers' depths.

A straggler is somewhere in the model when the deadline comes.
"""

from __future__ import annotations

from abc import abstractmethod
from math import isclose
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from hpcfl.base.errors import UsageError, no_meaning, refusal
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats, Ints
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.plan import Attempt
from hpcfl.schedule.speeds.base import CLOSE, Speed


class Memoryless(Speed):
    """Exponential times around each client's mean: drawn once per run, or anew in each round."""

    sorted: bool = False
    """Number clients from fast to slow. With ``data.label_groups``, speeds then go with labels."""

    @property
    @abstractmethod
    def redrawn(self) -> bool:
        """Whether times are drawn anew in each round."""

    @abstractmethod
    def means(self, seed: int, clients: int) -> Floats:
        """Every client's mean seconds per visit, float64 [clients]."""

    def paces(self, seed: int, clients: int) -> Floats:
        """Return the times where they are drawn once, the means where they are drawn anew, float64 [clients]."""
        paces = self.means(seed, clients)
        if not self.redrawn:
            paces = paces * keyed(seed, "pace").exponential(1.0, clients)
        return np.sort(paces) if self.sorted else paces

    def seconds(self, attempt: Attempt) -> Floats:
        times = self.paces(attempt.seed, attempt.clients)
        if self.redrawn:
            rng = keyed(attempt.seed, "time", attempt.round, step=attempt.number)
            times = times * rng.exponential(1.0, attempt.clients)
        return times[attempt.cohort]

    def arrival(self, attempt: Attempt) -> Floats:
        """Return ``1 − exp(−closes_after / (mean · work_fraction))`` where times are drawn anew, float64 [n, L]."""
        if not self.redrawn:
            return super().arrival(attempt)
        means = self.paces(attempt.seed, attempt.clients)[attempt.cohort]
        return 1.0 - np.exp(-attempt.closes_after / np.outer(means, attempt.work_fractions))

    def in_time(self, attempt: Attempt, limits: Floats) -> Floats:
        if not self.redrawn:
            return super().in_time(attempt, limits)
        means = self.paces(attempt.seed, attempt.clients)[attempt.cohort]
        chance: Floats = -np.expm1(-np.maximum(0.0, limits) / means[:, None])
        return chance


class Exponential(Memoryless):
    """Exponential visit times, as in SRPFL's and FLANP's experiments."""

    model: Literal["exponential"] = "exponential"
    rate: float = Field(1.0, gt=0)
    """λ of ``T_i ~ Exp(λ)``, mean 1/λ seconds (``fixed`` and ``dynamic`` only)."""
    kind: Literal["fixed", "dynamic", "dynamic-rate", "dynamic-scale"] = "fixed"
    """``fixed``: T_i is drawn once. ``dynamic``: anew each round, clients alike. ``dynamic-rate``: ``λ_i ~ U[1/M, 1]``
    once, ``T_i ~ Exp(λ_i)`` anew each round (the paper). ``dynamic-scale``: the *mean* is from ``U[1, M]`` (the
    released code)."""

    def check(self, participation: Participation, clock: str = "simulated") -> None:
        if self.sorted and self.kind == "dynamic":
            why = "numbers clients by their mean times, and speed.kind = 'dynamic' gives no others"
            raise UsageError(f"speed.sorted = true {why}; did you mean speed.kind = 'dynamic-rate'?")

    @property
    def redrawn(self) -> bool:
        return self.kind != "fixed"

    def order(self, seed: int, clients: int, members: Ints, invited: int) -> Floats:
        """Return ``(H_N − H_{N−n}) / λ`` where clients are alike before anything is drawn, float64 [invited]."""
        if self.kind in ("fixed", "dynamic"):
            return np.cumsum(1.0 / np.arange(invited, 0, -1)) / self.rate
        return super().order(seed, clients, members, invited)

    def means(self, seed: int, clients: int) -> Floats:
        if self.kind in ("fixed", "dynamic"):
            return np.full(clients, 1.0 / self.rate)
        rng = keyed(seed, "pace")
        if self.kind == "dynamic-rate":
            return 1.0 / rng.uniform(1.0 / clients, 1.0, clients)
        return rng.uniform(1.0, clients, clients)


class Groups(Memoryless):
    """Exponential visit times whose mean is that of the client's group (SRPFL, Figure 8)."""

    model: Literal["groups"] = "groups"
    means_of: tuple[Annotated[float, Field(gt=0)], ...] = (0.1, 10.0)
    """Mean seconds per visit of each group."""
    shares_of: tuple[Annotated[float, Field(ge=0)], ...] = (0.9, 0.1)
    """Share of the clients in each group; they add up to 1."""
    kind: Literal["fixed", "dynamic"] = "fixed"
    """``fixed``: a client's time is drawn once. ``dynamic``: anew in each round."""

    def check(self, participation: Participation, clock: str = "simulated") -> None:
        if len(self.shares_of) != len(self.means_of) or not isclose(sum(self.shares_of), 1.0, abs_tol=1e-6):
            wanted = f"a share for each of the {len(self.means_of)} groups of speed.means_of, 1 in all"
            raise UsageError(f"speed.shares_of: expected {wanted}, got {list(self.shares_of)}")

    @property
    def redrawn(self) -> bool:
        return self.kind == "dynamic"

    def group(self, seed: int, clients: int) -> Ints:
        """Return every client's group, drawn once per run, int64 [clients]."""
        ends = np.rint(np.cumsum(self.shares_of) * clients)
        place = keyed(seed, "group").permutation(clients)
        return np.minimum(np.searchsorted(ends, place, side="right"), len(self.means_of) - 1)

    def means(self, seed: int, clients: int) -> Floats:
        return np.array(self.means_of)[self.group(seed, clients)]


class Uniform(Speed):
    """Uniform visit times, clients alike, drawn anew in each round: at a deadline of x·`longest`, 1 − x straggle."""

    model: Literal["uniform"] = "uniform"
    longest: float = Field(1.0, gt=0)
    """Seconds that no visit exceeds; means are half of it."""

    def paces(self, seed: int, clients: int) -> Floats:
        return np.full(clients, self.longest / 2)

    def seconds(self, attempt: Attempt) -> Floats:
        rng = keyed(attempt.seed, "time", attempt.round, step=attempt.number)
        return rng.uniform(0.0, self.longest, attempt.clients)[attempt.cohort]

    def arrival(self, attempt: Attempt) -> Floats:
        """Return ``min(1, closes_after / (longest · work_fraction))``, float64 [n, L]."""
        chance = np.minimum(1.0, attempt.closes_after / (self.longest * attempt.work_fractions))
        return np.tile(chance, (len(attempt.cohort), 1))

    @property
    def redrawn(self) -> bool:
        return True

    def in_time(self, attempt: Attempt, limits: Floats) -> Floats:
        return np.clip(limits / self.longest, 0.0, 1.0)


class UniformDepth(Speed):
    """A given share of the clients straggles, each to a depth drawn uniformly (SALF, section IV and eq. 10)."""

    model: Literal["uniform-depth"] = "uniform-depth"
    stragglers: float = Field(0.5, ge=0, le=1)
    """Share of the clients that straggle."""
    redraw: bool = True
    """Draw anew in each round who straggles (the paper), or once per run (the released code)."""
    nothing: bool = True
    """A straggler may deliver nothing: depth L + 1."""
    complete: bool = True
    """A straggler may finish: depth 1."""

    late: Literal["pace", "rounds"] = "pace"
    """How long a straggler's whole visit takes. ``pace``: by the share of its work done at the deadline. ``rounds``:
    one that stopped at layer l reports every 2l-th deadline, as SALF's AsyncFL (``arrivals`` only)."""
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
