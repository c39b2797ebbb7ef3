"""Rounds that arrivals end: who is at work with which state, and who arrives next. In simulated time an event queue.

Clients are sent out with the newest state, in the order in which places become free, and report when they are done; the
server takes a step with every `buffer` visits, when all have reported often enough, or after a `deadline`, and a round
is such a step. All of it is a pure function of config and seed, so every rank keeps the same queue without a word. Who
arrives at the same time arrives in the order of the ids. A step is taken before anybody is sent out in its stead, so
that who arrives last begins with what it has brought about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.errors import RunError
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats, Ints
from hpcfl.schedule.participation import Participation, Staleness
from hpcfl.schedule.plan import Arrivals, Attempt, Plan
from hpcfl.schedule.speeds.base import CLOSE, Speed

MOST_FRUITLESS = 100_000
"""After so many arrivals in a row of which nothing counts, a run is given up."""
Came = tuple[int, int, int, float, float, int, int]
"""Client, version, number, time of arrival, seconds of a whole visit, depth, steps."""
PREFIX = "flight "  # begins the names of what a checkpoint remembers


class Run(Protocol):
    """What a queue depends on of a run, see `hpcfl.schedule.planner.Planner`."""

    participation: Participation
    speed: Speed
    staleness: Staleness
    seed: int
    work_fractions: Floats

    @property
    def clients(self) -> int: ...
    @property
    def members(self) -> Ints: ...
    @property
    def visit_steps(self) -> tuple[Ints, Ints]: ...
    def cut_short(self, attempt: Attempt, seconds: Floats) -> tuple[NDArray[np.bool_], Ints, Ints | None]: ...


@dataclass
class Flights:
    """Who is at work, with which state: what checkpoints hold of rounds that arrivals end.

    Attributes
    ----------
    version : int64 [clients]
        The round whose state each client was last sent out with; -1: none yet.
    number : int64 [clients]
        How many visits it had begun before with the same.
    due : float64 [clients]
        When it reports, in seconds since the start of the run; inf: never; NaN: it is not at work. In real time
        nobody knows, and 0 stands for all who are at work.
    now : float
        Seconds since the start of the run.
    drawn : int
        How often it was drawn who is sent out: each draw has a key of its own.
    """

    version: Ints
    number: Ints
    due: Floats
    now: float = 0.0
    drawn: int = 0

    @classmethod
    def none(cls, clients: int) -> Flights:
        """Nobody has been sent out yet."""
        return cls(np.full(clients, -1), np.zeros(clients, dtype=np.int64), np.full(clients, np.nan))

    @property
    def waiting(self) -> Ints:
        """Who is at work, ascending ids."""
        return np.flatnonzero(~np.isnan(self.due))

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint remembers, arrays by name; nothing where nobody was ever sent out."""
        if (self.version < 0).all():
            return {}
        return {PREFIX + name: np.asarray(value) for name, value in vars(self).items()}

    @classmethod
    def restored(cls, saved: Mapping[str, Any], clients: int) -> Flights:
        """Return what a checkpoint remembers; nobody has been sent out where it remembers nothing."""
        if PREFIX + "now" not in saved:
            return cls.none(clients)
        version, number, due = (saved[PREFIX + name].copy() for name in ("version", "number", "due"))
        return cls(version, number, due, float(saved[PREFIX + "now"]), int(saved[PREFIX + "drawn"]))

    def chosen(self, seed: int, rules: Participation, members: Ints, round: int) -> Ints:
        """Return who of the `members` is sent out now, with the state of this round, ascending ids."""
        places = rules.at_work(len(self.due)) - len(self.waiting)
        free = self.free(rules, members, round)
        if places >= len(free):
            return free
        self.drawn += 1
        return np.sort(keyed(seed, "dispatch", step=self.drawn).choice(free, places, replace=False))

    def free(self, rules: Participation, members: Ints, round: int) -> Ints:
        """Return which of the `members` may be sent out with the state of this round, if there is a place."""
        free = members[np.isnan(self.due[members])]
        if rules.most_per_version is not None:
            begun = np.where(self.version[free] == round, self.number[free] + 1, 0)
            free = free[begun < rules.most_per_version]
        if rules.dispatch == "reporter" and (self.version >= 0).any():
            free = free[self.version[free] >= 0]  # others have never begun, and do not now
        return free

    def leave(self, clients: Ints, round: int) -> None:
        """Send clients out with the state of a round; when they are due is still to be said."""
        again = self.version[clients] == round
        self.number[clients] = np.where(again, self.number[clients] + 1, 0)
        self.version[clients], self.due[clients] = round, 0.0


class Queue:
    """The arrivals of a run in simulated time.

    Parameters
    ----------
    flights : Flights
        Where it begins; it is kept up to date, and is that of a round's end once the round is planned.
    """

    def __init__(self, run: Run, flights: Flights) -> None:
        self.run, self.flights = run, flights
        self.rules = run.speed.rules(run.participation)
        self.depth: Ints = np.ones(run.clients, dtype=np.int64)
        self.steps: Ints = run.visit_steps[0].copy() if self.rules.by_steps else self.depth.copy()
        self.seconds: Floats = np.full(run.clients, np.nan)
        there = flights.waiting  # how far those come who are at work follows from when they began
        for kind in np.unique(np.stack([flights.version[there], flights.number[there]]), axis=1).T:
            self._draw(there[(flights.version[there] == kind[0]) & (flights.number[there] == kind[1])])

    def plans(self, first: int) -> Iterator[Plan]:
        """Return the plan of each round from `first` on, without end.

        Raises
        ------
        RunError
            Where nobody ever arrives, or nothing ever counts.
        """
        return map(self._planned, count(first))

    def _planned(self, round: int) -> Plan:
        rules, flights, start = self.rules, self.flights, self.flights.now
        end = start + self.run.participation.closes_after(round, ())
        if rules.stop_stale and rules.max_staleness is not None:
            flights.due[flights.waiting[round - flights.version[flights.waiting] > rules.max_staleness]] = np.nan
        self._send(round)
        came: list[Came] = []
        fruitless, full = 0, False
        while not full:
            client = int(np.nanargmin(flights.due)) if len(flights.waiting) else -1
            due = float(flights.due[client]) if client >= 0 else inf
            if due > end * (1 + CLOSE):  # ends are sums of many deadlines
                flights.now = end
                break
            if due == inf:
                raise RunError(f"round {round}: nobody arrives any more: every visit that is under way takes for ever")
            flights.now, flights.due[client] = due, np.nan
            version, number = int(flights.version[client]), int(flights.number[client])
            depth, steps = int(self.depth[client]), int(self.steps[client])
            if counts(self.run, rules, round - version, depth, steps):
                came.append((client, version, number, due, float(self.seconds[client]), depth, steps))
                full = enough(self.run, rules, came)
            else:
                fruitless += 1
                check_fruitless(round, fruitless)
            if not full and due < end * (1 - CLOSE):
                self._send(round)
        return planned(self.run, round, came, flights, start, end - start)

    def _send(self, round: int) -> None:
        """Send clients out for all free places."""
        run, flights = self.run, self.flights
        chosen = flights.chosen(run.seed, self.rules, run.members, round)
        flights.leave(chosen, round)
        for number in np.unique(flights.number[chosen]).tolist():
            some = chosen[flights.number[chosen] == number]
            self._draw(some)
            lasts = np.minimum(self.seconds[some], self.rules.max_seconds or inf)
            flights.due[some] = flights.now + run.speed.communication + lasts

    def _draw(self, clients: Ints) -> None:
        """Say how long the visits of clients that begin alike take, and how far they come."""
        if not len(clients):
            return
        run, flights, rules = self.run, self.flights, self.rules
        round_, number = int(flights.version[clients[0]]), int(flights.number[clients[0]])
        ends = rules.max_seconds or run.participation.closes_after(round_, ())
        attempt = Attempt(run.seed, run.clients, run.work_fractions, round_, number, run.members, ends)
        places = np.searchsorted(run.members, clients)  # models may draw for all at once
        seconds = run.speed.seconds(attempt)
        self.seconds[clients] = seconds[places]
        if rules.max_seconds is not None:
            _, depth, steps = run.cut_short(attempt, seconds)
            self.depth[clients] = depth[places]
            if steps is not None:
                self.steps[clients] = steps[places]


def counts(run: Run, rules: Participation, staleness: int, depth: int, steps: int) -> bool:
    """Return whether a visit counts that has reached this layer, after so many steps where they may be fewer."""
    fresh = rules.max_staleness is None or staleness <= rules.max_staleness
    return fresh and depth <= len(run.work_fractions) and (steps > 0 or not rules.by_steps)


def enough(run: Run, rules: Participation, came: Sequence[Came]) -> bool:
    """Return whether the server takes its step with the visits that have come and count.

    Where every client is waited for, with B_i visits of client i of n: when (1/n Σ 1/B_i)⁻¹ ≥ buffer/n.
    """
    if rules.buffer is None:
        return False
    if not rules.every_client:
        return len(came) >= rules.buffer
    visits, clients = np.unique([visit[0] for visit in came], return_counts=True)[1], len(run.members)
    return len(visits) == clients and bool(rules.buffer * (1 / visits).sum() <= clients**2 * (1 + CLOSE))


def check_fruitless(round: int, visits: int) -> None:
    """Raise RunError where so many visits of a round have been in vain that it will never end."""
    if visits > MOST_FRUITLESS:
        hint = "did you mean a larger participation.max_seconds or participation.max_staleness?"
        raise RunError(f"round {round}: given up after {MOST_FRUITLESS} visits of which nothing counted; {hint}")


def planned(run: Run, round: int, came: list[Came], flights: Flights, start: float, closes_after: float) -> Plan:
    """Return the round that these visits have ended: it began at `start`, and has ended by now.

    So many seconds later it would have in any case; inf: it would not.
    """
    layers, waiting = len(run.work_fractions), flights.waiting
    table = np.array(sorted(came, key=lambda each: each[0]), dtype=np.float64).reshape(-1, 7).T
    cohort, versions, numbers, depth, steps = (table[row].astype(np.int64) for row in (0, 1, 2, 5, 6))
    times, seconds = table[3], table[4]
    factors = run.staleness.factors(round - versions) * run.participation.evened(cohort)
    return Plan.of_arrivals(
        round,
        layers,
        Arrivals(versions, numbers, times, factors, waiting, flights.version[waiting]),
        *(cohort, seconds, depth),
        duration=flights.now - start,
        closes_after=closes_after if closes_after < inf else np.nan,
        steps=steps if run.participation.by_steps else None,
    )
