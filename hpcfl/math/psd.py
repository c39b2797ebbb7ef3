"""Square roots of symmetric positive semi-definite matrices, which may be singular.

Everything is computed in float64, one matrix at a time from memory of its own: a batched product may choose another
kernel, and an unaligned one too, so the last bits of a result would depend on the batch that its matrix is in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product

import numpy as np

from hpcfl.base.errors import UsageError
from hpcfl.base.lazy import Tensor, torch

EPS = sys.float_info.epsilon
SLACK = 1e-6  # relative to the largest entry or eigenvalue: what rounding to float32 may do to a covariance


def per_matrix(function: Callable[..., tuple[Tensor, ...]], *matrices: Tensor) -> tuple[Tensor, ...]:
    """Apply a function of float64 matrices to ``[..., k, k]`` one by one; the leading dimensions are broadcast."""
    lead = np.broadcast_shapes(*(m.shape[:-2] for m in matrices))  # torch's own loads sympy, for a second and more
    flat = [m.double().expand(*lead, *m.shape[-2:]).reshape(-1, *m.shape[-2:]) for m in matrices]
    results = [function(*(m.clone(memory_format=torch.contiguous_format) for m in row)) for row in zip(*flat)]
    return tuple(torch.stack(part).reshape([*lead, *part[0].shape]) for part in zip(*results))


def symmetric(matrix: Tensor) -> Tensor:
    """The symmetric part of ``[..., k, k]``: exactly symmetric, where products are so up to rounding."""
    return (matrix + matrix.mT).mul_(0.5)


def sqrtm(cov: Tensor) -> Tensor:
    """The symmetric root of ``[..., k, k]``, in the type that came; NaN where `cov` has an entry that is not finite."""
    return per_matrix(lambda one: (sqrtm_one(one),), cov)[0].to(cov.dtype)


def sqrtm_one(cov: Tensor) -> Tensor:
    values, vectors = _spectrum(cov)
    return symmetric((vectors * values.sqrt()) @ vectors.mT)


def sqrtm_pair(cov: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric root of one matrix and its pseudo-inverse, by one decomposition."""
    values, vectors = _spectrum(cov)
    inverse = torch.where(values == 0, 0, values.rsqrt())
    return symmetric((vectors * values.sqrt()) @ vectors.mT), symmetric((vectors * inverse) @ vectors.mT)


def _spectrum(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors.

    Values below ``k·eps`` times the largest count as zero, as do negative ones: they are rounding, and their roots
    would be 1e-8 of the largest, far above rounding.
    """
    if not matrix.sum().isfinite():  # LAPACK would raise; a run that diverges is to go on with NaN
        return matrix.new_full((len(matrix),), torch.nan), torch.full_like(matrix, torch.nan)
    values, vectors = torch.linalg.eigh(symmetric(matrix))
    return torch.where(values > len(matrix) * EPS * values[-1].clamp(min=0), values, 0), vectors


def check_psd(cov: Tensor, name: str) -> None:
    """Raise UsageError where one of ``[..., k, k]``, named with its index, is no covariance."""
    if cov.dim() < 2 or cov.shape[-1] != cov.shape[-2] or not cov.numel():
        raise UsageError(f"{name}: expected square matrices [..., k, k], got shape {list(cov.shape)}")
    cov = cov.double()
    if not cov.isfinite().all():
        raise UsageError(f"{name}: expected finite numbers, got {int((~cov.isfinite()).sum())} that are not")
    lead = cov.shape[:-2]
    for index, one in zip(product(*map(range, lead)), cov.reshape(-1, *cov.shape[-2:])):
        where, skew = f"{name}{list(index)}" if lead else name, float((one - one.mT).abs().max())
        if skew > SLACK * float(one.abs().max()):
            raise UsageError(f"{where}: expected a symmetric matrix, got entries {skew:.3g} apart from their mirror")
        values = torch.linalg.eigvalsh(symmetric(one))
        least, largest = float(values[0]), float(values[-1])
        if least < -SLACK * max(largest, 0.0):
            raise UsageError(
                f"{where}: expected a covariance, with no eigenvalue below 0, got a smallest of {least:.3g} beside a "
                f"largest of {largest:.3g} (rounding explains {SLACK:g} of that); set negative eigenvalues to 0"
            )
