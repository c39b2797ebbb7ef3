"""FedCompass and FedQueue: how many steps each client is sent out with, and which visits the server takes together.

Both measure what clients take, and send each one out with as many steps as let it be back when it is wanted. What they
know of clients are numbers by client, which checkpoints hold; who has come since the last step waits for the next one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import floor, inf, isnan
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hpcfl.base.config import ConfigBase
from hpcfl.base.errors import UsageError, check_within, no_meaning
from hpcfl.base.types import Floats, Ints
from hpcfl.schedule.participation import Participation

Known = dict[str, Floats]
"""What a rule knows of clients, float64 [clients] each."""
UNKNOWN = "pace", "came", "group", "expected", "latest", "since"  # numbers that are NaN before anything is known


class Stepping(Protocol):
    """A method whose visits may have any number of steps, see `hpcfl.algorithms.hooks.Hooks`."""

    @property
    def name(self) -> str: ...
    @property
    def goes_on(self) -> bool: ...
    @property
    def scales_steps(self) -> bool: ...
    def visit_steps(self, samples: int) -> tuple[int, int]: ...


class Scheduler(ConfigBase):
    """What rules of ``participation.dispatch`` need that choose local steps."""

    least_steps: int = Field(20, ge=1)
    """Local steps of a visit at least, FedCompass' Q_min and FedQueue's E_0; at most ``algorithm.steps``."""
    patience: float = Field(1.5, ge=1)
    """FedCompass' λ: a group is waited for until this times the seconds that its first member should take."""
    period: float = Field(3600.0, gt=0)
    """FedQueue's T_sync: seconds after which all should be back; the server waits 1.15 times as long."""
    margin: float = Field(60.0, ge=0)
    """FedQueue's θ: seconds of a `period` that are left for the unforeseen."""
    allowance: float = Field(0.2, ge=0)
    """FedQueue's α: the share of a `period` by which a wait in the queue may exceed the expected; who waits longer is
    merged a round later."""
    asked_by: ClassVar[dict[str, tuple[str, ...]]] = {
        "least_steps": ("fedcompass", "fedqueue"),
        "patience": ("fedcompass",),
        **dict.fromkeys(("period", "margin", "allowance"), ("fedqueue",)),
    }

    def check(self, participation: Participation, algorithm: Stepping, varies: str) -> None:
        """Raise UsageError where a key has no meaning, or a rule cannot be followed; `varies`: what else says when."""
        rule = f"participation.dispatch = '{participation.dispatch}'"
        for key, rules in self.asked_by.items():
            value = getattr(self, key)
            if value != type(self).model_fields[key].default and participation.dispatch not in rules:
                raise no_meaning(f"scheduler.{key}", value, rule, f"participation.dispatch = '{rules[0]}'")
        if not participation.scheduled:
            return
        if varies:
            raise UsageError(f"{rule} measures who is always there: {varies} does not go with it: remove it")
        most, least = algorithm.visit_steps(1)
        if not least or not most or algorithm.visit_steps(2**31) != (most, least):
            wanted = "expected a method with algorithm.epochs = 0 and algorithm.steps, the most of them, above 0"
            raise UsageError(f"{rule} says how many steps clients take: {wanted}")
        if algorithm.goes_on:
            why = "merges what visits have changed, which is not what it is about"
            raise UsageError(f"{rule} {why} with algorithm.name = '{algorithm.name}'; did you mean 'uniform'?")
        if participation.dispatch == "fedqueue" and not algorithm.scales_steps:
            why = f"scales clients' step sizes, which algorithm.name = '{algorithm.name}' does not do"
            raise UsageError(f"{rule} {why}; did you mean 'fedavg'?")
        check_within("scheduler.least_steps", self.least_steps, least, most, " (algorithm.steps)")


class Rule(ABC):
    """When who goes out with how many steps, and who is merged.

    Of each client it is known: ``pace``, its seconds per step; when it ``came``, NaN: it is out; of its last visit the
    ``steps``, and the ``rate`` by which its step size is multiplied.

    Parameters
    ----------
    most : int
        Local steps of a visit at most.
    members : int64 [n]
        Who takes part.
    known : Known
        What was known before; it is kept up to date. Empty: nothing.

    Attributes
    ----------
    lost : bool [clients]
        Whose ranks are lost: nobody waits for them.
    """

    def __init__(self, keys: Scheduler, most: int, clients: int, members: Ints, known: Known) -> None:
        self.keys, self.most, self.members, self.known = keys, most, members, known
        self.lost = np.zeros(clients, dtype=np.bool_)
        for name in self.names if not known else ():
            known[name] = np.full(clients, np.nan if name in UNKNOWN else self.first.get(name, 0.0))

    newest: ClassVar[float]
    """How much the last visit counts in what is known of a client's seconds per step."""
    names: ClassVar[tuple[str, ...]] = ("pace", "came", "steps", "rate")
    first: ClassVar[dict[str, float]] = {"rate": 1.0}

    @abstractmethod
    def depart(self, clients: Ints, now: float) -> None:
        """Say how many steps they take (``steps``), and by what their step size is multiplied (``rate``)."""

    @abstractmethod
    def arrive(self, client: int, now: float, waited: float, took: float) -> Ints | None:
        """Take note of a visit, after its wait and its seconds beside; return whose are merged now.

        None: it counts in whatever merge is next, and its client goes out again at once.
        """

    @property
    @abstractmethod
    def ends(self) -> float:
        """When the server waits no longer; inf: it waits."""

    @abstractmethod
    def close(self, now: float) -> Ints:
        """Return whose visits are merged now that it waits no longer."""

    def measured(self, client: int, seconds: float) -> None:
        """Mix the seconds per step of a visit into what is known of its client's."""
        pace, last = self.known["pace"], seconds / self.known["steps"][client]
        pace[client] = last if isnan(pace[client]) else (1 - self.newest) * pace[client] + self.newest * last

    @property
    def there(self) -> NDArray[np.bool_]:
        """Who has come and waits, bool [clients]."""
        return ~np.isnan(self.known["came"])


class Compass(Rule):
    """FedCompass: clients are put into groups that should arrive together (Li et al., ICLR 2024, arXiv 2309.14675).

    A first visit is merged by itself. Then a client joins the group that gives it the most steps of those whose
    arrival it can meet with an allowed number of steps; else it founds one. A group is merged when all are there, or
    at its latest; who comes later goes out again, and counts in the next merge, whoever's it is, or once as many such
    visits wait as there are clients. The authors' code (APPFL 1.12) forgets such a change where a newer one of the same
    client comes before that merge. Here all count.

    Known are also each client's last ``group``, whether it is ``open``, neither merged nor past its time, when its
    arrival is ``expected``, and its ``latest`` one.
    """

    names = (*Rule.names, "group", "expected", "latest", "open")
    newest = 0.9

    def depart(self, clients: Ints, now: float) -> None:
        known = self.known
        order = np.lexsort((known["came"][clients], known["pace"][clients]))
        known["came"][clients] = np.nan
        for client in clients[order].tolist():
            if isnan(known["pace"][client]):
                known["steps"][client] = self.most
            else:
                self._assign(client, now)

    def _assign(self, client: int, now: float) -> None:
        known, pace, least = self.known, self.known["pace"][client], self.keys.least_steps
        groups = [self._members(group) for group in np.unique(known["group"][known["open"] > 0])]
        fits = [(floor((known["expected"][group[0]] - now) / pace), number) for number, group in enumerate(groups)]
        joins = [(steps, number) for steps, number in fits if least <= steps <= self.most]
        if joins:
            steps, number = max(joins)  # of equals the newest
            for name in ("group", "expected", "latest"):
                known[name][client] = known[name][groups[number][0]]
        else:
            later = [group for group in groups if now < known["latest"][group[0]]]
            nexts = [known["latest"][group[0]] + self.most * known["pace"][group].min() for group in later]
            meets = [floor((when - now) / pace) for when in nexts]
            steps = max([each for each in meets if each <= self.most], default=self.most)
            steps = max(steps, least)
            known["group"][client] = np.nanmax(known["group"], initial=-1.0) + 1
            known["expected"][client] = now + steps * pace
            known["latest"][client] = now + self.keys.patience * steps * pace
        known["steps"][client], known["open"][client] = steps, 1

    def arrive(self, client: int, now: float, waited: float, took: float) -> Ints | None:
        known = self.known
        self.measured(client, waited + took)
        known["came"][client] = now
        if isnan(known["group"][client]):
            return np.array([client])
        if not known["open"][client]:
            return None
        members = self._members(known["group"][client])
        return self._merged(members) if (self.there | self.lost)[members].all() else np.zeros(0, dtype=np.int64)

    def _members(self, group: float) -> Ints:
        return np.flatnonzero((self.known["open"] > 0) & (self.known["group"] == group))

    def _merged(self, members: Ints) -> Ints:
        self.known["open"][members] = 0
        return members[self.there[members]]

    @property
    def ends(self) -> float:
        return float(self.known["latest"][self.known["open"] > 0].min(initial=inf))

    def close(self, now: float) -> Ints:
        there = np.flatnonzero((self.known["open"] > 0) & (self.known["latest"] <= now))
        return self._merged(self._members(self.known["group"][there[0]]))


class QueueAware(Rule):
    """FedQueue: rounds of clients that wait in batch queues (Li et al., 2026, arXiv 2605.02125).

    Who leaves takes as many steps as fit into the `period` beside its expected wait, and its step size makes up for
    them: rate times steps is the same for all. A wait beyond what is admitted, which is said at departure, moves a
    visit to the next round. The first round's time begins with its first arrival, that of others with the merge before.
    Where nobody is there when it is over it begins anew; the authors' code (APPFL 1.12) then waits for all.

    Known are also each client's expected ``wait``, when it ``left``, the ``limit`` of a wait that is admitted, and
    whether it came too ``late``: for the merge after which it left alone. The same for all is when the ``last`` merge
    was, and ``since`` when the round's time runs.
    """

    names = (*Rule.names, "wait", "limit", "late", "left", "last", "since")
    first: ClassVar[dict[str, float]] = {**Rule.first, "wait": 2.0}
    newest = 0.5
    newest_wait: ClassVar[float] = 0.5
    overtime: ClassVar[float] = 1.15

    def depart(self, clients: Ints, now: float) -> None:
        known, keys = self.known, self.keys
        known["came"][clients] = np.nan
        room = np.maximum(0.5, keys.period - known["wait"] - keys.margin)
        steps = np.floor(room / known["pace"])
        steps = steps.clip(keys.least_steps, self.most)  # NaN of who has never come
        known["steps"][clients] = np.nan_to_num(steps[clients], nan=keys.least_steps)
        rates = np.fmin.reduce(steps[~self.lost]) / steps[clients]
        known["rate"][clients] = np.nan_to_num(rates, nan=1.0)  # of first visits
        known["limit"][clients] = known["wait"][clients] + keys.allowance * keys.period
        known["left"][clients] = now

    def arrive(self, client: int, now: float, waited: float, took: float) -> Ints | None:
        known = self.known
        self.measured(client, took)
        share, known["late"][client] = self.newest_wait, waited > known["limit"][client]
        known["wait"][client] = share * waited + (1 - share) * known["wait"][client]
        known["came"][client] = now
        if isnan(known["since"][0]):
            known["since"][:] = now
        return self.close(now) if (self.there | self.lost)[self.members].all() else np.zeros(0, dtype=np.int64)

    @property
    def ends(self) -> float:
        since = float(self.known["since"][0])
        return inf if isnan(since) else since + self.overtime * self.keys.period

    def close(self, now: float) -> Ints:
        known, there = self.known, self.there
        late = (known["late"] > 0) & (known["left"] >= known["last"])
        merged = np.flatnonzero(there & ~late)
        merged = merged if len(merged) else np.flatnonzero(there)
        known["since"][:] = now
        known["last"][:] = now if len(merged) else known["last"]
        return merged


RULES: dict[str, type[Rule]] = {"fedcompass": Compass, "fedqueue": QueueAware}
"""Values of ``participation.dispatch``."""
