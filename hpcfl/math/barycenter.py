"""Square roots of covariances, and of the Wasserstein barycenter of Gaussians the pieces of a distributed iteration.

The barycenter of ``N(m_i, Σ_i)`` with weights w_i has mean ``Σ w_i m_i``; its covariance is the fixed point of
``S ← S^{-½} (Σ w_i (S^½ Σ_i S^½)^½)² S^{-½}`` (Álvarez-Esteban et al. 2016). An iteration is one sum over i of
k × k matrices: each holder of a Σ_i gives a `barycenter_term`, `fixed_point` makes the next S of their weighted sum.

Covariances ``[..., k, k]`` may be singular. Everything is computed in float64, one matrix at a time from memory of its
own: a batched product may choose another kernel, and an unaligned one too, so the last bits of a result would depend
on the batch that its matrix is in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from hpcfl.base.lazy import Tensor, torch

EPS = sys.float_info.epsilon


def per_matrix(function: Callable[..., tuple[Tensor, ...]], *matrices: Tensor) -> tuple[Tensor, ...]:
    """Apply a function of float64 matrices to ``[..., k, k]`` one by one; the leading dimensions are broadcast."""
    lead = np.broadcast_shapes(*(m.shape[:-2] for m in matrices))  # torch's own loads sympy, for a second and more
    flat = [m.double().expand(*lead, *m.shape[-2:]).reshape(-1, *m.shape[-2:]) for m in matrices]
    results = [function(*(m.clone(memory_format=torch.contiguous_format) for m in row)) for row in zip(*flat)]
    return tuple(torch.stack(part).reshape([*lead, *part[0].shape]) for part in zip(*results))


def symmetric(matrix: Tensor) -> Tensor:
    """The symmetric part of ``[..., k, k]``: exactly symmetric, where products are so up to rounding."""
    return (matrix + matrix.mT).mul_(0.5)


def covariance(factor: Tensor) -> Tensor:
    """``L Lᵀ`` of factors ``[..., k, k]``."""
    return per_matrix(lambda one: (symmetric(one @ one.mT),), factor)[0]


def sqrtm_one(cov: Tensor) -> Tensor:
    """The symmetric root of one matrix."""
    values, vectors = _spectrum(cov)
    return symmetric((vectors * values.sqrt()) @ vectors.mT)


def sqrtm_and_inverse(cov: Tensor) -> tuple[Tensor, ...]:
    """``S^½`` and ``S^{-½}`` of ``[..., k, k]`` by one decomposition, the inverse on the range of a singular S."""

    def both(one: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = _spectrum(one)
        inverse = torch.where(values == 0, 0, values.rsqrt())
        return symmetric((vectors * values.sqrt()) @ vectors.mT), symmetric((vectors * inverse) @ vectors.mT)

    return per_matrix(both, cov)


def _spectrum(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors.

    Values below ``k·eps`` times the largest count as zero, as do negative ones: they are rounding, and their roots
    would be 1e-8 of the largest, far above rounding.
    """
    if not matrix.sum().isfinite():  # LAPACK would raise; a run that diverges is to go on with NaN
        return matrix.new_full((len(matrix),), torch.nan), torch.full_like(matrix, torch.nan)
    values, vectors = torch.linalg.eigh(symmetric(matrix))
    return torch.where(values > len(matrix) * EPS * values[-1].clamp(min=0), values, 0), vectors


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
