"""A linear representation and a linear head, without biases."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hpcfl.errors import UsageError
from hpcfl.models.base import Model

if TYPE_CHECKING:
    from torch import nn


class Linear(Model):
    """A linear representation and a linear head: ``W B x``.

    Attributes
    ----------
    rank : int
        Dimension of the representation, k.
    """

    name: Literal["linear"] = "linear"
    rank: int = Field(2, ge=1)

    def check(self, shape: tuple[int, ...], classes: int) -> None:
        """Refuse a representation of more dimensions than the features have."""
        most = prod(shape)
        if self.rank > most:
            raise UsageError(f"model.rank: expected at most {most} for this data, got {self.rank}; nearest: {most}")

    def stages(self, shape: tuple[int, ...], classes: int) -> list[tuple[str, nn.Sequential]]:
        """Return the two layers."""
        from torch import nn

        representation = nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), self.rank, bias=False))
        return [("representation", representation), ("head", nn.Sequential(nn.Linear(self.rank, classes, bias=False)))]
