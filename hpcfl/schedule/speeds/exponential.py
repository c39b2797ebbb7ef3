"""Exponential visit times, as in SRPFL's and FLANP's experiments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats
from hpcfl.schedule.speeds.memoryless import Memoryless

if TYPE_CHECKING:
    from hpcfl.schedule.participation import Participation


class Exponential(Memoryless):
    """Exponential visit times, as in SRPFL's and FLANP's experiments."""

    model: Literal["exponential"] = "exponential"
    rate: float = 1.0
    """λ of ``T_i ~ Exp(λ)``, mean 1/λ seconds (``fixed`` and ``dynamic`` only)."""
    kind: Literal["fixed", "dynamic", "dynamic-rate", "dynamic-scale"] = "fixed"
    """``fixed``: T_i is drawn once. ``dynamic``: anew each round, the clients alike. ``dynamic-rate``:
    ``λ_i ~ U[1/M, 1]`` once, ``T_i ~ Exp(λ_i)`` anew each round (the paper's text). ``dynamic-scale``: the *mean* is
    drawn from ``U[1, M]`` (the released code)."""

    def check(self, participation: Participation, clock: str = "simulated") -> None:
        if self.rate <= 0:
            raise UsageError(f"speed.rate: expected a number above 0, got {self.rate}")
        if self.sorted and self.kind == "dynamic":
            raise UsageError(
                "speed.sorted = true numbers clients by their mean times, and speed.kind = 'dynamic' gives no others; "
                "did you mean speed.kind = 'dynamic-rate'?"
            )

    @property
    def redrawn(self) -> bool:
        return self.kind != "fixed"

    def order(self, seed: int, clients: int, invited: int) -> Floats:
        """Return ``(H_N − H_{N−n}) / λ`` where clients are alike before anything is drawn, float64 [invited]."""
        if self.kind in ("fixed", "dynamic"):
            return np.cumsum(1.0 / np.arange(invited, 0, -1)) / self.rate
        return super().order(seed, clients, invited)

    def means(self, seed: int, clients: int) -> Floats:
        if self.kind in ("fixed", "dynamic"):
            return np.full(clients, 1.0 / self.rate)
        rng = keyed(seed, "pace")
        if self.kind == "dynamic-rate":
            return 1.0 / rng.uniform(1.0 / clients, 1.0, clients)
        return rng.uniform(1.0, clients, clients)
