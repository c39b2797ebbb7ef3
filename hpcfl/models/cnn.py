"""Convolutional networks: convolution, ReLU, 2x2 max-pooling, repeated; then fully connected layers."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from hpcfl.base.errors import UsageError
from hpcfl.base.lazy import torch
from hpcfl.models import Chance, Model, Width
from hpcfl.models.mlp import dense


class Cnn(Model):
    """The SALF paper's CNN by default: conv 5x5x6, pool, conv 5x5x6, pool, fc 50, fc."""

    name: Literal["cnn"] = "cnn"
    channels: tuple[Width, ...] = (6, 6)
    """Filters of each convolution."""
    kernel: Width = 5
    """Side of the square filters."""
    padding: Literal["valid", "same"] = "valid"
    """``valid``: no padding. ``same``: zeros around, so that the input's size is kept."""
    hidden: tuple[Width, ...] = (50,)
    """Widths of the hidden fully connected layers."""
    dropout: Chance = 0.0
    """Chance that a unit of the hidden fully connected layers is dropped while training."""

    def check(self, shape: tuple[int, ...], classes: int) -> None:
        if len(shape) != 3:
            raise UsageError(f"model.name = 'cnn' needs features of shape (channels, height, width), got {shape}")
        if min(self._sides(shape)) < 1:
            these = f"{len(self.channels)} convolutions of kernel {self.kernel}"
            where = f"model.channels: {these} leave nothing of {shape[1]}x{shape[2]} images"
            raise UsageError(f"{where}; expected fewer, a smaller kernel, or padding = 'same'")

    def build(self, shape: tuple[int, ...], classes: int) -> list[tuple[str, torch.nn.Sequential]]:
        convolutions = []
        for number, (inputs, outputs) in enumerate(pairwise((shape[0], *self.channels)), start=1):
            convolution = torch.nn.Conv2d(inputs, outputs, self.kernel, padding=self.padding)
            layer = torch.nn.Sequential(convolution, torch.nn.MaxPool2d(2), torch.nn.ReLU())
            convolutions.append((f"conv{number}", layer))
        height, width = self._sides(shape)
        flat = (shape[0], *self.channels)[-1] * height * width
        return convolutions + dense([flat, *self.hidden, classes], self.dropout)

    def _sides(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Height and width after the last pooling."""
        height, width = shape[1:]
        lost = self.kernel - 1 if self.padding == "valid" else 0
        for _ in self.channels:
            height, width = (height - lost) // 2, (width - lost) // 2
        return height, width
