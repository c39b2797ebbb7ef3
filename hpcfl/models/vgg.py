"""VGG networks with batch normalisation (Simonyan & Zisserman, ICLR 2015, Table 1; Ioffe & Szegedy, ICML 2015)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, cast

from hpcfl.base.errors import UsageError
from hpcfl.base.lazy import torch
from hpcfl.base.types import Shape
from hpcfl.models.base import ModuleModel, Width

CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""Convolutions of each block, by depth."""
FACTORS = (1, 2, 4, 8, 8)
"""Channels of each block, in those of the first one."""
SHRINKS = 2 ** len(FACTORS)


class Vgg(ModuleModel):
    """A VGG network for small images, as in the SALF paper: one linear layer after the convolutions.

    Each convolution 3x3 has a batch normalisation and ReLU behind it, each of the five blocks ends in 2x2 max-pooling.
    """

    name: Literal["vgg"] = "vgg"
    depth: Literal[11, 13, 16, 19] = 11
    """Which network: its convolutions and three, as the original has three linear layers."""
    width: Width = 64
    """Channels of the first block; the others have 2, 4, 8 and 8 times as many."""

    def check(self, shape: tuple[int, ...], classes: int) -> None:
        if len(shape) != 3:
            raise UsageError(f"model.name = 'vgg' needs features of shape (channels, height, width), got {shape}")
        if min(shape[1:]) < SHRINKS:
            needed = f"images of at least {SHRINKS}x{SHRINKS}, got {shape[1]}x{shape[2]}"
            raise UsageError(f"model.name = 'vgg' needs {needed}; for MNIST, did you mean data.name = 'mnist32'?")

    def module(self, shape: Shape | tuple[Shape, ...], classes: int) -> torch.nn.Module:
        inputs, height, columns = cast(Shape, shape)
        parts, number = OrderedDict[str, torch.nn.Module](), 0
        for block, (count, factor) in enumerate(zip(CONVOLUTIONS[self.depth], FACTORS), start=1):
            for _ in range(count):
                number, outputs = number + 1, factor * self.width
                parts[f"conv{number}"] = torch.nn.Conv2d(inputs, outputs, 3, padding=1)
                parts[f"norm{number}"] = torch.nn.BatchNorm2d(outputs)
                parts[f"relu{number}"] = torch.nn.ReLU()
                inputs = outputs
            parts[f"pool{block}"] = torch.nn.MaxPool2d(2)
        parts["flat"] = torch.nn.Flatten()
        parts["fc1"] = torch.nn.Linear(inputs * (height // SHRINKS) * (columns // SHRINKS), classes)
        return torch.nn.Sequential(parts)
