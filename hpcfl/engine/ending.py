"""Why a run ends before its last round: by its config, or because the script that began it says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf, isnan, nan
from typing import Any

import numpy as np

from hpcfl.base.lazy import xarray
from hpcfl.schedule.cadence import Target

Row = Mapping[str, Any]
NAMES = {"accuracy": 1.0, "test_loss": -1.0}
ASKED = "on_round"
"""The reason where a script's function has said so: the run may be gone on with."""


class Ending:
    """What is looked at after each round, at the server.

    Parameters
    ----------
    on_round : callable, optional
        What is called with each round's figures by name; the run ends where it returns something true.
    earlier : iterable of float
        What tests of earlier rounds gave, see `score`.
    """

    def __init__(self, target: Target, on_round: Callable[[Row], Any] | None, earlier: Iterable[float] = ()) -> None:
        self.target, self.on_round = target, on_round
        self.best, self.since = -inf, 0  # and tests since then
        for value in earlier:
            self._saw(value)

    def after(self, row: Row) -> str:
        """Return why the run ends with this round, "" where it does not."""
        asked = self.on_round is not None and self.on_round(row)
        value = score(row)
        self._saw(value)
        if self.target.accuracy is not None and value >= self.target.accuracy:
            return f"accuracy {value:.4f} has reached stop.accuracy = {self.target.accuracy:g}"
        if self.target.patience is not None and self.since >= self.target.patience:
            return f"no test was better than {abs(self.best):.4f} for stop.patience = {self.target.patience}"
        return ASKED if asked else ""

    def _saw(self, value: float) -> None:
        if not isnan(value):
            self.since = 0 if value > self.best else self.since + 1
            self.best = max(self.best, value)


def scores(data: xarray.Dataset, done: int) -> list[float]:
    """Return what the tests of a run's first rounds gave, that are `done`; NaN where there was none."""
    names = [name for each in NAMES for name in (each, f"mean_client_{each}") if name in data]
    places = np.flatnonzero(data["round"].values < done)  # those after a checkpoint are done again
    return [score({name: data[name].values[place] for name in names}) for place in places]


def score(row: Row) -> float:
    """Return a test's accuracy, or where a task has none the loss below 0; NaN where nothing was tested.

    It is the shared model's, or where that is not tested the mean over the clients' own.
    """
    for name, sign in NAMES.items():
        for key in (name, f"mean_client_{name}"):
            value = float(row.get(key, nan))
            if not isnan(value):
                return sign * value
    return nan
