"""What a visit waits in a batch queue before it starts."""

from __future__ import annotations

import re
from functools import cached_property
from typing import ClassVar, Literal

from pydantic import Field

from hpcfl.base.config import ConfigBase
from hpcfl.base.errors import UsageError, no_meaning
from hpcfl.schedule.participation import Participation
from hpcfl.schedule.speeds import Speed, speed_class

LAW = "mean", "between", "within", "persistence"


class BatchQueue(ConfigBase):
    """What a visit waits in a batch queue before it starts."""

    model: Literal[
        "none", "lognormal", "gamma", "weibull", "pareto", "shifted-exponential", "uniform-about", "table"
    ] = "none"
    """``none``: nothing. A law, as in ``[speed]``; ``gamma`` with ``within = 1`` is exponential. ``table``: a file."""
    mean: float = Field(1.0, gt=0)
    """Seconds in the mean over clients and rounds."""
    between: float = Field(0.0, ge=0)
    """Spread between clients, as the law has it."""
    within: float = Field(0.0, ge=0)
    """Spread of one client's waits, as the law has it."""
    persistence: float = Field(0.0, gt=-1, lt=1)
    """How much of a wait's deviation is there in the next round."""
    file: str | None = None
    """A table of seconds, as ``speed.file`` has them (``table``)."""
    paths: ClassVar[tuple[str, ...]] = ("file",)

    @cached_property
    def times(self) -> Speed | None:
        """The law or table that waits are drawn from; None: there are none."""
        keys = {"none": (), "table": ("file",)}.get(self.model, LAW)
        for key in (*LAW, "file"):
            if key not in keys and getattr(self, key) != type(self).model_fields[key].default:
                raise no_meaning(f"queue.{key}", getattr(self, key), f"queue.model = '{self.model}'")
        if self.model == "none":
            return None
        if self.model == "table" and self.file is None:
            raise UsageError("queue.file: model = 'table' needs it")
        return speed_class(self.model).from_table(
            {"model": self.model, **{key: getattr(self, key) for key in keys}}, "queue"
        )

    def check(self, participation: Participation, rounds: int, clients: int, clock: str) -> None:
        """Raise UsageError where keys do not go together, or the file is not of these rounds and clients."""
        if (times := self.times) is None:
            return
        try:
            times.check(participation, clock)
            if times.needs_end:
                raise UsageError(f"speed.file = {self.file!r} has depths, expected seconds")
            times.covers(rounds, clients)
        except UsageError as error:
            raise UsageError(re.sub(r"(^|; did you mean |with )speed\.", r"\1queue.", str(error))) from None
