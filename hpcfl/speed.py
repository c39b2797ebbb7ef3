"""How slow each client is. Every model is a pure function of the seed, the round and the client.

A unit of work is one visit, so a pace (seconds per unit of work) is also the seconds that a whole visit takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from hpcfl.errors import UsageError, nearest
from hpcfl.plan import Floats, Ints, Invitation, Plan
from hpcfl.rng import keyed
from hpcfl.section import Section

if TYPE_CHECKING:
    from hpcfl.participation import Participation


class Speed(Section):
    """Base of the speed models: times first, and depths that follow from them.

    Attributes
    ----------
    costs : {"equal", "parameters"}
        What a layer's share of a visit's work is counted by. (The SALF paper leaves it open.)
    enforce : {"sleep", "busy"}
        How wall-clock runs are slowed down to this model: asleep between layers, or computing without a use.
    replays : bool
        Whether rounds are taken as they were recorded, not decided.
    """

    model: str
    costs: Literal["equal", "parameters"] = "equal"
    enforce: Literal["sleep", "busy"] = "sleep"
    replays: ClassVar[bool] = False

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


class Equal(Speed):
    """Every visit takes one second in simulated time; in wall time, whatever it takes."""

    model: Literal["none"] = "none"

    def known(self, clock: str) -> bool:
        """Return whether time is simulated: nobody knows how fast real hardware will be."""
        return clock == "simulated"

    def enforced(self, asked: Invitation) -> Floats:
        """Return zeros: nothing is enforced."""
        return np.zeros(len(asked.cohort))

    def reach(self, asked: Invitation) -> Floats:
        """Return 0 or 1 in simulated time, NaN in wall time, float64 [n, L]."""
        return super().reach(asked) if self.known(asked.clock) else np.full((len(asked.cohort), asked.layers), np.nan)


class Exponential(Speed):
    """Exponential visit times, as in SRPFL's and FLANP's experiments.

    Attributes
    ----------
    rate : float
        λ of ``T_i ~ Exp(λ)``, mean 1/λ seconds (``fixed`` and ``dynamic`` only).
    kind : {"fixed", "dynamic", "dynamic-rate", "dynamic-scale"}
        ``fixed``: T_i is drawn once. ``dynamic``: anew each round, the clients alike. ``dynamic-rate``:
        ``λ_i ~ U[1/M, 1]`` once, ``T_i ~ Exp(λ_i)`` anew each round (the paper's text). ``dynamic-scale``: the
        *mean* is drawn from ``U[1, M]`` (the released code).
    """

    model: Literal["exponential"] = "exponential"
    rate: float = 1.0
    kind: Literal["fixed", "dynamic", "dynamic-rate", "dynamic-scale"] = "fixed"

    def check(self, participation: Participation, clock: str = "simulated") -> None:
        """Refuse a rate that gives no finite time."""
        if self.rate <= 0:
            raise UsageError(f"speed.rate: expected a number above 0, got {self.rate}")

    def paces(self, seed: int, clients: int) -> Floats:
        """Return the drawn times (fixed) or the means (dynamic), float64 [clients]."""
        rng = keyed(seed, "pace")
        if self.kind == "fixed":
            return rng.exponential(1.0 / self.rate, clients)
        if self.kind == "dynamic":
            return np.full(clients, 1.0 / self.rate)
        if self.kind == "dynamic-rate":
            return 1.0 / rng.uniform(1.0 / clients, 1.0, clients)
        return rng.uniform(1.0, clients, clients)

    def seconds(self, asked: Invitation) -> Floats:
        """Return this round's times, float64 [n]."""
        means = self.paces(asked.seed, asked.clients)
        if self.kind != "fixed":
            means = means * keyed(asked.seed, "time", asked.round, step=asked.attempt).exponential(1.0, asked.clients)
        return means[asked.cohort]

    def reach(self, asked: Invitation) -> Floats:
        """Return ``1 − exp(−deadline / (mean · share))`` where times are drawn anew, float64 [n, L]."""
        if self.kind == "fixed":
            return super().reach(asked)
        means = self.paces(asked.seed, asked.clients)[asked.cohort]
        return 1.0 - np.exp(-asked.deadline / np.outer(means, asked.shares))


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

    def check(self, participation: Participation, clock: str = "simulated") -> None:
        """Refuse shares outside [0, 1] and rounds that do not close by a deadline of its own."""
        if not 0 <= self.stragglers <= 1:
            near = min(max(self.stragglers, 0.0), 1.0)
            raise UsageError(
                f"speed.stragglers: expected a share between 0 and 1, got {self.stragglers}; nearest: {near}"
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


def speed_models() -> tuple[type[Speed], ...]:
    """Return the speed models there are."""
    from hpcfl.trace import Trace  # derived from what is here, so not before

    return Equal, Exponential, UniformDepth, Trace


def speed_class(name: str) -> type[Speed]:
    """Return the speed model called `name`; UsageError names the nearest where there is none."""
    known = {str(model.model_fields["model"].default): model for model in speed_models()}
    if name not in known:
        raise UsageError(f"speed.model: no model '{name}'{nearest(name, known)}")
    return known[name]
