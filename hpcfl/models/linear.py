"""A linear representation and a linear head, without biases; in front of them an affine embedding, if wanted."""

from __future__ import annotations

from math import prod
from typing import Literal

from pydantic import Field

from hpcfl.base.errors import check_within
from hpcfl.base.lazy import torch
from hpcfl.models import Model


class Linear(Model):
    """A linear representation and a linear head: ``W B x``, or ``W B (E x + b)``."""

    name: Literal["linear"] = "linear"
    rank: int = Field(2, ge=1)
    """Dimension of the representation, k."""
    dimension: int | None = Field(None, ge=1)
    """Coordinates to which an affine embedding, which alone knows the features' shape, brings them first. By default
    there is none."""

    def check(self, shape: tuple[int, ...], classes: int) -> None:
        most = prod(shape) if self.dimension is None else self.dimension
        check_within("model.rank", self.rank, 1, most, " for this data")

    def build(self, shape: tuple[int, ...], classes: int) -> list[tuple[str, torch.nn.Sequential]]:
        width = prod(shape)
        representation = torch.nn.Linear(self.dimension or width, self.rank, bias=False)
        head = ("head", torch.nn.Sequential(torch.nn.Linear(self.rank, classes, bias=False)))
        if self.dimension is None:
            return [("representation", torch.nn.Sequential(torch.nn.Flatten(), representation)), head]
        embedding = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(width, self.dimension))
        return [("embedding", embedding), ("representation", torch.nn.Sequential(representation)), head]
