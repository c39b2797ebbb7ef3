"""No model: the hardware as it is."""

from __future__ import annotations

from typing import Literal

import numpy as np

from hpcfl.base.types import Floats
from hpcfl.schedule.plan import Attempt
from hpcfl.schedule.speeds.base import Speed


class Equal(Speed):
    """Every visit takes one second in simulated time; in wall time, whatever it takes."""

    model: Literal["none"] = "none"

    def known(self, clock: str) -> bool:
        return clock == "simulated"  # nobody knows how fast real hardware will be

    def enforced(self, attempt: Attempt) -> Floats:
        return np.zeros(len(attempt.cohort))
