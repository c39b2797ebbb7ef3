"""Gradient descent on gradients that are not exact, and may lead nowhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Leash:
    """Where a descent goes back for good.

    Attributes
    ----------
    growth : float
        The gradient's norm has grown by more than this factor, or is no number.
    start : Tensor [p]
    reach : float
        It is farther from there than this.
    """

    growth: float
    start: Tensor
    reach: float


@dataclass
class Descent:
    """How far a descent has come.

    Attributes
    ----------
    theta : Tensor [p]
        Where it is.
    best : Tensor [p]
        Where the gradient's norm was least.
    least : float
        The least norm.
    taken : int
        Steps so far.
    halted : bool
        Whether it has gone back to `best` for good.
    norm : float
        The norm where it was last computed.
    """

    theta: Tensor
    best: Tensor
    least: float = inf
    taken: int = 0
    halted: bool = False
    norm: float = 0.0

    def go(self, gradient: Callable[[Tensor], Tensor], steps: int, lr: float, tolerance: float, leash: Leash) -> None:
        """Take up to so many steps.

        Parameters
        ----------
        gradient : callable
            The inexact gradient at a point, ``[p]``.
        lr : float
            Step size.
        tolerance : float
            No step is taken where the norm is at most this.
        leash : Leash
            Where it goes back to `best` and ends.
        """
        for _ in range(steps):
            if self.halted:
                return
            slope = gradient(self.theta)
            self.norm = float(slope.norm())
            far = float((self.theta - leash.start).norm()) > leash.reach
            if self.norm <= self.least and not far:
                self.best, self.least = self.theta, self.norm
            if far or not self.norm <= leash.growth * self.least:
                self.theta, self.norm, self.halted = self.best, self.least, True
            elif self.norm <= tolerance:
                return
            else:
                self.theta = (self.theta - lr * slope).to(self.theta)
                self.taken += 1
