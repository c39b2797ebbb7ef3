"""Gradient descent on inexact gradients, which may lead nowhere, and the safeguard that ends it then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from hpcfl.base.lazy import Tensor


@dataclass(frozen=True)
class Safeguard:
    """Ends a descent whose gradient is no number or has grown more than `growth`, or that is `reach` from `start`."""

    growth: float
    start: Tensor
    reach: float


@dataclass
class Descent:
    """How far a descent has come.

    Attributes
    ----------
    theta, best : Tensor [p]
        Where it is, and where the gradient's norm was least.
    least, norm : float
        The least norm, and the norm where it was last computed.
    taken : int
        Steps so far.
    halted : bool
        It has gone back to `best` for good.
    """

    theta: Tensor
    best: Tensor
    least: float = inf
    taken: int = 0
    halted: bool = False
    norm: float = 0.0

    def go(
        self, gradient: Callable[[Tensor], Tensor], steps: int, lr: float, tolerance: float, guard: Safeguard
    ) -> None:
        """Take up to so many steps, none where the norm of the inexact gradient is at most `tolerance`."""
        for _ in range(steps):
            if self.halted:
                return
            slope = gradient(self.theta)
            self.norm = float(slope.norm())
            far = float((self.theta - guard.start).norm()) > guard.reach
            if self.norm <= self.least and not far:
                self.best, self.least = self.theta, self.norm
            if far or not self.norm <= guard.growth * self.least:
                self.theta, self.norm, self.halted = self.best, self.least, True
            elif self.norm <= tolerance:
                return
            else:
                self.theta = (self.theta - lr * slope).to(self.theta)
                self.taken += 1
