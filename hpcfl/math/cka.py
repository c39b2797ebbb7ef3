"""Centred kernel alignment of linear kernels (CKA; Kornblith et al., ICML 2019), without forming the kernels.

A representation of m samples is ``Z [m, k]``, its kernel ``K = H Z Zᵀ H`` with ``H = I − 11ᵀ/m``. With a centred ``Z``,
``<T, K> = <Z, T Z>`` and ``‖K‖ = ‖ZᵀZ‖`` (Frobenius norms), without another m × m matrix per client.
"""

from __future__ import annotations

from hpcfl.base.lazy import Tensor, torch

FLAT = 10.0
"""A representation whose deviations are below so many roundings of its values is the same for all samples."""


def triangle_size(samples: int) -> int:
    """Entries of a kernel of so many samples on and above its diagonal."""
    return samples * (samples + 1) // 2


def kernel_triangles(z: Tensor) -> Tensor:
    """Upper triangles of the kernels of representations ``[c, m, k]``, row by row, ``[c, m(m+1)/2]``."""
    upper = _upper(z.shape[1], z.device)
    # one by one: m x m for all of a chunk would be the largest tensors of a visit
    return torch.stack([(rows @ rows.T).masked_select(upper) for rows in _centred(z)])


def unit_kernel(triangle: Tensor, samples: int) -> Tensor:
    """The kernel ``[m, m]`` of this upper triangle, scaled to Frobenius norm 1; zero stays zero."""
    whole = triangle.new_zeros(samples, samples).masked_scatter_(_upper(samples, triangle.device), triangle)
    whole += whole.triu(1).T
    norm = whole.norm()
    return whole.div_(torch.where(norm == 0, 1.0, norm))


def alignment(target: Tensor, z: Tensor) -> Tensor:
    """``<target, K> / ‖K‖``, 0 … 1, ``[c]``: the CKA of the kernels K of `z` ``[c, m, k]`` with a `unit_kernel`.

    The target is a constant. Where all samples have the same representation, K is zero: so are the alignment and its
    gradient.
    """
    centred = _centred(z)
    size, whole = (part.detach().flatten(1).norm(dim=1) for part in (centred, z))
    flat = size <= FLAT * torch.finfo(z.dtype).eps * whole
    z = centred * torch.where(flat, 0.0, 1 / size)[:, None, None]  # alignment does not depend on their scale
    gram = z.mT @ z if z.shape[2] <= z.shape[1] else z @ z.mT
    with torch.no_grad():
        slope = (z.mT @ target).mT
        half = (z * slope).sum((1, 2))
    # <Z, T Z> has the gradient 2 T Z: said so, since autograd would multiply by T once more
    along = 2 * (z * slope).sum((1, 2)) - half
    value: Tensor = along / gram.flatten(1).norm(dim=1).clamp(min=1e-12)
    return value


def _upper(samples: int, device: torch.device) -> Tensor:
    """Where the upper triangle is, bool ``[m, m]``: an eighth of the memory of its indices."""
    return torch.ones(samples, samples, dtype=torch.bool, device=device).triu_()


def _centred(z: Tensor) -> Tensor:
    return z - z.mean(1, keepdim=True)
