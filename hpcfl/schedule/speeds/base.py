"""The base of the speed models, and the one that is none: pure functions of the seed, the round and the client.

A unit of work is one visit, so a pace (seconds per unit of work) is also the seconds that a whole visit takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from hpcfl.base.config import ConfigBase
from hpcfl.base.errors import UsageError
from hpcfl.base.rng import keyed
from hpcfl.base.types import Computing, Floats, Ints
from hpcfl.schedule.participation import Participation, Staleness
from hpcfl.schedule.plan import Attempt, Plan, Timeline

DRAWS = 1000
NO_ATTEMPT = 2**31 - 1
CLOSE = 1e-12
"""What a visit's share of its steps may lack, so that rounding costs none: seconds and shares follow from quotients."""


def _above_0(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return value
    if not all(isinstance(each, (int, float)) and each > 0 for each in value):
        raise ValueError("expected numbers above 0, one for each layer")
    return tuple(value)


Costs = Literal["equal", "parameters"] | tuple[Annotated[float, Field(gt=0)], ...]


class Speed(ConfigBase):
    """Base of the speed models: times first, and depths that follow from them.

    Attributes
    ----------
    replays : bool
        Whether rounds are taken as they were recorded, not decided.
    slows : bool
        Whether visits in real time are slowed down to this model.
    needs_end : bool
        Whether times follow from when a round closes, so that it must close after so many seconds.
    chunk : int or None
        The size of the chunks of the run that is replayed; None where none is.
    computing : str or None
        How that run computed chunks of clients whose model is one of ours; None where none is replayed.
    """

    model: str
    costs: Annotated[Costs, BeforeValidator(_above_0)] = "equal"
    """What a layer's share of a visit's work is counted by. ``equal``: all layers alike. ``parameters``: their
    parameters. A list: a number above 0 per layer from the first to the last, as seconds of its backward pass
    (``analysis/salf_deadlines.py --measure``)."""
    communication: float = Field(0.0, ge=0)
    """Simulated seconds of sending back and forth in each round or void attempt, beside its visits (SRPFL's C.T.)."""
    enforce: Literal["sleep", "busy"] = "sleep"
    """How wall-clock runs are slowed down to this model. ``sleep``: asleep between layers. ``busy``: computing in
    vain."""
    per: Literal["visit", "step"] = "visit"
    """What takes these seconds: a whole ``visit``, or each local ``step``, so that who has more samples takes
    longer."""
    scale: float = Field(1.0, gt=0)
    """All seconds of ``[speed]``, ``[queue]``, ``[link]`` and ``[availability]`` are multiplied by this."""
    replays: ClassVar[bool] = False
    slows: ClassVar[bool] = True
    needs_end: ClassVar[bool] = False
    chunk: ClassVar[int | None] = None
    computing: ClassVar[Computing | None] = None

    def check(self, participation: Participation, clock: str = "simulated") -> None:
        """Raise UsageError where this model cannot serve rounds that close so, or by this clock."""

    def covers(self, rounds: int, clients: int, layers: int | None = None) -> None:
        """Raise UsageError where this model does not reach so far; before the task is there, `layers` is None."""

    def known(self, clock: str) -> bool:
        """Return whether this model gives the probability to arrive in time."""
        return True

    def rules(self, participation: Participation) -> Participation:
        """Return the rules that rounds really follow; a replay has its own."""
        return participation

    def counts(self) -> Costs:
        """Return what a layer's fraction of the work is counted by; a replay has its own."""
        return self.costs

    def recorded(self, attempt: Attempt) -> Attempt:
        """Return the attempt that a round really is; a replay has its own."""
        return attempt

    def replayed(self, plan: Plan, whole: bool, steps: Ints | None) -> Plan:
        """Return what a round really came to; a replay knows it.

        Parameters
        ----------
        whole : bool
            Visits are whole or nothing, but for what `steps` says.
        steps : int64 [n], optional
            The local steps of whole visits, where they may be cut short.
        """
        return plan

    def arrived(self, first: int, staleness: Staleness, whole: bool, by_steps: bool) -> Iterator[Plan] | None:
        """Return rounds that arrivals have ended, from `first` on; None where none are replayed."""
        return None

    def slots(self) -> int | None:
        """Return how many visits may have ended in a round that arrivals ended; None: nothing is replayed."""
        return None

    def paces(self, seed: int, clients: int) -> Floats:
        """Return every client's expected seconds per visit, float64 [clients]."""
        return np.ones(clients)

    def seconds(self, attempt: Attempt) -> Floats:
        """Return the seconds that each invited client's visit takes this round, float64 [n]."""
        return self.paces(attempt.seed, attempt.clients)[attempt.cohort]

    def order(self, seed: int, clients: int, members: Ints, invited: int) -> Floats:
        """Return the expected seconds until 1 … n of the invited visits have arrived, float64 [invited].

        So many of the `members`, ids of `clients` in all, are invited. By default means over `DRAWS` rounds that are no
        round of any run.
        """
        return drawn_order(self.seconds, seed, clients, members, invited)

    def enforced(self, attempt: Attempt) -> Floats:
        """Return the seconds that each invited client's visit shall take in real time, float64 [n]; 0: as it is."""
        return self.seconds(attempt)

    def timeline(self, attempt: Attempt) -> Timeline:
        """Return what each invited client's visit shall do when in real time."""
        return Timeline.computing(self.enforced(attempt), attempt.work_fractions)

    def share(self, attempt: Attempt, seconds: Floats, end: float | Floats) -> Floats:
        """Return the share of their steps that visits which take `seconds` do by the `end`, float64 [n]."""
        return np.where(seconds <= end, 1.0, end / seconds)

    def lasting(self, attempt: Attempt, share: Floats) -> Floats:
        """Return the seconds of visits that do a `share` of their steps and no more, float64 [n]."""
        return self.seconds(attempt) * share

    def waits(self, attempt: Attempt) -> Floats:
        """Return what of their seconds visits wait in a queue, float64 [n]."""
        return np.zeros(len(attempt.cohort))

    @property
    def redrawn(self) -> bool:
        """Whether a client's visits differ by chance from round to round."""
        return False

    @property
    def persists(self) -> bool:
        """Whether how long a visit takes says something about the client's next one, its mean aside."""
        return False

    def in_time(self, attempt: Attempt, limits: Floats) -> Floats:
        """Return the chance that each invited client's visit takes no more than each limit, float64 [n, K]."""
        return (self.seconds(attempt)[:, None] <= limits).astype(np.float64)

    def depth(self, attempt: Attempt) -> Ints:
        """Return the first layer that each invited client delivers in time, int64 [n], L + 1 for none."""
        ready = self._ready(attempt)
        return np.where(ready.any(1), ready.argmax(1), attempt.layers).astype(np.int64) + 1

    def arrival(self, attempt: Attempt) -> Floats:
        """Return ``P[d_u <= l]`` before this round's times are drawn, float64 [n, L]."""
        if self.redrawn:
            return self.in_time(
                attempt, np.tile(attempt.closes_after / attempt.work_fractions, (len(attempt.cohort), 1))
            )
        return self._ready(attempt).astype(np.float64)

    def _ready(self, attempt: Attempt) -> NDArray[np.bool_]:
        return np.outer(self.seconds(attempt), attempt.work_fractions) <= attempt.closes_after

    def reach(self, attempt: Attempt, share: Floats) -> Floats:
        """Return the chance that each invited client does a `share` (float64 [n]) of its visit in time, float64 [n]."""
        parts, own = np.unique(-share, return_inverse=True)  # work fractions fall
        later = replace(attempt, work_fractions=-parts, closes_after=attempt.closes_after * (1 + CLOSE))
        return self.arrival(later)[np.arange(len(share)), own]

    def miss_probability(self, attempt: Attempt) -> Floats:
        """Return ``P[nobody reaches l]``, float64 [L]; the product form holds for independent clients."""
        chance: Floats = np.prod(1.0 - self.arrival(attempt), axis=0)
        return chance


def check_together(what: str, participation: Participation, clock: str) -> None:
    """Refuse rounds whose visits do not begin together in simulated time, where seconds follow from when they do."""
    if clock != "simulated" or participation.by_arrivals:
        said = f"clock = '{clock}'" if clock != "simulated" else "participation.close = 'arrivals'"
        raise UsageError(f"{what}, in simulated time, got {said}")


def drawn_order(seconds: Callable[[Attempt], Floats], seed: int, clients: int, members: Ints, invited: int) -> Floats:
    """Return the mean seconds until 1 … n visits have arrived over `DRAWS` rounds that are no round of any run."""
    total = np.zeros(invited)
    for draw in range(DRAWS):
        cohort = np.sort(keyed(seed, "order", draw).choice(members, invited, replace=False))
        total += np.sort(seconds(Attempt(seed, clients, np.ones(1), draw, NO_ATTEMPT, cohort)))
    return total / DRAWS


class Equal(Speed):
    """Every visit takes one second in simulated time; in wall time, whatever it takes."""

    model: Literal["none"] = "none"
    slows: ClassVar[bool] = False

    def known(self, clock: str) -> bool:
        return clock == "simulated"  # nobody knows how fast real hardware will be

    def enforced(self, attempt: Attempt) -> Floats:
        return np.zeros(len(attempt.cohort))
