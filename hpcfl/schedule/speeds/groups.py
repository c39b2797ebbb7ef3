"""Groups of fast and of slow clients, as in SRPFL's experiments (Figure 8)."""

from __future__ import annotations

from math import isclose
from typing import TYPE_CHECKING, Literal

import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats, Ints
from hpcfl.schedule.speeds.memoryless import Memoryless

if TYPE_CHECKING:
    from hpcfl.schedule.participation import Participation


class Groups(Memoryless):
    """Exponential visit times whose mean is that of the client's group (SRPFL, Figure 8)."""

    model: Literal["groups"] = "groups"
    means_of: tuple[float, ...] = (0.1, 10.0)
    """Mean seconds per visit of each group."""
    shares_of: tuple[float, ...] = (0.9, 0.1)
    """Share of the clients in each group; they add up to 1."""
    kind: Literal["fixed", "dynamic"] = "fixed"
    """A client's time is drawn once, or anew in each round."""

    def check(self, participation: Participation, clock: str = "simulated") -> None:
        if any(mean <= 0 for mean in self.means_of):
            raise UsageError(f"speed.means_of: expected seconds above 0, got {list(self.means_of)}")
        whole = isclose(sum(self.shares_of), 1.0, abs_tol=1e-6) and min(self.shares_of) >= 0
        if len(self.shares_of) != len(self.means_of) or not whole:
            raise UsageError(
                f"speed.shares_of: expected a share for each of the {len(self.means_of)} groups of speed.means_of, "
                f"1 in all, got {list(self.shares_of)}"
            )

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
