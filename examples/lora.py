"""Low-rank adapters (E. J. Hu et al.: LoRA, ICLR 2022) on the linear layers of a GPT's blocks.

A layer gives ``W x + (alpha / rank) B A x``. With ``model.train = ["*.lora_*"]`` A and B are trained and sent, and W
stays what ``model.initial`` gives. B begins as 0, so that the GPT begins as it was.
"""

from math import sqrt

import torch
import torch.nn.functional as F
from gpt import GPT
from torch import nn


class Adapted(nn.Linear):
    """A linear layer with an adapter; its weight and bias keep their names."""

    def __init__(self, layer, rank, alpha):
        super().__init__(layer.in_features, layer.out_features)
        self.weight, self.bias, self.scale = layer.weight, layer.bias, alpha / rank
        self.lora_a = nn.Parameter(torch.randn(rank, layer.in_features) / sqrt(layer.in_features))
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x):
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


class LoraGPT(GPT):
    """A GPT with adapters in its blocks, of this `rank`; keys as of `GPT`."""

    def __init__(self, shape, classes, rank: int = 4, alpha: float = 8.0, **keys):
        super().__init__(shape, classes, **keys)
        for block in self.blocks:
            for name in ("attend", "mix", "wide", "narrow"):
                setattr(block, name, Adapted(getattr(block, name), rank, alpha))
