"""Who is invited to a round, and when the round closes. The two are independent choices."""

from __future__ import annotations

from typing import Literal

import numpy as np

from hpcfl.errors import UsageError
from hpcfl.plan import Floats, Ints, Invitation, Plan
from hpcfl.rng import keyed
from hpcfl.section import Section
from hpcfl.speed import Speed


class Participation(Section):
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
    deadline : float
        Seconds (``close = "deadline"`` only).
    partial : {"keep", "discard"}
        What becomes of a visit that was not complete at the deadline: the layers that had arrived count,
        or nothing of it does (drop-stragglers).
    """

    invite: Literal["all", "uniform"] = "all"
    size: int | None = None
    close: Literal["all", "first", "deadline"] = "all"
    first: int | None = None
    deadline: float = 1.0
    partial: Literal["keep", "discard"] = "keep"

    def check(self, clients: int) -> None:
        """Raise UsageError where a number does not fit the number of clients."""
        self._check_count("size", self.size, self.invite == "uniform", "invite = 'uniform'", clients)
        self._check_count("first", self.first, self.close == "first", "close = 'first'", self.invited(clients))
        if self.deadline <= 0:
            raise UsageError(f"participation.deadline: expected seconds above 0, got {self.deadline}")

    @staticmethod
    def _check_count(key: str, value: int | None, needed: bool, by: str, most: int) -> None:
        if needed != (value is not None):
            verb = "needs" if needed else "is only for"
            raise UsageError(f"participation.{key}: {by} needs it" if needed else f"participation.{key} {verb} {by}")
        if value is not None and not 1 <= value <= most:
            near = min(max(value, 1), most)
            raise UsageError(f"participation.{key}: expected 1 … {most}, got {value}; nearest: {near}")

    def invited(self, clients: int) -> int:
        """Return how many of `clients` a round invites."""
        return clients if self.size is None else self.size

    def cohort(self, seed: int, round_: int, clients: int) -> Ints:
        """Return the ids of who is invited, ascending, int64 [n]."""
        if self.invite == "all":
            return np.arange(clients)
        rng = keyed(seed, "cohort", round_)
        return np.sort(rng.choice(clients, self.invited(clients), replace=False))

    def plan(self, speed: Speed, seed: int, round_: int, clients: int, shares: Floats, layerwise: bool) -> Plan:
        """Decide one round.

        Parameters
        ----------
        shares : float64 [L]
            See `Invitation`.
        layerwise : bool
            Whether the algorithm delivers layers one by one; if not, a visit is whole or nothing.
        """
        asked = Invitation(seed, round_, clients, self.cohort(seed, round_, clients), shares, self.deadline)
        seconds = speed.seconds(asked)
        if self.close == "deadline":
            return self._by_deadline(asked, speed, seconds, whole=self.partial == "discard" or not layerwise)
        wanted = len(seconds) if self.first is None else self.first
        order = np.argsort(seconds, kind="stable")
        depth = np.full(len(seconds), asked.layers + 1, dtype=np.int64)
        depth[order[:wanted]] = 1
        known = 1.0 if wanted == len(seconds) else np.nan  # the chance to be among the first n has no closed form
        reach = np.full((len(seconds), asked.layers), known)
        closes = float(seconds[order[wanted - 1]])
        return Plan(round_, asked.cohort, seconds, depth, closes, reach, np.zeros(asked.layers))

    @staticmethod
    def _by_deadline(asked: Invitation, speed: Speed, seconds: Floats, whole: bool) -> Plan:
        depth, reach, missing = speed.depth(asked), speed.reach(asked), speed.missing(asked)
        late = depth > 1
        if whole:
            depth = np.where(late, asked.layers + 1, depth)
            reach = np.repeat(reach[:, :1], asked.layers, axis=1)
            missing = np.repeat(missing[:1], asked.layers)
        closes = asked.deadline if late.any() else float(seconds.max())
        return Plan(asked.round, asked.cohort, seconds, depth, closes, reach, missing)
