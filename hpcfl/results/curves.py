"""Curves over what passes differently for each seed: rounds, time, bytes; their mean and how far seeds lie from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, get_args

import numpy as np
from scipy.special import stdtrit

from hpcfl.base.lazy import xarray
from hpcfl.base.types import Floats

Band = Literal["sd", "ci95"]
Last = Literal["all", "any"]
X = Literal["rounds", "time", "bytes"]
COORDINATES: dict[str, str] = dict(zip(get_args(X), ("round", "sim_seconds", "message_bytes")))
Points = tuple[Floats, Floats]
"""Where a seed was measured, ascending [n], and what was measured there [n]."""


@dataclass(frozen=True)
class Curve:
    """Mean over seeds at `x`, and by how much a band is wider to each side (NaN where there is one seed), [n] each.

    Attributes
    ----------
    shared : bool
        Some x lies where all seeds are: else, though that was asked for, the curve is drawn where any is.
    """

    x: Floats
    mean: Floats
    half: Floats
    shared: bool = True

    @classmethod
    def of(cls, seeds: Sequence[Points], last: Last = "all", band: Band = "sd") -> Curve:
        """Return the mean at every x at which any seed was measured, within where all seeds are, or ``any`` is.

        Between two measurements a seed's value is taken to lie on the line between them, as it is drawn for one seed.
        The band is the sample standard deviation, or Student's 95 % interval of the mean.
        """
        known = [(x, y) for x, y in seeds if x.size]
        grid = np.unique(np.concatenate([x for x, _ in known])) if known else np.empty(0)
        begin, end = max((x[0] for x, _ in known), default=inf), min((x[-1] for x, _ in known), default=-inf)
        within = (grid >= begin) & (grid <= end) if len(known) == len(seeds) else np.zeros(len(grid), bool)
        grid = grid[within] if last == "all" and within.any() else grid
        values = np.stack([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in known] or [grid])
        count = np.isfinite(values).sum(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = np.nansum(values, 0) / count
            half = np.sqrt(np.nansum((values - mean) ** 2, 0) / np.where(count > 1, count - 1, np.nan))
            if band == "ci95":
                half *= stdtrit(count - 1.0, 0.975) / np.sqrt(count)
        return cls(grid, mean, half, bool(within.any()))


def points(scores: xarray.DataArray, x: X, every: int = 1) -> Points:
    """Return a run's scores [round] against `x`; of several at one x the last.

    Of a run that was also evaluated after each of its last rounds: after multiples of `every` rounds, and the last.
    """
    done = scores["round"].values + 1
    at = done.astype(np.float64) if x == "rounds" else scores[COORDINATES[x]].values.astype(np.float64)
    keep = np.isfinite(at) & np.append(np.diff(at) > 0, True)[: len(at)]
    even = done % every == 0
    if even.sum() > 1 and (np.diff(done) > 1).any():
        keep &= even | (done == done[-1])
    return at[keep], scores.values.astype(np.float64)[keep]


def clipped(curve: Curve, least: float, most: float) -> tuple[Floats, Floats]:
    """Return the lower and the upper edge of a curve's band, within what its values may be."""
    return np.clip(curve.mean - curve.half, least, most), np.clip(curve.mean + curve.half, least, most)
