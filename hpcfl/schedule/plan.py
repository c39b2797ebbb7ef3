"""An attempt at a round, and what becomes of it: who is invited, when it closes, how far each visit comes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from math import inf, isnan, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.types import Floats, Ints


@dataclass(frozen=True)
class Attempt:
    """One attempt at a round before anything is drawn: all that a speed model knows of it, and when it closes.

    Attributes
    ----------
    seed, clients : int
        The run's seed, and how many clients it has.
    work_fractions : float64 [L]
        The fraction of a visit's work that is done when layer l's gradient is ready; decreasing in l, 1 for l = 1.
    round, number : int
        The round from 0, and how many attempts at it were void; each draws anew.
    cohort : int64 [n]
        Who is invited, ascending client ids.
    closes_after : float
        Seconds after which it closes whatever has arrived; inf: never.
    quorum : int or None
        Visits that close it, or their weights' sum; None: all are waited for.
    weights : int64 [n] or None
        What each visit counts towards the quorum: its samples; None: 1.
    grace : float
        Seconds for which it goes on once it has its quorum.
    leaves : float64 [n] or None
        Seconds after which each client leaves, whether it is done or not; None: nobody does.
    begins : float
        When it begins, in seconds since the start of the run; 0 where nobody asks for it.
    work : tuple of int
        Of a visit for which a rule says them, in real time: its steps, and the fewest of any client's.
    """

    seed: int
    clients: int
    work_fractions: Floats
    round: int
    number: int
    cohort: Ints
    closes_after: float = inf
    quorum: int | None = None
    weights: Ints | None = None
    grace: float = 0.0
    leaves: Floats | None = None
    begins: float = 0.0
    work: tuple[int, int] = (0, 0)

    @property
    def layers(self) -> int:
        """L, the number of layers."""
        return len(self.work_fractions)

    def needed(self, order: Ints) -> int:
        """Return how many visits close the round if they arrive in this `order` (rows of the cohort)."""
        if self.quorum is None:
            return len(order)
        arrived = np.arange(1, len(order) + 1) if self.weights is None else np.cumsum(self.weights[order])
        return min(int(np.searchsorted(arrived, self.quorum)) + 1, len(order))

    def closing(self, seconds: Floats) -> float:
        """Return the seconds after which it closes where visits take so long; inf or NaN: they do not end."""
        whole = self.whole(seconds)
        order = np.argsort(whole, kind="stable")
        if not len(order):
            return self.closes_after
        closes = float(whole[order[self.needed(order) - 1]]) + self.grace
        if self.leaves is not None and closes == inf:  # nobody is left who could still come
            closes = self.last(seconds)
        return min(self.closes_after, closes)

    def last(self, seconds: Floats) -> float:
        """Return when the last of visits that take so long is over, whether it is done or its client leaves."""
        return float((seconds if self.leaves is None else np.minimum(seconds, self.leaves)).max())

    def whole(self, seconds: Floats) -> Floats:
        """Return when visits that take so long are complete, float64 [n]; inf where the client leaves before."""
        return seconds if self.leaves is None else np.where(seconds <= self.leaves, seconds, inf)

    def until(self, closes: float) -> float | Floats:
        """Return up to when what has come of each visit counts, if it closes then."""
        return closes if self.leaves is None else np.minimum(closes, self.leaves)

    def ends(self, arrived: int, seconds: float) -> float:
        """Return the seconds after which it is over in real time if `arrived` visits (or their weights) are there."""
        reached = self.quorum is not None and arrived >= self.quorum
        return min(self.closes_after, seconds + self.grace) if reached else self.closes_after


@dataclass(frozen=True)
class Timeline:
    """When visits do what, in seconds since they are invited.

    Attributes
    ----------
    begins, computes : float64 [n]
        When each begins to compute, and how long it does.
    sends : float64 [n]
        How long what is sent at its end takes to arrive.
    arrives : float64 [n, L]
        When each layer has arrived.
    """

    begins: Floats
    computes: Floats
    sends: Floats
    arrives: Floats

    @classmethod
    def computing(cls, seconds: Floats, work_fractions: Floats) -> Timeline:
        """Return that of visits which do nothing but compute, float64 [n]."""
        nothing = np.zeros(len(seconds))
        return cls(nothing, seconds, nothing, np.outer(seconds, work_fractions))

    def shortened(self, share: float) -> Timeline:
        """Return that of visits which do a share of their steps, and send what they have at their ends."""
        less = (1 - share) * self.computes
        return Timeline(self.begins, self.computes - less, self.sends, self.arrives - less[:, None])

    def of(self, rows: Ints) -> Timeline:
        """Return that of some visits."""
        return Timeline(self.begins[rows], self.computes[rows], self.sends[rows], self.arrives[rows])


class Fate(IntEnum):
    """What becomes of a visit."""

    COUNTED = 0
    """All of it."""
    PARTIAL = 1
    """Some layers, or some of its local steps."""
    LATE = 2
    """Nothing: its round closed before any of it had come, or it began with too old a state, or came too short.

    Or its client left before it was done."""
    REJECTED = 3
    """The guard rejected it, or layers of it."""
    LOST = 4
    """The rank of its client was lost, or, where arrivals end rounds, its client left."""
    CANCELLED = 5
    """The server stopped it, or the end of the run did."""
    UNDER_WAY = 6
    """It goes on after the round, where arrivals end rounds."""


@dataclass(frozen=True)
class Arrivals:
    """What is known of the visits of a round that arrivals end, [n] each.

    Attributes
    ----------
    versions, numbers : int64
        The round whose state each visit began with, and how many the client had begun before with the same.
    times : float64
        When each arrived, in seconds since the start of the run.
    factors : float64
        What each change counts, by its staleness or by how often its client reported.
    waiting, served : int64 [m]
        Who was at work when it ended, ascending ids, and the rounds whose states they had in their hands.
    rates : float64, optional
        By what each one's step size was multiplied; None: by nothing.
    """

    versions: Ints
    numbers: Ints
    times: Floats
    factors: Floats
    waiting: Ints
    served: Ints
    rates: Floats | None = None

    def of(self, rows: Ints) -> Arrivals:
        """Return the same of some visits."""
        own = {name: getattr(self, name)[rows] for name in ("versions", "numbers", "times", "factors")}
        return replace(self, **own, rates=None if self.rates is None else self.rates[rows])


@dataclass(frozen=True)
class Plan:
    """One round, decided: in simulated time a pure function of config and round, evaluated alike on every rank.

    Attributes
    ----------
    cohort : int64 [n]
        Who is invited, ascending client ids.
    seconds : float64 [n]
        Seconds that a whole visit takes (``inf``: it never ends).
    depth : int64 [n]
        First layer (1 … L) whose gradient counts; L + 1 where nothing does.
    duration : float
        Seconds from the round's start to its end, void attempts included.
    arrival : float64 [n, L]
        Chance that this client's layer l counts in one attempt, before anything is drawn; NaN where it is not known.
    miss_probability : float64 [L]
        Chance that nobody's layer l counts in one attempt (SALF's p_l); NaN where it is not known.
    closes_after : float
        Seconds after which the attempt that counted closed at the latest, whatever visits had come; NaN where only
        visits close rounds.
    repeats : int
        Void attempts before this one.
    steps : int64 [n] or None
        Local steps of each visit that count, 0 where nothing does; None: visits are not cut short at a step.
    arrivals : Arrivals, optional
        Where arrivals end rounds: which states the visits began with. The cohort is whose visits arrived, ascending,
        and may name a client more than once, its visits in the order of their arrival.
    number : int
        How many visits these clients have begun before with the same state.
    among : int64 [n] or None
        Of a part, where its visits stand in the cohort of the whole round; None: it is the whole.
    ended : mapping of int to Fate
        What has become of clients' visits that ended in the round beside those of the cohort.
    rate : float
        By what visits of a part multiply the size of their steps.
    step_chances : float64 [n, T] or None
        Chance that so many of each one's local steps, 1 … T, are done and count; None: the method does not ask.
    """

    round: int
    cohort: Ints
    seconds: Floats
    depth: Ints
    duration: float
    arrival: Floats
    miss_probability: Floats
    closes_after: float = nan
    repeats: int = 0
    steps: Ints | None = None
    arrivals: Arrivals | None = None
    number: int = 0
    among: Ints | None = None
    ended: Mapping[int, Fate] = field(default_factory=dict)
    step_chances: Floats | None = None
    rate: float = 1.0

    @classmethod
    def nobody(cls, round: int, layers: int, closes_after: float = nan, repeats: int = 0) -> Plan:
        """Return a round that invites nobody and takes no time."""
        none: Ints = np.zeros(0, dtype=np.int64)
        chances = np.zeros((0, layers)), np.ones(layers)
        return cls(round, none, np.zeros(0), none, 0.0, *chances, closes_after, repeats)

    @classmethod
    def of_arrivals(
        cls, layers: int, round: int, cohort: Ints, seconds: Floats, depth: Ints, duration: float, **more: Any
    ) -> Plan:
        """Return a round that arrivals have ended: what chances there were is not known."""
        chances = np.full((len(cohort), layers), nan), np.zeros(layers)
        return cls(round, cohort, seconds, depth, duration, *chances, **more)

    @property
    def invited(self) -> Ints:
        """Whose visits might have counted, ascending ids, int64 [n].

        With arrivals those are who has arrived, and where time alone ends rounds who was at work when it did.
        """
        return self.cohort if isnan(self.closes_after) else self.at_work

    @property
    def at_work(self) -> Ints:
        """Who was at work in it, ascending ids, int64 [n]: whose visits arrived, and who went on."""
        return self.cohort if self.arrivals is None else np.union1d(self.cohort, self.arrivals.waiting)

    def parts(self) -> list[Plan]:
        """Return the visits that can be done together, of one state and at most one of each client, in their order.

        The `round` of such a part is the one whose state the visits began with.
        """
        if self.arrivals is None:
            return [self]
        wave = np.arange(len(self.cohort)) - np.searchsorted(self.cohort, self.cohort)
        alike = wave, self.arrivals.versions, self.arrivals.numbers
        rates = () if self.arrivals.rates is None else (self.arrivals.rates,)
        kinds, parts = np.stack([*alike, *rates], 1), list[Plan]()
        for kind in np.unique(kinds, axis=0):
            rows = np.flatnonzero((kinds == kind).all(1))
            own = {name: getattr(self, name)[rows] for name in ("cohort", "seconds", "depth", "arrival")}
            own |= {"steps": None if self.steps is None else self.steps[rows], "arrivals": self.arrivals.of(rows)}
            rate = float(kind[3]) if len(kind) > 3 else 1.0
            parts.append(replace(self, round=int(kind[1]), number=int(kind[2]), rate=rate, among=rows, **own))
        return parts

    @cached_property
    def counted(self) -> NDArray[np.bool_]:
        """Whose visits count at all, bool [n]."""
        return self.depth <= self.layers

    @property
    def layers(self) -> int:
        """L, the number of layers."""
        return len(self.miss_probability)

    def arrived(self, rejected: Collection[int]) -> int:
        """Return how many visits counted, or would have, had they not been `rejected` (places in the cohort)."""
        return int((self.counted | np.isin(np.arange(len(self.cohort)), list(rejected))).sum())

    def places(self, clients: Ints) -> Ints:
        """Return where the visits of some `clients` stand in the cohort of the whole round, one of each."""
        own = np.searchsorted(self.cohort, clients)
        return own if self.among is None else self.among[own]

    def rows(self, clients: Ints) -> Ints:
        """Return the places in the cohort of those `clients` whose visits count, deepest first (ties by id)."""
        found = sorted(self._places[client] for client in clients.tolist() if client in self._places)
        return np.array([place for _, place in found], dtype=np.int64)

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """Depth and place in the cohort of each client whose visit counts: chunk after chunk looks for its own."""
        rows = np.flatnonzero(self.counted)
        return dict(zip(self.cohort[rows].tolist(), zip(self.depth[rows].tolist(), rows.tolist())))
