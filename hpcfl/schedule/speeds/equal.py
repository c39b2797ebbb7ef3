"""No model: the hardware as it is."""

from __future__ import annotations

from typing import Literal

import numpy as np

from hpcfl.base.types import Floats
from hpcfl.schedule.plan import Invitation
from hpcfl.schedule.speeds.base import Speed


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
