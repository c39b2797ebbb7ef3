"""Who is invited to a round, and when the round closes. The two are independent choices."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator

from hpcfl.base.config import ConfigBase
from hpcfl.base.errors import UsageError, check_within
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats, Ints
from hpcfl.schedule import deadlines
from hpcfl.schedule.plan import Invitation, Plan
from hpcfl.schedule.speeds.base import Speed


class Participation(ConfigBase):
    """The ``[participation]`` section.

    Attributes
    ----------
    invite : {"all", "uniform"}
        Everybody, or a fresh uniform sample of `size` clients.
    size : int
        Clients invited per round (``uniform`` only).
    close : {"all", "first", "deadline"}
        The round ends with the last visit, with the first `first` visits, or when `deadline` has passed.
    first : int
        Visits that a round waits for (``close = "first"`` only).
    deadline : float, "adaptive" or [[round, seconds], ...]
        Seconds, fewer or more of them from some rounds on ([[0, 1.0], [100, 0.5]]), or what past visits suggest
        (``close = "deadline"`` only).
    adaptive_quantile : float
        Share of the past visits that an adaptive deadline would have let in.
    adaptive_window : int
        How many past visits it looks at; one that missed its deadline counts as twice that deadline.
    adaptive_first : float
        Seconds before any visit is known.
    min_clients : int
        A round in which fewer visits count is void and repeated: all is drawn anew, its time counts, nothing else of
        it does. The chances that an algorithm may use stay those of a single attempt.
    partial : {"keep", "discard"}
        What becomes of a visit that was not complete at the deadline: the layers that had arrived count,
        or nothing of it does (drop-stragglers).
    """

    invite: Literal["all", "uniform"] = "all"
    size: int | None = None
    close: Literal["all", "first", "deadline"] = "all"
    first: int | None = None
    deadline: deadlines.Rule = 1.0
    adaptive_quantile: float = Field(0.9, gt=0, le=1)
    adaptive_window: int = Field(100, ge=1)
    adaptive_first: float = Field(10.0, gt=0)
    min_clients: int = 0
    partial: Literal["keep", "discard"] = "keep"

    @field_validator("deadline", mode="before")
    @classmethod
    def _shaped(cls, value: Any) -> Any:
        """Refuse what is no rule, in one line for all its kinds."""
        return deadlines.shaped(value)

    def check(self, clients: int) -> None:
        """Raise UsageError where a number does not fit the number of clients."""
        self._check_count("size", self.size, self.invite == "uniform", "invite = 'uniform'", clients)
        self._check_count("first", self.first, self.close == "first", "close = 'first'", self.invited(clients))
        deadlines.check(self.deadline)
        most = self.first or self.invited(clients)
        check_within("participation.min_clients", self.min_clients, 0, most)

    @staticmethod
    def _check_count(key: str, value: int | None, needed: bool, by: str, most: int) -> None:
        if needed != (value is not None):
            verb = "needs" if needed else "is only for"
            raise UsageError(f"participation.{key}: {by} needs it" if needed else f"participation.{key} {verb} {by}")
        if value is not None:
            check_within(f"participation.{key}", value, 1, most)

    def invited(self, clients: int) -> int:
        """Return how many of `clients` a round invites."""
        return clients if self.size is None else self.size

    def whole(self, layerwise: bool) -> bool:
        """Return whether a visit is whole or nothing; `layerwise`: the algorithm delivers layers one by one."""
        return self.partial == "discard" or not layerwise

    def cohort(self, seed: int, round_: int, clients: int, attempt: int = 0) -> Ints:
        """Return the ids of who is invited, ascending, int64 [n]."""
        if self.invite == "all":
            return np.arange(clients)
        rng = keyed(seed, "cohort", round_, step=attempt)
        return np.sort(rng.choice(clients, self.invited(clients), replace=False))

    def plan(self, speed: Speed, asked: Invitation, layerwise: bool) -> Plan:
        """Decide one attempt at a round, however many visits may count in it.

        Parameters
        ----------
        asked : Invitation
            Its cohort need not be `cohort`'s: in wall time, those who are late are left out. Nobody is fine.
        layerwise : bool
            Whether the algorithm delivers layers one by one; if not, a visit is whole or nothing.
        """
        deadline = asked.deadline if self.close == "deadline" else nan
        if not len(asked.cohort):
            return replace(Plan.nobody(asked.round, asked.layers), deadline=deadline, repeats=asked.attempt)
        seconds = speed.seconds(asked)
        if self.close == "deadline":
            return self._by_deadline(asked, speed, seconds, self.whole(layerwise))
        order = np.argsort(seconds, kind="stable")
        wanted = asked.first(order)
        depth = np.full(len(seconds), asked.layers + 1, dtype=np.int64)
        depth[order[:wanted]] = 1
        known = 1.0 if wanted == len(seconds) else np.nan  # the chance to be among the first n has no closed form
        reach = np.full((len(seconds), asked.layers), known)
        closes = float(seconds[order[wanted - 1]]) + speed.communication
        none = np.zeros(asked.layers)
        return Plan(asked.round, asked.cohort, seconds, depth, closes, reach, none, deadline, asked.attempt)

    @staticmethod
    def _by_deadline(asked: Invitation, speed: Speed, seconds: Floats, whole: bool) -> Plan:
        depth, reach, missing = speed.depth(asked), speed.reach(asked), speed.missing(asked)
        late = depth > 1
        if whole:
            depth = np.where(late, asked.layers + 1, depth)
            reach = np.repeat(reach[:, :1], asked.layers, axis=1)
            missing = np.repeat(missing[:1], asked.layers)
        closes = (asked.deadline if late.any() else float(seconds.max())) + speed.communication
        return Plan(asked.round, asked.cohort, seconds, depth, closes, reach, missing, asked.deadline, asked.attempt)
