"""The base of the speed models. Each is a pure function of the seed, the round and the client.

A unit of work is one visit, so a pace (seconds per unit of work) is also the seconds that a whole visit takes.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from hpcfl.base.config import ConfigBase
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats, Ints
from hpcfl.schedule.plan import Invitation, Plan

DRAWS = 1000
NO_ATTEMPT = 2**31 - 1

if TYPE_CHECKING:
    from hpcfl.schedule.participation import Participation


class Speed(ConfigBase):
    """Base of the speed models: times first, and depths that follow from them.

    Attributes
    ----------
    costs : {"equal", "parameters"}
        What a layer's share of a visit's work is counted by. (The SALF paper leaves it open.)
    communication : float
        Simulated seconds that a round takes for sending back and forth, beside its visits (SRPFL's C.T.); each void
        attempt at a round takes them too.
    enforce : {"sleep", "busy"}
        How wall-clock runs are slowed down to this model: asleep between layers, or computing without a use.
    replays : bool
        Whether rounds are taken as they were recorded, not decided.
    by_deadline : bool
        Whether times follow from the deadline, and so a round without one has no end.
    """

    model: str
    costs: Literal["equal", "parameters"] = "equal"
    communication: float = Field(0.0, ge=0)
    enforce: Literal["sleep", "busy"] = "sleep"
    replays: ClassVar[bool] = False
    by_deadline: ClassVar[bool] = False

    def check(self, participation: Participation, clock: str = "simulated") -> None:
        """Raise UsageError where this model cannot serve rounds that close so, or by this clock."""

    def covers(self, rounds: int, clients: int, layers: int | None = None) -> None:
        """Raise UsageError where this model does not reach so far; before the task is there, `layers` is None."""

    def known(self, clock: str) -> bool:
        """Return whether this model gives the chance to arrive by a deadline."""
        return True

    def rules(self, participation: Participation) -> Participation:
        """Return the rules that rounds really follow; a replay has its own."""
        return participation

    def counts(self) -> Literal["equal", "parameters"]:
        """Return what a layer's share of the work is counted by; a replay has its own."""
        return self.costs

    def plan(self, participation: Participation, asked: Invitation, layerwise: bool) -> Plan:
        """Decide one attempt at a round; see `Participation.plan`."""
        return participation.plan(self, asked, layerwise)

    def paces(self, seed: int, clients: int) -> Floats:
        """Return every client's expected seconds per visit, float64 [clients]."""
        return np.ones(clients)

    def seconds(self, asked: Invitation) -> Floats:
        """Return the seconds that each invited client's visit takes this round, float64 [n]."""
        return self.paces(asked.seed, asked.clients)[asked.cohort]

    def order(self, seed: int, clients: int, invited: int) -> Floats:
        """Return the expected seconds until 1 … n of the invited visits have arrived, float64 [invited].

        By default means over `DRAWS` rounds that are no round of any run.
        """
        found = np.zeros(invited)
        for draw in range(DRAWS):
            cohort = np.sort(keyed(seed, "order", draw).choice(clients, invited, replace=False))
            asked = Invitation(seed, draw, clients, cohort, np.ones(1), inf, attempt=NO_ATTEMPT)
            found += np.sort(self.seconds(asked))
        return found / DRAWS

    def enforced(self, asked: Invitation) -> Floats:
        """Return the seconds that each invited client's visit shall take in real time, float64 [n]; 0: as it is."""
        return self.seconds(asked)

    def depth(self, asked: Invitation) -> Ints:
        """Return the first layer that each invited client delivers by the deadline, int64 [n], L + 1 for none."""
        ready = np.outer(self.seconds(asked), asked.shares) <= asked.deadline
        return np.where(ready.any(1), ready.argmax(1), asked.layers).astype(np.int64) + 1

    def reach(self, asked: Invitation) -> Floats:
        """Return ``P[d_u <= l]`` before this round's times are drawn, float64 [n, L]."""
        return (np.outer(self.seconds(asked), asked.shares) <= asked.deadline).astype(np.float64)

    def missing(self, asked: Invitation) -> Floats:
        """Return ``P[nobody reaches l]``, float64 [L]; the product form holds for independent clients."""
        chance: Floats = np.prod(1.0 - self.reach(asked), axis=0)
        return chance
