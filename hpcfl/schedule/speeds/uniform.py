"""Visit times with a longest one, so that from some deadline on nobody straggles."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats
from hpcfl.schedule.plan import Attempt
from hpcfl.schedule.speeds.base import Speed


class Uniform(Speed):
    """Uniform visit times, clients alike, drawn anew in each round: at a deadline of x·`longest`, 1 − x straggle."""

    model: Literal["uniform"] = "uniform"
    longest: float = Field(1.0, gt=0)
    """Seconds that no visit exceeds; means are half of it."""

    def paces(self, seed: int, clients: int) -> Floats:
        return np.full(clients, self.longest / 2)

    def seconds(self, attempt: Attempt) -> Floats:
        rng = keyed(attempt.seed, "time", attempt.round, step=attempt.number)
        drawn: Floats = rng.uniform(0.0, self.longest, attempt.clients)[attempt.cohort]
        return drawn

    def arrival(self, attempt: Attempt) -> Floats:
        """Return ``min(1, closes_after / (longest · work_fraction))``, float64 [n, L]."""
        chance = np.minimum(1.0, attempt.closes_after / (self.longest * attempt.work_fractions))
        return np.tile(chance, (len(attempt.cohort), 1))
