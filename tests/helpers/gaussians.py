"""Distances and barycenters of Gaussians as a whole, in closed form: what the forms that train are judged by.

Barycenters iterate with the pieces of `hpcfl.math.barycenter`, on one process.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hpcfl.math.barycenter import (
    EPS,
    barycenter_term,
    fixed_point,
    per_matrix,
    relative_change,
    sqrtm_and_inverse,
    sqrtm_one,
    symmetric,
)


def _aligned(cov_a: Tensor, cov_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tr (A^½ B A^½)^½ and the transport maps from A to B and back, of one pair ``[k, k]``.

    From ``A^½ B^½ = U Σ Vᵀ``: the map is ``B^½ V Σ⁻¹ Vᵀ B^½``, which for regular A equals the usual formula, needs no
    inverse of A, and for singular A is still the derivative with respect to a factor of A.
    """
    root_a, root_b = sqrtm_one(cov_a), sqrtm_one(cov_b)
    product = root_a @ root_b
    if not product.isfinite().all():
        return product.new_tensor(torch.nan), product * torch.nan, product * torch.nan
    u, sigma, vt = torch.linalg.svd(product)
    inverse = torch.where(sigma > len(sigma) * EPS * sigma[0], sigma.rsqrt(), 0)
    there, back = (root_b @ vt.mT) * inverse, (root_a @ u) * inverse
    return sigma.sum(), symmetric(there @ there.mT), symmetric(back @ back.mT)


class _Bures(Function):
    """𝔅² of float64 covariances; the gradients are ``I − T``, T the map from this covariance to the other."""

    @staticmethod
    def forward(ctx: Any, cov_a: Tensor, cov_b: Tensor) -> Tensor:
        trace, there, back = per_matrix(_aligned, cov_a, cov_b)
        ctx.save_for_backward(there, back)
        ctx.shapes = cov_a.shape, cov_b.shape
        traces = cov_a.diagonal(dim1=-2, dim2=-1).sum(-1) + cov_b.diagonal(dim1=-2, dim2=-1).sum(-1)
        return (traces - 2 * trace).clamp(min=0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, ...]:
        eye = torch.eye(ctx.shapes[0][-1], dtype=upstream.dtype, device=upstream.device)
        return tuple(
            ((eye - map_) * upstream[..., None, None]).sum_to_size(shape)
            for map_, shape in zip(ctx.saved_tensors, ctx.shapes)
        )


def bures_squared(cov_a: Tensor, cov_b: Tensor) -> Tensor:
    """The squared Bures distance of covariances ``[..., k, k]``, which may be singular; they are not checked."""
    dtype = torch.promote_types(cov_a.dtype, cov_b.dtype)
    value: Tensor = _Bures.apply(cov_a.double(), cov_b.double())  # type: ignore[no-untyped-call]
    return value.to(dtype)


def w2_squared(mean_a: Tensor, cov_a: Tensor, mean_b: Tensor, cov_b: Tensor) -> Tensor:
    """The squared 2-Wasserstein distance of N(mean_a, cov_a) and N(mean_b, cov_b), ``[...]``."""
    apart = (mean_a.double() - mean_b.double()).square().sum(-1)
    value = apart + bures_squared(cov_a.double(), cov_b.double())
    return value.to(torch.promote_types(mean_a.dtype, cov_a.dtype))


def transport_map(cov_a: Tensor, cov_b: Tensor) -> Tensor:
    """``T = A^{-½} (A^½ B A^½)^½ A^{-½}``, which pushes N(0, A) to N(0, B), for regular A ``[..., k, k]``.

    ``T A T = B``. For singular A the map reaches only what the range of A can be moved to.
    """
    dtype = torch.promote_types(cov_a.dtype, cov_b.dtype)
    return per_matrix(_aligned, cov_a, cov_b)[1].to(dtype)


def sqrtm(cov: Tensor) -> Tensor:
    return sqrtm_and_inverse(cov)[0]


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


@torch.no_grad()
def barycenter(means: Tensor, covs: Tensor, weights: Tensor, tol: float = 1e-12, iterations: int = 200) -> Barycenter:
    """Return the Wasserstein barycenter over i of ``N(means[i], covs[i])``, mean and covariance in the types that came.

    Parameters
    ----------
    means, covs : Tensor [m, ..., k], [m, ..., k, k]
        Covariances may be singular, or zero.
    weights : Tensor [m] or [m, ...]
        At least 0, of a positive sum over i; they are normalised.
    tol : float
        The relative change (Frobenius norm) at which the iteration ends.
    """
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
