"""What all exponential visit times have in common."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats
from hpcfl.schedule.plan import Invitation
from hpcfl.schedule.speeds.base import Speed


class Memoryless(Speed):
    """Exponential times around each client's mean: drawn once per run, or anew in each round.

    Attributes
    ----------
    sorted : bool
        Whether clients are numbered from fast to slow. With ``data.label_groups``, speeds then go with labels.
    """

    sorted: bool = False

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

    def seconds(self, asked: Invitation) -> Floats:
        """Return this round's times, float64 [n]."""
        times = self.paces(asked.seed, asked.clients)
        if self.redrawn:
            times = times * keyed(asked.seed, "time", asked.round, step=asked.attempt).exponential(1.0, asked.clients)
        return times[asked.cohort]

    def reach(self, asked: Invitation) -> Floats:
        """Return ``1 − exp(−deadline / (mean · share))`` where times are drawn anew, float64 [n, L]."""
        if not self.redrawn:
            return super().reach(asked)
        means = self.paces(asked.seed, asked.clients)[asked.cohort]
        return 1.0 - np.exp(-asked.deadline / np.outer(means, asked.shares))
