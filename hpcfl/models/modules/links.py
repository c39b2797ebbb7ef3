"""Links of generalised linear models that torch does not have, as modules without parameters."""

from __future__ import annotations

from math import ceil, pi

import torch
from torch import Tensor, nn

FINEST = 40
"""Waves shorter than 2^-40 of the longest are left out: float64 does not resolve them."""
DIGITS = 52
"""Nor does it resolve terms below 2^-52 of the largest."""


class TwoLogits(nn.Module):
    """The logits ``(0, z)`` of two classes, ``[…, 1]`` to ``[…, 2]``: ``P(1) = 1 / (1 + exp(-z))``."""

    def forward(self, z: Tensor) -> Tensor:
        """Return the logits."""
        return torch.cat([torch.zeros_like(z), z], dim=-1)


class Rough(nn.Module):
    """A series of Weierstrass's kind, of Hölder order η + 1 and no better, so that its derivative is of order η.

    ``w(u) = u + a/N · Σ_j 2^(-j (η + 1)) sin(2^j π u) / π``, ``w'(u) = 1 + a/N · Σ_j 2^(-j η) cos(2^j π u)`` with
    ``N = Σ_j 2^(-j η)``: for a < 1, ``0 < 1 - a <= w' <= 1 + a``, and w is monotone. On (-1, 1), where tanh has its
    values, the longest wave makes one period; each further one is half as long. Where features lie in [0, 1]^d and
    parameters are of order 1 to 3, tanh(z) passes over much of that range. The loss ``(w(tanh(z)) - y)²`` has the
    gradient ``2 (w - y) w' (1 - tanh²) (x, 1)``, which is of the order of w', also in x. For an integer η the last
    derivative that there is falls short of Lipschitz continuity by a logarithm.

    Parameters
    ----------
    smoothness : float
        η, above 0.
    roughness : float
        a, at least 0.
    """

    def __init__(self, smoothness: float, roughness: float) -> None:
        super().__init__()
        self.smoothness, self.roughness = smoothness, roughness
        self.terms = 1 + min(FINEST, ceil(DIGITS / smoothness))

    def forward(self, u: Tensor) -> Tensor:
        """Return w(u), of the shape of u."""
        octaves = torch.arange(self.terms, dtype=u.dtype, device=u.device)
        slopes = torch.exp2(-self.smoothness * octaves)
        frequencies = pi * torch.exp2(octaves)
        heights = self.roughness * slopes / slopes.sum() / frequencies
        return u + (torch.sin(u.unsqueeze(-1) * frequencies) * heights).sum(-1)
