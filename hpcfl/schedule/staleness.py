"""What a change counts that a client made from an older state than the server has when it arrives."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from hpcfl.base.config import ConfigBase
from hpcfl.base.errors import UsageError, no_meaning, refusal
from hpcfl.base.types import Floats, Ints
from hpcfl.schedule.participation import Participation


class Staleness(ConfigBase):
    """What a visit's change counts by its staleness x, with ``participation.close = "arrivals"``.

    x is how many steps the server has taken since the client began: 0 where it began with the newest state, so that
    s(0) = 1. Some papers' indices can be read one higher. The server divides by the weights of the visits, not by
    these times s, as FedBuff does (Nguyen et al., AISTATS 2022).
    """

    weight: Literal["constant", "polynomial", "hinge"] = "constant"
    """What a change counts at staleness x (Xie, Koyejo & Gupta, arXiv 1903.03934). ``constant``: 1. ``polynomial``:
    (1 + x)^−a. ``hinge``: 1 up to b, then 1/(a(x − b) + 1)."""
    a: float | None = Field(None, gt=0)
    """How fast it falls: by default 0.5 of ``polynomial``, FedBuff's, and 10 of ``hinge``."""
    b: int | None = Field(None, ge=0)
    """The staleness up to which a ``hinge`` is 1: by default 4."""

    def check(self, participation: Participation, kept_by: str = "", without: str = "") -> None:
        """Raise UsageError where a key has no meaning; `kept_by`: what lets clients keep what they have sent.

        `without`: the method, where it shares nothing.
        """
        choice = "staleness.weight"
        if self.weight != "constant":
            if participation.close != "arrivals":
                beside, other = (f"participation.close = '{word}'" for word in (participation.close, "arrivals"))
                raise no_meaning(choice, self.weight, beside, other)
            if participation.every_client:
                why = "with participation.every_client = true, which takes gradients of the newest version only"
                raise refusal(choice, f"'constant' {why}", self.weight, "'constant'")
            if without:
                raise no_meaning(choice, self.weight, f"{without}, which shares nothing of the model")
            if kept_by:
                why = f"with {kept_by} clients keep what they have sent, which must count as a whole"
                raise UsageError(f"{choice} = '{self.weight}': {why}: expected 'constant'")
        self.check_only_for("staleness.", "weight", {"a": ("polynomial", "hinge"), "b": "hinge"})

    def factors(self, staleness: Ints) -> Floats:
        """Return s of each staleness, float64 [n]."""
        x = staleness.astype(np.float64)
        if self.weight == "polynomial":
            return (1.0 + x) ** -(self.a or 0.5)
        if self.weight == "hinge":
            b = 4 if self.b is None else self.b
            return 1.0 / ((self.a or 10.0) * (x - b).clip(min=0) + 1.0)
        return np.ones(len(x))
