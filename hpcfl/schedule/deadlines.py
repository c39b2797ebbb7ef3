"""Deadlines that are planned before the first round: ADEL-FL (Goren, Lang, Shlezinger & Cohen, arXiv 2505.23973).

In SALF's bound of the error after R rounds a deadline T_t stands in ``a_t C(T_t)`` alone. ``C = 4U/(U − 1) G² Σ_l (1 +
p_l)/(1 − p_l)``, where p_l, the chance that nobody reaches layer l, falls with the deadline; ``a_t = η_t² Π_{s>t} (1 −
ρ_c η_s)``. For steps ``η_t = 1/(ρ_c (t + γ))``, as the first author's code has them, ``a_t = 1/(ρ_c² (t + γ)(R + γ))``.
So the deadlines depend on the law of speeds and on γ: other constants of the bound scale it or add to it. Later code of
that group has ``1 − 2 p_l`` below; this is the bound of SALF's unbiased server (eq. 9).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from hpcfl.base.errors import refusal
from hpcfl.base.types import Floats

POINTS = 1000
"""Of the table of C: on its seconds, which grow geometrically, slopes are interpolated."""


def excess(missing: Floats) -> float:
    """Return ``Σ_l (1 + p_l)/(1 − p_l)`` less L, which cancels nothing where chances are small; inf where one is 1."""
    with np.errstate(divide="ignore"):
        return float((2 * missing / (1 - missing)).sum())


def planned(missing: Callable[[float], Floats], rounds: int, seconds: float, least: float, gamma: float) -> Floats:
    """Return the deadlines that minimise ``Σ_t C(T_t)/(t + γ)`` with ``Σ_t T_t = seconds``, float64 [rounds].

    Where C is convex, ``C'(T_t) = −λ (t + γ)`` or T_t is the `least`; λ is found by bisection. Elsewhere C is taken for
    its convex envelope.

    Parameters
    ----------
    missing : callable
        The chances p_l that nobody reaches layer l by a deadline, float64 [L].
    least : float
        The fewest seconds of a round, below ``seconds / rounds``; more where some p_l is 1 at these.
    """
    most = seconds - (rounds - 1) * least
    times = np.geomspace(least * (least / most) ** (1 / POINTS), most, POINTS + 2)
    values = np.array([excess(missing(each)) for each in times])
    times, values = times[np.isfinite(values)], values[np.isfinite(values)]
    least = max(least, times.min(initial=most))
    if rounds * least > seconds:
        why = f"at least {rounds * least:.4g}: somebody has to be able to reach every layer in each round"
        raise refusal("participation.planned_seconds", why, seconds)

    def gain(first: int, last: int) -> float:
        return float((values[first] - values[last]) / (times[last] - times[first]))

    corners = [0]  # of the convex envelope
    for here in range(1, len(times)):
        while len(corners) > 1 and gain(*corners[-2:]) <= gain(corners[-1], here):
            corners.pop()
        corners.append(here)
    sides = [side for side in pairwise(corners) if gain(*side) > 0]
    if not sides:
        return np.full(rounds, seconds / rounds)
    # −C' is a side's in its middle, and on all of it where it is no piece of a smooth curve
    ends = np.array([[times[[*side]].mean()] * 2 if side[1] == side[0] + 1 else times[[*side]] for side in sides])
    ends[0, 0] = times[0]
    falling = -np.log(np.repeat([gain(*side) for side in sides], 2))
    shares: Floats = np.log(np.arange(1, rounds + 1) + gamma)

    def at(level: float) -> Floats:
        return np.asarray(np.maximum(least, np.interp(-level - shares, falling, ends.ravel())))

    low, high = -falling[-1] - shares[-1], 1 - falling[0] - shares[0]  # log λ at which all have most, and least
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle).sum() > seconds else (low, middle)
    found = at(high)
    return np.asarray(found * (seconds / found.sum()))
