"""What Theorem 2 asks of FedLRGD for an accuracy ε: its rank r (eq. 47) and its steps S (eq. 48).

Features lie in [0, 1]^d and parameters in [-1, 1]^p, as in the paper's own example (Appendix A): beyond, a penalty's
gradient has no bound. Of α, which assumption 5 leaves open, 1 is the least, and asks for the lowest rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, inf, lgamma, log, log1p, pi

ALPHA = 1.0
ORDERS = 12
"""η is sought up to this times the least, 4 d: the best is at 5 to 10 times it."""


@dataclass(frozen=True)
class Constants:
    """What the theorem takes of a problem.

    Attributes
    ----------
    dimension, parameters : int
        d and p.
    smooth, convex : float
        L1 and μ.
    bound : float
        B, which no entry of a gradient exceeds.
    start : float
        A bound of F(θ0) - F*.
    """

    dimension: int
    parameters: int
    smooth: float
    convex: float
    bound: float
    start: float

    @property
    def condition(self) -> float:
        """κ."""
        return self.smooth / self.convex

    @property
    def far(self) -> float:
        """``F(θ0) - F* + 9 (B + 3)⁴ p / 2μ``."""
        return self.start + 9 * (self.bound + 3) ** 4 * self.parameters / (2 * self.convex)

    def steps(self, epsilon: float) -> int:
        """S (eq. 48)."""
        return ceil(log(self.far / epsilon) / -log1p(-1 / self.condition))

    def log_rank(self, epsilon: float, eta: float, log_holder: float) -> float:
        """Return log r (eq. 47), not rounded, for gradients that are (η, L2)-Hölder in the data; inf for too low η."""
        d, left = self.dimension, eta - (2 * ALPHA + 2) * self.dimension
        if left <= 0:
            return inf
        ahead = self.condition * self.far / ((self.condition - 1) * epsilon)
        power = d * (log_holder + log(eta) + eta * log((2 * eta + 2 * d) / (eta - 1)))
        power += eta * (d + 1) + eta / 2 * log(d) + d / 2 * log(ahead)
        return max(1 + log(d) / 2 + d * log(2 * (eta + d)), power / left)

    def best_log_rank(self, epsilon: float) -> tuple[float, int]:
        """Return log r and η where that is least, the link being logistic, and so of any order."""
        least = int((2 * ALPHA + 2) * self.dimension)
        return min((self.log_rank(epsilon, eta, log_holder(eta)), eta) for eta in range(least + 1, ORDERS * least + 1))


def log_holder(eta: int) -> float:
    """Return log L2 of ``x_i (σ(θᵀx) - y) + μ θ_i`` for an order η ≥ 2, with x in [0, 1]^d and θ in [-1, 1]^d.

    Derivatives of order η are at most ``sup |σ^(η)| + η sup |σ^(η-1)|``. From the poles of σ, at odd multiples of πi,
    ``sup |σ^(k)| ≤ k! / (4 π^(k-1))``.
    """
    return lgamma(eta + 1) + log((1 + pi) / 4) - (eta - 1) * log(pi)


def log_least_rank(dimension: int) -> float:
    """Return log of ``e √d (10 d)^d``, which eq. 47 exceeds for any loss and any ε, since η > (2α + 2) d ≥ 4 d."""
    return 1 + log(dimension) / 2 + dimension * log(10 * dimension)


def shown(log_rank: float) -> str:
    """Return a rank in digits, or its power of ten where it has many."""
    return f"{ceil(exp(log_rank)):,}" if log_rank < log(1e9) else f"1e{log_rank / log(10):.0f}"
