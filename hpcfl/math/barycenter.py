"""The Wasserstein barycenter of Gaussians, in the pieces of which a distributed iteration consists.

The barycenter of ``N(m_i, Σ_i)`` with weights w_i has mean ``Σ w_i m_i``; its covariance is the fixed point of
``S ← S^{-½} (Σ w_i (S^½ Σ_i S^½)^½)² S^{-½}`` (Álvarez-Esteban et al. 2016). An iteration is one sum over i of
k × k matrices: each holder of a Σ_i gives a `barycenter_term`, `fixed_point` makes the next S of their weighted sum.
All is float64, ``[..., k, k]``; the bits of a result do not depend on what else is in its batch.
"""

from __future__ import annotations

from hpcfl.base.lazy import Tensor, torch
from hpcfl.math.psd import per_matrix, sqrtm_one, symmetric


def barycenter_term(root: Tensor, cov: Tensor) -> Tensor:
    """``(S^½ Σ S^½)^½`` from ``S^½`` and Σ: one client's part of an iteration."""
    return per_matrix(lambda half, one: (sqrtm_one(half @ one @ half),), root, cov)[0]


def fixed_point(inverse: Tensor, total: Tensor) -> Tensor:
    """The next S, ``S^{-½} M² S^{-½}``, from ``S^{-½}`` and M, the mean of terms with weights that sum to 1."""

    def one(inverse: Tensor, total: Tensor) -> tuple[Tensor]:
        half = inverse @ total  # times its transpose: positive semi-definite whatever the rounding
        return (symmetric(half @ half.mT),)

    return per_matrix(one, inverse, total)[0]


def relative_change(before: Tensor, after: Tensor) -> Tensor:
    """``|after − before| / |before|`` (Frobenius norms), ``[...]``; 0 where nothing has changed."""

    def one(before: Tensor, after: Tensor) -> tuple[Tensor]:
        moved, size = (after - before).norm(), before.norm()
        return (torch.where(moved == 0, 0.0, moved / size),)

    return per_matrix(one, before, after)[0]
