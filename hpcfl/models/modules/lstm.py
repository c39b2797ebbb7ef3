"""Long short-term memory as plain products, which torch can batch over clients and differentiate twice."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn


class BiLstm(nn.Module):
    """One bidirectional LSTM layer (Hochreiter and Schmidhuber 1997; gates in torch's order i, f, g, o).

    ``torch.nn.LSTM`` has no rule for ``vmap``. The first index of each tensor is the direction: forward, backward.

    Attributes
    ----------
    weight_ih : [2, 4 * hidden, inputs]
    weight_hh : [2, 4 * hidden, hidden]
    bias_ih, bias_hh : [2, 4 * hidden]
        Two biases, whose sum counts, as in ``torch.nn.LSTM``; all start as U(−1/√hidden, 1/√hidden).
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
    """Where each direction of a `BiLstm` comes to its end: the last state of one, the first of the other."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, 2 * hidden]`` for x ``[B, T, 2 * hidden]``."""
        half = x.shape[2] // 2
        return torch.cat((x[:, -1, :half], x[:, 0, half:]), dim=1)
