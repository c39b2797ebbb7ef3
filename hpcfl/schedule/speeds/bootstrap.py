"""Visit times that are drawn from measured ones, as they are: no law is fitted."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from hpcfl.base.rng import keyed
from hpcfl.base.types import Floats, Ints
from hpcfl.data.formats.csv_file import read_seconds
from hpcfl.schedule.plan import Attempt
from hpcfl.schedule.speeds.base import Speed


class Bootstrap(Speed):
    """Visit times drawn with replacement from measured seconds, anew in each round."""

    model: Literal["bootstrap"] = "bootstrap"
    file: str = Field(min_length=1)
    """A CSV file whose first line names its columns. Rows without a value, or with 0, are left out."""
    column: str | None = None
    """Its column of seconds, or of other units by its end: _ms, _us, _min, _h. By default the first that looks so."""
    by: str | None = None
    """The column that says whose a row is: each client draws from the rows of one of those, drawn once per run with
    replacement. By default all draw from all rows."""
    sorted: bool = False
    """Number clients from fast to slow. With ``data.label_groups``, speeds then go with labels."""
    paths: ClassVar[tuple[str, ...]] = ("file",)

    @cached_property
    def values(self) -> list[Floats]:
        """The seconds of each of those whose rows they are, ascending."""
        by = [self.by] if self.by else []
        _, found = read_seconds("speed.column", "speed.by", Path(self.file), self.column, by)
        return [np.sort(each) for each in (found.values() if by else [np.concatenate([*found.values()])])]

    @cached_property
    def _rows(self) -> tuple[Floats, Ints, Ints]:
        """All values, one owner's after the other's; where each one's begin, and how many they are."""
        counts = np.array([len(each) for each in self.values])
        return np.concatenate(self.values), np.cumsum(counts) - counts, counts

    def covers(self, rounds: int, clients: int, layers: int | None = None) -> None:
        assert self.values  # a file that cannot be read is refused

    def paces(self, seed: int, clients: int) -> Floats:
        return np.array([each.mean() for each in self.values])[self._drawn(seed, clients)]

    def seconds(self, attempt: Attempt) -> Floats:
        who = self._drawn(attempt.seed, attempt.clients)[attempt.cohort]
        u = keyed(attempt.seed, "time", attempt.round, step=attempt.number).random(attempt.clients)[attempt.cohort]
        values, firsts, counts = self._rows
        return values[firsts[who] + (u * counts[who]).astype(np.int64)]

    @property
    def redrawn(self) -> bool:
        return True

    def in_time(self, attempt: Attempt, limits: Floats) -> Floats:
        chance, drawn = np.empty(limits.shape), self._drawn(attempt.seed, attempt.clients)[attempt.cohort]
        for who in np.unique(drawn):
            own = self.values[who]
            chance[drawn == who] = np.searchsorted(own, limits[drawn == who], side="right") / len(own)
        return chance

    def _drawn(self, seed: int, clients: int) -> Ints:
        """Return whose rows each client draws from, int64 [clients]."""
        drawn = keyed(seed, "pace").integers(len(self.values), size=clients)
        if not self.sorted:
            return drawn
        means = np.array([each.mean() for each in self.values])
        return drawn[np.argsort(means[drawn], kind="stable")]
