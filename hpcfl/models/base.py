"""What a model section gives: a chain of layers, each owning at most one layer's parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcfl.base.config import ConfigBase

if TYPE_CHECKING:
    from torch import nn


class Model(ConfigBase):
    """Base of the ``[model]`` sections. One file in ``hpcfl/models/`` is one family, named by ``model.name``."""

    name: str

    @property
    def penalty(self) -> float:
        """μ of a penalty ``μ/2 · |θ|²`` that belongs to what is minimised."""
        return 0.0

    def check(self, shape: tuple[int, ...], classes: int) -> None:
        """Raise UsageError where features of `shape` cannot go through this model. Does not import torch."""

    def build(self, shape: tuple[int, ...], classes: int) -> list[tuple[str, nn.Sequential]]:
        """Return the named layers, first layer first, freshly initialised from torch's global generator.

        A layer is a layer in SALF's sense: a module with weight and bias, with what follows it up to the next.
        """
        raise NotImplementedError
