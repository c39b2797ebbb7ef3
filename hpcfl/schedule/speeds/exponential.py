"""Exponential visit times: of clients alike or with means of their own, or of groups of fast and slow ones."""

from __future__ import annotations

from abc import abstractmethod
from math import isclose
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from hpcfl.base.errors import UsageError
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats, Ints
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.plan import Attempt
from hpcfl.schedule.speeds.base import Speed


class Memoryless(Speed):
    """Exponential times around each client's mean: drawn once per run, or anew in each round."""

    sorted: bool = False
    """Number clients from fast to slow. With ``data.label_groups``, speeds then go with labels."""

    @property
    @abstractmethod
    def redrawn(self) -> bool:
        """Whether times are drawn anew in each round."""

    @abstractmethod
    def means(self, seed: int, clients: int) -> Floats:
        """Every client's mean seconds per visit, float64 [clients]."""

    def paces(self, seed: int, clients: int) -> Floats:
        """Return the times where they are drawn once, the means where they are drawn anew, float64 [clients]."""
        paces = self.means(seed, clients)
        if not self.redrawn:
            paces = paces * keyed(seed, "pace").exponential(1.0, clients)
        return np.sort(paces) if self.sorted else paces

    def seconds(self, attempt: Attempt) -> Floats:
        times = self.paces(attempt.seed, attempt.clients)
        if self.redrawn:
            rng = keyed(attempt.seed, "time", attempt.round, step=attempt.number)
            times = times * rng.exponential(1.0, attempt.clients)
        return times[attempt.cohort]

    def arrival(self, attempt: Attempt) -> Floats:
        """Return ``1 − exp(−closes_after / (mean · work_fraction))`` where times are drawn anew, float64 [n, L]."""
        if not self.redrawn:
            return super().arrival(attempt)
        means = self.paces(attempt.seed, attempt.clients)[attempt.cohort]
        return 1.0 - np.exp(-attempt.closes_after / np.outer(means, attempt.work_fractions))


class Exponential(Memoryless):
    """Exponential visit times, as in SRPFL's and FLANP's experiments."""

    model: Literal["exponential"] = "exponential"
    rate: float = Field(1.0, gt=0)
    """λ of ``T_i ~ Exp(λ)``, visits per second, mean 1/λ seconds (``fixed`` and ``dynamic`` only)."""
    kind: Literal["fixed", "dynamic", "dynamic-rate", "dynamic-scale"] = "fixed"
    """``fixed``: T_i is drawn once. ``dynamic``: anew each round, the clients alike. ``dynamic-rate``:
    ``λ_i ~ U[1/M, 1]`` once, ``T_i ~ Exp(λ_i)`` anew each round (the paper's text). ``dynamic-scale``: the *mean* is
    drawn from ``U[1, M]`` (the released code)."""

    def check(self, participation: Participation, clock: str = "simulated") -> None:
        if self.sorted and self.kind == "dynamic":
            why = "numbers clients by their mean times, and speed.kind = 'dynamic' gives no others"
            raise UsageError(f"speed.sorted = true {why}; did you mean speed.kind = 'dynamic-rate'?")

    @property
    def redrawn(self) -> bool:
        return self.kind != "fixed"

    def order(self, seed: int, clients: int, members: Ints, invited: int) -> Floats:
        """Return ``(H_N − H_{N−n}) / λ`` where clients are alike before anything is drawn, float64 [invited]."""
        if self.kind in ("fixed", "dynamic"):
            return np.cumsum(1.0 / np.arange(invited, 0, -1)) / self.rate
        return super().order(seed, clients, members, invited)

    def means(self, seed: int, clients: int) -> Floats:
        if self.kind in ("fixed", "dynamic"):
            return np.full(clients, 1.0 / self.rate)
        rng = keyed(seed, "pace")
        if self.kind == "dynamic-rate":
            return 1.0 / rng.uniform(1.0 / clients, 1.0, clients)
        return rng.uniform(1.0, clients, clients)


class Groups(Memoryless):
    """Exponential visit times whose mean is that of the client's group (SRPFL, Figure 8)."""

    model: Literal["groups"] = "groups"
    means_of: tuple[Annotated[float, Field(gt=0)], ...] = (0.1, 10.0)
    """Mean seconds per visit of each group."""
    shares_of: tuple[Annotated[float, Field(ge=0)], ...] = (0.9, 0.1)
    """Share of the clients in each group; they add up to 1."""
    kind: Literal["fixed", "dynamic"] = "fixed"
    """``fixed``: a client's time is drawn once. ``dynamic``: anew in each round."""

    def check(self, participation: Participation, clock: str = "simulated") -> None:
        if len(self.shares_of) != len(self.means_of) or not isclose(sum(self.shares_of), 1.0, abs_tol=1e-6):
            wanted = f"a share for each of the {len(self.means_of)} groups of speed.means_of, 1 in all"
            raise UsageError(f"speed.shares_of: expected {wanted}, got {list(self.shares_of)}")

    @property
    def redrawn(self) -> bool:
        return self.kind == "dynamic"

    def group(self, seed: int, clients: int) -> Ints:
        """Return every client's group, drawn once per run, int64 [clients]."""
        ends = np.rint(np.cumsum(self.shares_of) * clients)
        place = keyed(seed, "group").permutation(clients)
        number: Ints = np.minimum(np.searchsorted(ends, place, side="right"), len(self.means_of) - 1)
        return number

    def means(self, seed: int, clients: int) -> Floats:
        means: Floats = np.array(self.means_of)[self.group(seed, clients)]
        return means
