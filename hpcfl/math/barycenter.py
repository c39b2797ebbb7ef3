"""The Wasserstein barycenter of Gaussians, as a whole and in the pieces of which a distributed iteration consists.

The barycenter of ``N(m_i, Σ_i)`` with weights w_i has mean ``Σ w_i m_i``; its covariance is the fixed point of
``S ← S^{-½} (Σ w_i (S^½ Σ_i S^½)^½)² S^{-½}`` (Álvarez-Esteban et al. 2016). An iteration is one sum over i of
k × k matrices: each holder of a Σ_i gives a `barycenter_term`, `fixed_point` makes the next S of their weighted sum.
All is float64, ``[..., k, k]``; the bits of a result do not depend on what else is in its batch.
"""

from __future__ import annotations

from typing import NamedTuple

from hpcfl.base.lazy import Tensor, no_grad, torch
from hpcfl.math.psd import check_psd, per_matrix, sqrtm_one, sqrtm_pair, symmetric


class Barycenter(NamedTuple):
    """A Gaussian between Gaussians, and how it was come by."""

    mean: Tensor
    """``[..., k]``."""
    cov: Tensor
    """``[..., k, k]``."""
    iterations: Tensor
    """How many were taken, int64 ``[...]``."""
    change: Tensor
    """Relative change of the covariance in the last one, ``[...]``; above the tolerance where it has not converged."""


@no_grad
def barycenter(means: Tensor, covs: Tensor, weights: Tensor, tol: float = 1e-12, iterations: int = 200) -> Barycenter:
    """Return the Wasserstein barycenter over i of ``N(means[i], covs[i])``, mean and covariance in the types that came.

    Parameters
    ----------
    means, covs : Tensor [m, ..., k], [m, ..., k, k]
        Covariances may be singular, or zero; UsageError where one is none.
    weights : Tensor [m] or [m, ...]
        At least 0, of a positive sum over i; they are normalised.
    tol : float
        The relative change (Frobenius norm) at which the iteration ends.
    """
    check_psd(covs, "covs")
    lead = covs.shape[1:-2]
    shares = weights.double().reshape(*weights.shape, *[1] * (covs.dim() - 2 - weights.dim()))
    if bool((shares < 0).any()) or not bool((shares.sum(0) > 0).all()):
        raise ValueError("weights of a barycenter: expected none below 0 and a sum above 0")
    shares = (shares / shares.sum(0)).expand(len(covs), *lead)
    mean = weighted_sum(shares.unsqueeze(-1), means.double())
    # one by one: each ends when it has converged itself, whatever the others do
    columns = covs.double().reshape(len(covs), -1, *covs.shape[-2:]).unbind(1)
    rows = shares.reshape(len(covs), -1).unbind(1)
    found, counts, changes = list[Tensor](), list[int](), list[float]()
    for column, share in zip(columns, rows):
        # from the weighted mean, whose range holds all of theirs: a start with a smaller range could never leave it
        now, moved, count = symmetric(weighted_sum(share, column)), torch.inf, 0
        while count < iterations and not moved <= tol:
            root, inverse = sqrtm_and_inverse(now)
            after = fixed_point(inverse, weighted_sum(share, barycenter_term(root, column)))
            now, moved, count = after, float(relative_change(now, after)), count + 1
        found.append(now)
        counts.append(count)
        changes.append(moved)
    cov = torch.stack(found).reshape(covs.shape[1:]).to(covs.dtype)
    taken, last = torch.tensor(counts).reshape(lead), torch.tensor(changes, dtype=torch.float64).reshape(lead)
    return Barycenter(mean.to(means.dtype), cov, taken, last)


def weighted_sum(shares: Tensor, values: Tensor) -> Tensor:
    """``Σ_i shares[i]·values[i]``, added up in the order of i."""
    total = torch.zeros_like(values[0])
    for share, value in zip(shares, values):
        total = total + share * value
    return total


def sqrtm_and_inverse(cov: Tensor) -> tuple[Tensor, Tensor]:
    """``S^½`` and ``S^{-½}``, the inverse on the range of S if it is singular."""
    root, inverse = per_matrix(sqrtm_pair, cov)
    return root, inverse


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
