"""How long a round waits: the same seconds always, others from some round on, or what past visits suggest."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.base.types import Floats

if TYPE_CHECKING:
    from hpcfl.schedule.participation import Participation

Rule = float | Literal["adaptive"] | tuple[tuple[int, float], ...]
"""Seconds, ``"adaptive"``, or ``((round, seconds), …)``: seconds from that round on."""


class Deadlines:
    """The deadline of each round, by the rule in ``participation.deadline``.

    ``"adaptive"``: the seconds in which a share `adaptive_quantile` of the last `adaptive_window` visits were
    done; one that missed its deadline counts as twice that deadline, so that the rule can grow again.
    """

    def __init__(self, participation: Participation) -> None:
        self.rule: Rule = participation.deadline if participation.close == "deadline" else inf
        self.quantile, self.first = participation.adaptive_quantile, participation.adaptive_first
        self.known: deque[float] = deque(maxlen=participation.adaptive_window)

    @property
    def adaptive(self) -> bool:
        """Whether a deadline depends on the rounds before it."""
        return self.rule == "adaptive"

    def seconds(self, round: int) -> float:
        """Return the seconds that a round is given, `inf` where it does not close by a deadline."""
        if isinstance(self.rule, tuple):
            return next(seconds for start, seconds in reversed(self.rule) if start <= round)
        if isinstance(self.rule, float):
            return self.rule
        if not self.known:
            return self.first
        return float(np.quantile(self.known, self.quantile, method="inverted_cdf"))

    def saw(self, seconds: Floats, deadline: float) -> None:
        """Take note of the visits of an attempt, void or not.

        Parameters
        ----------
        seconds : float64 [n]
            What each whole visit took, in the order of the cohort; `inf` or NaN: it never arrived.
        deadline : float
            The seconds that they were given.
        """
        self.known.extend(np.where(seconds <= deadline, seconds, 2 * deadline).tolist())


def shaped(value: Any) -> Any:
    """Return a rule as a config may write it; ValueError where it is of no such kind."""
    if _is_number(value) or value == "adaptive":
        return value
    if isinstance(value, (list, tuple)) and all(_is_step(step) for step in value):
        return tuple(tuple(step) for step in value)
    raise ValueError("expected seconds, 'adaptive' or [[round, seconds], ...]")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_step(step: Any) -> bool:
    """Return whether this is a round and finite seconds."""
    pair = isinstance(step, (list, tuple)) and len(step) == 2 and all(map(_is_number, step))
    return pair and isinstance(step[0], int) and isfinite(step[1])


def check(rule: Rule) -> None:
    """Raise UsageError where the seconds are not above 0, or a schedule is not one."""
    if isinstance(rule, str):
        return
    if isinstance(rule, float):
        rule = ((0, rule),)
    rounds = [start for start, _ in rule]
    if rounds[:1] != [0]:
        found = f"got one from round {rounds[0]}" if rounds else "got none"
        raise UsageError(f"participation.deadline: expected a first entry [0, seconds], {found}")
    for before, after in pairwise(rounds):
        if after <= before:
            raise UsageError(f"participation.deadline: expected ascending rounds, got {after} after {before}")
    for start, seconds in rule:
        if seconds <= 0:
            where = f" from round {start} on" if len(rule) > 1 else ""
            raise UsageError(f"participation.deadline: expected seconds above 0, got {seconds}{where}")
