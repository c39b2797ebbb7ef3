"""What a round looks like before it runs: who is invited, and how far each visit comes."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

import numpy as np
from numpy.typing import NDArray

from hpcfl.base.types import Floats, Ints


@dataclass(frozen=True)
class Invitation:
    """The facts a speed model needs about one round.

    Attributes
    ----------
    seed : int
        The run's seed.
    round : int
        Counted from 0.
    clients : int
        How many clients the run has.
    cohort : int64 [n]
        Who is invited, ascending client ids.
    shares : float64 [L]
        ``shares[l-1]`` is the part of a visit's work that is done when layer l's gradient is ready;
        decreasing in l, ``shares[0] = 1``.
    deadline : float
        Seconds from the start of the round; inf where it has none.
    attempt : int
        How many attempts at this round were void; each draws anew.
    clock : {"simulated", "wall"}
        Whose seconds these are: drawn ones, or real ones.
    stage : int
        The stage of doubling participant sets.
    enough : int
        Visits that close the round where it closes with the first ones, or their samples; None: it waits for all.
    worth : int64 [n], optional
        The invited clients' samples, where these are counted; None: every visit counts 1.
    """

    seed: int
    round: int
    clients: int
    cohort: Ints
    shares: Floats
    deadline: float
    attempt: int = 0
    clock: str = "simulated"
    stage: int = 0
    enough: int | None = None
    worth: Ints | None = None

    def first(self, order: Ints) -> int:
        """Return how many visits close the round if they arrive in this `order` (rows of the cohort)."""
        if self.enough is None:
            return len(order)
        found = np.arange(1, len(order) + 1) if self.worth is None else np.cumsum(self.worth[order])
        return min(int(np.searchsorted(found, self.enough)) + 1, len(order))

    @property
    def layers(self) -> int:
        """L, the number of layers."""
        return len(self.shares)


@dataclass(frozen=True)
class Plan:
    """One round, decided: a pure function of the config and the round, evaluated alike on every rank.

    Attributes
    ----------
    round : int
        Counted from 0.
    cohort : int64 [n]
        Who is invited, ascending client ids.
    seconds : float64 [n]
        Simulated seconds a whole visit takes (``inf``: it never ends).
    depth : int64 [n]
        First layer (1 … L) whose gradient counts; L + 1 where nothing does.
    closes : float
        Simulated seconds from the round's start to its end, void attempts included.
    reach : float64 [n, L]
        Chance that this client's layer l counts in one attempt, before anything is drawn; NaN where it is not known.
    missing : float64 [L]
        Chance that nobody's layer l counts in one attempt (SALF's p_l); NaN where it is not known.
    deadline : float
        Seconds from the start of the attempt that counted; NaN where the round has none.
    repeats : int
        Void attempts before this one.
    """

    round: int
    cohort: Ints
    seconds: Floats
    depth: Ints
    closes: float
    reach: Floats
    missing: Floats
    deadline: float = nan
    repeats: int = 0

    @classmethod
    def nobody(cls, round_: int, layers: int) -> Plan:
        """Return a round that invites nobody and takes no time."""
        none: Ints = np.zeros(0, dtype=np.int64)
        return cls(round_, none, np.zeros(0), none, 0.0, np.zeros((0, layers)), np.ones(layers))

    @property
    def counted(self) -> NDArray[np.bool_]:
        """Whose visits count at all, bool [n]."""
        return self.depth <= self.layers

    @property
    def layers(self) -> int:
        """L, the number of layers."""
        return len(self.missing)

    def rows(self, clients: Ints) -> Ints:
        """Return the places in the cohort of those `clients` whose visits count, deepest first (ties by id)."""
        places = np.flatnonzero(self.counted & np.isin(self.cohort, clients))
        return places[np.argsort(self.depth[places], kind="stable")]
