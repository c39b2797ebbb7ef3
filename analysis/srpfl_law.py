"""How SRPFL's gain over FedRep grows with the number of clients (Theorem 4.9), from lines of analysis/papers.py.

ε is ĉ times the floor: the median over seeds of FedRep's distance in its last rounds, with all N clients. With N/2 it
is √2 as much, so that SRPFL needs its last stage. The speed-up is E[T_FedRep] / E[T_SRPFL], means over seeds of the
seconds until the distance is first at most ε, and what the theorem states is that it grows at least in proportion to
log N. Intervals are from seeds drawn anew, the same for all N, since a seed's start is the same for all N.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
LAST = 20
"""Rounds of FedRep from which the floor is taken."""
DRAWN = 2000


@dataclass(frozen=True)
class Reached:
    """Of N clients: the floor, and of each seed both methods' seconds until ε, and whether SRPFL needed all N."""

    clients: int
    floor: float
    srpfl: Floats
    fedrep: Floats
    everybody: Floats

    def speedup(self, seeds: npt.NDArray[np.int64] | slice = slice(None)) -> float:
        """Return E[T_FedRep] / E[T_SRPFL]."""
        return float(self.fedrep[seeds].mean() / self.srpfl[seeds].mean())


def reached(
    clients: int,
    srpfl: Sequence[Mapping[str, Any]],
    fedrep: Sequence[Mapping[str, Any]],
    constant: float,
    cost: float = 0.0,
) -> Reached:
    """Return what the lines of both methods say of ε = `constant` times the floor, with `cost` seconds per round."""
    floor = float(np.median([line["distance"][-LAST:] for line in fedrep]))
    seconds, everybody = {"srpfl": list[float](), "fedrep": list[float]()}, list[float]()
    for method, lines in (("srpfl", srpfl), ("fedrep", fedrep)):
        for line in lines:
            took, there = np.array(line["sim_seconds"]), np.flatnonzero(np.array(line["distance"]) <= constant * floor)
            if not len(there):
                seconds[method].append(inf)
                continue
            at = int(there[0])
            seconds[method].append(float(took[at] + cost * line["rounds"][at]))
            if method == "srpfl":
                steps = np.diff(took, prepend=0.0)
                everybody.append(float(steps[at] > 0.99 * steps[-1]))
    return Reached(clients, floor, *(np.array(each) for each in (*seconds.values(), everybody)))


def slope(sizes: Sequence[Reached], seeds: npt.NDArray[np.int64] | slice = slice(None)) -> float:
    """Return by how much the speed-up grows per unit of ln N, by least squares."""
    return float(np.polyfit(np.log([each.clients for each in sizes]), [each.speedup(seeds) for each in sizes], 1)[0])


def interval(of: Any, seeds: int) -> tuple[float, float]:
    """Return the 95 % interval of a function of the seeds that count."""
    rng = np.random.default_rng(0)
    low, high = np.quantile([of(rng.integers(seeds, size=seeds)) for _ in range(DRAWN)], (0.025, 0.975))
    return float(low), float(high)


def said(say: str, sizes: Sequence[Reached]) -> str:
    """Return what is asked for: ``slope``, ``speedup N``, ``everybody N`` (share of runs), ``floor`` (times √N)."""
    word, _, number = say.partition(" ")
    if word == "floor":
        scaled = [each.floor * sqrt(each.clients) for each in sizes]
        return f"{min(scaled):.2f}–{max(scaled):.2f}"
    if any(np.isinf([*each.srpfl, *each.fedrep]).any() for each in sizes):
        return "never"
    if word == "slope":
        low, high = interval(lambda seeds: slope(sizes, seeds), len(sizes[0].srpfl))
        return f"{slope(sizes):.2f} ({low:.2f} to {high:.2f})"
    (size,) = (each for each in sizes if each.clients == int(number))
    if word == "everybody":
        return f"{100 * size.everybody.mean():.0f}"
    low, high = interval(size.speedup, len(size.srpfl))
    return f"{size.speedup():.2f} ({low:.2f} to {high:.2f})"
