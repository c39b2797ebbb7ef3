"""Modules that torch does not have: an LSTM that can be batched over clients, links of linear models."""

from __future__ import annotations

from math import ceil, pi, sqrt

import torch
from torch import Tensor, nn


class BiLstm(nn.Module):
    """One bidirectional LSTM layer (Hochreiter and Schmidhuber 1997; gates in torch's order i, f, g, o).

    As plain products, which torch can batch over clients and differentiate twice: ``torch.nn.LSTM`` has no rule for
    ``vmap``. The first index of each tensor is the direction, forward or backward. As there, two biases are added up,
    and all tensors start as U(−1/√hidden, 1/√hidden).
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.weight_ih = nn.Parameter(torch.empty(2, 4 * hidden, inputs))
        self.weight_hh = nn.Parameter(torch.empty(2, 4 * hidden, hidden))
        self.bias_ih = nn.Parameter(torch.empty(2, 4 * hidden))
        self.bias_hh = nn.Parameter(torch.empty(2, 4 * hidden))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / sqrt(hidden), 1 / sqrt(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Return the states of both directions side by side, ``[B, T, 2 * hidden]``, for x ``[B, T, inputs]``."""
        both = torch.stack((x, x.flip(1)))
        biases = (self.bias_ih + self.bias_hh)[:, None, None]
        driven = torch.einsum("zbti,zgi->zbtg", both, self.weight_ih) + biases
        recurrent = self.weight_hh.transpose(1, 2).contiguous()  # one copy here, or one in every step
        hidden = cell = x.new_zeros(2, len(x), self.weight_hh.shape[2])
        states = []
        for inputs in driven.unbind(2):
            i, f, g, o = (inputs + torch.bmm(hidden, recurrent)).chunk(4, dim=2)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
            states.append(hidden)
        ahead, back = torch.stack(states, dim=2)
        return torch.cat((ahead, back.flip(1)), dim=2)


class Ends(nn.Module):
    """The last state of a `BiLstm`'s one direction and the first of the other: ``[B, T, 2 h]`` to ``[B, 2 h]``."""

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[2] // 2
        return torch.cat((x[:, -1, :half], x[:, 0, half:]), dim=1)


class Addend(nn.Module):
    """One of several linear terms of a sum: it takes some features, and passes on the others and the sum so far.

    ``(own, others, z)`` becomes ``(others, z + W own + b)``. So a chain of them computes a linear function whose
    parameters are layers: the gradient of any needs those above it, and the objective stays convex in all.
    """

    def __init__(self, own: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.own, self.outputs = own, outputs
        self.weight = nn.Parameter(torch.zeros(outputs, own))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, others + outputs]`` for x ``[B, own + others + outputs]``."""
        own, others, z = torch.split(x, [self.own, x.shape[1] - self.own - self.outputs, self.outputs], 1)
        return torch.cat([others, z + nn.functional.linear(own, self.weight, self.bias)], 1)


class TwoLogits(nn.Module):
    """The logits ``(0, z)`` of two classes, ``[…, 1]`` to ``[…, 2]``: ``P(1) = 1 / (1 + exp(-z))``."""

    def forward(self, z: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(z), z], dim=-1)


class Rough(nn.Module):
    """A series of Weierstrass's kind, of Hölder order η + 1 and no better, so that its derivative is of order η.

    ``w(u) = u + a/N · Σ_j 2^(-j (η + 1)) sin(2^j π u) / π``, ``w'(u) = 1 + a/N · Σ_j 2^(-j η) cos(2^j π u)`` with
    ``N = Σ_j 2^(-j η)`` and η, a the smoothness and roughness: for a < 1, ``0 < 1 - a <= w' <= 1 + a``, and w is
    monotone. On (-1, 1), where tanh has its values, the longest wave makes one period; each further one is half as
    long. The loss ``(w(tanh(z)) - y)²`` has the gradient ``2 (w - y) w' (1 - tanh²) (x, 1)``, of the order of w', also
    in x. For an integer η the last derivative falls short of Lipschitz continuity by a logarithm.
    """

    def __init__(self, smoothness: float, roughness: float) -> None:
        super().__init__()
        self.smoothness, self.roughness = smoothness, roughness
        # float64 resolves neither waves shorter than 2^-40 of the longest nor terms below 2^-52 of the largest
        self.terms = 1 + min(40, ceil(52 / smoothness))

    def forward(self, u: Tensor) -> Tensor:
        octaves = torch.arange(self.terms, dtype=u.dtype, device=u.device)
        slopes = torch.exp2(-self.smoothness * octaves)
        frequencies = pi * torch.exp2(octaves)
        heights = self.roughness * slopes / slopes.sum() / frequencies
        return u + (torch.sin(u.unsqueeze(-1) * frequencies) * heights).sum(-1)
