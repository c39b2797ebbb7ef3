"""Wasserstein distances between Gaussians, with gradients that stay finite where covariances are singular.

``W2²(N(m, A), N(v, B)) = |m − v|² + 𝔅²(A, B)`` with the Bures distance
``𝔅²(A, B) = tr A + tr B − 2 tr (A^½ B A^½)^½`` (Muzellec & Cuturi 2018). The last trace is the nuclear norm of
``A^½ B^½``, or of ``Z L/√n`` where ``A = L Lᵀ`` and ``B = ZᵀZ/n``: that form needs neither roots nor inverses, and is
the one to train with. Everything is computed in float64 and returned in the type that came; leading dimensions are
batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hpcfl.math.barycenter import EPS


@dataclass(frozen=True)
class Moments:
    """Empirical moments."""

    mean: Tensor
    """``[..., k]``, zero where there is no row."""
    centred: Tensor
    """Rows less their mean, ``[..., n, k]``; those that do not count are zero."""
    count: Tensor
    """How many rows count, int64 ``[...]``."""


def moments(points: Tensor, mask: Tensor) -> Moments:
    """Mean, centred rows and number of the rows of `points` ``[..., n, k]`` that `mask` ``[..., n]`` picks.

    The cost of a nuclear norm grows with the cube of n: better gather a class than mask all others in a batch.
    """
    rows = torch.where(mask.unsqueeze(-1), points.double(), 0)
    count = mask.expand(rows.shape[:-1]).sum(-1)
    mean = rows.sum(-2) / count.clamp(min=1).unsqueeze(-1)
    centred = torch.where(mask.unsqueeze(-1), rows - mean.unsqueeze(-2), 0)
    return Moments(mean.to(points.dtype), centred.to(points.dtype), count)


def _polar(z: Tensor, came: torch.dtype, wanted: bool) -> tuple[Tensor, Tensor | None]:
    """The singular values of ``[..., n, k]``, float64, in no order, and, if wanted, U Vᵀ of those that count.

    From the eigenvectors Q of the smaller Gram matrix, say Z Zᵀ, at less than half the cost of a singular value
    decomposition. Its eigenvalues are off by eps·σ_max², so that their roots would make √eps·σ_max = 1.5e-8·σ_max of
    a singular value that is zero (centred points always have one). The rows of QᵀZ have the norms σ_i as well, off
    by eps·σ_max only, and divided by these they are Vᵀ.
    """
    small, large = sorted(z.shape[-2:])
    wide = z if z.shape[-2] == small else z.mT
    # LAPACK raises where a number is not finite; such numbers still come through in `rows`
    vectors = torch.linalg.eigh((wide @ wide.mT).nan_to_num(0.0, 0.0, 0.0))[1]
    rows = vectors.mT @ wide
    sigma = rows.norm(dim=-1)
    if not wanted:
        return sigma, None
    negligible = max(large * torch.finfo(came).eps, (small * EPS) ** 0.5)
    inverse = torch.where(sigma <= negligible * sigma.amax(-1, keepdim=True), 0, 1 / sigma)
    polar = vectors @ rows.mul_(inverse.unsqueeze(-1))
    return sigma, polar if wide is z else polar.mT


class _NuclearNorm(Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, came: torch.dtype) -> Tensor:
        sigma, polar = _polar(z, came, ctx.needs_input_grad[0])
        ctx.save_for_backward(polar)
        return sigma.sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * upstream[..., None, None], None


def nuclear_norm(z: Tensor, came: torch.dtype) -> Tensor:
    """``‖Z‖_*``, the sum of the singular values of float64 ``[..., n, k]``, whose numbers are as exact as `came`.

    Its gradient is ``U Vᵀ``, without the directions of singular values that cannot be told from rounding: those
    below ``max(n, k)·eps`` (of `came`) or ``√(min(n, k)·eps)`` (of float64, below which the Gram matrix does not
    separate them) times the largest. That is a subgradient where they are zero.
    """
    norm: Tensor = _NuclearNorm.apply(z, came)  # type: ignore[no-untyped-call]
    return norm


class _Isotropic(Function):
    """𝔅²(s²·I, cZᵀZ) for numbers s ≥ 0: ``Σ_j (s − √c σ_j)²`` with σ_j = 0 where Z has less than k.

    One node, for the loss that is trained with most: as several they took longer than the eigenvectors.
    """

    @staticmethod
    def forward(ctx: Any, points: Tensor, scale: Tensor, s: float) -> Tensor:
        scale = scale[..., None, None]
        z = points.double() * scale
        sigma, polar = _polar(z, points.dtype, ctx.needs_input_grad[0])
        if polar is not None:
            ctx.save_for_backward(z.sub_(polar, alpha=s).mul_(2 * scale))
        ctx.dtype, ctx.shape = points.dtype, points.shape
        return ((sigma - s).square().sum(-1) + s * s * (z.shape[-1] - sigma.shape[-1])).to(points.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        return (ctx.saved_tensors[0] * upstream[..., None, None]).sum_to_size(ctx.shape).to(ctx.dtype), None, None


def bures_factor_squared(factor: Tensor | float, points: Tensor, count: Tensor | int, ddof: int = 0) -> Tensor:
    """``𝔅²(L Lᵀ, ZᵀZ/d) = ‖L‖² + ‖Z‖²/d − 2 ‖Z L‖_*/√d`` with ``d = count − ddof``, ``[...]``.

    `factor` is L ``[..., k, k]``; a number s stands for s·I, without a k × k product. `points` are Z
    ``[..., n, k]``, centred; the rows that `count` leaves out are zero. With ``d ≤ 0`` the covariance counts as zero.
    """
    divisor = (torch.as_tensor(count, device=points.device) - ddof).double()
    scale = torch.where(divisor > 0, divisor.clamp(min=1).rsqrt(), 0)
    if not isinstance(factor, Tensor):
        isotropic: Tensor = _Isotropic.apply(points, scale, abs(factor))  # type: ignore[no-untyped-call]
        return isotropic
    z, widened = points.double() * scale[..., None, None], factor.double()
    sizes = widened.square().sum((-2, -1)) + z.square().sum((-2, -1))
    value = sizes - 2 * nuclear_norm(z @ widened, points.dtype)
    # rounding below zero is taken off the value alone: the gradient holds there too
    value = value + (value.clamp(min=0) - value).detach()
    return value.to(torch.promote_types(factor.dtype, points.dtype))
