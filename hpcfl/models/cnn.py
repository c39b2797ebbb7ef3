"""Convolutional networks: convolution, ReLU, 2x2 max-pooling, repeated; then fully connected layers."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from hpcfl.base.errors import UsageError
from hpcfl.models.base import Model
from hpcfl.models.mlp import check_dropout, dense

if TYPE_CHECKING:
    from torch import nn


class Cnn(Model):
    """The SALF paper's CNN by default: conv 5x5x6, pool, conv 5x5x6, pool, fc 50, fc.

    Attributes
    ----------
    channels : tuple of int
        Filters of each convolution.
    kernel : int
        Side of the square filters.
    padding : {"valid", "same"}
        No padding, or the input's size kept.
    hidden : tuple of int
        Widths of the hidden fully connected layers.
    dropout : float
        Chance that a hidden unit of those is dropped while training.
    """

    name: Literal["cnn"] = "cnn"
    channels: tuple[int, ...] = (6, 6)
    kernel: int = 5
    padding: Literal["valid", "same"] = "valid"
    hidden: tuple[int, ...] = (50,)
    dropout: float = 0.0

    def check(self, shape: tuple[int, ...], classes: int) -> None:
        """Refuse inputs that are no images or too small for the pooling, and sizes below 1."""
        if min((*self.channels, *self.hidden, self.kernel), default=1) < 1:
            raise UsageError("model: expected channels, hidden and kernel of at least 1")
        if len(shape) != 3:
            raise UsageError(f"model.name = 'cnn' needs features of shape (channels, height, width), got {shape}")
        check_dropout(self.dropout)
        if min(self._sides(shape)) < 1:
            raise UsageError(
                f"model.channels: {len(self.channels)} convolutions of kernel {self.kernel} leave nothing of "
                f"{shape[1]}x{shape[2]} images; expected fewer, a smaller kernel, or padding = 'same'"
            )

    def build(self, shape: tuple[int, ...], classes: int) -> list[tuple[str, nn.Sequential]]:
        """Return conv1 … convn, fc1 … fcm."""
        from torch import nn

        convolutions = [
            (
                f"conv{number}",
                nn.Sequential(
                    nn.Conv2d(inputs, outputs, self.kernel, padding=self.padding), nn.ReLU(), nn.MaxPool2d(2)
                ),
            )
            for number, (inputs, outputs) in enumerate(pairwise((shape[0], *self.channels)), start=1)
        ]
        height, width = self._sides(shape)
        flat = (shape[0], *self.channels)[-1] * height * width
        return convolutions + dense([flat, *self.hidden, classes], self.dropout)

    def _sides(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return height and width after the last pooling."""
        height, width = shape[1:]
        lost = self.kernel - 1 if self.padding == "valid" else 0
        for _ in self.channels:
            height, width = (height - lost) // 2, (width - lost) // 2
        return height, width
