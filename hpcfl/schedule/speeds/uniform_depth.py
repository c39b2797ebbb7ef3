"""Stragglers that are somewhere in the model when the deadline comes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats, Ints
from hpcfl.schedule.plan import Invitation
from hpcfl.schedule.speeds.base import Speed

if TYPE_CHECKING:
    from hpcfl.schedule.participation import Participation


class UniformDepth(Speed):
    """A given share of the clients straggles, each to a depth drawn uniformly (SALF, section IV and eq. 10).

    Attributes
    ----------
    stragglers : float
        Share of the clients that straggle, 0 … 1.
    redraw : bool
        Draw anew in each round who straggles (the paper), or once per run (the released code).
    nothing : bool
        A straggler may deliver nothing: depth L + 1 is one of the outcomes.
    complete : bool
        A straggler may finish: depth 1 is one of the outcomes.
    """

    model: Literal["uniform-depth"] = "uniform-depth"
    stragglers: float = 0.5
    redraw: bool = True
    nothing: bool = True
    complete: bool = True
    by_deadline: ClassVar[bool] = True

    def check(self, participation: Participation, clock: str = "simulated") -> None:
        """Refuse shares outside [0, 1] and rounds that do not close by a deadline of its own."""
        if not 0 <= self.stragglers <= 1:
            near = min(max(self.stragglers, 0.0), 1.0)
            raise UsageError(
                f"speed.stragglers: expected a share between 0 and 1, got {self.stragglers}; did you mean {near}?"
            )
        if participation.close != "deadline":
            raise UsageError(
                "speed.model = 'uniform-depth' says how far stragglers are at the deadline: "
                f"expected participation.close = 'deadline', got '{participation.close}'"
            )
        if participation.deadline == "adaptive":
            raise UsageError(
                "participation.deadline = 'adaptive' follows from times, and the times of "
                "speed.model = 'uniform-depth' from the deadline; expected seconds"
            )

    def paces(self, seed: int, clients: int) -> Floats:
        """Return 1 for all, or 2 for those who straggle in every round, float64 [clients]."""
        late = np.zeros(clients) if self.redraw else self._drawn(seed, 0, clients)
        return 1.0 + late

    def depth(self, asked: Invitation) -> Ints:
        """Return 1 for who is in time and a uniform draw for stragglers, int64 [n]."""
        low, high = self._range(asked.layers)
        rng = keyed(asked.seed, "depth", asked.round, step=asked.attempt)
        drawn = rng.integers(low, high + 1, asked.clients)
        return np.where(self._late(asked), drawn[asked.cohort], 1).astype(np.int64)

    def seconds(self, asked: Invitation) -> Floats:
        """Return the seconds a whole visit would take at the pace seen at the deadline, float64 [n]."""
        share = np.append(asked.shares, 0.0)[self.depth(asked) - 1]
        with np.errstate(divide="ignore"):
            return asked.deadline / share

    def enforced(self, asked: Invitation) -> Floats:
        """Return paces that do not race with the deadline, float64 [n].

        The deadline falls midway, in work, between the first layer that counts being ready and the next one being
        ready; a visit that is in time takes half the deadline.
        """
        done = np.concatenate([[3.0], asked.shares, [0.0]])  # before layer 1 there is none: 3 halves the deadline
        depth = self.depth(asked)
        paces: Floats = 2 * asked.deadline / (done[depth] + done[depth - 1])
        return paces

    def reach(self, asked: Invitation) -> Floats:
        """Return ``P[d_u <= l]``, float64 [n, L]."""
        late = (
            self._late(asked) if not self.redraw else np.full(len(asked.cohort), self._count(asked) / len(asked.cohort))
        )
        return 1.0 - late[:, None] * (1.0 - self._cumulative(asked.layers))

    def missing(self, asked: Invitation) -> Floats:
        """Return ``P[nobody reaches l]``, float64 [L]: 0 as soon as somebody never straggles."""
        if not self.redraw:
            return super().missing(asked)
        everyone = self._count(asked) == len(asked.cohort)
        return everyone * (1.0 - self._cumulative(asked.layers)) ** len(asked.cohort)

    def _range(self, layers: int) -> tuple[int, int]:
        low, high = (1 if self.complete else 2), (layers + 1 if self.nothing else layers)
        if low > high:
            raise UsageError("speed: with one layer, stragglers need complete = true or nothing = true")
        return low, high

    def _cumulative(self, layers: int) -> Floats:
        low, high = self._range(layers)
        levels = np.arange(1, layers + 1)
        return np.clip(levels - low + 1, 0, None) / (high - low + 1)

    def _count(self, asked: Invitation) -> int:
        return round(self.stragglers * len(asked.cohort))

    def _late(self, asked: Invitation) -> Floats:
        if not self.redraw:
            return self._drawn(asked.seed, 0, asked.clients)[asked.cohort]
        rng = keyed(asked.seed, "stragglers", asked.round, step=asked.attempt)
        order = rng.permutation(len(asked.cohort))
        return (order < self._count(asked)).astype(np.float64)

    def _drawn(self, seed: int, round_: int, clients: int) -> Floats:
        order = keyed(seed, "stragglers", round_).permutation(clients)
        return (order < round(self.stragglers * clients)).astype(np.float64)
