"""What all exponential visit times have in common."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats
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
        """Return every client's mean seconds per visit, float64 [clients]."""

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
