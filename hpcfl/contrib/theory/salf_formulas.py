"""What is known of SALF's steps: their exact variance, the paper's bound of it, and Theorem III.1.

Lang, Cohen & Shlezinger assume that users are alike and independent (AS4): user u reaches layer l with chance π_l, in
the paper ``l/(L+1)``. Then ``|U^l| ~ Bin(U, π_l)`` (eq. 12), nobody reaches layer l with chance ``p_l = (1 − π_l)^U``
(eq. 10), and eq. 9 takes FedAvg's step on average (Lemma 2). Rounds count from 0: `rounds` = k is the model after k
steps, the paper's w_(k+1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcfl.base.types import Floats


def uniform_reach(layers: int) -> Floats:
    """Return ``π_l = l/(L+1)`` for l = 1 … L: depths uniform on 1 … L + 1 (AS4)."""
    return np.arange(1, layers + 1) / (layers + 1)


def variance_factors(users: int, reach: Floats) -> tuple[Floats, Floats]:
    """Return what ``|ḡ|²`` and ``S²`` are multiplied by in the variance of eq. 9's step over η², per layer.

    With ḡ the mean of the users' gradients of layer l and S² their sample variance (over U − 1, summed over
    coordinates), and K the number of users who reach it,

        E|step − mean step|² / η² = p/(1 − p) · |ḡ|² + Σ_(K≥1) P(K) (1/K − 1/U) / (1 − p)² · S².

    The first term: a layer that nobody reaches stays, one that is reached moves by 1/(1 − p) as much. The second: K of
    U users drawn without replacement. The paper bounds both (eqs. B.2 to B.6); this is exact. With q = 1 − π_l,
    ``Σ_(K≥1) P(K)/K = Σ_(j=1)^U (q^(U−j) − q^U)/j``: both are the integral of ``((q + s π_l)^U − q^U)/s`` over (0, 1).

    Parameters
    ----------
    users : int
        U.
    reach : float64 [L]
        π_l, above 0.

    Returns
    -------
    tuple of float64 [L]
        ``p/(1 − p)``, and ``Σ …/(1 − p)²``.
    """
    missed, j = (1 - reach) ** users, np.arange(1, users)[:, None]  # the term j = U is what is taken off, (1 − p)/U
    fewer = (((1 - reach) ** (users - j) - missed) / j).sum(0)
    return missed / (1 - missed), fewer / (1 - missed) ** 2


def variance_bound(users: int, layers: int) -> float:
    """Return the bound (14) of the variance of the whole step over ``η² G²``, which is C/G² (16b); inf for one user."""
    if users == 1:
        return float("inf")
    missed = (1 - 1 / (layers + 1)) ** users
    return 4 * users * layers / (users - 1) * (1 + missed) / (1 - missed)


@dataclass(frozen=True)
class Convergence:
    """Theorem III.1: after k rounds ``E F − F* ≤ κ/(γ + k) · (2 (B + C)/ρ_c + ρ_c γ/2 · |w_1 − w*|²)`` (15).

    It follows from ``Δ_(k+1) ≤ (1 − η_k ρ_c) Δ_k + η_k² (B + C)`` for the mean square distances Δ_k from w*, where
    ``η_k = 2/(ρ_c (γ + k))`` and ``η_0 ≤ 1/(4 ρ_s)``. So it holds for any ρ_c up to the objectives' own, and for any γ
    from ``8 ρ_s/ρ_c`` on, of which the paper takes the least.

    Attributes
    ----------
    users, layers : int
        U and L.
    smooth, convex : float
        ρ_s and ρ_c, of every user's objective (AS1).
    gap : float
        ``Γ = F* − mean_u min F_u`` (11).
    gradient : float
        G², which the mean square of a user's gradients never exceeds (AS3). No strongly convex objective has one
        everywhere: it has to hold where the iterates are.
    distance : float
        ``|w_1 − w*|²``.
    noise : float
        ``Σ_u σ_u²/U²`` (AS2): 0 where users take all their samples.
    """

    users: int
    layers: int
    smooth: float
    convex: float
    gap: float
    gradient: float
    distance: float
    noise: float = 0.0

    @property
    def gamma(self) -> float:
        """The theorem's γ = 8 κ; κ is at least 1."""
        return 8 * self.smooth / self.convex

    @property
    def step(self) -> tuple[float, float]:
        """Keys `lr` and `decay` of the theorem's step sizes ``2/(ρ_c (γ + k))``."""
        return 2 / (self.convex * self.gamma), 1 / self.gamma

    @property
    def b(self) -> float:
        """B (16a)."""
        return self.noise + 6 * self.smooth * self.gap

    @property
    def c(self) -> float:
        """C (16b)."""
        return variance_bound(self.users, self.layers) * self.gradient

    def covers(self, lr: float, decay: float) -> bool:
        """Whether the theorem holds for the step sizes ``lr/(1 + decay·k)``, up to rounding of the keys."""
        return decay > 0 and 2 * decay / lr <= self.convex * (1 + 1e-6) and lr * 4 * self.smooth <= 1 + 1e-6

    def bound(self, rounds: Floats | int, lr: float, decay: float, variance: float | None = None) -> Floats:
        """Return (15) after so many rounds of steps ``lr/(1 + decay·k)`` that it covers, float64.

        Where users take all their samples, a known bound of a step's `variance` over η² may stand for ``B + C``.
        """
        convex, gamma = 2 * decay / lr, 1 / decay
        noise = self.b + self.c if variance is None else variance
        start = 2 * noise / convex + convex * gamma / 2 * self.distance
        found: Floats = self.smooth / convex / (gamma + np.asarray(rounds)) * start
        return found
